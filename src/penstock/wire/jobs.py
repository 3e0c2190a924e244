"""The types of jobs: the body of a submit, a job in an answer, and the explanation of its state."""

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
        r"^([0-9a-zA-Z#][0-9a-zA-Z-]{0,63}|batch:[A-Za-z0-9][A-Za-z0-9_.-]{0,48})(:(ok|done|failed))?$(?!\n)",
        "must be the id of a job or an array, #n, or batch:NAME, then :ok, :done or :failed if needed",
        max_length=71,
        description="The id of a job or an array, or batch:NAME; then :ok, :done or :failed if needed.",
    ),
]


BatchName: TypeAlias = Annotated[
    str,
    matching(f"^{BATCH_NAME.pattern}$(?!\\n)", BATCH_NAME_WORDS, description="Unique in this store."),
]


class Constraints(Struct, frozen=True, forbid_unknown_fields=True):
    """What the job uses heavily."""

    cpu_heavy: bool = False
    disk_write_heavy: bool = False
    network_heavy: bool = False


class SubmitBody(WireRequest):
    """A job to submit."""

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
    #: The job starts only on a host that has all of these labels.
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
    #: false: the running job never has to yield to a job of higher priority.
    preemptible: bool = True
    #: Jobs that must end first: `ID`, `ID:done` or `ID:failed`; in a bulk submit `#n` is the job at position
    #: n. The id of an array works too, and `batch:NAME`.
    after: Annotated[tuple[ParentName, ...], Meta(max_length=MOST_PARENTS)] = ()
    #: What happens to this job if one of them ends otherwise.
    if_unmet: IfUnmet = IfUnmet.CANCEL
    #: Add the job to this batch, which must not have ended.
    batch: BatchName | None = None
    #: Seconds to wait for room when the queue is full. 0: refuse at once.
    wait_sec: Wait = 0


class Submitted(WireAnswer):
    """A submitted job. `created` false: the idempotency key was used before, and this is that job."""

    job_id: str
    state: JobState
    created: bool
    #: Whether the job is expected to start before its deadline. null: it has none.
    deadline_reachable: bool | None = None
    likely_start_at: datetime | None = None


class SubmitMany(WireRequest):
    """Jobs to submit: all or none, in one transaction."""

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
    #: How many of them the queued job still waits for.
    unmet: int
    attempts: int
    fence: int
    dispatch_id: str | None
    #: The same as `dispatch_id`, once the job is RUNNING.
    lease_id: str | None
    #: The process that runs the job, on the machine of its worker. null: none runs, or it is not reported
    #: yet.
    pid: int | None
    progress: float | None
    spent: float
    created_at: datetime
    ready_at: datetime
    ended_at: datetime | None
    #: The reason why the last round did not start the job: a code, as in explain.
    denied: str
    #: Why the job waits, its progress, or why it failed or was not run: one clause of at most 60 characters.
    why: str
    #: The actions that its state allows now: cancel, retry, ...
    allowed: tuple[str, ...]
    #: The job in one line: its command line, its function call, or its type with the payload.
    title: str


class JobInfo(JobSummary):
    """
    A job with its request and its result. `result`, `error` and `end` are those of the last attempt, or of
    the job if it ended in the queue.
    """

    payload: Raw
    checkpoint: Raw
    result: Raw
    error: str | None
    end: JobEnd | None
    worker: str


class Jobs(WireAnswer):
    """A page of jobs. `next`: the `after` of the next page. null: there is none."""

    jobs: list[JobSummary]
    next: int | None


class RelatedJob(WireAnswer):
    """
    A parent or a child of a job. `job_id` may be the id of an array or `batch:NAME`; then `job_type` is
    `array` or `batch`. `status`: `open`, `met`, or `void` if the child was canceled.
    """

    job_id: str
    condition: str
    status: str
    state: JobState
    job_type: str
    title: str


class JobDependencies(WireAnswer):
    """The parents and the children of a job, at most 200 of each."""

    parents: list[RelatedJob]
    children: list[RelatedJob]


class FoundJobs(WireAnswer):
    """The ids that contain `part`, newest first. Several ids mean that `part` is too short."""

    job_ids: list[str]


class Cancel(WireRequest):
    """
    `now`: kill a command or function of this host at once, instead of asking it to stop first. A job of
    another worker is asked to stop in any case.
    """

    now: bool = False


class Edit(WireRequest):
    """
    Changes of a QUEUED job. A missing field stays as it is; null removes a time. Another `run_when` than
    "quiet" ends `quiet_for_sec`.
    """

    priority: PriorityWord | UnsetType = UNSET
    earliest_start_at: When | UnsetType | None = UNSET
    deadline_at: When | UnsetType | None = UNSET
    run_when: RunWhen | UnsetType = UNSET
    quiet_for_sec: Delay | UnsetType = UNSET


class LogsQuery(WireRequest):
    """
    `offset`: the `next` of the previous answer. `attempt`: its number; by default the last. `wait_sec`: how
    long to wait for more output.
    """

    attempt: Annotated[int, Meta(ge=1, le=MAX_NUMBER)] | UnsetType = UNSET
    offset: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    wait_sec: Wait = 0


class LogPiece(WireAnswer):
    """
    A piece of output. `stream`: stdout, stderr, or log for lines that the job reported. `skipped`: bytes
    before it that are no longer kept.
    """

    stream: str
    at: datetime
    text: str
    skipped: int


class Logs(WireAnswer):
    """The output of an attempt. `over`: there will be no more."""

    job_id: str
    attempt: int
    pieces: list[LogPiece]
    next: int
    over: bool


class JobRequest(WireRequest):
    """
    A request of a running job. Each `op` has its own field; the op `checkpoint` without the field returns the
    last checkpoint.
    """

    op: Literal["checkpoint", "progress", "spend", "log", "should_yield", "yield"]
    checkpoint: Raw | UnsetType = UNSET
    progress: Fraction | None = None
    #: The additional cost, in the job's unit.
    amount: Spent | None = None
    message: Words | None = None


class JobAnswer(WireAnswer):
    """The answer to a running job. `yield`: whether to stop at the next safe place."""

    checkpoint: Raw
    yield_: bool | None = msgspec.field(default=None, name="yield")


class AheadInfo(WireAnswer):
    job_id: str | None
    addon_id: str | None
    why: str


class ReasonInfo(WireAnswer):
    """One reason why the job does not start. `way_out`: a command that would change it."""

    reason: str
    data: dict[str, Any]
    text: str
    way_out: str


class FailureInfo(WireAnswer):
    """The last failure of a job: attempt n of m. `of` null: attempts have no limit."""

    attempt: int
    of: int | None
    end: str
    error: str
    at: datetime | None


class YieldInfo(WireAnswer):
    """A running job was asked to yield to a waiting one. null in place of a job: the token may not see it."""

    victim: str | None
    wanted_by: str | None
    asked: int
    until: datetime
    #: When the running job is stopped if it does not yield.
    forced_at: datetime
    #: false: it starts again from the beginning.
    checkpoint: bool


class OtherHost(WireAnswer):
    """Another host of the database. `reason`: why it does not start the job. Empty: it could."""

    host: str
    reason: str
    text: str


class WaitInfo(WireAnswer):
    """How long a job waited for one reason."""

    reason: str
    sec: float


class Explained(WireAnswer):
    """
    Why the job is in its state. `recorded`: the last round recorded this; else the same decision was made
    now.
    """

    job_id: str
    state: JobState
    text: str
    #: `text` in one clause.
    short: str
    waiting_sec: float | None
    reason: str
    reason_data: dict[str, Any] | None
    #: All reasons that apply, the main one first.
    gates: list[ReasonInfo]
    retry_after_sec: float | None
    recorded: bool
    ahead: list[AheadInfo]
    line_ahead: int
    likely_start_at: datetime | None
    #: In 8 cases of 10 the job starts between these two. null: too little was learned.
    likely_start_low_at: datetime | None
    likely_start_high_at: datetime | None
    #: The running job whose end is expected to free the units.
    next_when_ends: str | None
    #: The next event that the job waits for, and when it is expected.
    next_step: str
    next_at: datetime | None
    #: One command that would change it; empty: there is none.
    way_out: str
    #: The jobs that hold the units it waits for. null: the token may not see that job.
    held_by: list[str | None]
    last_failure: FailureInfo | None
    preemption: YieldInfo | None
    deadline_at: datetime | None
    deadline_reachable: bool | None
    hosts: list[OtherHost]
    #: How long the job waited for each reason.
    waited: list[WaitInfo]
    allowed: tuple[str, ...]


class JobFilter(WireRequest):
    """
    Which jobs. `state`: one or several, with commas. `since` and `before`: when the job was created. `text`:
    a part of its type, payload, tags or error, among the newest 100,000 jobs.
    """

    state: Annotated[str, _STATES] | UnsetType = UNSET
    addon_id: AddonName | UnsetType = UNSET
    job_type: TypeName | UnsetType = UNSET
    tag: Tag | UnsetType = UNSET
    since: When | UnsetType = UNSET
    before: When | UnsetType = UNSET
    text: Annotated[str, Meta(min_length=1, max_length=200, pattern=_NO_NUL)] | UnsetType = UNSET


class JobsQuery(JobFilter):
    """Which jobs to list. `after`: the `next` of the previous page."""

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    limit: PageSize = 50
    newest_first: bool = False


class JobCounts(WireAnswer):
    """
    How many jobs of each state match; `state` is ignored. Filters by time, tag or text cover the newest
    100,000 jobs.
    """

    jobs: dict[JobState, int]


class BulkChange(JobFilter):
    """Which jobs to change. `after`: the `next` of the previous answer; by default from the oldest job on."""

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0


class RefusedJob(WireAnswer):
    job_id: str
    problem: str


class BulkChanged(WireAnswer):
    """
    `refused`: jobs that could not be changed. `next`: the `after` of the next request. null: all are done.
    """

    changed: int
    refused: list[RefusedJob]
    next: int | None


class Rerun(WireRequest):
    """A new job with the request of an old one. The fields given here replace those of the old one."""

    payload: Annotated[Raw, Meta(description="At most 1,000,000 characters of JSON.")] | UnsetType = UNSET
    priority: PriorityWord | UnsetType = UNSET
    cost_units: Units | UnsetType = UNSET
    run_when: RunWhen | UnsetType = UNSET
    idempotency_key: Key | UnsetType = UNSET


class FindQuery(WireRequest):
    """`part`: any part of an id. Lists show the last 8 characters."""

    part: Annotated[
        str,
        matching(r"^[0-9a-f_-]+$(?!\n)", "must be a part of an id: 0-9 a-f - _", min_length=4, max_length=60),
    ]
    limit: Annotated[int, Meta(ge=1, le=100)] = 10


class WaitQuery(WireRequest):
    """`wait_sec`: wait so long until the job is settled."""

    wait_sec: Wait = 0
