"""Order and shares between workers: each runs its own kinds of jobs, and one round decides for all (SPEC OR-7)."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from penstock.core.jobs.admission import AdmissionLimits, Caps
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import SECOND, AddonId, EndReason
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.job_service import EndReport, YieldRequests
from penstock.scheduler.preemption import Preempter
from penstock.stores.api import SetAddon, committed

A, B = WorkerKinds(AddonId("a")), WorkerKinds(AddonId("b"))
ONLY_T, ONLY_U = (WorkerKinds(job_types=frozenset({name})) for name in "tu")


class PullingWorker:
    """Claims for as many jobs as it has room, every time it gets a turn, and runs each for `length` seconds."""

    def __init__(self, kit, name, kinds, room, length):
        self.kit, self.name, self.kinds, self.room, self.length = kit, name, kinds, room, length
        self.ends, self.started = {}, []

    def turn(self):
        now = self.kit.now
        ended = [dispatch_id for dispatch_id, ends_at in self.ends.items() if ends_at <= now]
        for dispatch_id in ended:
            del self.ends[dispatch_id]
        free = self.room - len(self.ends)
        if not free:
            return
        reports = [EndReport(dispatch_id) for dispatch_id in ended]
        _, granted = self.kit.job_service.exchange(reports, self.kinds, free, self.name)
        for job, dispatch, *_ in granted:
            self.ends[dispatch.dispatch_id] = now + self.length * SECOND
            self.started.append((now, job.job_id))
        self.kit.pulling_workers.has_room(
            self.name, self.kinds, free - len(granted), now
        )  # its next claim waits


class Host:
    """A host of 40 units. Claims of workers with room wait, and the first worker always asks first."""

    def __init__(self, kit, **rules):
        self.kit = kit.under(capacity=Capacity(fixed=40), lease_for=3_600 * SECOND, **rules)
        self.workers, self._waits = [], ExitStack()
        self.began = self.kit.now

    def worker(self, name, kinds, room=40, length=5, *, waits=True):
        worker = PullingWorker(self.kit, name, kinds, room, length)
        if waits:
            self._waits.enter_context(self.kit.pulling_workers.waiting(name, kinds, room))
        self.workers.append(worker)
        return worker

    def run(self, seconds, step=1):
        for _ in range(0, seconds, step):
            for worker in self.workers:
                worker.turn()
            self.kit.step()
            self.kit.later(step)

    def since_began(self, moment):
        return (moment - self.began) / SECOND


@pytest.fixture
def host(every_kit):
    return Host(every_kit)


def test_the_first_job_of_a_higher_band_starts_within_one_job_length_of_another_worker(host):
    first, second = host.worker("first", A), host.worker("second", B)
    host.kit.submit(n=320, cost_units=1, priority=10)
    host.run(7)
    host.began = host.kit.now
    host.kit.submit(n=40, addon_id="b", cost_units=1, priority=95)
    host.run(10)

    assert host.since_began(second.started[0][0]) <= first.length
    assert len(second.started) == 40


def test_shares_follow_the_weights_between_workers(host):
    for addon, weight in (("a", 100), ("b", 300)):
        committed(host.kit.store, SetAddon(AddonId(addon), weight=weight))
    first, second = host.worker("first", A, length=3), host.worker("second", B, length=3)
    host.kit.submit(n=2_000, cost_units=1)
    host.kit.submit(n=2_000, addon_id="b", cost_units=1)
    host.run(60)

    share = len(second.started) / (len(first.started) + len(second.started))
    assert 0.675 <= share <= 0.825


def test_equal_addons_get_equal_shares_however_often_one_of_them_asks(host):
    first = host.worker("first", A, length=3)
    second = host.worker("second", B, length=3)
    host.workers = [first, first, first, second]
    host.kit.submit(n=2_000, cost_units=1)
    host.kit.submit(n=2_000, addon_id="b", cost_units=1)
    host.run(60)

    assert len(second.started) == pytest.approx(len(first.started), rel=0.1)


def test_units_kept_for_a_large_job_are_given_to_no_other_worker(host):
    first, runner = host.worker("first", A, length=7), host.worker("runner", B, room=1)
    host.kit.submit(n=400, cost_units=10, priority=10)
    host.run(3)
    [large] = host.kit.submit(addon_id="b", cost_units=40, priority=95)
    host.began = host.kit.now
    host.run(60)

    [(started_at, job_id)] = runner.started
    assert job_id == large
    assert host.since_began(started_at) <= 30 + 2 * first.length


def test_a_full_worker_holds_up_no_other(host):
    first, second = host.worker("first", A), host.worker("second", B, room=2, length=100)
    host.kit.submit(n=100, addon_id="b", cost_units=1, priority=95)
    host.run(2)
    host.kit.submit(n=100, cost_units=1, priority=10)
    host.run(2)

    assert len(second.started) == 2
    assert len(first.started) == 38


def test_units_are_set_aside_for_as_many_jobs_as_the_other_worker_has_room(host):
    first, _ = host.worker("first", A), host.worker("second", B, room=2)
    host.kit.submit(n=100, addon_id="b", cost_units=1, priority=95)
    host.kit.submit(n=100, cost_units=1, priority=10)
    first.turn()

    assert len(first.started) == 38


def test_a_claim_with_a_report_leaves_the_places_for_which_another_claim_waits(host):
    first, second = host.worker("first", A), host.worker("second", B, room=3)
    service = host.kit.job_service
    host.kit.submit(n=2, addon_id="b", cost_units=1)
    [(_, ended, *_)] = service.claim(B, 1, "second")
    host.kit.pulling_workers.has_room("second", B, 3, 0)  # the claim that waits has looked and found nothing
    service.exchange([EndReport(ended.dispatch_id)], B, 1, "second")
    host.kit.submit(n=100, addon_id="b", cost_units=1, priority=95)
    host.kit.submit(n=100, cost_units=1, priority=10)
    first.turn()

    assert second.started == []
    assert len(first.started) == 40 - 1 - 3


def test_a_worker_that_does_not_come_back_keeps_units_for_one_tick_at_most(host):
    first, gone = host.worker("first", A), host.worker("gone", B, waits=False)
    gone.turn()
    host.workers.remove(gone)
    host.kit.submit(n=100, addon_id="b", cost_units=1, priority=95)
    host.kit.submit(n=100, cost_units=1, priority=10)
    first.turn()
    assert first.started == []

    host.kit.later(2)
    first.turn()
    assert len(first.started) == 40


def test_jobs_of_a_type_that_no_worker_asks_for_keep_no_units_after_three_timeouts(host):
    host.worker("first", A)
    jobs = host.kit.submit(n=3, addon_id="unserved", cost_units=5)
    host.run(3_000, step=10)

    assert [host.kit.store.job(job).counters.start for job in jobs] == [3, 3, 3]
    assert {host.kit.state(job) for job in jobs} == {"QUEUED"}
    assert host.kit.store.ledger(host.kit.rules.host).units == 0


def test_a_job_left_after_three_timeouts_is_reserved_when_a_worker_polls(host):
    [job] = host.kit.submit(addon_id="b")
    host.run(1_500, step=10)
    assert host.kit.store.job(job).counters.start == 3

    host.kit.job_service.poll(B)
    host.kit.step()
    assert [dispatch.job_id for dispatch in host.kit.job_service.poll(B)] == [job]


def test_workers_that_have_gone_are_forgotten_also_while_no_job_waits(host):
    for number in range(100):
        host.kit.job_service.claim(A, 1, f"worker {number}")
    host.run(4)

    in_the_past = 0  # at that moment each of them would be present, if it were still known
    assert host.kit.pulling_workers.at(in_the_past).free == {}


def test_a_full_worker_that_renews_its_lease_is_present_and_gets_no_reservations(host):
    """It claims nothing while its only place is taken. Its next job waits in the queue and holds no units."""
    worker = host.worker("only", A, room=1, length=200, waits=False)
    host.kit.submit(n=2, cost_units=10)
    for _ in range(12):
        host.run(10)
        for dispatch_id in worker.ends:
            host.kit.job_service.heartbeat(dispatch_id)

    assert len(worker.started) == 1
    assert [run.phase for run in host.kit.store.live()] == [DispatchPhase.LEASED]


def test_a_full_worker_that_falls_silent_is_gone_after_a_while(host):
    host.worker("only", A, room=1, length=200, waits=False)
    host.kit.submit(n=2, cost_units=10)
    host.run(40)

    assert DispatchPhase.RESERVED in [run.phase for run in host.kit.store.live()]


def test_a_job_near_its_deadline_goes_before_jobs_of_another_worker(host):
    """Of the same addon, band and share, and behind 300 others by its turn."""
    first, second = host.worker("first", ONLY_T), host.worker("second", ONLY_U)
    host.kit.submit(n=300, cost_units=1)
    host.run(3)
    soon = host.kit.now + 20 * SECOND
    fields = {"deadline_at": soon, "time_sensitive": True, "expected_duration_sec": 5}
    [urgent] = host.kit.submit(job_type="u", cost_units=1, **fields)
    host.run(8)

    [(started_at, job_id)] = second.started
    assert job_id == urgent
    assert host.since_began(started_at) <= 3 + first.length
    assert len(first.started) < 300


def test_a_place_under_a_cap_goes_to_the_best_job_of_any_worker(every_kit):
    host = Host(every_kit, limits=AdmissionLimits(Caps(per_addon=3)))
    first, second = host.worker("first", ONLY_T), host.worker("second", ONLY_U)
    host.kit.submit(n=100, cost_units=1, priority=10)
    host.run(3)
    host.kit.submit(n=4, job_type="u", cost_units=1, priority=95)
    host.run(3)

    assert [len(first.started), len(second.started)] == [3, 3]
    assert len(host.kit.store.live()) == 3


def test_the_units_of_a_preempted_run_go_to_the_job_that_it_yielded_to(host):
    """Though the worker of the run asks first."""
    first, second = host.worker("first", A, room=2, length=1_000), host.worker("second", B)
    host.kit.submit(n=5, cost_units=40, priority=10)
    first.turn()
    [wanted_by] = host.kit.submit(addon_id="b", cost_units=40, priority=95)
    preempter = Preempter(
        host.kit.store, host.kit.rules, host.kit.dispatcher, host.kit.job_service, YieldRequests()
    )
    preempter.step(host.kit.now)
    assert (preempter.cycle.victim, preempter.cycle.wanted_by) == (*first.ends, wanted_by)

    host.kit.job_service.end(preempter.cycle.victim, EndReason.COOPERATIVE_PREEMPTION)
    assert host.kit.job_service.claim(A, 2, "first") == []
    second.turn()
    assert [job_id for _, job_id in second.started] == [wanted_by]


@pytest.mark.parametrize(
    "end", [EndReason.COOPERATIVE_PREEMPTION, EndReason.RELEASED, EndReason.GRACEFUL_SHUTDOWN]
)
def test_a_job_that_was_preempted_does_not_start_again_before_the_job_that_it_yielded_to(host, end):
    """Its age begins anew: it waited or ran for so long that the other job would be behind it."""
    [old] = host.kit.submit(cost_units=40, priority=50)
    host.kit.later(3_600)
    worker = host.worker("w", WorkerKinds(), length=1_000)
    worker.turn()
    [wanted_by] = host.kit.submit(addon_id="b", cost_units=40, priority=95)
    job_service = host.kit.job_service
    preempter = Preempter(
        host.kit.store, host.kit.rules, host.kit.dispatcher, job_service, job_service.yields
    )
    with host.kit.pulling_workers.waiting("w", WorkerKinds(), 1):
        preempter.step(host.kit.now)
    assert (preempter.cycle.victim, preempter.cycle.wanted_by) == (*worker.ends, wanted_by)

    job_service.end(preempter.cycle.victim, end)

    assert [each.job.job_id for each in job_service.claim(WorkerKinds(), 2, "w")] == [wanted_by]
    assert host.kit.store.job(old).ready_at == host.kit.now


def test_no_run_is_asked_to_yield_to_a_job_without_a_present_worker(host):
    """Until one asks for it. The run would lose what it has done, and the units would be reserved in vain."""
    first = host.worker("first", A, room=1, length=1_000)
    host.kit.submit(cost_units=40, priority=10)
    first.turn()
    host.kit.submit(addon_id="unserved", cost_units=40, priority=95)
    parts = (host.kit.store, host.kit.rules, host.kit.dispatcher, host.kit.job_service, YieldRequests())
    preempter = Preempter(*parts)
    preempter.step(host.kit.now)
    assert preempter.cycle is None

    host.kit.pulling_workers.polled(WorkerKinds(AddonId("unserved")), until=host.kit.now + SECOND)
    preempter.step(host.kit.now)
    assert preempter.cycle is not None


PREEMPTING_CHANGES = {
    "everything paused": lambda host, _: host.kit.job_service.pause(),
    "its addon paused": lambda host, _: host.kit.job_service.pause("b"),
    "priority lowered": lambda host, job_id: host.kit.job_service.edit(job_id, priority=20),
    "put off": lambda host, job_id: host.kit.job_service.edit(
        job_id, earliest_start_at=host.kit.now + 3_600 * SECOND
    ),
    "drained": lambda host, _: setattr(host.kit.machine, "draining", True),
}


@pytest.mark.parametrize("change", PREEMPTING_CHANGES)
def test_no_run_is_stopped_for_a_job_that_may_no_longer_start(host, change):
    """The run would lose what it has done, and nothing would start in its place."""
    first = host.worker("first", A, room=1, length=1_000)
    host.worker("second", B)
    host.kit.submit(cost_units=40, priority=10)
    first.turn()
    [wanted_by] = host.kit.submit(addon_id="b", cost_units=40, priority=95)
    preempter = Preempter(
        host.kit.store, host.kit.rules, host.kit.dispatcher, host.kit.job_service, YieldRequests()
    )
    preempter.step(host.kit.now)
    [victim] = first.ends
    assert preempter.cycle.victim == victim

    PREEMPTING_CHANGES[change](host, wanted_by)
    preempter.step(host.kit.now)
    assert preempter.cycle is None

    for _ in range(10):
        host.kit.later(20)
        host.kit.job_service.heartbeat(victim)
        preempter.step(host.kit.now)
    assert host.kit.store.dispatch(victim).phase is DispatchPhase.LEASED
