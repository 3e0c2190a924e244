"""
Jobs, dispatches and events as stores return them; the steps that move a job and a dispatch; and how a job
ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionClass
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Place
from penstock.core.jobs.states import IN_FLIGHT, NONE_YET, SETTLED, Counters, DispatchPhase, JobState
from penstock.core.jobs.types import (
    BATCH_TAG,
    AddonId,
    DispatchId,
    EndReason,
    HostId,
    JobId,
    Moment,
    Money,
    Span,
)


class EventKind(StrEnum):
    """The kind of an event: what happened."""

    SUBMITTED = "SUBMITTED"
    ADMITTED = (
        "ADMITTED"  # stored for a lease without a job; of a job it is a part of DISPATCHING, see `shown`
    )
    DENIED = "DENIED"
    DISPATCHING = "DISPATCHING"
    RUNNING = "RUNNING"
    CHECKPOINT = "CHECKPOINT"
    STOP_REQUESTED = "STOP_REQUESTED"
    PREEMPT_REQUESTED = "PREEMPT_REQUESTED"
    SIGNALED = "SIGNALED"  # a step of the ladder was taken; the reason says which
    REQUEUED = "REQUEUED"
    TIMEOUT = "TIMEOUT"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELED = "CANCELED"
    BLOCKED = "BLOCKED"
    RETRIED = "RETRIED"
    EDITED = "EDITED"
    RELEASED = "RELEASED"  # a lease without a job, given back or expired
    ALERT = "ALERT"
    ADDON_SET = "ADDON_SET"
    HOST_SET = "HOST_SET"  # an operator drained the host, or ended that
    SCHEDULE_SET = "SCHEDULE_SET"  # added, edited, paused ...; the reason says what
    ARRAY_SUBMITTED = "ARRAY_SUBMITTED"  # one request for many indices was accepted
    ARRAY_CANCELED = "ARRAY_CANCELED"  # it makes no more jobs; those that live are canceled one by one
    ARRAY_RETRIED = "ARRAY_RETRIED"  # its failed indices run again
    ARRAY_ENDED = "ARRAY_ENDED"  # its last index has ended; the reason says how
    BATCH_SUBMITTED = "BATCH_SUBMITTED"  # a named set of jobs was accepted; its data has whether it is open
    BATCH_CLOSED = "BATCH_CLOSED"  # it ends with the jobs that it has
    BATCH_CANCELED = "BATCH_CANCELED"  # its jobs that have not ended are canceled one by one
    BATCH_RETRIED = "BATCH_RETRIED"  # its jobs that failed are queued again
    BATCH_ENDED = "BATCH_ENDED"  # it is closed, and its last job has ended; the reason says how
    SCHEDULE_FIRED = "SCHEDULE_FIRED"  # a moment became a job: it was due, or a person ran the schedule
    SCHEDULE_MISSED = "SCHEDULE_MISSED"  # moments at which no scheduler ran, and that are not made up for
    SCHEDULE_SKIPPED = "SCHEDULE_SKIPPED"  # a moment became no job: an earlier one had not ended
    CLOCK_SHIFTED = "CLOCK_SHIFTED"
    SCHEDULER_STARTED = (
        "SCHEDULER_STARTED"  # with what it did about dispatches that its predecessor left in flight
    )
    PRUNED = "PRUNED"
    TOKEN_MADE = "TOKEN_MADE"  # noqa: S105 - no password
    TOKEN_REVOKED = "TOKEN_REVOKED"  # noqa: S105 - no password
    READY = "READY"  # the last of its parents has ended as it must
    RESTORED = "RESTORED"  # a backup has taken the place of the database
    LOGIN = "LOGIN"  # a link was made, or opened: the reason says which; data has read_only
    LOSS_ACCEPTED = "LOSS_ACCEPTED"  # started on a file that had lost events, because the operator said so


#: The events that end an attempt, if there was one.
ENDS: Final = frozenset(
    {EventKind.DONE, EventKind.FAILED, EventKind.REQUEUED, EventKind.CANCELED, EventKind.BLOCKED}
)


class Job(Struct, frozen=True, gc=False):
    """A job at one moment."""

    no: int
    job_id: JobId
    intent: Intent  # as edited since the submit
    state: JobState
    created_at: Moment
    ready_at: Moment
    not_before: Moment | None = None
    fence: int = 0  # of the last dispatch; only grows
    dispatch_id: DispatchId | None = None  # the live one
    counters: Counters = NONE_YET
    active: Span = 0  # over all ended attempts since the last retry by hand
    spent: Money = 0
    spent_before: Money = 0  # when it was last retried by hand: the limit counts from there
    progress: float | None = None
    denied: str = ""
    denied_data: str = "{}"
    denied_at: Moment | None = None
    passed_at: Moment | None = None
    ended_at: Moment | None = None
    pid: int | None = None  # of the process that runs it, if its worker reported it
    unmet: int = 0  # parents that it waits for, while it is queued

    @property
    def attempt(self) -> int:
        """The number of the next or current attempt: 1, and one more for each failure."""
        failures = self.counters
        return 1 + failures.crash + failures.unavailable + failures.error

    @property
    def next_earliest_start_at(self) -> Moment | None:
        moments = [m for m in (self.not_before, self.intent.earliest_start_at) if m is not None]
        return max(moments, default=None)


class Dispatch(Struct, frozen=True, gc=False):
    """A dispatch at one moment."""

    dispatch_id: DispatchId
    job_id: JobId | None  # None: a lease without a job
    addon_id: AddonId
    host: HostId
    admission_class: AdmissionClass
    fence: int
    phase: DispatchPhase
    admitted_at: Moment
    expires_at: Moment
    started_at: Moment | None = None
    ends_at: Moment | None = None  # expected
    stop_at: Moment | None = None  # when it must end, by its runtime limit or hard cap
    stop_for: EndReason | None = None
    reason: EndReason | None = None  # the first reason to end it early
    worker: str = ""
    spent: Money = 0
    progress: float | None = None
    ended_at: Moment | None = None
    end: EndReason | None = None
    result: str | None = None
    error: str | None = None
    pid: int | None = None

    @property
    def active(self) -> Span:
        """How long the attempt lasted; 0 until it has ended."""
        if self.started_at is None or self.ended_at is None:
            return 0
        return max(0, self.ended_at - self.started_at)


def editable(intent: Intent) -> tuple[Any, ...]:
    """The values that an edit may change."""
    return (
        *(intent.priority, intent.earliest_start_at, intent.deadline_at),
        *(intent.run_when, intent.quiet_for_sec),
    )


class JobStep(Struct, frozen=True, gc=False):
    """
    A move of a job. It applies only if the job is still in `source` with the same `fence`. `seen`: for an edit, the
    `editable` values that the decider saw, so that of two edits none undoes the other.
    """

    job_id: JobId
    source: JobState
    fence: int
    target: JobState
    counters: Counters | None = None
    place: Place | None = None  # needed when the target is QUEUED
    fresh: bool = False  # the hard-cap clock and the spending limit count from here
    denied: tuple[str, str] | None = None  # the code and the data of its last denial, if they change
    seen: tuple[Any, ...] | None = None

    def applies_to(self, job: Job | None) -> bool:
        if job is None or job.state is not self.source or job.fence != self.fence:
            return False
        return self.seen is None or self.seen == editable(job.intent)

    def apply(self, job: Job, active: Span, now: Moment) -> Job:
        """The job after this step. `active`: the length of the attempt that the same change ends."""
        in_flight, place = self.target in IN_FLIGHT, self.place
        job = replace(
            job,
            state=self.target,
            counters=job.counters if self.counters is None else self.counters,
            active=0 if self.fresh else job.active + active,
            spent_before=job.spent if self.fresh else job.spent_before,
            dispatch_id=job.dispatch_id if in_flight else None,
            pid=job.pid if in_flight else None,
            unmet=job.unmet if self.target is JobState.QUEUED else 0,
        )
        if self.denied is not None:
            job = replace(job, denied=self.denied[0], denied_data=self.denied[1])
        if self.target is not self.source or place is not None:
            job = replace(job, ended_at=now if self.target in SETTLED else None)
        if place is None:
            return job
        intent = replace(
            job.intent,
            priority=place.priority,
            earliest_start_at=place.earliest_start_at,
            deadline_at=place.deadline_at,
            run_when=place.admission_class.run_when,
            quiet_for_sec=place.admission_class.quiet_for_sec,
        )
        return replace(job, intent=intent, ready_at=place.ready_at, not_before=place.not_before)


class DispatchStep(Struct, frozen=True, gc=False):
    """
    A move of a dispatch. It applies only if the dispatch is still in `source` and its reason to end is still
    `source_reason`: a cancel may have replaced that reason since. A field that is None stays as it is.
    """

    dispatch_id: DispatchId
    source: DispatchPhase
    target: DispatchPhase
    source_reason: EndReason | None = None
    #: Apply only while the lease is valid: for a worker's report. Maintenance also ends dispatches after
    #: that.
    while_valid: bool = False
    expires_at: Moment | None = None
    stop_at: Moment | None = None
    stop_for: EndReason | None = None
    reason: EndReason | None = None
    worker: str | None = None
    end: EndReason | None = None
    result: str | None = None
    error: str | None = None

    def applies_to(self, dispatch: Dispatch | None, now: Moment) -> bool:
        if dispatch is None or dispatch.phase is not self.source or dispatch.reason is not self.source_reason:
            return False
        return dispatch.expires_at > now or not self.while_valid

    def apply(self, dispatch: Dispatch, now: Moment) -> Dispatch:
        names = ("expires_at", "stop_at", "stop_for", "reason", "worker", "end", "result", "error")
        moved = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.target is DispatchPhase.LEASED and dispatch.started_at is None:
            moved["started_at"] = now
        if self.target is DispatchPhase.ENDED:
            moved["ended_at"] = now
        return replace(dispatch, phase=self.target, **moved)


class Event(Struct, frozen=True, gc=False):
    """
    One entry of the trail. `seq` orders all events; `n` counts the events of a job, without gaps. `state`:
    the job's state after the event.
    """

    seq: int
    at: Moment
    kind: EventKind
    job_id: JobId | None = None
    n: int = 0
    state: JobState | None = None
    reason: str = ""
    dispatch_id: DispatchId | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


def shown(event: Event) -> tuple[Event, ...]:
    """
    The events that readers see for an entry of the trail. One decision admits and dispatches a job, and the
    store writes one entry for it, because a second one would make every start slower. Readers see two events
    with the same number.
    """
    if event.kind is not EventKind.DISPATCHING:
        return (event,)
    return replace(event, kind=EventKind.ADMITTED, state=JobState.QUEUED, reason=""), event


#: The end reason of a job whose deadline passed in the queue, where no attempt ended.
DEADLINE_PASSED: Final = "deadline_passed"
_LATE: Final = "its deadline passed while it waited in the queue"
#: The end reason of a job that may not start because of the end of a parent. It is also its last denial.
DEPENDENCY_UNMET: Final = "dependency_unmet"


def unmet_words(data: Mapping[str, Any]) -> str:
    """
    Words for an unmet dependency, from the data of the denial: `parent`, `condition`, `state` of the parent,
    and `array` if it is one. An empty parent is one that the reader may not know.
    """
    parent = str(data["parent"])
    if not parent:
        return "it was to run after a job of another addon, which ended otherwise"
    if parent.startswith(BATCH_TAG):
        name = f"batch {parent.removeprefix(BATCH_TAG)}"
    else:
        name = f"{'array' if data.get('array') else 'job'} {parent[-8:]}"
    return f"it was to run after {name}:{data['condition']}, which is {data['state']}"


class JobOutcome(NamedTuple):
    """How a job ended: an end reason, and the error text."""

    end: str | None
    error: str | None


def outcome_of(job: Job, last: Dispatch | None) -> JobOutcome:
    """
    How a job ended. The API, the library and explain all use this. `last`: its last attempt. A settled job
    may have ended after it, in the queue: by its deadline, a cancel or an unmet dependency.
    """
    if job.state in SETTLED and (last is None or last.ended_at != job.ended_at):
        if job.denied == DEPENDENCY_UNMET:
            return JobOutcome(DEPENDENCY_UNMET, unmet_words(json.loads(job.denied_data)))
        if job.state is JobState.FAILED:
            return JobOutcome(DEADLINE_PASSED, _LATE)
        if job.state is JobState.CANCELED:
            return JobOutcome(str(EndReason.CANCELED), None)
    if last is None:
        return JobOutcome(None, None)
    return JobOutcome(None if last.end is None else str(last.end), last.error)
