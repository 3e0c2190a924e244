from __future__ import annotations

import json

import pytest

from penstock.core.jobs.admission import AdmissionClass
from penstock.core.jobs.explain import explain
from penstock.core.jobs.forecast import Ahead, Outlook
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import DEPENDENCY_UNMET, Dispatch, Job
from penstock.core.jobs.reasons import NotEnoughUnits, NotReady
from penstock.core.jobs.states import Counters, DispatchPhase, JobState
from penstock.core.jobs.types import SECOND, EndReason

NOW = 1_900_000_000 * SECOND


def job(state=JobState.QUEUED, ready_at=NOW - 41 * SECOND, retry_delays_sec=(), **more):
    intent = Intent(addon_id="a", job_type="t", cost_units=8, retry_delays_sec=retry_delays_sec)
    return Job(
        no=1, job_id="job-00000001", intent=intent, state=state, created_at=NOW, ready_at=ready_at, **more
    )


@pytest.mark.parametrize(
    ("end", "error", "words"),
    [
        (EndReason.JOB_ERROR, "Traceback:\nexit code 7", "Attempt 2 of 4 failed (exit code 7). "),
        (EndReason.HOST_LOST, None, "Attempt 1 of 6 was cut off: its host was lost. "),
        (EndReason.LEASE_EXPIRED, None, "Attempt 1 of 6 was cut off: its worker sent no heartbeat in time. "),
    ],
)
def test_a_job_that_is_retried_says_what_failed_and_when_the_next_attempt_is(end, error, words):
    waits = job(ready_at=NOW + 540 * SECOND, counters=Counters(error=2), retry_delays_sec=(600, 600, 600))
    last = run(DispatchPhase.ENDED, end=end, error=error)

    told = explain(waits, NOW, last, Outlook(NotReady(waits.ready_at), likely_start_at=waits.ready_at))

    assert told.text == words + "Next attempt in about 9 min."


def test_a_waiting_job_says_what_it_waits_for_how_much_who_is_ahead_and_until_when():
    told = explain(
        job(),
        NOW,
        outlook=Outlook(
            NotEnoughUnits(8, 5, 90),
            ahead=(Ahead("job-00000017", "b", "share"), Ahead("job-00000018", "c", "band")),
            line_ahead=3,
            likely_start_at=NOW + 14 * SECOND,
        ),
    )

    assert told.text == (
        "Waiting for 41 s. It needs 8 units; 5 of 90 are free. 3 jobs of the same kind are before it. "
        "Job 00000017 of b goes first (its addon is further below its fair share); then 1 more. Likely start in 14 s. "
        "`penstock edit 00000001 --priority urgent` changes that."
    )


def test_the_json_has_what_the_words_say():
    told = json.loads(json.dumps(explain(job(), NOW, outlook=Outlook(NotEnoughUnits(8, 5, 90))).as_json()))

    assert told["reason"] == "no_room"
    assert told["reason_data"] == {"needs": 8, "free": 5, "capacity": 90, "until": None, "most": None}
    assert told["retry_after_sec"] >= 1
    assert told["recorded"] is False
    assert told["allowed"] == ["admit", "cancel", "fail"]


def test_a_job_that_nothing_holds_says_so():
    assert "Nothing is in its way" in explain(job(), NOW).text


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (DispatchPhase.RESERVED, "10 units are reserved; its worker has 12 s to ask"),
        (DispatchPhase.LEASED, "Running for 5 s on host h, expected to end in 7 s."),
        (DispatchPhase.ENDING, "told to stop (canceled); given up in 12 s"),
    ],
)
def test_a_job_in_flight_says_how_far_it_is(phase, words):
    dispatch = run(phase, started_at=NOW - 5 * SECOND, ends_at=NOW + 7 * SECOND, reason=EndReason.CANCELED)

    assert words in explain(job(JobState.RUNNING), NOW, dispatch).text


def run(phase, **more):
    return Dispatch(
        dispatch_id="d",
        job_id="j",
        addon_id="a",
        host="h",
        admission_class=AdmissionClass("a", "t", 10),
        fence=1,
        phase=phase,
        admitted_at=NOW - 9 * SECOND,
        expires_at=NOW + 12 * SECOND,
        **more,
    )


def test_a_settled_job_says_when_that_was_and_what_may_be_done():
    told = explain(job(JobState.BLOCKED, ended_at=NOW - 3 * SECOND), NOW)

    assert told.text == "BLOCKED 3 s ago. `penstock retry 00000001` queues it again."
    assert told.allowed == ("cancel", "retry")


@pytest.mark.parametrize(
    ("state", "end", "error", "words", "reason"),
    [
        (JobState.DONE, EndReason.COMPLETED, None, "DONE 3 s ago.", "completed"),
        (JobState.CANCELED, EndReason.CANCELED, "ended by SIGTERM", "CANCELED 3 s ago: ended by SIGTERM.", "canceled"),
        (JobState.FAILED, EndReason.JOB_ERROR, "Traceback\n...\nKeyError: 7\n", "FAILED 3 s ago (job error): KeyError: 7. That was attempt 1 of 1.", "job_error"),
        (JobState.BLOCKED, EndReason.COST_LIMIT_REACHED, None, "BLOCKED 3 s ago (cost limit reached). A budget of its addon is spent.", "cost_limit_reached"),
    ],
)  # fmt: skip
def test_a_settled_job_says_how_its_last_run_ended(state, end, error, words, reason):
    ended = NOW - 3 * SECOND
    told = explain(
        job(state, ended_at=ended),
        NOW,
        run(DispatchPhase.ENDED, end=end, error=error, ended_at=ended),
    )

    retry = " `penstock retry 00000001` queues it again." * (state in ("FAILED", "BLOCKED"))
    assert (told.text, told.reason) == (words + retry, reason)


@pytest.mark.parametrize(
    ("parent", "way_out", "effect"),
    [
        ("CANCELED", "penstock rerun 00000001", "submits it again, to run after no other job."),
        ("FAILED", "penstock retry 00000001", "queues it again."),  # a person can retry the parent first
    ],
)
def test_a_job_that_a_parent_failed_is_retried_only_if_that_can_help(parent, way_out, effect):
    data = json.dumps({"parent": "x" * 36, "condition": "ok", "state": parent})
    told = explain(
        job(JobState.FAILED, ended_at=NOW, denied=DEPENDENCY_UNMET, denied_data=data),
        NOW,
    )

    assert told.way_out == way_out
    assert told.text.endswith(f"which is {parent}. `{way_out}` {effect}")


def test_a_job_that_its_deadline_failed_does_not_blame_the_run_before():
    before = run(DispatchPhase.ENDED, end=EndReason.WORKER_CRASHED, ended_at=NOW - 9 * SECOND)
    told = explain(job(JobState.FAILED, ended_at=NOW - 3 * SECOND), NOW, before)

    assert told.text.startswith("FAILED 3 s ago (deadline passed).")


def test_one_job_is_and_several_are():
    one = explain(job(), NOW, outlook=Outlook(ahead=(Ahead("job-00000017", "b", "turn"),), line_ahead=1)).text

    assert "1 job of the same kind is before it. Job 00000017 of b goes first (queued before)." in one
