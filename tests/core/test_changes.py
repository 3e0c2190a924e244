from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.errors import IllegalMove
from penstock.core.jobs.admission import AdmissionClass, admission_class_of
from penstock.core.jobs.changes import (
    cancel,
    completed,
    edit,
    end,
    miss_deadline,
    release,
    retry,
    start,
    stop,
)
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.ordering import Ordering, order_key, place
from penstock.core.jobs.states import Counters, DispatchPhase, JobState, Schedules
from penstock.core.jobs.types import MINUTE, SECOND, AddonId, EndReason

NOW = 1_900_000_000 * SECOND
RULES = {"schedules": Schedules(), "ordering": Ordering()}
INTENT = Intent(addon_id=AddonId("a"), job_type="t")


def job(state=JobState.RUNNING, **more):
    return Job(
        **{
            "no": 1,
            "job_id": "j",
            "intent": INTENT,
            "created_at": NOW - MINUTE,
            "ready_at": NOW - MINUTE,
            "fence": 3,
        }
        | {"state": state}
        | more
    )


def dispatch(phase=DispatchPhase.LEASED, **more):
    return Dispatch(
        **{
            "dispatch_id": "d",
            "job_id": "j",
            "addon_id": "a",
            "host": "h",
            "admission_class": AdmissionClass("a", "t", 10),
            "fence": 3,
        }
        | {"admitted_at": NOW - SECOND, "expires_at": NOW + SECOND, "phase": phase}
        | more
    )


def kinds(change):
    return [note.kind for note in change.notes]


def test_a_reservation_becomes_the_lease_and_forgets_that_nobody_had_come():
    change = start(
        job(JobState.DISPATCHING, counters=Counters(crash=1, start=4)),
        dispatch(DispatchPhase.RESERVED),
        NOW,
        ttl=30 * SECOND,
    )

    assert change.job.target is JobState.RUNNING
    assert change.job.counters == Counters(crash=1)
    assert change.dispatch.expires_at == NOW + 30 * SECOND
    assert change.dispatch.while_valid


@pytest.mark.parametrize(
    ("runtime", "cap", "active", "expected"),
    [
        (None, None, 0, (None, None)),
        (60, None, 0, (NOW + 60 * SECOND, EndReason.MAX_RUNTIME_EXCEEDED)),
        (60, 100, 30 * SECOND, (NOW + 60 * SECOND, EndReason.MAX_RUNTIME_EXCEEDED)),
        (60, 100, 50 * SECOND, (NOW + 50 * SECOND, EndReason.HARD_CAP_EXCEEDED)),
        (60, 100, 500 * SECOND, (NOW, EndReason.HARD_CAP_EXCEEDED)),
    ],
)
def test_an_attempt_stops_at_its_runtime_or_at_what_is_left_of_the_hard_cap(runtime, cap, active, expected):
    limited = replace(INTENT, max_runtime_sec=runtime, max_active_sec=cap)
    change = start(
        job(JobState.DISPATCHING, intent=limited, active=active),
        dispatch(DispatchPhase.RESERVED),
        NOW,
        ttl=30 * SECOND,
    )

    assert (change.dispatch.stop_at, change.dispatch.stop_for) == expected


def test_a_crash_puts_the_job_back_with_a_delay_and_a_new_place():
    change = end(job(), dispatch(), EndReason.WORKER_CRASHED, NOW, **RULES)

    assert change.job.target is JobState.QUEUED
    assert change.job.place.not_before == change.job.place.ready_at == NOW + MINUTE
    assert change.job.counters == Counters(crash=1)
    assert kinds(change) == [EventKind.REQUEUED]


def test_an_interruption_keeps_the_jobs_age():
    change = end(job(), dispatch(), EndReason.GRACEFUL_SHUTDOWN, NOW, **RULES)

    assert change.job.place.ready_at == NOW - MINUTE
    assert change.job.place.line(NOW) == 1


def test_a_time_limit_is_told_as_timeout_before_where_it_landed():
    assert kinds(end(job(), dispatch(), EndReason.MAX_RUNTIME_EXCEEDED, NOW, **RULES)) == [
        EventKind.TIMEOUT,
        EventKind.REQUEUED,
    ]


def test_a_hard_cap_alerts():
    assert kinds(end(job(), dispatch(), EndReason.HARD_CAP_EXCEEDED, NOW, **RULES)) == [
        EventKind.FAILED,
        EventKind.ALERT,
    ]


def test_what_a_worker_reports_counts_only_while_its_lease_does():
    reported = end(job(), dispatch(), EndReason.COMPLETED, NOW, reported=True, **RULES)
    swept = end(job(), dispatch(), EndReason.LEASE_EXPIRED, NOW, **RULES)

    assert reported.dispatch.while_valid
    assert not swept.dispatch.while_valid


def test_cancel_before_a_run_has_begun_is_done_at_once():
    queued = cancel(job(JobState.QUEUED), None, NOW, grace=SECOND, **RULES)
    reserved = cancel(job(JobState.DISPATCHING), dispatch(DispatchPhase.RESERVED), NOW, grace=SECOND, **RULES)
    blocked = cancel(job(JobState.BLOCKED), None, NOW, grace=SECOND, **RULES)

    assert {c.job.target for c in (queued, reserved, blocked)} == {JobState.CANCELED}
    assert reserved.dispatch.target is DispatchPhase.ENDED


def test_cancel_of_a_run_holds_its_units_until_it_is_gone():
    change = cancel(job(), dispatch(), NOW, grace=15 * SECOND, **RULES)

    assert change.job.target is JobState.RUNNING
    assert change.dispatch.target is DispatchPhase.ENDING
    assert change.dispatch.reason is EndReason.CANCELED
    assert change.dispatch.expires_at == NOW + 15 * SECOND


def test_a_run_that_was_told_to_stop_is_not_given_up_before_its_lease_is_over():
    lease = dispatch(expires_at=NOW + 25 * SECOND)

    assert (
        stop(lease, job(), EndReason.CANCELED, NOW, grace=15 * SECOND).dispatch.expires_at == lease.expires_at
    )


def test_the_second_reason_to_stop_changes_nothing():
    ending = dispatch(DispatchPhase.ENDING, reason=EndReason.COST_LIMIT_REACHED)

    assert stop(ending, job(), EndReason.CANCELED, NOW, grace=SECOND) is None
    late = cancel(job(), ending, NOW, grace=SECOND, **RULES)
    assert (late.dispatch, late.job.target) == (None, job().state)


def test_a_canceled_job_is_canceled_again_without_a_change():
    assert cancel(job(JobState.CANCELED), None, NOW, grace=SECOND, **RULES) is None


@pytest.mark.parametrize("state", [JobState.DONE, JobState.FAILED])
def test_what_is_over_cannot_be_canceled(state):
    with pytest.raises(IllegalMove):
        cancel(job(state), None, NOW, grace=SECOND, **RULES)


def test_retry_clears_counters_waiting_and_the_hard_cap_clock():
    failed = job(JobState.FAILED, counters=Counters(crash=6), not_before=NOW + 9, active=99, intent=INTENT)
    change = retry(failed, NOW, Ordering())

    assert change.job.counters == Counters()
    assert change.job.fresh
    assert change.job.place.not_before is None
    assert change.job.place.ready_at == NOW


def test_retry_after_a_missed_deadline_does_not_miss_it_again():
    late = job(JobState.FAILED, intent=replace(INTENT, deadline_at=NOW - 1, time_sensitive=True))

    assert retry(late, NOW, Ordering()).job.place.deadline_at is None


@pytest.mark.parametrize("state", [s for s in JobState if s not in (JobState.FAILED, JobState.BLOCKED)])
def test_only_failed_and_blocked_jobs_are_retried(state):
    with pytest.raises(IllegalMove):
        retry(job(state), NOW, Ordering())


def test_a_deadline_fails_only_what_is_queued():
    assert miss_deadline(job(JobState.QUEUED), NOW).job.target is JobState.FAILED
    assert miss_deadline(job(JobState.QUEUED), NOW).notes[0].reason == "deadline_passed"
    with pytest.raises(IllegalMove):
        miss_deadline(job(JobState.DONE), NOW)


def test_an_edit_moves_the_job_in_line_and_keeps_its_age():
    change = edit(job(JobState.QUEUED), replace(INTENT, priority=80), NOW, Ordering())

    assert change.job.place.ready_at == NOW - MINUTE
    assert change.job.place.turn == order_key(80, NOW - MINUTE, Ordering().aging)
    assert change.job.place.admission_class.high


def test_only_a_queued_job_is_edited():
    with pytest.raises(IllegalMove):
        edit(job(JobState.RUNNING), INTENT, NOW, Ordering())


def test_a_lease_without_a_job_ends_without_one():
    change = release(dispatch(job_id=None), NOW, EndReason.RELEASED)

    assert change.job is None
    assert change.dispatch.target is DispatchPhase.ENDED


def test_the_place_of_a_job_waits_for_the_latest_of_its_moments():
    intent = replace(INTENT, earliest_start_at=NOW + 20)

    assert place(intent, NOW, NOW + 10, Ordering()).ready_at == NOW + 20
    assert place(intent, NOW, NOW + 30, Ordering()).ready_at == NOW + 30
    assert place(intent, NOW, None, Ordering()).line(NOW) == 0
    assert place(intent, NOW, None, Ordering()).line(NOW + 20) == 1


def test_near_its_deadline_a_time_sensitive_job_stands_in_the_urgent_line():
    intent = replace(INTENT, deadline_at=NOW + 60 * MINUTE, time_sensitive=True)
    its_place = place(intent, NOW, None, Ordering())

    assert [its_place.line(NOW), its_place.line(NOW + 50 * MINUTE)] == [1, 2]


@pytest.mark.parametrize(
    ("expected", "klass"), [(None, 0), (0.2, 1), (2, 1), (2.5, 2), (4, 2), (5, 3), (3600, 12)]
)
def test_like_durations_share_a_line_and_its_bound_holds(expected, klass):
    admission_class = admission_class_of(replace(INTENT, expected_duration_sec=expected))

    assert admission_class.duration_class == klass
    assert expected is None or (1 << admission_class.duration_class) >= expected


def test_demands_that_differ_have_different_keys():
    demands = [
        AdmissionClass("a", "t", 10),
        AdmissionClass("a", "t", 11),
        AdmissionClass("a", "t1", 1),
        AdmissionClass("a", "t", 10, high=True),
        AdmissionClass("a", "t", 10, duration_class=1),
        AdmissionClass("a", "t", 10, quiet_for_sec=1),
    ]

    assert len({d.key for d in demands}) == len(demands)


def test_a_completion_follows_from_the_name_of_its_lease():
    read = end(
        job(), dispatch(dispatch_id="j.3"), EndReason.COMPLETED, NOW, result="1", reported=True, **RULES
    )

    assert completed("j.3", NOW, "1") == read


@pytest.mark.parametrize("name", ["loan.0", "j", "", "j.x", "j."])
def test_from_a_name_that_is_no_jobs_lease_follows_a_change_that_no_job_matches(name):
    assert completed(name, NOW).job.fence == 0
