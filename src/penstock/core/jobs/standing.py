"""
The standing of a job: one clause for lists (`penstock ls`, `top`, the page's jobs table).

A list has many rows, so the clause comes from the row: the recorded denial, the counters, and for a job that
has failed its last attempt. No round is tried for it. It names no other job except the parent that ended this
one, which `Viewer.ended_job` hides from a reader who may not know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, ValidationError
from msgspec.json import decode

from penstock.core.jobs.job import DEPENDENCY_UNMET, Dispatch, Job, outcome_of
from penstock.core.jobs.reason_base import cut, due_in, units_of
from penstock.core.jobs.reasons import (
    REASONS,
    LabelMissing,
    NotEnoughUnits,
    NotReady,
    Reason,
    WaitsForParents,
    from_json,
)
from penstock.core.jobs.states import DEFAULT, END_RULES, Category, DispatchPhase, JobState, Schedules
from penstock.core.jobs.types import EndReason, Moment, spelled

_TURN: Final = "waits for its turn"
#: Words for ends of an attempt that the job did not cause.
_CUT_OFF: Final[Mapping[str, str]] = {
    EndReason.SCHEDULER_RESTARTED: "the scheduler was killed or stopped unexpectedly",
    EndReason.LEASE_EXPIRED: "its worker sent no heartbeat in time",
    EndReason.HOST_LOST: "its host was lost",
}


class LastFailure(Struct, frozen=True):
    """
    The last failed attempt: number `attempt` of `of` in its category; `of` is None if attempts have no limit.
    """

    attempt: int
    of: int | None
    end: str
    error: str
    at: Moment | None

    @property
    def words(self) -> str:
        if self.end == EndReason.START_TIMEOUT:
            times = "once" if self.attempt == 1 else f"{self.attempt} times"
            return f"No worker took it up, {times}."
        if self.end in _CUT_OFF:
            return f"{self._attempt.capitalize()} was cut off: {_CUT_OFF[self.end]}."
        return f"{self._attempt.capitalize()} failed ({self.error or self.end.replace('_', ' ')})."

    @property
    def short(self) -> str:
        if self.end == EndReason.START_TIMEOUT:
            return "no worker took it up"
        if self.end == EndReason.SCHEDULER_RESTARTED:
            return f"scheduler killed in {self._attempt}"
        return f"{self._attempt} {'was cut off' if self.end in _CUT_OFF else 'failed'}"

    @property
    def _attempt(self) -> str:
        return f"attempt {self.attempt}" if self.of is None else f"attempt {self.attempt} of {self.of}"


def last_failure(job: Job, last: Dispatch | None, schedules: Schedules) -> LastFailure | None:
    """The last attempt, if it failed. None: it did not fail, or there was none."""
    if last is None or last.end is None:
        return None
    category = END_RULES[last.end][1].retry
    if category is None:
        return None
    attempt = getattr(job.counters, category) or 1
    return LastFailure(
        attempt, _most(job, category, schedules), str(last.end), last_line(last.error), last.ended_at
    )


def _most(job: Job, category: Category, schedules: Schedules) -> int | None:
    if category is Category.START:
        return None
    delays = job.intent.retry_delays_sec if category is Category.ERROR else getattr(schedules, category)
    return len(delays) + 1


def end_words(end: str) -> str:
    return _CUT_OFF.get(end, end.replace("_", " "))


def last_line(text: str | None) -> str:
    return ((text or "").strip().splitlines() or [""])[-1]


def standing(
    job: Job,
    now: Moment,
    reason: Reason | None,
    *,
    last: Dispatch | None = None,
    schedules: Schedules = DEFAULT,
) -> str:
    """
    The clause. `reason`: why a queued job does not start, as `recorded_reason` reads it or as decided anew.
    """
    match job.state:
        case JobState.QUEUED:
            return _queued(job, now, reason, last_failure(job, last, schedules), schedules)
        case JobState.DISPATCHING:
            return "reserved; waits for its worker"
        case JobState.RUNNING:
            return _running(job, now, last)
        case JobState.FAILED | JobState.BLOCKED:
            end, error = outcome_of(job, last)
            return cut(last_line(error) or end_words(end or ""))
        case JobState.CANCELED if job.denied == DEPENDENCY_UNMET:
            return cut(last_line(outcome_of(job, last).error))
        case _:
            return ""


def _queued(
    job: Job, now: Moment, reason: Reason | None, failure: LastFailure | None, schedules: Schedules
) -> str:
    if reason is not None and not isinstance(reason, NotReady):
        return cut(reason.short(now))
    if job.unmet:  # no round sees such a job, so no denial is recorded
        return WaitsForParents((), (), (), job.unmet).short(now)
    if job.ready_at > now and (failed := failure.short if failure else _failures(job, schedules)):
        return f"{failed}; next {due_in(job.ready_at, now)}"
    if job.ready_at > now:
        return NotReady(job.ready_at).short(now)
    if job.intent.labels:  # no round of a host without these labels records a denial
        return LabelMissing(job.intent.labels).short(now)
    return _TURN


def _failures(job: Job, schedules: Schedules) -> str:
    """
    The failures of the category with the most, if the last attempt was not read and so its category is
    unknown.
    """
    counters = job.counters
    failed = [
        (getattr(counters, category), _most(job, category, schedules))
        for category in (Category.ERROR, Category.CRASH, Category.UNAVAILABLE)
    ]
    attempt, of = max(failed, key=lambda pair: pair[0])
    if attempt:
        return f"attempt {attempt} of {of} failed"
    return "no worker took it up" if counters.start else ""


def _running(job: Job, now: Moment, last: Dispatch | None) -> str:
    if last is not None and last.phase is DispatchPhase.ENDING:
        return f"told to stop ({str(last.reason).replace('_', ' ')})"
    if job.progress is not None:
        return f"{job.progress:.0%}"
    return "" if last is None or last.started_at is None else f"running for {spelled(now - last.started_at)}"


#: How many jobs before one in its ready queue are counted for a list.
MOST_BEFORE: Final = 100


def _behind(before: int) -> str:
    count = f"{before} or more" if before >= MOST_BEFORE else str(before)
    return f"behind {count} job{'s' * (before > 1)} of the same kind"


def waits_for_turn(job: Job, now: Moment) -> bool:
    """Whether no reason is recorded for a queued job: then its place in its ready queue says more."""
    return job.state is JobState.QUEUED and standing(job, now, recorded_reason(job, now)) == _TURN


def recorded_standing(
    job: Job,
    now: Moment,
    last: Dispatch | None,
    schedules: Schedules,
    *,
    before: int = 0,
    present: Reason | None = None,
) -> str:
    """
    The clause by the denial that a round has recorded. A denial is recorded only when its reason changes, so
    its numbers may be old. `before`: how many jobs are before this one in its ready queue, up to
    `MOST_BEFORE`. `present`: a reason that holds now, in place of the recorded one.
    """
    reason = present or recorded_reason(job, now)
    if job.state is not JobState.QUEUED:  # the last denial outlives the wait
        reason = None
    if isinstance(reason, NotEnoughUnits) and reason.needs <= reason.capacity:
        return f"needs {units_of(reason.needs)}; too few are free"
    text = standing(job, now, reason, last=last, schedules=schedules)
    return _behind(before) if before and text == _TURN else text


def recorded_reason(job: Job, now: Moment) -> Reason | None:
    """The reason of the last denial. None: no round has refused the job since it became ready."""
    if job.denied not in REASONS or job.ready_at > now:
        return None
    try:
        return from_json(job.denied, decode(job.denied_data))
    except ValidationError:  # written by another version
        return None
