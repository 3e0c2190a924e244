from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from penstock.core.jobs import changes
from penstock.core.jobs.end_rules import DispatchPhase, EndReason
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.retry import Counters
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import MINUTE, SECOND
from penstock.stores.api import Apply, Complete, CompletedDispatch, Query, committed


def test_a_completed_job_is_done_and_its_units_are_back(yard):
    job, dispatch = yard.start(cost_units=40)
    yard.later(7)

    assert yard.end(dispatch, result='{"n": 1}')
    assert yard.state(job.job_id) == "DONE"
    assert yard.store.ledger("here").units == 0
    [attempt] = yard.store.attempts(job.job_id)
    assert (attempt.end, attempt.result, attempt.ended_at) == (EndReason.COMPLETED, '{"n": 1}', yard.now)
    assert yard.kinds(job.job_id)[-1] == "DONE"


def test_units_come_back_once(yard):
    job, dispatch = yard.start()
    done = changes.end(job, dispatch, EndReason.COMPLETED, yard.now, **yard.rules)

    assert committed(yard.store, Apply([done, done])) == [True, False]
    assert committed(yard.store, Apply([done])) == [False]
    assert yard.store.ledger("here").units == 0


def test_of_many_that_are_done_each_counts_on_its_own_merits(yard):
    jobs = [yard.start(cost_units=5, job_type=kind) for kind in ("a", "a", "b", "c", "d")]
    (first, one), (second, two), (third, three), (_, told), (_, gone) = jobs
    committed(
        yard.store, Apply([changes.stop(told, jobs[3][0], EndReason.CANCELED, yard.now, grace=15 * SECOND)])
    )
    yard.end(gone, EndReason.GRACEFUL_SHUTDOWN)
    yard.later(7)
    names = [one.dispatch_id, two.dispatch_id, one.dispatch_id, "nobody.1", "", "x.0", f"{first.job_id}.2"]
    done = [CompletedDispatch(name) for name in names] + [
        CompletedDispatch(three.dispatch_id, "[1]"),
        CompletedDispatch(told.dispatch_id),
        CompletedDispatch(gone.dispatch_id),
    ]

    assert committed(yard.store, Complete(done)) == [True, True, *[False] * 5, True, False, False]
    assert [yard.state(job.job_id) for job in (first, second, third)] == ["DONE"] * 3
    assert [yard.store.attempts(job.job_id)[0].result for job in (second, third)] == [None, "[1]"]
    assert yard.store.job(first.job_id).active == 7 * SECOND
    assert yard.store.ledger("here").units == 5
    assert yard.kinds(third.job_id)[-1] == "DONE"
    assert yard.store.audit() == []


def test_what_is_done_when_the_lease_has_run_out_is_refused(yard):
    _, dispatch = yard.start()
    yard.later(30)
    before = yard.everything()

    assert committed(yard.store, Complete([CompletedDispatch(dispatch.dispatch_id)])) == [False]
    assert yard.everything() == before


def test_who_is_done_twice_at_once_is_done_once(yard):
    _, dispatch = yard.start()

    assert committed(yard.store, Complete([CompletedDispatch(dispatch.dispatch_id)] * 2)) == [True, False]


@pytest.mark.parametrize("what", ["beats", "tells", "is stopped"])
def test_what_a_run_did_before_it_was_completed_counts(yard, what):
    job, dispatch = yard.start()
    if what == "beats":
        yard.later(20)
        yard.beat(dispatch)
        yard.later(20)  # behind the end of the lease as it was given
    elif what == "tells":
        yard.beat(dispatch, checkpoint="1")
    else:
        stop = changes.stop(dispatch, job, EndReason.CANCELED, yard.now, grace=10 * SECOND)
        committed(yard.store, Apply([stop]))

    done = committed(yard.store, Complete([CompletedDispatch(dispatch.dispatch_id)]))

    assert done == [what != "is stopped"]


def test_a_reservation_becomes_a_lease_without_a_second_admission(yard):
    [job_id] = yard.submit(cost_units=30)
    [dispatch] = yard.tick()
    started = changes.start(yard.store.job(job_id), dispatch, yard.now, ttl=30 * SECOND, worker="w")

    assert committed(yard.store, Apply([started])) == [True]
    assert yard.state(job_id) == "RUNNING"
    assert yard.store.ledger("here").units == 30
    assert yard.store.dispatch(dispatch.dispatch_id).worker == "w"


def test_a_reservation_that_has_timed_out_cannot_become_a_lease(yard):
    [job_id] = yard.submit()
    [dispatch] = yard.tick()
    yard.later(30)
    before = yard.everything()
    started = changes.start(yard.store.job(job_id), dispatch, yard.now, ttl=30 * SECOND)

    assert committed(yard.store, Apply([started])) == [False]
    assert yard.everything() == before


@pytest.mark.parametrize(
    "how", [EndReason.COMPLETED, EndReason.JOB_ERROR, EndReason.UNAVAILABLE, EndReason.RELEASED]
)
def test_a_stale_completion_changes_nothing(yard, how):
    job, first = yard.start()
    stale = changes.end(job, first, how, yard.now, **yard.rules)
    yard.end(first, EndReason.GRACEFUL_SHUTDOWN)
    [second] = yard.tick(lease=True)
    before = yard.everything()

    assert committed(yard.store, Apply([stale])) == [False]
    assert yard.everything() == before
    assert yard.end(second)


def test_a_worker_that_reports_after_its_lease_has_expired_is_too_late(yard):
    job, dispatch = yard.start()
    yard.later(30)
    before = yard.everything()
    late = changes.end(job, dispatch, EndReason.COMPLETED, yard.now, reported=True, **yard.rules)

    assert committed(yard.store, Apply([late])) == [False]
    assert yard.everything() == before


def test_of_cancel_and_complete_one_wins(yard):
    job, dispatch = yard.start()
    done = changes.end(job, dispatch, EndReason.COMPLETED, yard.now, **yard.rules)
    told = changes.cancel(job, dispatch, yard.now, grace=15 * SECOND, **yard.rules)

    assert committed(yard.store, Apply([told, done])) == [True, False]
    assert yard.state(job.job_id) == "RUNNING"


def test_units_of_a_run_that_was_told_to_stop_are_held_until_it_is_gone(yard):
    job, dispatch = yard.start(cost_units=40)
    committed(yard.store, Apply([changes.cancel(job, dispatch, yard.now, grace=15 * SECOND, **yard.rules)]))
    ending = yard.store.dispatch(dispatch.dispatch_id)

    assert (ending.phase, ending.reason) == (DispatchPhase.ENDING, EndReason.CANCELED)
    assert yard.store.ledger("here").units == 40
    assert yard.end(ending, EndReason.COMPLETED)
    assert yard.state(job.job_id) == "CANCELED"
    assert yard.store.ledger("here").units == 0


def test_a_crash_comes_back_after_its_delay_and_not_before(yard):
    job, dispatch = yard.start()
    yard.end(dispatch, EndReason.WORKER_CRASHED)
    back = yard.store.job(job.job_id)

    assert (back.state, back.not_before, back.counters) == (
        JobState.QUEUED,
        yard.now + MINUTE,
        Counters(crash=1),
    )
    assert yard.tick() == []
    yard.later(60)
    assert [d.job_id for d in yard.tick()] == [job.job_id]


def test_crashes_use_all_five_delays_and_then_fail(yard):
    job, dispatch = yard.start()
    waits = []
    while yard.state(job.job_id) != "FAILED":
        yard.end(dispatch, EndReason.WORKER_CRASHED)
        back = yard.store.job(job.job_id)
        if back.state is JobState.QUEUED:
            waits.append((back.ready_at - yard.now) // MINUTE)
            yard.clock.now = back.ready_at
            [dispatch] = yard.tick(lease=True)

    assert waits == [1, 5, 15, 30, 30]
    assert yard.kinds(job.job_id).count("REQUEUED") == 5
    assert len(yard.store.attempts(job.job_id)) == 6


def test_active_time_adds_up_over_attempts_and_stops_the_last_at_the_hard_cap(yard):
    job, dispatch = yard.start(max_active_sec=100)
    yard.later(25)
    yard.beat(dispatch)
    yard.end(dispatch, EndReason.GRACEFUL_SHUTDOWN)
    [again] = yard.tick(lease=True)

    assert yard.store.job(job.job_id).active == 25 * SECOND
    assert (again.stop_at, again.stop_for) == (yard.now + 75 * SECOND, EndReason.HARD_CAP_EXCEEDED)


def test_retry_brings_a_failed_job_back_with_everything_cleared(yard):
    job, dispatch = yard.start(max_active_sec=100)
    yard.later(25)
    yard.end(dispatch, EndReason.JOB_ERROR, error="boom")
    failed = yard.store.job(job.job_id)
    assert (failed.state, failed.ended_at) == (JobState.FAILED, yard.now)

    assert committed(yard.store, Apply([changes.retry(failed, yard.now, Ordering())])) == [True]
    back = yard.store.job(job.job_id)
    assert (back.state, back.counters, back.active, back.ended_at) == (JobState.QUEUED, Counters(), 0, None)
    assert yard.kinds(job.job_id)[-1] == "RETRIED"
    assert yard.tick()


def test_a_canceled_job_leaves_the_line(yard):
    [job_id] = yard.submit()
    committed(
        yard.store, Apply([changes.cancel(yard.store.job(job_id), None, yard.now, grace=0, **yard.rules)])
    )

    assert yard.state(job_id) == "CANCELED"
    assert yard.tick() == []


def test_an_edit_moves_a_job_in_line(yard):
    first, second = yard.submit(n=2)
    job = yard.store.job(second)
    edited = changes.edit(job, replace(job.intent, priority=90), yard.now, Ordering())

    assert committed(yard.store, Apply([edited])) == [True]
    assert yard.store.job(second).intent.priority == 90
    assert [d.job_id for d in yard.tick(capacity=10)] == [second]
    assert [d.job_id for d in yard.tick(capacity=20)] == [first]


def test_an_edit_can_put_a_start_off_and_bring_it_back(yard):
    [job_id] = yard.submit()
    job = yard.store.job(job_id)
    put_off = replace(job.intent, earliest_start_at=yard.now + 60 * SECOND)
    committed(yard.store, Apply([changes.edit(job, put_off, yard.now, Ordering())]))
    assert yard.tick() == []

    job = yard.store.job(job_id)
    committed(
        yard.store, Apply([changes.edit(job, replace(put_off, earliest_start_at=None), yard.now, Ordering())])
    )
    assert yard.tick()


def test_a_change_that_was_decided_on_an_older_state_changes_nothing(yard):
    [job_id] = yard.submit()
    seen = yard.store.job(job_id)
    yard.tick()
    before = yard.everything()

    stale = [
        changes.cancel(seen, None, yard.now, grace=0, **yard.rules),
        changes.edit(seen, replace(seen.intent, priority=90), yard.now, Ordering()),
        changes.miss_deadline(seen, yard.now),
    ]
    assert committed(yard.store, Apply(stale)) == [False] * 3
    assert yard.everything() == before


def test_a_change_that_was_decided_before_another_attempt_changes_nothing(yard):
    [job_id] = yard.submit()
    seen = yard.store.job(job_id)
    [dispatch] = yard.tick(lease=True)
    yard.end(dispatch, EndReason.GRACEFUL_SHUTDOWN)
    before = yard.everything()

    assert yard.state(job_id) == str(seen.state)
    assert committed(yard.store, Apply([changes.miss_deadline(seen, yard.now)])) == [False]
    assert yard.everything() == before


def test_in_one_call_each_change_stands_on_its_own_merits(yard):
    jobs = [yard.store.job(job_id) for job_id in yard.submit(n=3)]
    committed(yard.store, Apply([changes.miss_deadline(jobs[1], yard.now)]))
    applied = committed(
        yard.store, Apply([changes.cancel(job, None, yard.now, grace=0, **yard.rules) for job in jobs])
    )

    assert applied == [True, False, True]
    assert [yard.state(job.job_id) for job in jobs] == ["CANCELED", "FAILED", "CANCELED"]


def test_of_many_that_end_the_same_dispatch_at_once_one_does(yard):
    job, dispatch = yard.start()
    ends = [EndReason.COMPLETED, EndReason.JOB_ERROR, EndReason.WORKER_CRASHED, EndReason.CANCELED] * 4
    decided = [changes.end(job, dispatch, how, yard.now, **yard.rules) for how in ends]

    with ThreadPoolExecutor(16) as pool:
        applied = list(pool.map(lambda change: committed(yard.store, Apply([change]))[0], decided))

    assert applied.count(True) == 1
    assert yard.store.ledger("here").units == 0


def test_events_are_numbered_without_gaps_and_read_with_a_cursor(yard):
    _, dispatch = yard.start()
    yard.end(dispatch)
    yard.submit(n=3)
    everything = yard.store.events(0, 100)
    paged, after = [], 0
    while page := yard.store.events(after, 2):
        paged += page
        after = page[-1].seq

    assert [event.seq for event in everything] == list(range(1, len(everything) + 1))
    assert paged == everything
    assert yard.store.newest() == everything[-1].seq


def test_events_of_some_kinds_are_read_with_the_same_cursor(yard):
    _, dispatch = yard.start()
    yard.end(dispatch)
    yard.submit(n=3)
    everything = yard.store.events(0, 100)
    kinds = {EventKind.SUBMITTED, EventKind.RUNNING}
    wanted = [event for event in everything if event.kind in kinds]

    assert 5 == len(wanted) < len(everything)
    assert wanted == yard.store.events_of(kinds, 0, 100)
    assert wanted[2:4] == yard.store.events_of(kinds, wanted[1].seq, 2)
    assert [] == yard.store.events_of([EventKind.ALERT], 0, 100) == yard.store.events_of([], 0, 100)


def test_a_trail_that_has_not_begun_ends_at_zero(yard):
    assert yard.store.newest() == 0


def test_the_trail_of_a_job_tells_its_states(yard):
    job, dispatch = yard.start()
    yard.end(dispatch, EndReason.MAX_RUNTIME_EXCEEDED)
    trail = yard.store.events(0, 100, job.job_id)

    assert [(str(e.kind), str(e.state), e.n) for e in trail] == [
        ("SUBMITTED", "QUEUED", 1),
        ("DISPATCHING", "DISPATCHING", 2),
        ("RUNNING", "RUNNING", 3),
        ("TIMEOUT", "QUEUED", 4),
        ("REQUEUED", "QUEUED", 5),
    ]
    assert trail[-1].data == {"not_before": yard.now + MINUTE}
    assert trail[-1].dispatch_id == dispatch.dispatch_id


def test_addons_know_how_many_jobs_they_have_in_each_state(yard):
    _, dispatch = yard.start()
    yard.submit(n=2)
    yard.submit(addon_id="b")
    yard.end(dispatch)

    assert {a.addon_id: dict(a.jobs) for a in yard.store.addons()} == {
        "a": {JobState.DONE: 1, JobState.QUEUED: 2},
        "b": {JobState.QUEUED: 1},
    }


def test_an_addons_average_follows_what_it_holds(yard):
    _, dispatch = yard.start(cost_units=80)
    yard.later(300)
    yard.end(dispatch, EndReason.WORKER_CRASHED)

    [addon] = yard.store.addons()
    assert addon.units == 0
    assert addon.average == pytest.approx(40)


def test_pages_of_finished_jobs_are_found_by_state(yard):
    _, dispatch = yard.start()
    yard.submit()
    yard.end(dispatch)

    assert [job.job_id for job in yard.store.find(Query(states=[JobState.DONE]))] == [dispatch.job_id]


@pytest.mark.parametrize("how", [EndReason.COMPLETED, EndReason.JOB_ERROR, EndReason.RELEASED, None])
def test_a_remark_can_be_made_wherever_a_job_is(yard, how):
    job, dispatch = yard.start()
    if how is not None:
        committed(yard.store, Apply([changes.end(job, dispatch, how, yard.now, **yard.rules)]))
    job = yard.store.job(job.job_id)
    before = yard.kinds(job.job_id)

    assert committed(
        yard.store, Apply([changes.remark(job, changes.Note(EventKind.SIGNALED, "x"), yard.now)])
    ) == [True]
    assert yard.kinds(job.job_id) == [*before, "SIGNALED"]
    assert yard.store.job(job.job_id).state is job.state
