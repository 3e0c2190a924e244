"""Jobs: the body of a submit, and what the API shows of a job."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from penstock.core.jobs.dependencies import MOST_PARENTS, IfUnmet
from penstock.core.jobs.job import DEADLINE_PASSED, DEPENDENCY_UNMET
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import BATCH_NAME, BATCH_NAME_WORDS, EndReason, RunWhen
from penstock.wire.common import (
    _NO_NUL,
    _STATES,
    MAX_BULK,
    MAX_NUMBER,
    AddonName,
    Delay,
    Duration,
    Fraction,
    Key,
    Label,
    MoneyIn,
    PageSize,
    PriorityWord,
    Seconds,
    Spent,
    Tag,
    TypeName,
    Units,
    Wait,
    When,
    WireAnswer,
    WireRequest,
    Words,
    matching,
)

JobEnd: TypeAlias = Annotated[
    str,
    matching(
        "^({})$".format("|".join([*EndReason, DEADLINE_PASSED, DEPENDENCY_UNMET])),
        f"must be one of {', '.join([*EndReason, DEADLINE_PASSED, DEPENDENCY_UNMET])}",
    ),
]


ParentName: TypeAlias = Annotated[
    str,
    matching(
        r"^([0-9a-zA-Z#][0-9a-zA-Z-]{0,63}|batch:[A-Za-z0-9][A-Za-z0-9_.-]{0,48})(:(ok|done|failed))?$",
        "must be the id of a job or an array, #n, or batch:NAME, and :ok, :done or :failed behind it",
        max_length=71,
        description="The id of a job or an array, or batch:NAME, and :ok, :done or :failed.",
    ),
]


BatchName: TypeAlias = Annotated[
    str,
    matching(f"^{BATCH_NAME.pattern}$(?!\\n)", BATCH_NAME_WORDS, description="Unique in this store."),
]


class Constraints(Struct, frozen=True, forbid_unknown_fields=True):
    """What the job leans on."""

    cpu_heavy: bool = False
    disk_write_heavy: bool = False
    network_heavy: bool = False


class SubmitBody(WireRequest):
    """What a submitter asks for."""

    addon_id: AddonName
    job_type: TypeName
    cost_units: Units = 10
    priority: PriorityWord = 50
    constraints: Constraints = Constraints()
    run_when: RunWhen = RunWhen.NORMAL
    quiet_for_sec: Delay = 0
    expected_duration_sec: Duration | None = None
    payload: Annotated[Raw, Meta(description="At most 1,000,000 characters of JSON.")] | UnsetType = UNSET
    tags: Annotated[tuple[Tag, ...], Meta(max_length=32)] = ()
    #: It starts only on a host that has all of them.
    labels: Annotated[tuple[Label, ...], Meta(max_length=16)] = ()
    time_sensitive: bool = False
    deadline_at: When | None = None
    earliest_start_at: When | None = None
    max_runtime_sec: Seconds | None = None
    max_active_sec: Seconds | None = None
    cost_limit: MoneyIn | None = None
    unit: Annotated[str, Meta(min_length=1, max_length=16, pattern=_NO_NUL)] = "USD"
    idempotency_key: Key | None = None
    retry_delays_sec: Annotated[tuple[Delay, ...], Meta(max_length=20)] = ()
    #: false: a run is never asked or forced to give its units to a job of higher priority.
    preemptible: bool = True
    #: Jobs that must end first: `ID`, `ID:done` or `ID:failed`; in a bulk submit `#n` for the job at position n. An array
    #: is named by its id too, a batch by `batch:NAME`.
    after: Annotated[tuple[ParentName, ...], Meta(max_length=MOST_PARENTS)] = ()
    #: What becomes of the job if one of them ends otherwise.
    if_unmet: IfUnmet = IfUnmet.CANCEL
    #: The batch that it is added to, which must not have ended.
    batch: BatchName | None = None
    #: How long to wait for room when the queue is full; 0: be refused at once.
    wait_sec: Wait = 0


class Submitted(WireAnswer):
    """`created`: false when the idempotency key had been used before, and this is that job."""

    job_id: str
    state: JobState
    created: bool
    #: Whether the deadline looks reachable as things stand; null when there is none.
    deadline_reachable: bool | None = None
    likely_start_at: datetime | None = None


class SubmitMany(WireRequest):
    """All or none, in one transaction."""

    jobs: Annotated[list[SubmitBody], Meta(min_length=1, max_length=MAX_BULK)]
    wait_sec: Wait = 0


class BulkSubmitted(WireAnswer):
    jobs: list[Submitted]


class JobSummary(WireAnswer):
    """A job as a list shows it. `attempts` counts dispatches; `fence` is the number of the last one."""

    job_id: str
    addon_id: str
    job_type: str
    state: JobState
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
    preemptible: bool
    #: The jobs that must end first, with the condition on each.
    after: tuple[str, ...]
    if_unmet: IfUnmet
    #: How many of them it waits for, while it is queued.
    unmet: int
    attempts: int
    fence: int
    dispatch_id: str | None
    #: The same as `dispatch_id`, once the job is RUNNING.
    lease_id: str | None
    #: Of the process that runs it, on the machine of its worker; null until a worker reported it, and when
    #: nothing runs.
    pid: int | None
    progress: float | None
    spent: float
    created_at: datetime
    ready_at: datetime
    ended_at: datetime | None
    #: Why the last round that weighed it did not start it: a code, as in explain.
    denied: str
    #: Why it waits, how far it is or why it failed, in one clause of at most 60 characters.
    why: str
    #: What may be done with it now: cancel, retry, ...
    allowed: tuple[str, ...]
    #: What it is, in one line: its command line, its function call, or its type with the payload.
    title: str


class JobInfo(JobSummary):
    """
    Besides: what was given and what came out. `result`, `error` and `end` are those of the last attempt, or
    of the job if it ended in the queue.
    """

    payload: Raw
    checkpoint: Raw
    result: Raw
    error: str | None
    end: JobEnd | None
    worker: str


class Jobs(WireAnswer):
    """`next`: hand it in as `after` for the next page; null: that was all."""

    jobs: list[JobSummary]
    next: int | None


class RelatedJob(WireAnswer):
    """
    `job_id`: also of an array, or `batch:NAME`; `job_type` is `array` or `batch` then. `status`: `open`, `met`, or `void` if
    the child was canceled.
    """

    job_id: str
    condition: str
    status: str
    state: JobState
    job_type: str
    title: str


class JobDependencies(WireAnswer):
    """The jobs that a job waits for or waited for, and those that wait for it. At most 200 of each."""

    parents: list[RelatedJob]
    children: list[RelatedJob]


class Found(WireAnswer):
    """The ids that contain `part`, newest first; two ids mean that `part` was too short."""

    job_ids: list[str]


class Cancel(WireRequest):
    """
    `now`: a job that this host runs itself is killed without being asked first. A worker elsewhere is asked
    to stop either way.
    """

    now: bool = False


class Edit(WireRequest):
    """Of a QUEUED job. A field that is left out stays; a time that is null is taken away."""

    priority: PriorityWord | UnsetType = UNSET
    earliest_start_at: When | UnsetType | None = UNSET
    deadline_at: When | UnsetType | None = UNSET


class LogsQuery(WireRequest):
    """
    `offset`: the `next` of the answer before. `attempt`: its number; left out: the last. With `wait_sec` it
    waits for more.
    """

    attempt: Annotated[int, Meta(ge=1, le=MAX_NUMBER)] | UnsetType = UNSET
    offset: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    wait_sec: Wait = 0


class LogPiece(WireAnswer):
    """
    `stream`: stdout, stderr, or log for what the job noted. `skipped`: so many bytes before it are no longer
    kept.
    """

    stream: str
    at: datetime
    text: str
    skipped: int


class Logs(WireAnswer):
    """`over`: nothing more will come of this attempt."""

    job_id: str
    attempt: int
    pieces: list[LogPiece]
    next: int
    over: bool


class Say(WireRequest):
    """
    What a run tells about itself, or asks. Each `op` has its own field; `checkpoint` without one asks for the
    last.
    """

    op: Literal["checkpoint", "progress", "spend", "log", "should_yield", "yield"]
    checkpoint: Raw | UnsetType = UNSET
    progress: Fraction | None = None
    #: What it has cost more, in the job's unit.
    amount: Spent | None = None
    message: Words | None = None


class Said(WireAnswer):
    """`yield`: in answer to that question, whether to stop at the next safe place."""

    checkpoint: Raw
    yield_: bool | None = msgspec.field(default=None, name="yield")


class AheadInfo(WireAnswer):
    job_id: str | None
    addon_id: str | None
    why: str


class ReasonInfo(WireAnswer):
    """One reason that holds the job back. `way_out`: a command that would change it."""

    reason: str
    data: dict[str, Any]
    text: str
    way_out: str


class FailureInfo(WireAnswer):
    """The last failure of a job: attempt n of m. `of`: null where attempts have no limit."""

    attempt: int
    of: int | None
    end: str
    error: str
    at: datetime | None


class YieldInfo(WireAnswer):
    """A run was asked to yield to a waiting job. null in place of a job: one that the reader may not know."""

    victim: str | None
    wanted_by: str | None
    asked: int
    until: datetime
    #: When the run is stopped if it does not yield.
    forced_at: datetime
    #: false: the run starts again from the beginning.
    checkpoint: bool


class OtherHost(WireAnswer):
    """Another host of the database. `reason`: why it does not start the job; empty: it could."""

    host: str
    reason: str
    text: str


class WaitInfo(WireAnswer):
    """How long a job waited for one reason."""

    reason: str
    sec: float


class Explained(WireAnswer):
    """Why the job is where it is. `recorded`: by the last round; else the same decision, made now."""

    job_id: str
    state: JobState
    text: str
    #: The same in one clause.
    short: str
    waiting_sec: float | None
    reason: str
    reason_data: dict[str, Any] | None
    #: Every reason that holds, the main one first.
    gates: list[ReasonInfo]
    retry_after_sec: float | None
    recorded: bool
    ahead: list[AheadInfo]
    line_ahead: int
    likely_start_at: datetime | None
    #: In 8 cases of 10 it starts between these two; null while too little was learned to tell.
    likely_start_low_at: datetime | None
    likely_start_high_at: datetime | None
    #: The running job whose end is expected to free the units.
    next_when_ends: str | None
    #: What must happen next, and when that is expected.
    next_step: str
    next_at: datetime | None
    #: One command that would change it; empty: there is none.
    way_out: str
    #: Jobs that hold what it waits for; null: a job that the reader may not know.
    held_by: list[str | None]
    last_failure: FailureInfo | None
    preemption: YieldInfo | None
    deadline_at: datetime | None
    deadline_reachable: bool | None
    hosts: list[OtherHost]
    #: How long it waited, by reason.
    waited: list[WaitInfo]
    allowed: tuple[str, ...]


class JobFilter(WireRequest):
    """
    `state` may be several, with commas. `since` and `before`: when the job was created. `text`: a part of the job's
    type, payload, tags or of an error, among the newest 100,000 jobs.
    """

    state: Annotated[str, _STATES] | UnsetType = UNSET
    addon_id: AddonName | UnsetType = UNSET
    job_type: TypeName | UnsetType = UNSET
    tag: Tag | UnsetType = UNSET
    since: When | UnsetType = UNSET
    before: When | UnsetType = UNSET
    text: Annotated[str, Meta(min_length=1, max_length=200, pattern=_NO_NUL)] | UnsetType = UNSET


class JobsQuery(JobFilter):
    """`after`: the `next` of the page before."""

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    limit: PageSize = 50
    newest_first: bool = False


class JobCounts(WireAnswer):
    """How many jobs of each state match, whatever `state` says; of filters by time, tag or text among the newest 100,000."""

    jobs: dict[JobState, int]


class BulkChange(JobFilter):
    """Which jobs to change. `after`: the `next` of the answer before; left out: from the oldest job on."""

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0


class RefusedJob(WireAnswer):
    job_id: str
    problem: str


class BulkChanged(WireAnswer):
    """`refused`: the jobs that could not be changed. `next`: there may be more; hand it in as `after`."""

    changed: int
    refused: list[RefusedJob]
    next: int | None


class Rerun(WireRequest):
    """A new job with the same request. A field that is left out stays as it was."""

    payload: Annotated[Raw, Meta(description="At most 1,000,000 characters of JSON.")] | UnsetType = UNSET
    priority: PriorityWord | UnsetType = UNSET
    cost_units: Units | UnsetType = UNSET
    run_when: RunWhen | UnsetType = UNSET
    idempotency_key: Key | UnsetType = UNSET


class FindQuery(WireRequest):
    """`part`: any part of an id; they are shown by their last 8."""

    part: Annotated[
        str,
        matching(r"^[0-9a-f_-]+$(?!\n)", "must be a part of an id: 0-9 a-f - _", min_length=4, max_length=60),
    ]
    limit: Annotated[int, Meta(ge=1, le=100)] = 10


class WaitQuery(WireRequest):
    """With `wait_sec` the answer comes when the job is settled, or when the time is over."""

    wait_sec: Wait = 0
