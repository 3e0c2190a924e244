"""Claims that ride in the commit of the submit that brings the job, on the store that has them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.errors import QueueFull
from penstock.core.jobs.admission import AdmissionLimits, Conditions
from penstock.core.jobs.changes import end
from penstock.core.jobs.end_rules import EndReason
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering, Placement, run_round
from penstock.core.jobs.retry import Schedules
from penstock.stores.api import Depth, Ride, Terms
from penstock.stores.sqlite.store import SqliteStore

T0 = 1_900_000_000_000_000
JOB = Intent(addon_id="a", job_type="t", cost_units=1)


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "jobs.db", lambda: T0)
    yield store
    problems = store.audit()
    store.close()
    assert problems == []


@pytest.fixture
def commits(store):
    seen = []
    store._con.set_commit_hook(lambda: bool(seen.append(1)))
    return seen


class Idler:
    def __init__(self, most=10, decide=run_round):
        self.most, self.decide, self.landings, self.asked = most, decide, [], 0

    def __call__(self):
        self.asked += 1
        return Ride(
            "here", self._weigh, Terms(worker="idler"), lambda granted, _: self.landings.append(granted)
        )

    def _weigh(self, admission_view):
        limits = AdmissionLimits()
        return self.decide(
            admission_view,
            Conditions(90),
            limits,
            Ordering(),
            lambda _: Placement.LEASE,
            most_leases=self.most,
        )


def test_a_job_is_submitted_and_claimed_by_one_commit(store, commits):
    idle_worker = Idler()
    store.ride(idle_worker)
    [receipt] = store.submit([JOB], Depth())

    assert [[receipt.job_id]] == [[d.job_id for d in landed] for landed in idle_worker.landings]
    assert "RUNNING" == store.job(receipt.job_id).state
    assert ["SUBMITTED", "DISPATCHING", "RUNNING"] == [str(e.kind) for e in store.events(0, 10)]
    assert 1 == len(commits)


def test_what_a_ride_began_is_known_as_if_it_had_been_read(store):
    idle_worker = Idler()
    store.ride(idle_worker)
    deadline = T0 + 3_600_000_000
    told = [
        replace(JOB, payload="[1]", tags=("x",), priority=70, deadline_at=deadline, time_sensitive=True),
        JOB,
    ]
    for intent in told:
        [receipt] = store.submit([intent], Depth())

        assert store.claimed(idle_worker.landings[-1]) == store.jobs([receipt.job_id])


def test_a_later_attempt_is_read_anew(store):
    idle_worker = Idler()
    leave = store.ride(idle_worker)
    [receipt] = store.submit([JOB], Depth())
    leave()
    [dispatch] = idle_worker.landings[-1]
    job = store.job(receipt.job_id)
    store.apply(
        [end(job, dispatch, EndReason.GRACEFUL_SHUTDOWN, T0, schedules=Schedules(), ordering=Ordering())]
    )
    again = store.admit(*idle_worker()[:3])

    assert store.claimed(again) == store.jobs([receipt.job_id])
    assert [2] == [job.fence for job in store.claimed(again)]


def test_a_ride_is_a_round_what_waits_longer_goes_first(store):
    old = [receipt.job_id for receipt in store.submit([JOB, JOB], Depth())]
    idle_worker = Idler(most=1)
    store.ride(idle_worker)
    store.submit([JOB], Depth())

    assert [old[:1]] == [[d.job_id for d in landed] for landed in idle_worker.landings]


def test_a_rider_that_fails_does_not_harm_the_submit(store):
    def fails(*_, **__):
        raise RuntimeError("in the middle of a round")

    idle_worker = Idler(decide=fails)
    store.ride(idle_worker)
    [receipt] = store.submit([JOB], Depth())

    assert "QUEUED" == store.job(receipt.job_id).state
    assert [None] == idle_worker.landings


def test_a_rider_that_cannot_even_say_what_it_wants_does_not_harm_the_submit(store):
    def board():
        raise RuntimeError("nobody knows")

    store.ride(board)
    [receipt] = store.submit([JOB], Depth())

    assert "QUEUED" == store.job(receipt.job_id).state


def test_one_rider_that_fails_takes_the_others_down_with_it_and_claims_nothing_for_them(store):
    def fails(*_, **__):
        raise RuntimeError("in the middle of a round")

    good, bad = Idler(), Idler(decide=fails)
    store.ride(good)
    store.ride(bad)
    [receipt] = store.submit([JOB], Depth())

    assert ([None], [None]) == (good.landings, bad.landings)
    assert "QUEUED" == store.job(receipt.job_id).state


def test_a_submit_that_is_refused_takes_nobody_along(store):
    store.submit([JOB], Depth())
    idle_worker = Idler()
    store.ride(idle_worker)
    with pytest.raises(QueueFull):
        store.submit([JOB], Depth(total=1))

    assert ([], 0) == (idle_worker.landings, idle_worker.asked)


def test_who_has_left_is_not_asked(store):
    idle_worker = Idler()
    leave = store.ride(idle_worker)
    leave()
    store.submit([JOB], Depth())

    assert 0 == idle_worker.asked


def test_what_landed_is_on_disk_when_it_is_told(store, tmp_path):
    seen = []

    class Looks(Idler):
        def __call__(self):
            return super().__call__()._replace(landed=self.look)

        def look(self, dispatches, _):
            other = SqliteStore(tmp_path / "jobs.db", lambda: T0)
            seen.extend(str(other.job(d.job_id).state) for d in dispatches)
            other.close()

    store.ride(Looks())
    store.submit([JOB], Depth())

    assert ["RUNNING"] == seen


def test_an_answer_that_cannot_be_taken_stops_nobody(store):
    def fails(*_):
        raise RuntimeError("no hands")

    store.ride(lambda: Idler()()._replace(landed=fails))

    assert [1, 1] == [len(store.submit([JOB], Depth())) for _ in range(2)]


def test_what_brings_no_job_asks_nobody(store):
    idle_worker = Idler()
    store.ride(idle_worker)
    store.set_addon("a", weight=200)
    store.prune(T0, 10)

    assert 0 == idle_worker.asked
