"""
The types of what people look at: events, addons, hosts, the machine, and the pools and graphs of attached
programs.
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
    An event. `seq` orders all events; `n` counts the events of one job, without gaps. The ADMITTED of a job
    is one entry with its DISPATCHING and has the same numbers.
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
    """
    A page of events. `next`: the `after` of the next request; it grows even if no event was for this token.
    """

    events: list[EventInfo]
    next: int


class EventsQuery(WireRequest):
    """
    `after`: a `seq`, or with `job_id` that job's `n`. `wait_sec`: how long to wait for an event.
    """

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    limit: PageSize = 100
    job_id: Ident | UnsetType = UNSET
    addon_id: AddonName | UnsetType = UNSET
    wait_sec: Wait = 0


class StreamQuery(WireRequest):
    """Where to begin without a Last-Event-ID; by default now."""

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] | UnsetType = UNSET
    job_id: Ident | UnsetType = UNSET
    addon_id: AddonName | UnsetType = UNSET


class LeasesQuery(WireRequest):
    addon_id: AddonName | UnsetType = UNSET
    limit: PageSize = 100


class Lease(WireAnswer):
    """A dispatch that holds units now. `job_id` null: a lease without a job."""

    lease_id: str
    job_id: str | None
    addon_id: str
    job_type: str
    #: The job in one line. Empty for a lease without a job.
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
    """A worker with a name that recently asked this scheduler for jobs and can take `free` more."""

    worker: str
    host: str
    #: It takes only jobs of this addon. null: of any.
    addon_id: str | None
    #: It takes only jobs of these types. Empty: of any.
    job_types: list[str]
    free: int


class LeaseList(WireAnswer):
    """`free_workers`: the free workers of this host; those of other hosts ask their own scheduler."""

    leases: list[Lease]
    free_workers: list[FreeWorker]


class BudgetUse(WireAnswer):
    """The spending of an addon's jobs in the present day or month (UTC). `limit` null: there is none."""

    window: Literal["day", "month"]
    name: str
    spent: float
    limit: float | None
    #: The highest mark that was passed: 80 % of the limit, or the limit.
    mark: SpendMark | None
    ends_at: datetime


class AddonInfo(WireAnswer):
    addon_id: str
    weight: int
    paused: bool
    units: int
    #: The weighted average of recently held units, which fair share uses.
    average: float
    jobs: dict[str, int]
    #: The windows with a limit or with spending.
    budgets: list[BudgetUse]


class Addons(WireAnswer):
    """`paused`: whether all addons are paused."""

    addons: list[AddonInfo]
    paused: bool


class AddonEdit(WireRequest):
    """
    `create`: accept an addon that has never had a job. Without it such a name, often a misspelling, is
    refused.
    """

    addon_id: AddonName
    weight: Annotated[int, Meta(ge=1, le=10_000)] | UnsetType = UNSET
    paused: bool | UnsetType = UNSET
    create: bool = False


class AddonScope(WireRequest):
    """An addon, or by default all addons. `create`: accept an addon that has never had a job."""

    addon_id: AddonName | None = None
    create: bool = False


class Ok(WireAnswer):
    ok: bool = True


class KnownHost(WireAnswer):
    """
    A host: one scheduler with a capacity of its own. `lost`: its heartbeats are missing; its jobs return to
    the queue when their leases end.
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
    Counts of jobs by state, in all and per addon. `oldest_queued_sec`: the age of the job that has been
    queued longest. `units_in_use`, `capacity` and `quiet` are those of the host that answers; `hosts` has
    them for all hosts.
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
    #: The number of the last event: the `after` for later ones.
    newest_event: int
    now: datetime
    hosts: list[KnownHost]


class TypeInfo(WireAnswer):
    """
    The learned figures of a job type, or of one `size` of it (from the tag `size:NAME`). `attempts`: how many
    attempts they come from; later ones count more. `..._low` and `..._high` are the percentiles 10 and 90,
    the name alone is the median. null: unknown.
    """

    addon_id: str
    job_type: str
    size: str
    attempts: int
    duration_low_sec: float | None
    duration_sec: float | None
    duration_high_sec: float | None
    #: The peak memory of an attempt, if its worker reports it.
    memory_bytes: int | None
    memory_high_bytes: int | None
    #: In the unit of the jobs, for attempts that spent something.
    spend: float | None
    spend_high: float | None
    #: The recent rate.
    arrivals_per_hour: float
    #: Predicted starts that were compared with the real ones.
    predictions: int
    #: The share of them that started within the predicted range; it should be 0.8.
    coverage: float | None
    #: The median distance between the middle of the range and the start.
    error_sec: float | None
    #: The same as a share of the wait.
    error_share: float | None


class TypeList(WireAnswer):
    """The learned types, sorted by addon, type and size."""

    types: list[TypeInfo]


class StatsSecond(WireAnswer):
    """The counts of one second, and the use of the machine at its end. `at`: seconds since 1970."""

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
    attempt_p50: float | None
    attempt_p95: float | None


class StatsPoint(WireAnswer):
    """The same for a longer time: counts per second, means, and null where nothing was measured."""

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
    attempt_p50: float | None
    attempt_p95: float | None


class HistoryQuery(WireRequest):
    """
    `range_sec`: how far back, at most seven days. Up to 900 s in steps of a second, else of a minute or more.
    """

    range_sec: Annotated[int, Meta(ge=60, le=604_800)] = 900


class StatsFrame(WireAnswer):
    """
    The newest second, and the other live figures of the page. `wait`, `attempt`: p50 and p95 of the last minute,
    in seconds.
    """

    now: datetime
    second: StatsSecond
    jobs: dict[str, int]
    waiting: int
    quiet: QuietState
    paused: bool
    oldest_queued_sec: float | None
    wait: tuple[float, float] | None
    attempt: tuple[float, float] | None
    #: The newest events of this second; a busy second has more.
    events: list[EventInfo]
    #: The addon of each job in `events`, and in one line what the job is.
    names: dict[str, tuple[str, str]]
    #: Refusals of the last quarter of an hour, by reason.
    denials: dict[str, int]


class History(WireAnswer):
    """One list for each figure, for charts; null where nothing was measured."""

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
    attempt_p50: list[float | None]
    attempt_p95: list[float | None]


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
    """`read_only`: the page can show all that this token may see, and change nothing."""

    read_only: bool = False


class Login(WireAnswer):
    """A link that opens the page once, until `expires_at`."""

    url: str
    expires_at: datetime


class LoadReading(WireAnswer):
    name: str
    value: float
    at: datetime
    fresh: bool
    #: The application that reported it. Empty: the host itself.
    source: str


class CapacityInfo(WireAnswer):
    """
    The usable units of the host that answers, the units in use, and the reason for both. `hosts`: all hosts
    that share the jobs.
    """

    host: str
    capacity: int
    most: int
    in_use: int
    free: int
    quiet: QuietState
    #: How long the state has lasted. null: a setting fixes the capacity, and nothing is measured.
    quiet_sec: float | None
    busy: float
    busy_by: str
    #: Whether everything is paused, on all hosts.
    paused: bool
    #: Whether this host starts no more jobs: its scheduler is stopping, or an operator drained it.
    draining: bool
    readings: list[LoadReading]
    hosts: list[KnownHost]


class LoadSignals(WireRequest):
    """
    Load readings of an application: p95_ms, in_flight, error_rate. A reading is valid for a short time, so
    report it repeatedly.
    """

    addon_id: AddonName
    readings: Annotated[dict[SignalName, Annotated[float, Meta(ge=0, le=1e9)]], Meta(min_length=1)]
    ttl_sec: Annotated[float, Meta(ge=1, le=3_600)] | None = None


class Health(WireAnswer):
    status: Literal["ok", "degraded"]


class HostInfo(WireAnswer):
    """
    The health of this host: its version, since when it runs, and what is wrong.
    """

    status: Literal["ok", "degraded"]
    problems: list[str]
    version: str
    host: str
    started_at: datetime
    now: datetime
    #: The scopes of the token of this request.
    scopes: list[str]


class Hosts(WireAnswer):
    """`here`: the host that answers."""

    here: str
    hosts: list[KnownHost]


class HostRequest(WireRequest):
    host: Annotated[str, Meta(min_length=1, max_length=200)]


class LaneBar(Struct, forbid_unknown_fields=True):
    """One attempt at a node of a graph. Times are seconds since the beginning of the run."""

    node: Line
    lane: Line
    worker: Line
    ready: float
    started: float
    #: null: it still runs.
    ended: float | None
    failed: bool
    #: Whether the attempt is on the critical path of the run.
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
    """One pool or graph of a program, with the fields of its `snapshot()`."""

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


class AttachRequest(WireRequest):
    """
    The present state of a program's pools and graphs. The program sends it about once a second.
    """

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=_NO_NUL)]
    tasks: Annotated[list[TaskInfo], Meta(max_length=100)]


class Program(WireAnswer):
    name: str
    at: datetime
    tasks: list[TaskInfo]


class ProgramList(WireAnswer):
    programs: list[Program]
