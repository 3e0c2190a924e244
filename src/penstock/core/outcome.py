"""How a job ended, whichever way: the one rule for the API, the library and explain."""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.core.jobs.end_rules import EndReason
from penstock.core.jobs.job import Dispatch, Job
from penstock.core.jobs.states import SETTLED, JobState

__all__ = ["DEADLINE_PASSED", "JobOutcome", "outcome_of"]

#: The end reason of a job whose deadline passed in the queue: no attempt ended then.
DEADLINE_PASSED: Final = "deadline_passed"
_LATE: Final = "its deadline passed while it waited in the queue"


class JobOutcome(NamedTuple):
    end: str | None
    error: str | None


def outcome_of(job: Job, last: Dispatch | None) -> JobOutcome:
    """`last`: its last attempt. A settled job may have ended after that one: in the queue, by its deadline or by a cancel."""
    if job.state in SETTLED and (last is None or last.ended_at != job.ended_at):
        if job.state is JobState.FAILED:
            return JobOutcome(DEADLINE_PASSED, _LATE)
        if job.state is JobState.CANCELED:
            return JobOutcome(str(EndReason.CANCELED), None)
    if last is None:
        return JobOutcome(None, None)
    return JobOutcome(None if last.end is None else str(last.end), last.error)
