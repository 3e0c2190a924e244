"""
What travels: every request and every answer of the HTTP API, as types.

The server decodes, checks and documents by these; the client builds and reads by them; so neither can drift from the other. Moments are
RFC 3339 with a zone, spans are seconds, money is a number in the job's own unit. `payload`, `result` and `checkpoint` are the user's
JSON: they pass through unread. Requests refuse fields they do not know, by name. Answers may gain fields: readers skip what they do not know.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from penstock.core.intent import LABEL, LABEL_WORDS, MAX_SPAN_SEC
from penstock.core.landing import End, Phase
from penstock.core.quiet import TOLD, QuietState
from penstock.core.spend import Mark
from penstock.core.states import State
from penstock.core.words import RunWhen

__all__ = [
    "MAX_BULK",
    "MAX_PAGE",
    "MAX_WAIT_SEC",
    "PREFIX",
    "Ack",
    "Addon",
    "AddonEdit",
    "Addons",
    "Ahead",
    "Attach",
    "Beat",
    "BeatSecond",
    "Beaten",
    "BudgetUse",
    "BulkSubmitted",
    "Cancel",
    "Capacity",
    "Claim",
    "Claimed",
    "ClaimedJob",
    "Complete",
    "Completed",
    "Constraints",
    "Description",
    "Dispatchable",
    "DispatchableJob",
    "DispatchableQuery",
    "Done",
    "Edit",
    "Ended",
    "Event",
    "Events",
    "EventsQuery",
    "Exchange",
    "Exchanged",
    "Explained",
    "Exposition",
    "Failure",
    "FieldProblem",
    "FindQuery",
    "Found",
    "Health",
    "Heartbeat",
    "History",
    "Host",
    "HostNamed",
    "Hosts",
    "Job",
    "JobSummary",
    "Jobs",
    "JobsQuery",
    "KnownHost",
    "LaneBar",
    "Lanes",
    "Lease",
    "LeaseGranted",
    "LeaseRequest",
    "Leases",
    "LeasesQuery",
    "LogPiece",
    "Login",
    "Logs",
    "LogsQuery",
    "NewToken",
    "Nothing",
    "Outcome",
    "Outcomes",
    "Problem",
    "Program",
    "Programs",
    "Reading",
    "Release",
    "Report",
    "Reported",
    "Said",
    "Say",
    "Scope",
    "Scoped",
    "Settled",
    "Signals",
    "Stats",
    "StreamQuery",
    "Submit",
    "SubmitMany",
    "Submitted",
    "Task",
    "Token",
    "TokenMade",
    "Tokens",
    "WaitQuery",
    "constraint_names",
]

PREFIX: Final = "/api/system/scheduler"
MAX_PAGE: Final = 500
MAX_BULK: Final = 1_000
MAX_WAIT_SEC: Final = 60

# In Python a `$` also matches before a last line feed, hence what stands behind it.
_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$(?!\n)"

# Bounds stand here as well as in the core: here they are what the API's description promises, there they are the rule.
AddonName: TypeAlias = Annotated[str, Meta(pattern=_NAME, max_length=128, description="The tenant.")]
TypeName: TypeAlias = Annotated[str, Meta(pattern=_NAME, max_length=128)]
Units: TypeAlias = Annotated[int, Meta(ge=1, le=100, description="Of the 100 that the whole machine is.")]
PriorityWord: TypeAlias = (
    Annotated[int, Meta(ge=1, le=100)]
    | Annotated[
        str,
        Meta(
            pattern=r"^([Ll][Oo][Ww]|[Nn][Oo][Rr][Mm][Aa][Ll]|[Hh][Ii][Gg][Hh]|[Uu][Rr][Gg][Ee][Nn][Tt])$",
            description="LOW 25, NORMAL 50, HIGH 75, URGENT 95.",
        ),
    ]
)
Seconds: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SPAN_SEC)]
Duration: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_SPAN_SEC)]
Delay: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SPAN_SEC)]
Wait: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_WAIT_SEC)]
When: TypeAlias = Annotated[datetime, Meta(tz=True)]
MoneyIn: TypeAlias = Annotated[float, Meta(gt=0, le=1e9, description="In the job's unit.")]
Spent: TypeAlias = Annotated[float, Meta(ge=0, le=1e9, description="In the job's unit.")]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
# No NUL: not every database can keep one in a text.
Line: TypeAlias = Annotated[str, Meta(max_length=200, pattern=r"^[^\u0000]*$")]
Words: TypeAlias = Annotated[str, Meta(max_length=20_000, pattern=r"^[^\u0000]*$")]
Label: TypeAlias = Annotated[str, Meta(pattern=f"^{LABEL.pattern}$(?!\\n)", description=LABEL_WORDS)]
Tag: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^\u0000]*$")]
Key: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\u0000]*$")]
SignalName: TypeAlias = Annotated[str, Meta(pattern="^({})$(?!\\n)".format("|".join(TOLD)))]
PageSize: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PAGE)]
MAX_NUMBER: Final = 2**62
_STATES: Final = "^({0})(,({0}))*$(?!\\n)".format("|".join(State))
Ident: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[0-9A-Za-z._-]+$(?!\n)")]


class Asked(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a request."""


class Told(Struct):
    """The body of an answer."""


class Nothing(Asked):
    """Nothing is to be said."""


class Description(Told):
    """The API in OpenAPI 3.1."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


# jobs


class Constraints(Struct, frozen=True, forbid_unknown_fields=True):
    """What the job leans on."""

    cpu_heavy: bool = False
    disk_write_heavy: bool = False
    network_heavy: bool = False


def constraint_names(constraints: Constraints) -> tuple[str, ...]:
    return tuple(name for name in constraints.__struct_fields__ if getattr(constraints, name))


class Submit(Asked):
    """What a submitter asks for."""

    addon_id: AddonName
    job_type: TypeName
    cost_units: Units = 10
    priority: PriorityWord = 50
    constraints: Constraints = Constraints()
    run_when: RunWhen = RunWhen.NORMAL
    quiet_for_sec: Delay = 0
    expected_duration_sec: Duration | None = None
    payload: Raw | UnsetType = UNSET
    tags: Annotated[tuple[Tag, ...], Meta(max_length=32)] = ()
    #: It starts only on a host that has all of them.
    labels: Annotated[tuple[Label, ...], Meta(max_length=16)] = ()
    time_sensitive: bool = False
    deadline_at: When | None = None
    earliest_start_at: When | None = None
    max_runtime_sec: Seconds | None = None
    max_active_sec: Seconds | None = None
    cost_limit: MoneyIn | None = None
    unit: Annotated[str, Meta(min_length=1, max_length=16, pattern=r"^[^\u0000]*$")] = "USD"
    idempotency_key: Key | None = None
    retry_delays_sec: Annotated[tuple[Delay, ...], Meta(max_length=20)] = ()
    #: How long to wait for room when the queue is full; 0: be refused at once.
    wait_sec: Wait = 0


class Submitted(Told):
    """`created`: false when the idempotency key had been used before, and this is that job."""

    job_id: str
    state: State
    created: bool
    #: Whether the deadline looks reachable as things stand; null when there is none.
    deadline_reachable: bool | None = None
    likely_start_at: datetime | None = None


class SubmitMany(Asked):
    """All or none, in one transaction."""

    jobs: Annotated[list[Submit], Meta(min_length=1, max_length=MAX_BULK)]
    wait_sec: Wait = 0


class BulkSubmitted(Told):
    jobs: list[Submitted]


class JobSummary(Told):
    """A job as a list shows it. `attempts` counts dispatches; `fence` is the number of the last one."""

    job_id: str
    addon_id: str
    job_type: str
    state: State
    cost_units: int
    priority: int
    constraints: Constraints
    run_when: RunWhen
    quiet_for_sec: int
    expected_duration_sec: float | None
    tags: tuple[str, ...]
    labels: tuple[str, ...]
    time_sensitive: bool
    deadline_at: datetime | None
    earliest_start_at: datetime | None
    not_before: datetime | None
    next_earliest_start_at: datetime | None
    max_runtime_sec: int | None
    max_active_sec: int | None
    cost_limit: float | None
    unit: str
    idempotency_key: str | None
    retry_delays_sec: tuple[int, ...]
    attempts: int
    fence: int
    dispatch_id: str | None
    #: The same as `dispatch_id`, once the job is RUNNING.
    lease_id: str | None
    progress: float | None
    spent: float
    created_at: datetime
    ready_at: datetime
    ended_at: datetime | None
    #: Why the last round that weighed it did not start it: a code, as in explain.
    denied: str
    #: What may be done with it now: cancel, retry, ...
    allowed: tuple[str, ...]


class Job(JobSummary):
    """Besides: what was given and what came out. `result`, `error` and `end` are those of the last attempt."""

    payload: Raw
    checkpoint: Raw
    result: Raw
    error: str | None
    end: End | None
    worker: str


class Jobs(Told):
    """`next`: hand it in as `after` for the next page; null: that was all."""

    jobs: list[JobSummary]
    next: int | None


class Found(Told):
    """The ids that contain what was asked for, newest first; two of them mean that it was too short."""

    job_ids: list[str]


class Cancel(Asked):
    """`now`: what this host runs itself is killed instead of being asked first. A worker elsewhere can only be told, and is told either way."""

    now: bool = False


class Edit(Asked):
    """Of a QUEUED job. A field that is left out stays; a time that is null is taken away."""

    priority: PriorityWord | UnsetType = UNSET
    earliest_start_at: When | UnsetType | None = UNSET
    deadline_at: When | UnsetType | None = UNSET


class LogsQuery(Asked):
    """`offset`: the `next` of the answer before. `attempt`: its number; left out: the last. With `wait_sec` it waits for more."""

    attempt: Annotated[int, Meta(ge=1, le=MAX_NUMBER)] | UnsetType = UNSET
    offset: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    wait_sec: Wait = 0


class LogPiece(Told):
    """`stream`: stdout, stderr, or log for what the job noted. `skipped`: so many bytes before it are no longer kept."""

    stream: str
    at: datetime
    text: str
    skipped: int


class Logs(Told):
    """`over`: nothing more will come of this attempt."""

    job_id: str
    attempt: int
    pieces: list[LogPiece]
    next: int
    over: bool


class Say(Asked):
    """What a run tells about itself, or asks. Each `op` has its own field; `checkpoint` without one asks for the last."""

    op: Literal["checkpoint", "progress", "spend", "log", "should_yield", "yield"]
    checkpoint: Raw | UnsetType = UNSET
    progress: Fraction | None = None
    #: What it has cost more, in the job's unit.
    amount: Spent | None = None
    message: Words | None = None


class Said(Told):
    """`yield`: whether to stop at the next safe place, to who asked that."""

    checkpoint: Raw
    yield_: bool | None = msgspec.field(default=None, name="yield")


class Ahead(Told):
    job_id: str | None
    addon_id: str | None
    why: str


class Explained(Told):
    """Why the job is where it is. `recorded`: by the last round; else the same decision, made now."""

    job_id: str
    state: State
    text: str
    waiting_sec: float | None
    reason: str
    reason_data: dict[str, Any] | None
    retry_after_sec: float | None
    recorded: bool
    ahead: list[Ahead]
    line_ahead: int
    likely_start_at: datetime | None
    allowed: tuple[str, ...]


class JobsQuery(Asked):
    """`state` may be several, with commas. `after`: the `next` of the page before."""

    state: Annotated[str, Meta(max_length=100, pattern=_STATES)] | UnsetType = UNSET
    addon_id: AddonName | UnsetType = UNSET
    job_type: TypeName | UnsetType = UNSET
    tag: Tag | UnsetType = UNSET
    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    limit: PageSize = 50
    newest_first: bool = False


class FindQuery(Asked):
    """`part`: any part of an id; they are shown by their last 8."""

    part: Annotated[str, Meta(min_length=4, max_length=36, pattern=r"^[0-9a-f-]+$(?!\n)")]
    limit: Annotated[int, Meta(ge=1, le=100)] = 10


class WaitQuery(Asked):
    """With `wait_sec` the answer comes when the job is settled, or when the time is over."""

    wait_sec: Wait = 0


# workers


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


class Heartbeat(Asked):
    """`spent`: the total of this lease so far, so that a beat told twice counts once."""

    lease_id: Ident
    progress: Fraction | None = None
    spent: Spent | None = None
    checkpoint: Raw | UnsetType = UNSET


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


# looking at it all


class Event(Told):
    """`seq` orders everything; `n` counts within a job, without gaps."""

    seq: int
    at: datetime
    kind: str
    job_id: str | None
    n: int
    state: State | None
    reason: str
    dispatch_id: str | None
    data: dict[str, Any]


class Events(Told):
    """`next`: hand it in as `after` to go on; it moves on even when nothing was for you."""

    events: list[Event]
    next: int


class EventsQuery(Asked):
    """`after` counts `seq`, and with `job_id` it counts that job's `n`. With `wait_sec` the answer waits for something to tell."""

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    limit: PageSize = 100
    job_id: Ident | UnsetType = UNSET
    addon_id: AddonName | UnsetType = UNSET
    wait_sec: Wait = 0


class StreamQuery(Asked):
    """Where to begin, when there is no Last-Event-ID; left out: with what happens from now on."""

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] | UnsetType = UNSET
    job_id: Ident | UnsetType = UNSET
    addon_id: AddonName | UnsetType = UNSET


class LeasesQuery(Asked):
    addon_id: AddonName | UnsetType = UNSET
    limit: PageSize = 100


class Lease(Told):
    """Something that holds units now. `job_id` is null for a lease without a job."""

    lease_id: str
    job_id: str | None
    addon_id: str
    job_type: str
    cost_units: int
    host: str
    phase: Phase
    fence: int
    worker: str
    admitted_at: datetime
    started_at: datetime | None
    expires_at: datetime
    ends_at: datetime | None
    stop_at: datetime | None
    reason: End | None
    progress: float | None
    spent: float


class Leases(Told):
    leases: list[Lease]


class BudgetUse(Told):
    """What an addon's jobs spent in the present day or month (UTC). `limit`: null if there is none."""

    window: Literal["day", "month"]
    name: str
    spent: float
    limit: float | None
    #: The worst of those it has passed: 80 % of the limit, or the limit.
    mark: Mark | None
    ends_at: datetime


class Addon(Told):
    addon_id: str
    weight: int
    paused: bool
    units: int
    #: The weighted average of the units it has held lately: what fair share goes by.
    average: float
    jobs: dict[str, int]
    #: Windows that have a limit, or in which something was spent.
    budgets: list[BudgetUse]


class Addons(Told):
    """`paused`: everything is."""

    addons: list[Addon]
    paused: bool


class AddonEdit(Asked):
    addon_id: AddonName
    weight: Annotated[int, Meta(ge=1, le=10_000)] | UnsetType = UNSET
    paused: bool | UnsetType = UNSET


class Scoped(Asked):
    """An addon, or everything when it is left out."""

    addon_id: AddonName | None = None


class Done(Told):
    ok: bool = True


class KnownHost(Told):
    """One scheduler with a capacity of its own. `lost`: it has not been heard of in time; what it ran comes back as its leases run out."""

    host: str
    state: Literal["alive", "lost"]
    draining: bool
    capacity: int
    units: int
    quiet: QuietState
    labels: list[str]
    version: str
    url: str | None
    started_at: datetime
    seen_at: datetime


class Stats(Told):
    """
    `jobs` by state, in all and per addon. `oldest_queued_sec`: how long the job that was accepted first has been queued. `units_in_use`,
    `capacity` and `quiet` are those of the host that answers; `hosts` has them for all.
    """

    jobs: dict[str, int]
    addons: dict[str, dict[str, int]]
    oldest_queued_sec: float | None
    units_in_use: int
    in_flight: int
    capacity: int
    quiet: QuietState
    paused: bool
    #: How many submits wait for room.
    waiting: int
    #: The number of the last event: where to go on from for what is to come.
    newest_event: int
    now: datetime
    hosts: list[KnownHost]


class BeatSecond(Told):
    """What happened in one second, `at` (seconds since 1970), and how full the machine was at its end."""

    at: float
    submitted: int
    started: int
    done: int
    failed: int
    queued: int
    in_use: int
    capacity: int
    busy: float
    wait_p50: float | None
    wait_p95: float | None
    run_p50: float | None
    run_p95: float | None


class Beat(Told):
    """The newest second, and all that a page shows beside it. `wait`, `run`: p50 and p95 of the last minute, in seconds."""

    now: datetime
    second: BeatSecond
    jobs: dict[str, int]
    waiting: int
    quiet: QuietState
    paused: bool
    oldest_queued_sec: float | None
    wait: tuple[float, float] | None
    run: tuple[float, float] | None
    #: The newest of this second; a busy one has more.
    events: list[Event]
    #: Addon and type of the jobs in `events`.
    names: dict[str, tuple[str, str]]
    #: Refusals of the last quarter of an hour, by reason.
    denials: dict[str, int]


class History(Told):
    """The last quarter of an hour, a list per figure: as charts want it."""

    at: list[float]
    submitted: list[int]
    started: list[int]
    done: list[int]
    failed: list[int]
    queued: list[int]
    in_use: list[int]
    capacity: list[int]
    busy: list[float]
    wait_p50: list[float | None]
    wait_p95: list[float | None]
    run_p50: list[float | None]
    run_p95: list[float | None]


class LaneBar(Struct, forbid_unknown_fields=True):
    """One attempt at a node of a graph. Times in seconds since the run began."""

    node: Line
    lane: Line
    worker: Line
    ready: float
    started: float
    #: null: it goes on.
    ended: float | None
    failed: bool
    #: One of those that made the run take as long as it did.
    critical: bool


class Lanes(Struct, forbid_unknown_fields=True):
    """One run of a graph, as bars in the rows of those who worked on it."""

    graph: Line
    run: int
    status: Line
    seconds: float
    nodes: int
    bars: Annotated[list[LaneBar], Meta(max_length=400)]
    left_out: int


class Task(Struct, forbid_unknown_fields=True):
    """One pool or graph of a program, as its `snapshot()` tells."""

    name: Line
    kind: Line
    workers: Annotated[dict[str, int], Meta(max_length=16)]
    in_flight: int
    pending_queue_depth: int
    waiting_queue_depth: int
    max_in_flight: int
    #: null: unbounded.
    max_queue_depth: float | None
    policy: Line
    paused: bool
    load_by_worker: Annotated[tuple[int, ...], Meta(max_length=1_000)]
    settled_by_worker: Annotated[tuple[int, ...], Meta(max_length=1_000)]
    totals: Annotated[dict[str, int], Meta(max_length=64)]
    last_crash: Words | None
    lanes: Lanes | None = None


class Attach(Asked):
    """A program and its pools and graphs as they are now. Told again about once a second, for as long as they should be shown."""

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[^\u0000]*$")]
    tasks: Annotated[list[Task], Meta(max_length=100)]


class Program(Told):
    name: str
    at: datetime
    tasks: list[Task]


class Programs(Told):
    programs: list[Program]


class Login(Told):
    """A link that opens the page, good once until `expires_at`."""

    url: str
    expires_at: datetime


class Exposition(Told):
    """Prometheus's text format."""


class Reading(Told):
    name: str
    value: float
    at: datetime
    fresh: bool
    #: The application that told it; empty for the host itself.
    source: str


class Capacity(Told):
    """What may be used now on the host that answers, what is in use, and why it is as it is. `hosts`: all that share the jobs."""

    host: str
    capacity: int
    most: int
    in_use: int
    free: int
    quiet: QuietState
    quiet_sec: float
    busy: float
    busy_by: str
    draining: bool
    readings: list[Reading]
    hosts: list[KnownHost]


class Signals(Asked):
    """An application's own readings: p95_ms, in_flight, error_rate. It counts for as long as it goes on telling them."""

    addon_id: AddonName
    readings: Annotated[dict[SignalName, Annotated[float, Meta(ge=0, le=1e9)]], Meta(min_length=1)]
    ttl_sec: Annotated[float, Meta(ge=1, le=3_600)] | None = None


class Health(Told):
    status: Literal["ok", "degraded"]


class Host(Told):
    """For whoever may look closer: which version answers, since when, and what is wrong."""

    status: Literal["ok", "degraded"]
    problems: list[str]
    version: str
    host: str
    started_at: datetime
    now: datetime


class Hosts(Told):
    """`here`: the one that answers."""

    here: str
    hosts: list[KnownHost]


class HostNamed(Asked):
    host: Annotated[str, Meta(min_length=1, max_length=200)]


# tokens


class Scope(StrEnum):
    """What a token may do."""

    JOBS_READ = "jobs:read"
    JOBS_SUBMIT = "jobs:submit:registered"
    #: Besides: a job that is a command, or a shell script. Whoever may submit one has a shell on the host.
    JOBS_SUBMIT_COMMAND = "jobs:submit:command"
    JOBS_SUBMIT_SHELL = "jobs:submit:shell"
    JOBS_CANCEL = "jobs:cancel"
    WORKER_LEASE = "worker:lease"
    #: Of a run's own token, which the scheduler makes for it and which is good for that run alone.
    RUN_SELF = "run:self"
    SIGNALS_REPORT = "signals:report"
    METRICS_READ = "metrics:read"
    ADMIN_CONFIG = "admin:config"
    ADMIN_TOKENS = "admin:tokens"


class NewToken(Asked):
    """`addon_id` binds it: it then sees and touches that addon's jobs, and no others."""

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[^\u0000]*$")]
    scopes: Annotated[list[Scope], Meta(min_length=1, max_length=20)]
    addon_id: AddonName | None = None
    max_cost_units: Units | None = None
    max_priority: Annotated[int, Meta(ge=1, le=100)] | None = None
    expires_at: When | None = None


class Token(Told):
    token_id: str
    name: str
    scopes: list[Scope]
    addon_id: str | None
    max_cost_units: int | None
    max_priority: int | None
    created_at: datetime
    expires_at: datetime | None


class TokenMade(Told):
    """`secret` is shown this once: only its hash is kept."""

    token: Token
    secret: str


class Tokens(Told):
    tokens: list[Token]


# errors


class FieldProblem(Told):
    field: str
    message: str


class Problem(Told):
    """application/problem+json. `hint` says what to do about it; `data` has what the error knows, by name."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
    problems: list[FieldProblem] = []
    retry_after_sec: float | None = None
    data: dict[str, Any] = {}
