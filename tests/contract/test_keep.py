"""Heartbeats, what is overdue, retention, the clock: what the keeper lives on."""

from __future__ import annotations

import pytest
from tests.contract.conftest import OF_ONE_HOST, StoreKit

from penstock.core.errors import DispatcherHeld
from penstock.core.jobs import changes
from penstock.core.jobs.admission import AdmissionClass
from penstock.core.jobs.round import RoundResult
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import HOUR, SECOND, EndReason
from penstock.stores.api import Admit, Apply, Complete, CompletedDispatch, Due, Prune, Shift, Terms, committed


def due(kit, limit=100):
    return [(str(o.due), o.job and o.job.job_id) for o in kit.store.overdue(limit)]


def test_a_heartbeat_prolongs_the_lease(kit):
    _, dispatch = kit.start()
    kit.later(29)
    renewed = kit.beat(dispatch)
    kit.later(29)

    assert renewed.expires_at == kit.store.dispatch(dispatch.dispatch_id).expires_at == kit.now + SECOND
    assert due(kit) == []


def test_many_dispatches_are_read_at_once_and_those_that_do_not_exist_are_left_out(kit):
    started = [kit.start()[1] for _ in range(3)]
    ids = [dispatch.dispatch_id for dispatch in started]

    assert kit.store.dispatches([*ids, "no-such-job.1"]) == {each: kit.store.dispatch(each) for each in ids}
    assert kit.store.dispatches([]) == {}


def test_a_heartbeat_after_the_expiry_renews_nothing_though_nobody_has_swept(kit):
    job, dispatch = kit.start()
    kit.later(30)
    before = kit.everything()

    assert kit.beat(dispatch, progress=0.5, spent=100, checkpoint="{}") is None
    assert kit.everything() == before
    assert kit.store.checkpoint(job.job_id) is None


def test_a_stale_heartbeat_renews_nothing(kit):
    _, first = kit.start()
    kit.end(first, EndReason.GRACEFUL_SHUTDOWN)
    kit.tick(lease=True)
    before = kit.everything()

    assert kit.beat(first) is None
    assert kit.everything() == before


def test_a_reservation_has_no_heartbeat(kit):
    kit.submit()
    [dispatch] = kit.tick()

    assert kit.beat(dispatch) is None


def test_a_dispatch_that_was_told_to_stop_hears_it_and_is_not_prolonged(kit):
    job, dispatch = kit.start()
    committed(kit.store, Apply([changes.cancel(job, dispatch, kit.now, grace=15 * SECOND, **kit.rules)]))
    kit.later(10)
    renewed = kit.beat(dispatch)

    assert (renewed.phase, renewed.reason) == (DispatchPhase.ENDING, EndReason.CANCELED)
    assert renewed.expires_at == kit.now + 20 * SECOND
    kit.later(20)
    assert kit.beat(dispatch) is None


def test_progress_spend_and_checkpoint_ride_on_a_heartbeat(kit):
    job, dispatch = kit.start(cost_limit=1_000)
    renewed = kit.beat(dispatch, progress=0.25, spent=300, checkpoint='{"page": 3}')

    assert (renewed.spent_before, renewed.spent, renewed.cost_limit) == (0, 300, 1_000)
    assert kit.store.checkpoint(job.job_id) == '{"page": 3}'
    assert kit.kinds(job.job_id)[-1] == "CHECKPOINT"
    now = kit.store.job(job.job_id)
    assert (now.progress, now.spent) == (0.25, 300)
    assert kit.store.ledger("here").spent["a"] == {"day": 300, "month": 300}


def test_spending_told_twice_counts_once_and_adds_up_over_attempts(kit):
    job, dispatch = kit.start()
    for total in (300, 300, 200, 500):
        kit.beat(dispatch, spent=total)
    kit.end(dispatch, EndReason.GRACEFUL_SHUTDOWN)
    [again] = kit.tick(lease=True)
    renewed = kit.beat(again, spent=50)

    assert kit.store.job(job.job_id).spent == 550
    assert (renewed.spent_before, renewed.spent) == (500, 550)


def test_retry_by_hand_grants_the_limit_once_more_and_keeps_the_total(kit):
    job, dispatch = kit.start()
    kit.beat(dispatch, spent=500)
    kit.end(dispatch, EndReason.JOB_ERROR)
    committed(kit.store, Apply([changes.retry(kit.store.job(job.job_id), kit.now, kit.rules["ordering"])]))
    [again] = kit.tick(lease=True)

    assert kit.beat(again, spent=70).spent == 70
    assert kit.store.job(job.job_id).spent == 570


def test_a_checkpoint_outlives_the_attempt_that_made_it(kit):
    job, dispatch = kit.start()
    kit.beat(dispatch, checkpoint="[1]")
    kit.end(dispatch, EndReason.WORKER_CRASHED)

    assert kit.store.checkpoint(job.job_id) == "[1]"


def test_a_reservation_a_lease_and_a_stop_are_overdue_when_their_time_is_over(kit):
    [reserved] = kit.submit()
    kit.tick()
    running, _ = kit.start()
    ending, dispatch = kit.start()
    committed(kit.store, Apply([changes.cancel(ending, dispatch, kit.now, grace=40 * SECOND, **kit.rules)]))
    kit.later(29)
    assert due(kit) == []

    assert kit.store.alarm() == kit.now + SECOND
    kit.later(1)
    assert due(kit) == [("expired", reserved), ("expired", running.job_id)]
    kit.later(10)
    assert ("expired", ending.job_id) in due(kit)
    assert len(kit.store.overdue(2)) == 2


def test_a_run_past_its_limit_is_to_be_stopped(kit):
    job, dispatch = kit.start(max_runtime_sec=60)
    for _ in range(3):
        kit.later(20)
        kit.beat(dispatch)

    [overdue] = kit.store.overdue(10)
    assert (overdue.due, overdue.job.job_id, overdue.dispatch.stop_for) == (
        Due.STOP,
        job.job_id,
        EndReason.MAX_RUNTIME_EXCEEDED,
    )


def test_a_deadline_is_overdue_only_while_the_job_is_queued(kit):
    deadline = kit.now + 60 * SECOND
    [waits] = kit.submit(deadline_at=deadline)
    [future] = kit.submit(deadline_at=deadline, earliest_start_at=deadline - SECOND)
    kit.tick(capacity=0)
    assert kit.store.alarm() == deadline - SECOND
    kit.later(60)

    assert sorted(due(kit)) == sorted([("deadline", waits), ("deadline", future)])
    kit.tick()
    assert [kind for kind, _ in due(kit)] == []


def test_without_anything_to_come_there_is_no_alarm(kit):
    assert kit.store.alarm() is None
    kit.submit()
    assert kit.store.alarm() is None


@OF_ONE_HOST
def test_a_clock_that_was_set_moves_no_lease(kit):
    _, dispatch = kit.start(max_runtime_sec=60, expected_duration_sec=50)
    kit.clock.now += HOUR

    assert committed(kit.store, Shift(HOUR)) == 1
    moved = kit.store.dispatch(dispatch.dispatch_id)
    assert moved.expires_at == kit.now + 30 * SECOND
    assert moved.stop_at == kit.now + 60 * SECOND
    assert moved.ends_at == kit.now + 50 * SECOND
    assert due(kit) == []


def completed(kit, dispatch):
    assert committed(kit.store, Complete([CompletedDispatch(dispatch.dispatch_id)])) == [True]


@pytest.mark.parametrize("end", [StoreKit.end, completed], ids=["decided by a change", "reported as done"])
def test_settled_jobs_are_forgotten_in_steps_with_all_that_was_theirs(kit, end):
    for _ in range(5):
        _, dispatch = kit.start()
        kit.beat(dispatch, checkpoint="{}")
        end(kit, dispatch)
    [queued] = kit.submit()
    kit.later(100)
    old = kit.store.events(0, 1)[0].job_id

    assert committed(kit.store, Prune(kit.now, 3)) == 3
    assert committed(kit.store, Prune(kit.now, 3)) == 2
    assert committed(kit.store, Prune(kit.now, 3)) == 0
    assert kit.store.job(old) is None
    assert kit.store.attempts(old) == []
    assert kit.store.checkpoint(old) is None
    assert kit.store.events(0, 100, old) == []
    assert kit.state(queued) == "QUEUED"


def failed(kit):
    job, dispatch = kit.start()
    kit.end(dispatch, EndReason.JOB_ERROR, error="no")
    kit.later(10)
    return job.job_id


def revived(kit, job_id):
    retry = changes.retry(kit.store.job(job_id), kit.now, kit.rules["ordering"])
    assert committed(kit.store, Apply([retry])) == [True]


def test_a_job_that_was_revived_does_not_count_as_one_that_is_forgotten(kit):
    first, *rest = [failed(kit) for _ in range(4)]
    revived(kit, first)

    assert committed(kit.store, Prune(kit.now, 2)) == 2
    assert [kit.store.job(job_id) is None for job_id in (first, *rest)] == [False, True, True, False]


def test_a_job_that_ended_again_is_as_old_as_its_last_end(kit):
    first, second = failed(kit), failed(kit)
    revived(kit, first)
    [again] = kit.tick(lease=True)
    kit.end(again, EndReason.JOB_ERROR, error="no")
    kit.later(10)

    assert committed(kit.store, Prune(kit.now, 1)) == 1
    assert [kit.store.job(job_id) is None for job_id in (first, second)] == [False, True]


def test_young_and_blocked_jobs_are_kept(kit):
    _, dispatch = kit.start()
    kit.end(dispatch)
    blocked, dispatch = kit.start()
    kit.end(dispatch, EndReason.COST_LIMIT_REACHED)

    assert committed(kit.store, Prune(kit.now, 10)) == 0
    kit.later(1)
    assert committed(kit.store, Prune(kit.now, 10)) == 1
    assert kit.state(blocked.job_id) == "BLOCKED"


def test_a_key_protects_for_as_long_as_its_job_can_be_looked_at(kit):
    job, dispatch = kit.start(idempotency_key="k")
    kit.end(dispatch)
    assert kit.submit(idempotency_key="k") == [job.job_id]
    kit.later(1)
    committed(kit.store, Prune(kit.now, 10))

    [again] = kit.submit(idempotency_key="k")
    assert again != job.job_id
    assert kit.store.job(job.job_id) is None


def test_a_number_is_never_used_again_after_its_event_was_forgotten(kit):
    _, dispatch = kit.start()
    kit.end(dispatch)
    kit.later(1)
    last = kit.store.events(0, 100)[-1].seq
    committed(kit.store, Prune(kit.now, 10))
    [job_id] = kit.submit()

    assert all(event.seq > last for event in kit.store.events(0, 100))
    assert kit.store.job(job_id).no == 2


def test_a_lease_without_a_job_is_released(kit):
    admission_class = AdmissionClass("guest", "t", 20)

    def lend(admission_view):
        admission_view.ledger.take(admission_class, admission_view.now, kit.rules["ordering"].sharing)
        return RoundResult(standalone_lease=admission_class)

    [lease] = [grant.dispatch for grant in committed(kit.store, Admit("here", lend, Terms()))]
    kit.later(30)

    assert due(kit) == [("expired", None)]
    assert committed(kit.store, Apply([changes.release(lease, kit.now, EndReason.LEASE_EXPIRED)])) == [True]
    assert kit.store.ledger("here").units == 0
    assert [str(event.kind) for event in kit.store.events(0, 10)] == ["ADMITTED", "RELEASED"]


@OF_ONE_HOST
def test_one_dispatcher_and_the_second_is_told_who_it_is(kit):
    kit.store.acquire_dispatch("the first")

    with pytest.raises(DispatcherHeld, match="the first"):
        kit.store.acquire_dispatch("the second")


def test_every_commit_rings(kit):
    rings = []
    kit.store.on_change(lambda: rings.append(1))
    kit.submit()
    submitted = len(rings)
    kit.tick()

    assert 0 < submitted < len(rings)


def test_a_round_that_wrote_nothing_does_not_ring(kit):
    kit.submit(cost_units=50)
    kit.tick(capacity=40)
    rings = []
    kit.store.on_change(lambda: rings.append(1))
    kit.tick(capacity=40)

    assert rings == []
