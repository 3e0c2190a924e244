from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from penstock.core.jobs import changes
from penstock.core.jobs.admission import Conditions
from penstock.core.jobs.dependencies import Dependency
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import QuietState
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.states import Counters, DispatchPhase, JobState
from penstock.core.jobs.types import MINUTE, SECOND, EndReason, RunWhen
from penstock.stores.api import Apply, Complete, CompletedDispatch, Query, committed


def test_a_completed_job_is_done_and_its_units_are_back(kit):
    job, dispatch = kit.start(cost_units=40)
    kit.later(7)

    assert kit.end(dispatch, result='{"n": 1}')
    assert kit.state(job.job_id) == "DONE"
    assert kit.store.ledger("here").units == 0
    [attempt] = kit.store.attempts(job.job_id)
    assert (attempt.end, attempt.result, attempt.ended_at) == (EndReason.COMPLETED, '{"n": 1}', kit.now)
    assert kit.kinds(job.job_id)[-1] == "DONE"


def test_units_come_back_once(kit):
    job, dispatch = kit.start()
    done = changes.end(job, dispatch, EndReason.COMPLETED, kit.now, **kit.rules)

    assert committed(kit.store, Apply([done, done])) == [True, False]
    assert committed(kit.store, Apply([done])) == [False]
    assert kit.store.ledger("here").units == 0


def test_of_many_that_are_done_each_counts_on_its_own_merits(kit):
    jobs = [kit.start(cost_units=5, job_type=kind) for kind in ("a", "a", "b", "c", "d")]
    (first, one), (second, two), (third, three), (_, told), (_, gone) = jobs
    committed(
        kit.store, Apply([changes.stop(told, jobs[3][0], EndReason.CANCELED, kit.now, grace=15 * SECOND)])
    )
    kit.end(gone, EndReason.GRACEFUL_SHUTDOWN)
    kit.later(7)
    names = [one.dispatch_id, two.dispatch_id, one.dispatch_id, "nobody.1", "", "x.0", f"{first.job_id}.2"]
    done = [CompletedDispatch(name) for name in names] + [
        CompletedDispatch(three.dispatch_id, "[1]"),
        CompletedDispatch(told.dispatch_id),
        CompletedDispatch(gone.dispatch_id),
    ]

    assert committed(kit.store, Complete(done)) == [True, True, *[False] * 5, True, False, False]
    assert [kit.state(job.job_id) for job in (first, second, third)] == ["DONE"] * 3
    assert [kit.store.attempts(job.job_id)[0].result for job in (second, third)] == [None, "[1]"]
    assert kit.store.job(first.job_id).active == 7 * SECOND
    assert kit.store.ledger("here").units == 5
    assert kit.kinds(third.job_id)[-1] == "DONE"
    assert kit.store.audit() == []


def test_what_is_done_when_the_lease_has_run_out_is_refused(kit):
    _, dispatch = kit.start()
    kit.later(30)
    before = kit.everything()

    assert committed(kit.store, Complete([CompletedDispatch(dispatch.dispatch_id)])) == [False]
    assert kit.everything() == before


def test_who_is_done_twice_at_once_is_done_once(kit):
    _, dispatch = kit.start()

    assert committed(kit.store, Complete([CompletedDispatch(dispatch.dispatch_id)] * 2)) == [True, False]


@pytest.mark.parametrize("what", ["beats", "tells", "is stopped"])
def test_what_a_run_did_before_it_was_completed_counts(kit, what):
    job, dispatch = kit.start()
    if what == "beats":
        kit.later(20)
        kit.beat(dispatch)
        kit.later(20)  # behind the end of the lease as it was given
    elif what == "tells":
        kit.beat(dispatch, checkpoint="1")
    else:
        stop = changes.stop(dispatch, job, EndReason.CANCELED, kit.now, grace=10 * SECOND)
        committed(kit.store, Apply([stop]))

    done = committed(kit.store, Complete([CompletedDispatch(dispatch.dispatch_id)]))

    assert done == [what != "is stopped"]


def test_a_reservation_becomes_a_lease_without_a_second_admission(kit):
    [job_id] = kit.submit(cost_units=30)
    [dispatch] = kit.tick()
    started = changes.start(kit.store.job(job_id), dispatch, kit.now, ttl=30 * SECOND, worker="w")

    assert committed(kit.store, Apply([started])) == [True]
    assert kit.state(job_id) == "RUNNING"
    assert kit.store.ledger("here").units == 30
    assert kit.store.dispatch(dispatch.dispatch_id).worker == "w"


def test_a_reservation_that_has_timed_out_cannot_become_a_lease(kit):
    [job_id] = kit.submit()
    [dispatch] = kit.tick()
    kit.later(30)
    before = kit.everything()
    started = changes.start(kit.store.job(job_id), dispatch, kit.now, ttl=30 * SECOND)

    assert committed(kit.store, Apply([started])) == [False]
    assert kit.everything() == before


@pytest.mark.parametrize(
    "how", [EndReason.COMPLETED, EndReason.JOB_ERROR, EndReason.UNAVAILABLE, EndReason.RELEASED]
)
def test_a_stale_completion_changes_nothing(kit, how):
    job, first = kit.start()
    stale = changes.end(job, first, how, kit.now, **kit.rules)
    kit.end(first, EndReason.GRACEFUL_SHUTDOWN)
    [second] = kit.tick(lease=True)
    before = kit.everything()

    assert committed(kit.store, Apply([stale])) == [False]
    assert kit.everything() == before
    assert kit.end(second)


def test_a_worker_that_reports_after_its_lease_has_expired_is_too_late(kit):
    job, dispatch = kit.start()
    kit.later(30)
    before = kit.everything()
    late = changes.end(job, dispatch, EndReason.COMPLETED, kit.now, reported=True, **kit.rules)

    assert committed(kit.store, Apply([late])) == [False]
    assert kit.everything() == before


def test_of_cancel_and_complete_one_wins(kit):
    job, dispatch = kit.start()
    done = changes.end(job, dispatch, EndReason.COMPLETED, kit.now, **kit.rules)
    told = changes.cancel(job, dispatch, kit.now, grace=15 * SECOND, **kit.rules)

    assert committed(kit.store, Apply([told, done])) == [True, False]
    assert kit.state(job.job_id) == "RUNNING"


def test_units_of_a_run_that_was_told_to_stop_are_held_until_it_is_gone(kit):
    job, dispatch = kit.start(cost_units=40)
    committed(kit.store, Apply([changes.cancel(job, dispatch, kit.now, grace=15 * SECOND, **kit.rules)]))
    ending = kit.store.dispatch(dispatch.dispatch_id)

    assert (ending.phase, ending.reason) == (DispatchPhase.ENDING, EndReason.CANCELED)
    assert kit.store.ledger("here").units == 40
    assert kit.end(ending, EndReason.COMPLETED)
    assert kit.state(job.job_id) == "CANCELED"
    assert kit.store.ledger("here").units == 0


def test_a_crash_comes_back_after_its_delay_and_not_before(kit):
    job, dispatch = kit.start()
    kit.end(dispatch, EndReason.WORKER_CRASHED)
    back = kit.store.job(job.job_id)

    assert (back.state, back.not_before, back.counters) == (
        JobState.QUEUED,
        kit.now + MINUTE,
        Counters(crash=1),
    )
    assert kit.tick() == []
    kit.later(60)
    assert [d.job_id for d in kit.tick()] == [job.job_id]


def test_crashes_use_all_five_delays_and_then_fail(kit):
    job, dispatch = kit.start()
    waits = []
    while kit.state(job.job_id) != "FAILED":
        kit.end(dispatch, EndReason.WORKER_CRASHED)
        back = kit.store.job(job.job_id)
        if back.state is JobState.QUEUED:
            waits.append((back.ready_at - kit.now) // MINUTE)
            kit.clock.now = back.ready_at
            [dispatch] = kit.tick(lease=True)

    assert waits == [1, 5, 15, 30, 30]
    assert kit.kinds(job.job_id).count("REQUEUED") == 5
    assert len(kit.store.attempts(job.job_id)) == 6


def test_active_time_adds_up_over_attempts_and_stops_the_last_at_the_hard_cap(kit):
    job, dispatch = kit.start(max_active_sec=100)
    kit.later(25)
    kit.beat(dispatch)
    kit.end(dispatch, EndReason.GRACEFUL_SHUTDOWN)
    [again] = kit.tick(lease=True)

    assert kit.store.job(job.job_id).active == 25 * SECOND
    assert (again.stop_at, again.stop_for) == (kit.now + 75 * SECOND, EndReason.HARD_CAP_EXCEEDED)


def test_retry_brings_a_failed_job_back_with_everything_cleared(kit):
    job, dispatch = kit.start(max_active_sec=100)
    kit.later(25)
    kit.end(dispatch, EndReason.JOB_ERROR, error="boom")
    failed = kit.store.job(job.job_id)
    assert (failed.state, failed.ended_at) == (JobState.FAILED, kit.now)

    assert committed(kit.store, Apply([changes.retry(failed, kit.now, Ordering())])) == [True]
    back = kit.store.job(job.job_id)
    assert (back.state, back.counters, back.active, back.ended_at) == (JobState.QUEUED, Counters(), 0, None)
    assert kit.kinds(job.job_id)[-1] == "RETRIED"
    assert kit.tick()


def test_a_canceled_job_leaves_the_line(kit):
    [job_id] = kit.submit()
    committed(kit.store, Apply([changes.cancel(kit.store.job(job_id), None, kit.now, grace=0, **kit.rules)]))

    assert kit.state(job_id) == "CANCELED"
    assert kit.tick() == []


def test_a_canceled_job_keeps_the_reason_why_it_waited(kit):
    [job_id] = kit.submit(cost_units=50)
    kit.tick(capacity=40)
    waiting = kit.store.job(job_id)
    committed(kit.store, Apply([changes.cancel(waiting, None, kit.now, grace=0, **kit.rules)]))
    canceled = kit.store.job(job_id)

    assert (canceled.denied, canceled.denied_at) == (waiting.denied, waiting.denied_at)
    assert canceled.denied == "no_room"


def test_an_edit_moves_a_job_in_line(kit):
    first, second = kit.submit(n=2)
    job = kit.store.job(second)
    edited = changes.edit(job, replace(job.intent, priority=90), kit.now, Ordering())

    assert committed(kit.store, Apply([edited])) == [True]
    assert kit.store.job(second).intent.priority == 90
    assert [d.job_id for d in kit.tick(capacity=10)] == [second]
    assert [d.job_id for d in kit.tick(capacity=20)] == [first]


def test_an_edit_can_put_a_start_off_and_bring_it_back(kit):
    [job_id] = kit.submit()
    job = kit.store.job(job_id)
    put_off = replace(job.intent, earliest_start_at=kit.now + 60 * SECOND)
    committed(kit.store, Apply([changes.edit(job, put_off, kit.now, Ordering())]))
    assert kit.tick() == []

    job = kit.store.job(job_id)
    committed(
        kit.store, Apply([changes.edit(job, replace(put_off, earliest_start_at=None), kit.now, Ordering())])
    )
    assert kit.tick()


def test_an_edit_of_the_load_lets_a_waiting_job_start(kit):
    [job_id] = kit.submit(run_when=RunWhen.QUIET, quiet_for_sec=600)
    busy = Conditions(90, QuietState.BUSY)
    assert kit.tick(conditions=busy) == []
    job = kit.store.job(job_id)
    edited = replace(job.intent, run_when=RunWhen.ANY, quiet_for_sec=0)

    assert committed(kit.store, Apply([changes.edit(job, edited, kit.now, Ordering(), "me")])) == [True]

    after = kit.store.job(job_id)
    assert (after.intent, after.ready_at) == (edited, job.ready_at)
    [event] = kit.store.events_of([EventKind.EDITED], 0, 10)
    assert event.data == {"priority": 50, "run_when": "any", "quiet_for_sec": 0, "by": "me"}
    assert [d.job_id for d in kit.tick(conditions=busy)] == [job_id]
    assert kit.store.audit() == []


def test_of_two_edits_that_saw_the_same_job_none_undoes_the_other(kit):
    [job_id] = kit.submit()
    seen = kit.store.job(job_id)
    urgent, any_load = replace(seen.intent, priority=90), replace(seen.intent, run_when=RunWhen.ANY)
    edits = [changes.edit(seen, intent, kit.now, Ordering()) for intent in (urgent, any_load)]

    assert committed(kit.store, Apply(edits)) == [True, False]
    assert kit.store.job(job_id).intent == urgent


def test_a_child_that_waits_takes_an_edit_of_its_load(kit):
    [parent] = kit.submit()
    [child] = kit.submit(run_when=RunWhen.QUIET, after=(Dependency(parent),))
    job = kit.store.job(child)
    edited = replace(job.intent, run_when=RunWhen.ANY)
    committed(kit.store, Apply([changes.edit(job, edited, kit.now, Ordering())]))
    [dispatch] = kit.tick(lease=True)
    kit.end(dispatch)

    assert [child] == [d.job_id for d in kit.tick(conditions=Conditions(90, QuietState.BUSY))]


def test_a_change_that_was_decided_on_an_older_state_changes_nothing(kit):
    [job_id] = kit.submit()
    seen = kit.store.job(job_id)
    kit.tick()
    before = kit.everything()

    stale = [
        changes.cancel(seen, None, kit.now, grace=0, **kit.rules),
        changes.edit(seen, replace(seen.intent, priority=90), kit.now, Ordering()),
        changes.miss_deadline(seen, kit.now),
    ]
    assert committed(kit.store, Apply(stale)) == [False] * 3
    assert kit.everything() == before


def test_a_change_that_was_decided_before_another_attempt_changes_nothing(kit):
    [job_id] = kit.submit()
    seen = kit.store.job(job_id)
    [dispatch] = kit.tick(lease=True)
    kit.end(dispatch, EndReason.GRACEFUL_SHUTDOWN)
    before = kit.everything()

    assert kit.state(job_id) == str(seen.state)
    assert committed(kit.store, Apply([changes.miss_deadline(seen, kit.now)])) == [False]
    assert kit.everything() == before


def test_in_one_call_each_change_stands_on_its_own_merits(kit):
    jobs = [kit.store.job(job_id) for job_id in kit.submit(n=3)]
    committed(kit.store, Apply([changes.miss_deadline(jobs[1], kit.now)]))
    applied = committed(
        kit.store, Apply([changes.cancel(job, None, kit.now, grace=0, **kit.rules) for job in jobs])
    )

    assert applied == [True, False, True]
    assert [kit.state(job.job_id) for job in jobs] == ["CANCELED", "FAILED", "CANCELED"]


def test_of_many_that_end_the_same_dispatch_at_once_one_does(kit):
    job, dispatch = kit.start()
    ends = [EndReason.COMPLETED, EndReason.JOB_ERROR, EndReason.WORKER_CRASHED, EndReason.CANCELED] * 4
    decided = [changes.end(job, dispatch, how, kit.now, **kit.rules) for how in ends]

    with ThreadPoolExecutor(16) as pool:
        applied = list(pool.map(lambda change: committed(kit.store, Apply([change]))[0], decided))

    assert applied.count(True) == 1
    assert kit.store.ledger("here").units == 0


def test_events_are_numbered_without_gaps_and_read_with_a_cursor(kit):
    _, dispatch = kit.start()
    kit.end(dispatch)
    kit.submit(n=3)
    everything = kit.store.events(0, 100)
    paged, after = [], 0
    while page := kit.store.events(after, 2):
        paged += page
        after = page[-1].seq

    assert [event.seq for event in everything] == list(range(1, len(everything) + 1))
    assert paged == everything
    assert kit.store.newest() == everything[-1].seq


def test_events_of_some_kinds_are_read_with_the_same_cursor(kit):
    _, dispatch = kit.start()
    kit.end(dispatch)
    kit.submit(n=3)
    everything = kit.store.events(0, 100)
    kinds = {EventKind.SUBMITTED, EventKind.RUNNING}
    wanted = [event for event in everything if event.kind in kinds]

    assert 5 == len(wanted) < len(everything)
    assert wanted == kit.store.events_of(kinds, 0, 100)
    assert wanted[2:4] == kit.store.events_of(kinds, wanted[1].seq, 2)
    assert [] == kit.store.events_of([EventKind.ALERT], 0, 100) == kit.store.events_of([], 0, 100)


def test_a_trail_that_has_not_begun_ends_at_zero(kit):
    assert kit.store.newest() == 0


def test_the_trail_of_a_job_tells_its_states(kit):
    job, dispatch = kit.start()
    kit.end(dispatch, EndReason.MAX_RUNTIME_EXCEEDED)
    trail = kit.store.events(0, 100, job.job_id)

    assert [(str(e.kind), str(e.state), e.n) for e in trail] == [
        ("SUBMITTED", "QUEUED", 1),
        ("DISPATCHING", "DISPATCHING", 2),
        ("RUNNING", "RUNNING", 3),
        ("TIMEOUT", "QUEUED", 4),
        ("REQUEUED", "QUEUED", 5),
    ]
    assert trail[-1].data == {"not_before": kit.now + MINUTE}
    assert trail[-1].dispatch_id == dispatch.dispatch_id


def test_addons_know_how_many_jobs_they_have_in_each_state(kit):
    _, dispatch = kit.start()
    kit.submit(n=2)
    kit.submit(addon_id="b")
    kit.end(dispatch)

    assert {a.addon_id: dict(a.jobs) for a in kit.store.addons()} == {
        "a": {JobState.DONE: 1, JobState.QUEUED: 2},
        "b": {JobState.QUEUED: 1},
    }


def test_an_addons_average_follows_what_it_holds(kit):
    _, dispatch = kit.start(cost_units=80)
    kit.later(300)
    kit.end(dispatch, EndReason.WORKER_CRASHED)

    [addon] = kit.store.addons()
    assert addon.units == 0
    assert addon.average == pytest.approx(40)


def test_pages_of_finished_jobs_are_found_by_state(kit):
    _, dispatch = kit.start()
    kit.submit()
    kit.end(dispatch)

    assert [job.job_id for job in kit.store.find(Query(states=[JobState.DONE]))] == [dispatch.job_id]


@pytest.mark.parametrize("how", [EndReason.COMPLETED, EndReason.JOB_ERROR, EndReason.RELEASED, None])
def test_a_remark_can_be_made_wherever_a_job_is(kit, how):
    job, dispatch = kit.start()
    if how is not None:
        committed(kit.store, Apply([changes.end(job, dispatch, how, kit.now, **kit.rules)]))
    job = kit.store.job(job.job_id)
    before = kit.kinds(job.job_id)

    assert committed(
        kit.store, Apply([changes.remark(job, changes.Note(EventKind.SIGNALED, "x"), kit.now)])
    ) == [True]
    assert kit.kinds(job.job_id) == [*before, "SIGNALED"]
    assert kit.store.job(job.job_id).state is job.state
