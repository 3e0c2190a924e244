"""The types for workers: leases, heartbeats, outcomes and claims."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import EndReason, RunWhen
from penstock.wire.common import (
    MAX_BULK,
    MAX_PAGE,
    AddonName,
    Delay,
    Duration,
    Fraction,
    Ident,
    Line,
    PageSize,
    Pid,
    PriorityWord,
    ProblemDetails,
    Spent,
    TypeName,
    Units,
    Wait,
    WireAnswer,
    WireRequest,
    Words,
)
from penstock.wire.jobs import Constraints


class DispatchableQuery(WireRequest):
    addon_id: AddonName | UnsetType = UNSET
    job_type: TypeName | UnsetType = UNSET
    limit: PageSize = 50
    wait_sec: Wait = 0


class DispatchableJob(WireAnswer):
    """A reserved job, which waits until `expires_at` for a worker to request its lease."""

    job_id: str
    dispatch_id: str
    fence: int
    addon_id: str
    job_type: str
    cost_units: int
    expires_at: datetime


class Dispatchable(WireAnswer):
    jobs: list[DispatchableJob]


class LeaseRequest(WireRequest):
    """
    A request for a lease. With `job_id` the reservation of that job becomes a lease. Without it the lease is
    for other work, which the other fields describe.
    """

    job_id: Ident | None = None
    worker: Line = ""
    addon_id: AddonName | None = None
    job_type: TypeName | None = None
    cost_units: Units = 10
    priority: PriorityWord = 50
    constraints: Constraints = Constraints()
    run_when: RunWhen = RunWhen.NORMAL
    quiet_for_sec: Delay = 0
    expected_duration_sec: Duration | None = None


class LeaseGranted(WireAnswer):
    """A lease; or a refusal with its reason, and when to ask again."""

    approved: bool
    lease_id: str | None = None
    job_id: str | None = None
    fence: int | None = None
    expires_at: datetime | None = None
    ttl_sec: float | None = None
    reason: str = ""
    reason_data: dict[str, Any] | None = None
    message: str = ""
    retry_after_sec: float | None = None


class Ack(WireRequest):
    """A worker reports that it has started the job."""

    lease_id: Ident
    worker: Line = ""
    pid: Pid | None = None


class Heartbeat(WireRequest):
    """
    A renewal of a lease. `spent`: the total of this lease so far, so that a repeated heartbeat counts once.
    """

    lease_id: Ident
    progress: Fraction | None = None
    spent: Spent | None = None
    checkpoint: Raw | UnsetType = UNSET
    pid: Pid | None = None


class HeartbeatAnswer(WireAnswer):
    """
    `stop`: why the attempt must end. null: it need not. `cancel`: end it now. `yield`: end it at its next
    checkpoint; the job runs again later.
    """

    lease_id: str
    expires_at: datetime
    ttl_sec: float
    stop: EndReason | None = None
    cancel: bool = False
    yield_: bool = msgspec.field(default=False, name="yield")


class Failure(StrEnum):
    """Why an attempt FAILED, which decides its retry schedule."""

    JOB_ERROR = "job_error"
    UNAVAILABLE = "unavailable"
    WORKER_CRASHED = "worker_crashed"


class OutcomeReport(WireRequest):
    """
    The outcome of a job, from the worker with its lease. `result` belongs to DONE, `error` and `failure` to
    FAILED.
    """

    lease_id: Ident
    state: Literal["DONE", "FAILED"]
    result: Raw | UnsetType = UNSET
    error: Words = ""
    failure: Failure = Failure.JOB_ERROR


class Completed(WireAnswer):
    """
    The state of the job after the report: after a FAILED attempt it may be QUEUED again, by its retry
    schedule.
    """

    job_id: str | None
    state: JobState | None


class Outcomes(WireRequest):
    outcomes: Annotated[list[OutcomeReport], Meta(min_length=1, max_length=MAX_BULK)]


class OutcomeAnswer(WireAnswer):
    """The answer to one outcome: the state of its job, or the problem of this outcome."""

    lease_id: str
    job_id: str | None = None
    state: JobState | None = None
    problem: ProblemDetails | None = None


class OutcomeAnswers(WireAnswer):
    outcomes: list[OutcomeAnswer]


class Release(WireRequest):
    lease_id: Ident


class LeaseReport(Heartbeat):
    """Progress and spending of a lease; with `state` also its outcome."""

    state: Literal["DONE", "FAILED"] | None = None
    result: Raw | UnsetType = UNSET
    error: Words = ""
    failure: Failure = Failure.JOB_ERROR


class LeaseReported(HeartbeatAnswer):
    """`state`: the state of the job, if the report had an outcome."""

    state: JobState | None = None


class ClaimRequest(WireRequest):
    """A claim. Without an addon and types: any job that the token may take."""

    addon_id: AddonName | None = None
    job_types: Annotated[tuple[TypeName, ...], Meta(max_length=100)] = ()
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 1
    wait_sec: Wait = 0
    worker: Line = ""


class ClaimedJob(WireAnswer):
    """A claimed job, with all that its worker needs. `attempt` counts from 1 and grows with each failure."""

    job_id: str
    lease_id: str
    fence: int
    attempt: int
    addon_id: str
    job_type: str
    cost_units: int
    priority: int
    tags: tuple[str, ...]
    expires_at: datetime
    #: When the attempt will be stopped. null: it has no limit.
    stop_at: datetime | None
    deadline_at: datetime | None
    payload: Raw
    checkpoint: Raw
    #: Id, state and result of each parent.
    parents: Raw


class ClaimAnswer(WireAnswer):
    jobs: list[ClaimedJob]
    ttl_sec: float


class ExchangeRequest(WireRequest):
    """Outcomes of earlier jobs, and a claim, in one request that does not wait."""

    outcomes: Annotated[list[OutcomeReport], Meta(max_length=MAX_BULK)]
    addon_id: AddonName | None = None
    job_types: Annotated[tuple[TypeName, ...], Meta(max_length=100)] = ()
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 1
    worker: Line = ""


class ExchangeAnswerBody(ClaimAnswer):
    outcomes: list[OutcomeAnswer]
