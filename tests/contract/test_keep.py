"""Heartbeats, what is overdue, retention, the clock: what the keeper lives on."""

from __future__ import annotations

import pytest
from tests.contract.conftest import OF_ONE_HOST

from penstock.core.errors import DispatcherHeld
from penstock.core.jobs import changes
from penstock.core.jobs.end_rules import DispatchPhase, EndReason
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.ordering import RoundResult
from penstock.core.jobs.types import HOUR, SECOND
from penstock.stores.api import Admit, Apply, Due, Prune, Shift, Terms, committed


def due(yard, limit=100):
    return [(str(o.due), o.job and o.job.job_id) for o in yard.store.overdue(limit)]


def test_a_heartbeat_prolongs_the_lease(yard):
    _, dispatch = yard.start()
    yard.later(29)
    standing = yard.beat(dispatch)
    yard.later(29)

    assert standing.expires_at == yard.store.dispatch(dispatch.dispatch_id).expires_at == yard.now + SECOND
    assert due(yard) == []


def test_a_heartbeat_after_the_expiry_renews_nothing_though_nobody_has_swept(yard):
    job, dispatch = yard.start()
    yard.later(30)
    before = yard.everything()

    assert yard.beat(dispatch, progress=0.5, spent=100, checkpoint="{}") is None
    assert yard.everything() == before
    assert yard.store.checkpoint(job.job_id) is None


def test_a_stale_heartbeat_renews_nothing(yard):
    _, first = yard.start()
    yard.end(first, EndReason.GRACEFUL_SHUTDOWN)
    yard.tick(lease=True)
    before = yard.everything()

    assert yard.beat(first) is None
    assert yard.everything() == before


def test_a_reservation_has_no_heartbeat(yard):
    yard.submit()
    [dispatch] = yard.tick()

    assert yard.beat(dispatch) is None


def test_a_dispatch_that_was_told_to_stop_hears_it_and_is_not_prolonged(yard):
    job, dispatch = yard.start()
    committed(yard.store, Apply([changes.cancel(job, dispatch, yard.now, grace=15 * SECOND, **yard.rules)]))
    yard.later(10)
    standing = yard.beat(dispatch)

    assert (standing.phase, standing.reason) == (DispatchPhase.ENDING, EndReason.CANCELED)
    assert standing.expires_at == yard.now + 20 * SECOND
    yard.later(20)
    assert yard.beat(dispatch) is None


def test_progress_spend_and_checkpoint_ride_on_a_heartbeat(yard):
    job, dispatch = yard.start(cost_limit=1_000)
    standing = yard.beat(dispatch, progress=0.25, spent=300, checkpoint='{"page": 3}')

    assert (standing.spent_before, standing.spent, standing.cost_limit) == (0, 300, 1_000)
    assert yard.store.checkpoint(job.job_id) == '{"page": 3}'
    assert yard.kinds(job.job_id)[-1] == "CHECKPOINT"
    now = yard.store.job(job.job_id)
    assert (now.progress, now.spent) == (0.25, 300)
    assert yard.store.ledger("here").spent["a"] == {"day": 300, "month": 300}


def test_spending_told_twice_counts_once_and_adds_up_over_attempts(yard):
    job, dispatch = yard.start()
    for total in (300, 300, 200, 500):
        yard.beat(dispatch, spent=total)
    yard.end(dispatch, EndReason.GRACEFUL_SHUTDOWN)
    [again] = yard.tick(lease=True)
    standing = yard.beat(again, spent=50)

    assert yard.store.job(job.job_id).spent == 550
    assert (standing.spent_before, standing.spent) == (500, 550)


def test_retry_by_hand_grants_the_limit_once_more_and_keeps_the_total(yard):
    job, dispatch = yard.start()
    yard.beat(dispatch, spent=500)
    yard.end(dispatch, EndReason.JOB_ERROR)
    committed(
        yard.store, Apply([changes.retry(yard.store.job(job.job_id), yard.now, yard.rules["ordering"])])
    )
    [again] = yard.tick(lease=True)

    assert yard.beat(again, spent=70).spent == 70
    assert yard.store.job(job.job_id).spent == 570


def test_a_checkpoint_outlives_the_attempt_that_made_it(yard):
    job, dispatch = yard.start()
    yard.beat(dispatch, checkpoint="[1]")
    yard.end(dispatch, EndReason.WORKER_CRASHED)

    assert yard.store.checkpoint(job.job_id) == "[1]"


def test_a_reservation_a_lease_and_a_stop_are_overdue_when_their_time_is_over(yard):
    [reserved] = yard.submit()
    yard.tick()
    running, _ = yard.start()
    ending, dispatch = yard.start()
    committed(
        yard.store, Apply([changes.cancel(ending, dispatch, yard.now, grace=40 * SECOND, **yard.rules)])
    )
    yard.later(29)
    assert due(yard) == []

    assert yard.store.alarm() == yard.now + SECOND
    yard.later(1)
    assert due(yard) == [("expired", reserved), ("expired", running.job_id)]
    yard.later(10)
    assert ("expired", ending.job_id) in due(yard)
    assert len(yard.store.overdue(2)) == 2


def test_a_run_past_its_limit_is_to_be_stopped(yard):
    job, dispatch = yard.start(max_runtime_sec=60)
    for _ in range(3):
        yard.later(20)
        yard.beat(dispatch)

    [overdue] = yard.store.overdue(10)
    assert (overdue.due, overdue.job.job_id, overdue.dispatch.stop_for) == (
        Due.STOP,
        job.job_id,
        EndReason.MAX_RUNTIME_EXCEEDED,
    )


def test_a_deadline_is_overdue_only_while_the_job_is_queued(yard):
    deadline = yard.now + 60 * SECOND
    [waits] = yard.submit(deadline_at=deadline)
    [future] = yard.submit(deadline_at=deadline, earliest_start_at=deadline - SECOND)
    yard.tick(capacity=0)
    assert yard.store.alarm() == deadline - SECOND
    yard.later(60)

    assert sorted(due(yard)) == sorted([("deadline", waits), ("deadline", future)])
    yard.tick()
    assert [kind for kind, _ in due(yard)] == []


def test_without_anything_to_come_there_is_no_alarm(yard):
    assert yard.store.alarm() is None
    yard.submit()
    assert yard.store.alarm() is None


@OF_ONE_HOST
def test_a_clock_that_was_set_moves_no_lease(yard):
    _, dispatch = yard.start(max_runtime_sec=60, expected_duration_sec=50)
    yard.clock.now += HOUR

    assert committed(yard.store, Shift(HOUR)) == 1
    moved = yard.store.dispatch(dispatch.dispatch_id)
    assert moved.expires_at == yard.now + 30 * SECOND
    assert moved.stop_at == yard.now + 60 * SECOND
    assert moved.ends_at == yard.now + 50 * SECOND
    assert due(yard) == []


def test_settled_jobs_are_forgotten_in_steps_with_all_that_was_theirs(yard):
    for _ in range(5):
        _, dispatch = yard.start()
        yard.beat(dispatch, checkpoint="{}")
        yard.end(dispatch)
    [queued] = yard.submit()
    yard.later(100)
    old = yard.store.events(0, 1)[0].job_id

    assert committed(yard.store, Prune(yard.now, 3)) == 3
    assert committed(yard.store, Prune(yard.now, 3)) == 2
    assert committed(yard.store, Prune(yard.now, 3)) == 0
    assert yard.store.job(old) is None
    assert yard.store.attempts(old) == []
    assert yard.store.checkpoint(old) is None
    assert yard.store.events(0, 100, old) == []
    assert yard.state(queued) == "QUEUED"


def failed(yard):
    job, dispatch = yard.start()
    yard.end(dispatch, EndReason.JOB_ERROR, error="no")
    yard.later(10)
    return job.job_id


def revived(yard, job_id):
    retry = changes.retry(yard.store.job(job_id), yard.now, yard.rules["ordering"])
    assert committed(yard.store, Apply([retry])) == [True]


def test_a_job_that_was_revived_does_not_count_as_one_that_is_forgotten(yard):
    first, *rest = [failed(yard) for _ in range(4)]
    revived(yard, first)

    assert committed(yard.store, Prune(yard.now, 2)) == 2
    assert [yard.store.job(job_id) is None for job_id in (first, *rest)] == [False, True, True, False]


def test_a_job_that_ended_again_is_as_old_as_its_last_end(yard):
    first, second = failed(yard), failed(yard)
    revived(yard, first)
    [again] = yard.tick(lease=True)
    yard.end(again, EndReason.JOB_ERROR, error="no")
    yard.later(10)

    assert committed(yard.store, Prune(yard.now, 1)) == 1
    assert [yard.store.job(job_id) is None for job_id in (first, second)] == [False, True]


def test_young_and_blocked_jobs_are_kept(yard):
    _, dispatch = yard.start()
    yard.end(dispatch)
    blocked, dispatch = yard.start()
    yard.end(dispatch, EndReason.COST_LIMIT_REACHED)

    assert committed(yard.store, Prune(yard.now, 10)) == 0
    yard.later(1)
    assert committed(yard.store, Prune(yard.now, 10)) == 1
    assert yard.state(blocked.job_id) == "BLOCKED"


def test_a_key_protects_for_as_long_as_its_job_can_be_looked_at(yard):
    job, dispatch = yard.start(idempotency_key="k")
    yard.end(dispatch)
    assert yard.submit(idempotency_key="k") == [job.job_id]
    yard.later(1)
    committed(yard.store, Prune(yard.now, 10))

    [again] = yard.submit(idempotency_key="k")
    assert again != job.job_id
    assert yard.store.job(job.job_id) is None


def test_a_number_is_never_used_again_after_its_event_was_forgotten(yard):
    _, dispatch = yard.start()
    yard.end(dispatch)
    yard.later(1)
    last = yard.store.events(0, 100)[-1].seq
    committed(yard.store, Prune(yard.now, 10))
    [job_id] = yard.submit()

    assert all(event.seq > last for event in yard.store.events(0, 100))
    assert yard.store.job(job_id).no == 2


def test_a_lease_without_a_job_is_released(yard):
    admission_class = AdmissionClass("guest", "t", 20)

    def lend(admission_view):
        admission_view.ledger.take(admission_class, admission_view.now, yard.rules["ordering"].sharing)
        return RoundResult(loan=admission_class)

    [lease] = [grant.dispatch for grant in committed(yard.store, Admit("here", lend, Terms()))]
    yard.later(30)

    assert due(yard) == [("expired", None)]
    assert committed(yard.store, Apply([changes.release(lease, yard.now, EndReason.LEASE_EXPIRED)])) == [True]
    assert yard.store.ledger("here").units == 0
    assert [str(event.kind) for event in yard.store.events(0, 10)] == ["ADMITTED", "RELEASED"]


@OF_ONE_HOST
def test_one_dispatcher_and_the_second_is_told_who_it_is(yard):
    yard.store.acquire_dispatch("the first")

    with pytest.raises(DispatcherHeld, match="the first"):
        yard.store.acquire_dispatch("the second")


def test_every_commit_rings(yard):
    rings = []
    yard.store.on_change(lambda: rings.append(1))
    yard.submit()
    submitted = len(rings)
    yard.tick()

    assert 0 < submitted < len(rings)


def test_a_round_that_wrote_nothing_does_not_ring(yard):
    yard.submit(cost_units=50)
    yard.tick(capacity=40)
    rings = []
    yard.store.on_change(lambda: rings.append(1))
    yard.tick(capacity=40)

    assert rings == []
