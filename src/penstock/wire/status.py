"""
What people look at: events, addons, hosts, the machine, and the pools and graphs of attached programs.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.core.jobs.load import QuietState
from penstock.core.jobs.spending import SpendMark
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import EndReason
from penstock.wire.common import (
    _NO_NUL,
    MAX_NUMBER,
    AddonName,
    Ident,
    Line,
    PageSize,
    SignalName,
    Wait,
    WireAnswer,
    WireRequest,
    Words,
)


class EventInfo(WireAnswer):
    """
    `seq` orders everything; `n` counts within a job, without gaps. ADMITTED of a job is one entry with its
    DISPATCHING and has the same numbers.
    """

    seq: int
    at: datetime
    kind: str
    job_id: str | None
    n: int
    state: JobState | None
    reason: str
    dispatch_id: str | None
    data: dict[str, Any]


class Events(WireAnswer):
    """`next`: hand it in as `after` to go on; it moves on even when nothing was for you."""

    events: list[EventInfo]
    next: int


class EventsQuery(WireRequest):
    """
    `after` counts `seq`, and with `job_id` it counts that job's `n`. With `wait_sec` the answer waits for
    something to tell.
    """

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    limit: PageSize = 100
    job_id: Ident | UnsetType = UNSET
    addon_id: AddonName | UnsetType = UNSET
    wait_sec: Wait = 0


class StreamQuery(WireRequest):
    """Where to begin, when there is no Last-Event-ID; left out: with what happens from now on."""

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] | UnsetType = UNSET
    job_id: Ident | UnsetType = UNSET
    addon_id: AddonName | UnsetType = UNSET


class LeasesQuery(WireRequest):
    addon_id: AddonName | UnsetType = UNSET
    limit: PageSize = 100


class Lease(WireAnswer):
    """Something that holds units now. `job_id` is null for a lease without a job."""

    lease_id: str
    job_id: str | None
    addon_id: str
    job_type: str
    #: What the job is, in one line. Empty for a lease without a job.
    title: str
    cost_units: int
    host: str
    phase: DispatchPhase
    fence: int
    worker: str
    pid: int | None
    admitted_at: datetime
    started_at: datetime | None
    expires_at: datetime
    ends_at: datetime | None
    stop_at: datetime | None
    reason: EndReason | None
    progress: float | None
    spent: float


class FreeWorker(WireAnswer):
    """A worker with a name that asked this scheduler for jobs lately and can take `free` more."""

    worker: str
    host: str
    #: The only addon whose jobs it takes; null: any.
    addon_id: str | None
    #: The only types that it takes; empty: any.
    job_types: list[str]
    free: int


class LeaseList(WireAnswer):
    """`free_workers`: those of other hosts ask their own scheduler."""

    leases: list[Lease]
    free_workers: list[FreeWorker]


class BudgetUse(WireAnswer):
    """What an addon's jobs spent in the present day or month (UTC). `limit`: null if there is none."""

    window: Literal["day", "month"]
    name: str
    spent: float
    limit: float | None
    #: The worst of those it has passed: 80 % of the limit, or the limit.
    mark: SpendMark | None
    ends_at: datetime


class AddonInfo(WireAnswer):
    addon_id: str
    weight: int
    paused: bool
    units: int
    #: The weighted average of the units it has held lately: what fair share goes by.
    average: float
    jobs: dict[str, int]
    #: Windows that have a limit, or in which something was spent.
    budgets: list[BudgetUse]


class Addons(WireAnswer):
    """`paused`: everything is."""

    addons: list[AddonInfo]
    paused: bool


class AddonEdit(WireRequest):
    """`create`: also an addon that has never had a job; without it such a name is refused, because it is often misspelt."""

    addon_id: AddonName
    weight: Annotated[int, Meta(ge=1, le=10_000)] | UnsetType = UNSET
    paused: bool | UnsetType = UNSET
    create: bool = False


class Scoped(WireRequest):
    """An addon, or everything when it is left out. `create`: also an addon that has never had a job."""

    addon_id: AddonName | None = None
    create: bool = False


class Ok(WireAnswer):
    ok: bool = True


class KnownHost(WireAnswer):
    """
    One scheduler with a capacity of its own. `lost`: its heartbeats are missing; its jobs return to the queue
    as their leases end.
    """

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


class Stats(WireAnswer):
    """
    `jobs` by state, in all and per addon. `oldest_queued_sec`: how long the job that was accepted first has
    been queued. `units_in_use`, `capacity` and `quiet` are those of the host that answers; `hosts` has them
    for all.
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


class TypeInfo(WireAnswer):
    """
    What was learned about a job type, or about one `size` of it (from the tag `size:NAME`). `runs`: the
    attempts that it was learned from; later ones count more. Each `low` and `high`: the marks of 10 % and
    90 %; the name without a mark is the middle. None: unknown.
    """

    addon_id: str
    job_type: str
    size: str
    runs: int
    duration_low_sec: float | None
    duration_sec: float | None
    duration_high_sec: float | None
    #: Peak of a run, as far as its worker reports it.
    memory_bytes: int | None
    memory_high_bytes: int | None
    #: In the unit of the jobs, of runs that spent something.
    spend: float | None
    spend_high: float | None
    #: By the recent past.
    arrivals_per_hour: float
    #: Predicted starts that were compared with the real ones.
    predictions: int
    #: The part of them that started within the predicted range, which should be 0.8.
    coverage: float | None
    #: The median distance between the middle of the range and the start.
    error_sec: float | None
    #: The same, as a part of the wait.
    error_share: float | None


class TypeList(WireAnswer):
    """By addon, type and size."""

    types: list[TypeInfo]


class StatsSecond(WireAnswer):
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


class StatsPoint(WireAnswer):
    """As `StatsSecond`, of a longer time: counts per second, means, and null where nothing was measured."""

    at: float
    submitted: float | None
    started: float | None
    done: float | None
    failed: float | None
    queued: float | None
    in_use: float | None
    capacity: float | None
    busy: float | None
    wait_p50: float | None
    wait_p95: float | None
    run_p50: float | None
    run_p95: float | None


class HistoryQuery(WireRequest):
    """`range_sec`: how far back, at most seven days. Up to 900 s by the second, else by the minute or longer steps."""

    range_sec: Annotated[int, Meta(ge=60, le=604_800)] = 900


class StatsFrame(WireAnswer):
    """
    The newest second, and all that a page shows beside it. `wait`, `run`: p50 and p95 of the last minute, in
    seconds.
    """

    now: datetime
    second: StatsSecond
    jobs: dict[str, int]
    waiting: int
    quiet: QuietState
    paused: bool
    oldest_queued_sec: float | None
    wait: tuple[float, float] | None
    run: tuple[float, float] | None
    #: The newest of this second; a busy one has more.
    events: list[EventInfo]
    #: Addon and type of the jobs in `events`.
    names: dict[str, tuple[str, str]]
    #: Refusals of the last quarter of an hour, by reason.
    denials: dict[str, int]


class History(WireAnswer):
    """A list per figure, as charts want it; null where nothing was measured."""

    at: list[float]
    submitted: list[float | None]
    started: list[float | None]
    done: list[float | None]
    failed: list[float | None]
    queued: list[float | None]
    in_use: list[float | None]
    capacity: list[float | None]
    busy: list[float | None]
    wait_p50: list[float | None]
    wait_p95: list[float | None]
    run_p50: list[float | None]
    run_p95: list[float | None]


class AlertInfo(WireAnswer):
    """An alert to the owner of a job or addon."""

    seq: int
    at: datetime
    kind: str
    addon_id: str | None
    job_id: str | None
    text: str


class AlertList(WireAnswer):
    """Newest first."""

    alerts: list[AlertInfo]


class LoginRequest(WireRequest):
    """`read_only`: the page may look at everything that this token may see, and change nothing."""

    read_only: bool = False


class Login(WireAnswer):
    """A link that opens the page, good once until `expires_at`."""

    url: str
    expires_at: datetime


class LoadReading(WireAnswer):
    name: str
    value: float
    at: datetime
    fresh: bool
    #: The application that reported it; empty for the host itself.
    source: str


class CapacityInfo(WireAnswer):
    """
    What may be used now on the host that answers, what is in use, and why it is as it is. `hosts`: all that
    share the jobs.
    """

    host: str
    capacity: int
    most: int
    in_use: int
    free: int
    quiet: QuietState
    #: For how long it has been so; null where the capacity is fixed by a setting, and nothing is measured.
    quiet_sec: float | None
    busy: float
    busy_by: str
    draining: bool
    readings: list[LoadReading]
    hosts: list[KnownHost]


class LoadSignals(WireRequest):
    """
    An application's own readings: p95_ms, in_flight, error_rate. It counts for as long as it goes on telling
    them.
    """

    addon_id: AddonName
    readings: Annotated[dict[SignalName, Annotated[float, Meta(ge=0, le=1e9)]], Meta(min_length=1)]
    ttl_sec: Annotated[float, Meta(ge=1, le=3_600)] | None = None


class Health(WireAnswer):
    status: Literal["ok", "degraded"]


class HostInfo(WireAnswer):
    """
    The health of this host for a client with a token: its version, since when it runs, and what is wrong.
    """

    status: Literal["ok", "degraded"]
    problems: list[str]
    version: str
    host: str
    started_at: datetime
    now: datetime
    #: What the token of this request may do.
    scopes: list[str]


class Hosts(WireAnswer):
    """`here`: the one that answers."""

    here: str
    hosts: list[KnownHost]


class HostNamed(WireRequest):
    host: Annotated[str, Meta(min_length=1, max_length=200)]


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


class LanesInfo(Struct, forbid_unknown_fields=True):
    """One run of a graph, as bars in the rows of its workers."""

    graph: Line
    run: int
    status: Line
    seconds: float
    nodes: int
    bars: Annotated[list[LaneBar], Meta(max_length=400)]
    left_out: int


class TaskInfo(Struct, forbid_unknown_fields=True):
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
    lanes: LanesInfo | None = None


class Attach(WireRequest):
    """
    A program and its pools and graphs as they are now. Sent about once a second, for as long as they should
    be shown.
    """

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=_NO_NUL)]
    tasks: Annotated[list[TaskInfo], Meta(max_length=100)]


class Program(WireAnswer):
    name: str
    at: datetime
    tasks: list[TaskInfo]


class ProgramList(WireAnswer):
    programs: list[Program]
