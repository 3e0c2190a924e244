"""Workers: leases, heartbeats, outcomes and claims."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from penstock.core.landing import End
from penstock.core.states import State
from penstock.core.words import RunWhen
from penstock.http.wire.access import Problem
from penstock.http.wire.jobs import Constraints
from penstock.http.wire.words import (
    MAX_BULK,
    MAX_PAGE,
    AddonName,
    Asked,
    Delay,
    Duration,
    Fraction,
    Ident,
    Line,
    PageSize,
    Pid,
    PriorityWord,
    Spent,
    Told,
    TypeName,
    Units,
    Wait,
    Words,
)

__all__ = [
    "Ack",
    "Beaten",
    "Claim",
    "Claimed",
    "ClaimedJob",
    "Complete",
    "Completed",
    "Dispatchable",
    "DispatchableJob",
    "DispatchableQuery",
    "Ended",
    "Exchange",
    "Exchanged",
    "Failure",
    "Heartbeat",
    "LeaseGranted",
    "LeaseRequest",
    "Outcome",
    "Outcomes",
    "Release",
    "Report",
    "Reported",
    "Settled",
]


class DispatchableQuery(Asked):
    addon_id: AddonName | UnsetType = UNSET
    job_type: TypeName | UnsetType = UNSET
    limit: PageSize = 50
    wait_sec: Wait = 0


class DispatchableJob(Told):
    """Reserved, and waiting until `expires_at` for a worker to ask for the lease."""

    job_id: str
    dispatch_id: str
    fence: int
    addon_id: str
    job_type: str
    cost_units: int
    expires_at: datetime


class Dispatchable(Told):
    jobs: list[DispatchableJob]


class LeaseRequest(Asked):
    """
    With `job_id`: the reservation of that job becomes the lease. Without: may this much work start now? Then the other
    fields say what work.
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


class LeaseGranted(Told):
    """Approved, or denied with the reason and when to ask again."""

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


class Ack(Asked):
    """The worker has started."""

    lease_id: Ident
    worker: Line = ""
    pid: Pid | None = None


class Heartbeat(Asked):
    """`spent`: the total of this lease so far, so that a beat told twice counts once."""

    lease_id: Ident
    progress: Fraction | None = None
    spent: Spent | None = None
    checkpoint: Raw | UnsetType = UNSET
    pid: Pid | None = None


class Beaten(Told):
    """`stop`: why the run must end, if it must. `cancel`: now. `yield`: at its next checkpoint, and it will be run again."""

    lease_id: str
    expires_at: datetime
    ttl_sec: float
    stop: End | None = None
    cancel: bool = False
    yield_: bool = msgspec.field(default=False, name="yield")


class Failure(StrEnum):
    """Why a run that FAILED did. It decides which retry schedule applies."""

    JOB_ERROR = "job_error"
    UNAVAILABLE = "unavailable"
    WORKER_CRASHED = "worker_crashed"


class Outcome(Asked):
    """`result` comes with DONE, `error` and `failure` with FAILED."""

    lease_id: Ident
    state: Literal["DONE", "FAILED"]
    result: Raw | UnsetType = UNSET
    error: Words = ""
    failure: Failure = Failure.JOB_ERROR


class Complete(Outcome):
    """The outcome of a job, by the worker that holds its lease."""


class Completed(Told):
    """Where the job landed: a FAILED run may go back to QUEUED by its retry schedule."""

    job_id: str | None
    state: State | None


class Outcomes(Asked):
    outcomes: Annotated[list[Outcome], Meta(min_length=1, max_length=MAX_BULK)]


class Ended(Told):
    """Of one outcome: where its job landed, or what was wrong with it alone."""

    lease_id: str
    job_id: str | None = None
    state: State | None = None
    problem: Problem | None = None


class Settled(Told):
    outcomes: list[Ended]


class Release(Asked):
    lease_id: Ident


class Report(Asked):
    """Progress and spending of a lease, and with `state` its outcome, in one call."""

    lease_id: Ident
    progress: Fraction | None = None
    spent: Spent | None = None
    checkpoint: Raw | UnsetType = UNSET
    pid: Pid | None = None
    state: Literal["DONE", "FAILED"] | None = None
    result: Raw | UnsetType = UNSET
    error: Words = ""
    failure: Failure = Failure.JOB_ERROR


class Reported(Beaten):
    """`state`: where the job landed, when an outcome was told."""

    state: State | None = None


class Claim(Asked):
    """No addon, no types: any that the token may have."""

    addon_id: AddonName | None = None
    job_types: Annotated[tuple[TypeName, ...], Meta(max_length=100)] = ()
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 1
    wait_sec: Wait = 0
    worker: Line = ""


class ClaimedJob(Told):
    """All that a worker needs to run it."""

    job_id: str
    lease_id: str
    fence: int
    addon_id: str
    job_type: str
    cost_units: int
    priority: int
    tags: tuple[str, ...]
    expires_at: datetime
    #: When the run will be stopped, if there is a limit.
    stop_at: datetime | None
    deadline_at: datetime | None
    payload: Raw
    checkpoint: Raw


class Claimed(Told):
    jobs: list[ClaimedJob]
    ttl_sec: float


class Exchange(Asked):
    """Outcomes of what was claimed before, and a claim, in one call. It does not wait."""

    outcomes: Annotated[list[Outcome], Meta(max_length=MAX_BULK)]
    addon_id: AddonName | None = None
    job_types: Annotated[tuple[TypeName, ...], Meta(max_length=100)] = ()
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 1
    worker: Line = ""


class Exchanged(Claimed):
    outcomes: list[Ended]
