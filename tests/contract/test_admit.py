from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.jobs import changes
from penstock.core.jobs.admission import AdmissionClass, AdmissionLimits, Caps, Conditions
from penstock.core.jobs.ordering import Aging, Ordering, order_key
from penstock.core.jobs.round import Placement, RoundInputs, RoundResult, RunningJob, decide_standalone_lease
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import Admit, Apply, Query, SetAddon, Terms, committed


def test_a_picked_job_is_dispatching_and_its_units_are_reserved(kit):
    [job_id] = kit.submit(cost_units=30)
    [dispatch] = kit.tick()

    assert (dispatch.job_id, dispatch.phase, dispatch.fence) == (job_id, DispatchPhase.RESERVED, 1)
    assert kit.state(job_id) == "DISPATCHING"
    assert kit.store.ledger("here").units == 30
    assert kit.kinds(job_id) == ["SUBMITTED", "DISPATCHING"]
    assert kit.store.dispatch(dispatch.dispatch_id) == dispatch


def test_dispatch_and_lease_in_one_step(kit):
    [job_id] = kit.submit()
    [dispatch] = kit.tick(lease=True, worker="w1")

    assert (dispatch.phase, dispatch.worker) == (DispatchPhase.LEASED, "w1")
    assert kit.state(job_id) == "RUNNING"
    assert kit.kinds(job_id) == ["SUBMITTED", "DISPATCHING", "RUNNING"]


def test_what_a_claim_brought_is_known_as_if_it_had_been_read(kit):
    _, tried = kit.start(payload="[0]", max_active_sec=3_000)
    kit.beat(tried, progress=0.5, spent=3)
    kit.end(tried, EndReason.WORKER_CRASHED)
    kit.later(3_600)
    kit.submit(payload="[1]", tags=("x", "y"), priority=70, deadline_at=kit.now + 3_600 * SECOND)
    kit.submit(payload="[2]", idempotency_key="k", max_runtime_sec=60, retry_delays_sec=(1, 2), cost_limit=5)
    kit.submit(payload="[3]")
    grants = committed(kit.store, kit.round(lease=True))
    jobs = [grant.job for grant in grants]

    assert ["[0]", "[1]", "[2]", "[3]"] == sorted(job.intent.payload for job in jobs)
    assert jobs == kit.store.jobs([grant.dispatch.job_id for grant in grants])


def test_a_job_is_given_out_once(kit):
    kit.submit()

    assert len(kit.tick()) == 1
    assert kit.tick() == []


def test_rounds_that_race_never_share_a_job_and_never_exceed_capacity(kit):
    kit.submit(n=60, cost_units=3)

    with ThreadPoolExecutor(8) as pool:
        rounds = list(pool.map(lambda _: kit.tick(capacity=90, lease=True, limit=4), range(16)))

    given_out = [d.dispatch_id for dispatches in rounds for d in dispatches]
    assert len(given_out) == len(set(given_out)) == 30
    assert kit.store.ledger("here").units == 90


def test_nobody_decides_on_books_that_another_round_is_about_to_change(kit):
    first_decides, second_decides = Event(), Event()
    overlapped = []

    def slow(admission_view):
        first_decides.set()
        overlapped.append(second_decides.wait(0.3))
        return RoundResult()

    def quick(admission_view):
        second_decides.set()
        return RoundResult()

    with ThreadPoolExecutor(2) as pool:
        pool.submit(committed, kit.store, Admit("here", slow))
        first_decides.wait(30)
        pool.submit(committed, kit.store, Admit("here", quick))

    assert overlapped[0] is False
    assert second_decides.is_set()


def test_capacity_is_per_host_and_caps_are_not(kit):
    kit.submit(n=4, cost_units=60)

    assert len(kit.tick(host="here")) == 1
    assert len(kit.tick(host="there")) == 1
    assert kit.tick(host="third", caps=Caps(per_addon=2)) == []


def test_a_round_that_fails_leaves_no_trace(kit):
    kit.submit(n=2)
    before = kit.everything()

    def fails(admission_view):
        for line in admission_view.ready_queues():
            admission_view.ledger.take(line.admission_class, admission_view.now, Ordering().sharing)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        [grant.dispatch for grant in committed(kit.store, Admit("here", fails, Terms()))]
    assert kit.everything() == before
    assert len(kit.tick()) == 2


def test_looking_changes_nothing(kit):
    kit.submit(n=2)
    before = kit.everything()

    def look(admission_view):
        for line in admission_view.ready_queues():
            admission_view.ledger.take(line.admission_class, admission_view.now, Ordering().sharing)
        return [w.job_id for line in admission_view.ready_queues() for w in line.jobs]

    assert len(kit.store.read_view("here", look)) == 2
    assert kit.everything() == before


def test_a_round_without_a_verdict_writes_nothing(kit):
    kit.submit()
    before = kit.everything()

    assert [
        grant.dispatch
        for grant in committed(kit.store, Admit("here", lambda admission_view: RoundResult(), Terms()))
    ] == []
    assert kit.everything() == before


def test_a_job_whose_time_has_not_come_is_not_in_line(kit):
    [job_id] = kit.submit(earliest_start_at=kit.now + 60 * SECOND)

    assert kit.tick() == []
    assert kit.store.alarm() == kit.now + 60 * SECOND
    kit.later(60)
    assert [d.job_id for d in kit.tick()] == [job_id]


def test_a_job_near_its_deadline_steps_into_the_urgent_line(kit):
    [job_id] = kit.submit(time_sensitive=True, deadline_at=kit.now + 3_600 * SECOND)

    kit.tick(capacity=0)
    assert kit.store.read_view("here", lines_of) == [(False, job_id)]
    kit.later(3_000)
    kit.tick(capacity=0)
    assert kit.store.read_view("here", lines_of) == [(True, job_id)]


def test_a_job_whose_time_comes_near_its_deadline_steps_into_the_urgent_line_at_once(kit):
    start, end = kit.now + 60 * SECOND, kit.now + 3_600 * SECOND
    [job_id] = kit.submit(time_sensitive=True, earliest_start_at=start, deadline_at=end)
    kit.later(3_000)
    kit.tick(capacity=0)

    assert kit.store.read_view("here", lines_of) == [(True, job_id)]
    assert kit.store.alarm() == end


def lines_of(admission_view):
    return [(line.urgent, w.job_id) for line in admission_view.ready_queues() for w in line.jobs]


@settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    jobs=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(1, 100), st.integers(0, 600)),
        max_size=12,
    )
)
def test_lines_hold_what_is_due_in_the_cores_order(kit, jobs):
    kit.clock.now += 10_000 * SECOND
    for addon, cost, priority, age in jobs:
        kit.clock.now -= age * SECOND
        kit.submit(addon_id=addon, cost_units=cost, priority=priority)
        kit.clock.now += age * SECOND

    def lines(admission_view):
        return {
            line.admission_class: [(w.turn, w.no) for w in line.jobs]
            for line in admission_view.ready_queues()
        }

    seen = kit.store.read_view("here", lines)
    queued = kit.store.find(Query(states=[JobState.QUEUED], limit=1_000))
    assert sum(map(len, seen.values())) == len(queued)
    assert all(line == sorted(line) for line in seen.values())
    by_no = {job.no: job for job in queued}
    for line in seen.values():
        for its_turn, no in line:
            assert its_turn == order_key(by_no[no].intent.priority, by_no[no].ready_at, Aging())


def test_a_denial_is_recorded_once_until_its_reason_changes(kit):
    [job_id] = kit.submit(cost_units=50)
    for _ in range(3):
        kit.tick(capacity=40)
    kit.tick(capacity=90, caps=Caps(concurrent=0))

    denied = [event.reason for event in kit.store.events(0, 100, job_id)][1:]
    assert denied == ["no_room", "cap_reached"]
    assert kit.store.job(job_id).denied == "cap_reached"


def test_a_start_clears_the_recorded_denial(kit):
    [job_id] = kit.submit(cost_units=50)
    kit.tick(capacity=40)
    kit.tick()
    job = kit.store.job(job_id)

    assert (job.denied, job.denied_at, job.passed_at) == ("", None, None)


def test_a_job_passed_over_remembers_since_when(kit):
    [big] = kit.submit(cost_units=50)
    kit.submit(cost_units=10)
    kit.tick(capacity=40)
    since = kit.now
    kit.later(5)
    kit.submit(cost_units=10)
    kit.tick(capacity=40)

    assert kit.store.job(big).passed_at == since


def test_what_a_round_kept_room_with_is_what_runs_here(kit):
    kit.submit(cost_units=20, expected_duration_sec=60)
    kit.tick(lease=True)

    assert kit.store.read_view("here", lambda admission_view: list(admission_view.running())) == [
        RunningJob(20, kit.now, kit.now + 60 * SECOND)
    ]
    assert kit.store.read_view("there", lambda admission_view: list(admission_view.running())) == []


def test_a_paused_addon_waits_and_weights_are_kept(kit):
    committed(kit.store, SetAddon("a", paused=True, weight=300))
    kit.submit()
    kit.submit(addon_id="b")

    assert [d.addon_id for d in kit.tick()] == ["b"]
    committed(kit.store, SetAddon("a", paused=False))
    assert [d.addon_id for d in kit.tick()] == ["a"]
    assert [(a.addon_id, a.weight, a.paused) for a in kit.store.addons()] == [
        ("a", 300, False),
        ("b", 100, False),
    ]


def test_waiting_units_are_counted_by_the_labels_that_a_host_must_have(kit):
    kit.submit(n=3, cost_units=20)
    kit.submit(n=2, cost_units=30, labels=("gpu",))
    kit.submit(cost_units=5, addon_id="b", labels=("gpu",))
    kit.submit(cost_units=50, labels=("gpu",), earliest_start_at=kit.now + 60 * SECOND)

    assert kit.store.waiting_by_labels() == {(): (3, 60), ("gpu",): (3, 65)}
    kit.tick()
    assert kit.store.waiting_by_labels() == {("gpu",): (3, 65)}


def test_every_dispatch_has_a_higher_fence_than_the_last(kit):
    [job_id] = kit.submit()
    fences = []
    for _ in range(3):
        [dispatch] = kit.tick(lease=True)
        fences.append(dispatch.fence)
        kit.end(dispatch, EndReason.GRACEFUL_SHUTDOWN)

    assert fences == [1, 2, 3]
    assert [d.fence for d in kit.store.attempts(job_id)] == fences
    assert len({d.dispatch_id for d in kit.store.attempts(job_id)}) == 3


def loan(kit, cost=10, priority=50, capacity=90):
    reasons = []

    def run_round(admission_view):
        admission_class = AdmissionClass("guest", "t", cost)
        inputs = RoundInputs(
            admission_view, Conditions(capacity), AdmissionLimits(), Ordering(), lambda _: Placement.RESERVE
        )
        round_result, reason = decide_standalone_lease(inputs, admission_class, priority)
        reasons.append(reason)
        return round_result

    grants = committed(kit.store, Admit("here", run_round, Terms()))
    return [grant.dispatch for grant in grants], reasons[-1]


def test_a_lease_without_a_job_holds_units_like_any_other(kit):
    [lease], reason = loan(kit, cost=30)

    assert reason is None
    assert (lease.job_id, lease.phase) == (None, DispatchPhase.LEASED)
    assert kit.store.ledger("here").units == 30
    assert kit.beat(lease).phase is DispatchPhase.LEASED


def test_units_of_a_lease_without_a_job_come_back_once(kit):
    [first], _ = loan(kit, cost=30)
    loan(kit, cost=20)
    end = changes.release(first, kit.now, EndReason.RELEASED)

    assert [committed(kit.store, Apply([end])) for _ in range(2)] == [[True], [False]]
    assert kit.store.ledger("here").units == 20


def test_a_lease_without_a_job_that_has_ended_is_not_told_to_stop(kit):
    [lease], _ = loan(kit)
    stop = changes.stop(lease, None, EndReason.CANCELED, kit.now, grace=SECOND)
    committed(kit.store, Apply([changes.release(lease, kit.now, EndReason.RELEASED)]))

    assert committed(kit.store, Apply([stop])) == [False]
    assert kit.store.dispatch(lease.dispatch_id).phase is DispatchPhase.ENDED


def test_a_lease_without_a_job_is_denied_while_somebody_of_equal_priority_could_start(kit):
    [job_id] = kit.submit()

    dispatches, reason = loan(kit, priority=50)
    assert (dispatches, reason.code, reason.job_id) == ([], "queued_ahead", job_id)
    assert loan(kit, priority=51)[0]


def test_a_job_that_could_not_start_now_does_not_keep_others_from_a_lease(kit):
    kit.submit(cost_units=80)

    assert loan(kit, capacity=50)[0]


def test_a_job_that_asks_for_labels_starts_only_where_they_are(kit):
    [asks, plain] = [*kit.submit(labels=("gpu", "large")), *kit.submit()]

    assert [plain] == [d.job_id for d in kit.tick(host="other", labels=["gpu"])]
    assert [asks] == [d.job_id for d in kit.tick(host="here", labels=["large", "gpu", "arm"])]
    labels_of = {d.job_id: d.admission_class.labels for d in kit.store.live()}
    assert ("gpu", "large") == kit.store.job(asks).intent.labels == labels_of[asks]
