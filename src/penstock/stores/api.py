"""
The interface of a store, the same for memory, SQLite and PostgreSQL: `commit` writes, all other methods read.

Every write is an `Operation`, a frozen value: `Submit`, `Apply`, `Complete`, `Renew`, `Admit`, and the upkeep
(`ResolveDependencies`, `SetAddon`, `ChangeSchedule`, `ChangeArray`, `SubmitBatch`, `ChangeBatch`,
`RecordLoad`, `Prune`, `Shift`, `Reorder`, `RegisterHost`, `RemoveHost`, `DrainHost`, `Learn`). `commit` takes
any number of operations and returns a Future for each:

    receipts, grants = store.commit(Submit([intent], depth), Admit(host, run_round, terms))

1. The operations of one commit take effect in order and share a transaction with the operations that other
   callers commit at that moment: a sync to disk costs as much as a hundred inserts. An `Admit` comes last in
   its commit, so that a store may first write the ends that other callers commit in the same transaction.
2. A Future has its result when the operation is durable, and never before.
3. An operation that raises fails alone: the store rolls the transaction back and writes its other operations
   again, one by one. So no operation may rely on the success of the one before it. A bulk `Submit` is one
   operation: all of its jobs or none.
4. If the outcome of a commit is unknown (the sync failed, the server did not answer), the store does not try
   it again: every operation of the transaction fails with OutcomeUnknown. The error of a `Submit` names the
   jobs to look for.
5. `Admit`, `ChangeArray` and `ChangeBatch` contain a function that decides, because it must see rows that no
   other process can change until its decision is written: the ledger and the heads of the queues, the row of
   an array and the states of its jobs, the row of a batch. The function must be quick, and the store may call
   it again. Every other change of a job is a `Change` that the core decided before, applied by
   compare-and-set: the answer False means that the rows had changed meanwhile and nothing was written. When a
   job ends, the same transaction decides about its children (`common/dependencies.py`) and about its array
   (`common/array_changes.py`).
6. `commit` does not block, so an event loop may call it. With `wait=True` the calling thread promises to wait
   for the answers at once: the store may then write in that thread, which saves waking another (`committed`
   does so). Upkeep may block.

`commit(Complete(...), Admit(...))` completes and claims: the completed jobs free units for those that start.
An idle worker claims in the commit of a submit, because the service appends the worker's `Admit` to the
`Submit`.

Memory writes under one lock. SQLite has one writer thread and one transaction for all that arrived together
(`common/group_commit.py`). PostgreSQL has three such writers, so a commit that mixes their operations becomes
several transactions there, one after the other: `postgres/store.py` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from msgspec import Struct, field
from msgspec.structs import replace

from penstock.core.errors import DispatcherHeld, KeyConflict, QueueFull, Unavailable
from penstock.core.jobs.admission import Ledger
from penstock.core.jobs.arrays import ArrayDecision, ArrayRecord, IndexChunk
from penstock.core.jobs.changes import Change, Note, Renewal
from penstock.core.jobs.dependencies import StoredDependency
from penstock.core.jobs.groups import GroupChange, JobGroup
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, Event, EventKind, Job
from penstock.core.jobs.learning import ObservedJob
from penstock.core.jobs.load import Host
from penstock.core.jobs.ordering import Aging
from penstock.core.jobs.round import AdmissionView, RoundResult
from penstock.core.jobs.schedules import ScheduleChange, ScheduleRecord
from penstock.core.jobs.spending import RenewedDispatch
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import (
    HOUR,
    SECOND,
    AddonId,
    DispatchId,
    HostId,
    JobId,
    Moment,
    Span,
)

Clock: TypeAlias = Callable[[], Moment]
T = TypeVar("T")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

#: How long `hosts` lists a host that was lost.
LOST_FOR: Final[Span] = 24 * HOUR

# parameters and answers of operations


class DepthReached(NamedTuple):
    """A depth limit that new jobs would exceed. `addon_id` None: the limit of all addons together."""

    addon_id: AddonId | None
    limit: int
    queued: int

    def refusal(self, waited: Span = 0) -> QueueFull:
        """`waited`: how long the submit has waited for room."""
        where = "in all" if self.addon_id is None else f"for addon {self.addon_id}"
        text = f"{self.queued} jobs are queued {where}, the limit is {self.limit}"
        if waited:
            text += f"; no room in {waited / SECOND:g} s"
        return QueueFull(text, limit=self.limit, queued=self.queued, retry_after_sec=RETRY_AFTER_SEC)


#: When a refused submitter should try again: some jobs have usually started by then.
RETRY_AFTER_SEC: Final = 5


class Depth(Struct, frozen=True):
    """How many jobs may be queued. A requeue is never refused, so it may exceed the limit."""

    total: int | None = None
    per_addon: int | None = None

    def reached(
        self, addons: Sequence[AddonId], queued: Callable[[AddonId | None], int]
    ) -> DepthReached | None:
        """
        The limit that new jobs, one for each of `addons`, would exceed. `queued` counts the queued jobs of an
        addon, or of all addons (None).
        """
        if self.total is not None and addons and (before := queued(None)) + len(addons) > self.total:
            return DepthReached(None, self.total, before)
        if self.per_addon is not None:
            for addon_id, new in Counter(addons).items():
                if (before := queued(addon_id)) + new > self.per_addon:
                    return DepthReached(addon_id, self.per_addon, before)
        return None

    def check(self, new: Sequence[Intent], queued: Callable[[AddonId | None], int]) -> None:
        """Raise QueueFull if these jobs would exceed the limit."""
        reached = self.reached([intent.addon_id for intent in new], queued)
        if reached is not None:
            raise reached.refusal()


NO_LIMIT: Final = Depth()


def key_conflict(intent: Intent, job_id: JobId | None) -> KeyConflict:
    return KeyConflict(
        f"idempotency_key {intent.idempotency_key!r} was used for another job",
        field="idempotency_key",
        job_id=job_id,
    )


def name_taken(host: Host) -> DispatcherHeld:
    return DispatcherHeld(
        f"another live scheduler on this database has the name {host.host}: "
        "give this one another name (host.name)",
        holder=host.host,
    )


class Receipt(Struct, frozen=True, gc=False):
    """
    The answer to the submit of one job. `created`: False when the idempotency key had been used before, and
    this is that job. For a job with a deadline the service adds whether the deadline looks reachable, and the
    likely start; None: the service cannot tell.
    """

    job_id: JobId
    state: JobState
    created: bool
    deadline_reachable: bool | None = None
    likely_start_at: Moment | None = None


class ScheduleWritten(NamedTuple):
    """
    The schedule after a change (None: removed), and the receipt of the job that was submitted with the
    change.
    """

    record: ScheduleRecord | None
    receipt: Receipt | None


class Terms(Struct, frozen=True):
    """The times and the worker that a round gives to its dispatches."""

    reserve_for: Span = 30 * SECOND
    lease_for: Span = 30 * SECOND
    worker: str = ""


#: The state of each job, and the result of a job that is DONE.
JobResults: TypeAlias = Mapping[JobId, tuple[JobState, str | None]]


class Grant(NamedTuple):
    """
    A dispatch that a round started. `job`: as the round left it; None for a reservation and for a lease
    without a job. `parents`: the states and results of parents, if the store has read them with the start.
    """

    dispatch: Dispatch
    job: Job | None = None
    parents: JobResults = MappingProxyType({})


class CompletedDispatch(NamedTuple):
    """A worker's report that the job of this dispatch is done."""

    dispatch_id: DispatchId
    result: str | None = None


#: Makes the notes (events) that a heartbeat adds to the trail. Pure; may be called twice.
NotesFor: TypeAlias = Callable[[RenewedDispatch], Sequence[Note]]


def no_notes(_: RenewedDispatch) -> Sequence[Note]:
    return ()


# parameters and results of reads


class Due(StrEnum):
    """Why maintenance must act on a dispatch or a job."""

    #: A reservation that no worker took up, a lease without heartbeats, or a stop that did not end in time.
    EXPIRED = "expired"
    STOP = "stop"  # an attempt beyond its runtime limit or hard cap
    DEADLINE = "deadline"  # a queued job that can no longer start in time


class Overdue(NamedTuple):
    due: Due
    job: Job | None
    dispatch: Dispatch | None


#: How many jobs a search by text, or a count by filters, reads at most.
MOST_SEARCHED: Final = 100_000


class Query(Struct, frozen=True):
    """Filters for jobs. A filter that has its default matches every job."""

    states: Collection[JobState] = ()
    addon_id: AddonId | None = None
    job_type: str | None = None
    tag: str | None = None
    part: str | None = None  # of the job's id: people type the end of an id
    since: Moment | None = None  # created at or after this moment
    before: Moment | None = None  # created before this moment
    #: A part of the job's type, payload, tags or last error; the case of A to Z does not matter. Only the
    #: newest `MOST_SEARCHED` jobs are searched, because no index helps such a search.
    text: str | None = None
    after: int = 0  # the number of the last job of the page before
    newest_first: bool = False
    limit: int = 50


def among_newest(query: Query) -> Query:
    """The query by which `Reads.count` counts: the newest jobs that match, in any state."""
    return replace(query, states=(), after=0, newest_first=True, limit=MOST_SEARCHED)


class WaitingWork(NamedTuple):
    """How many jobs wait, and the units that they need together."""

    jobs: int
    units: int


class Addon(Struct, frozen=True):
    addon_id: AddonId
    weight: int = 100
    paused: bool = False
    average: float = 0.0
    units: int = 0
    jobs: Mapping[JobState, int] = field(default_factory=dict)


# the operations


class Operation(Struct, Generic[A_co], frozen=True, kw_only=True):
    """
    One write, answered with an `A_co`.

    The thread that writes calls `on_answer` with the answer before it notifies the listeners of the commit:
    a job that starts need not wait for threads that only read.
    """

    on_answer: Callable[[Future[Any]], None] | None = None

    @property
    def empty(self) -> bool:
        """Whether it writes nothing."""
        return False


class Submit(Operation[list[Receipt]], frozen=True):
    """Add jobs, all or none. Raises QueueFull and KeyConflict."""

    intents: Sequence[Intent]
    depth: Depth = NO_LIMIT


class Apply(Operation[list[bool]], frozen=True):
    """
    Apply changes, each by itself. False: the job has changed since the decision, so nothing was written for
    it.
    """

    changes: Sequence[Change]

    @property
    def empty(self) -> bool:
        return not self.changes


class Complete(Operation[list[bool]], frozen=True):
    """
    Complete jobs: `Apply` of what `changes.completed` makes of each report. By far the most frequent change,
    so the stores have a faster way for it.
    """

    done: Sequence[CompletedDispatch]

    @property
    def empty(self) -> bool:
        return not self.done


class Renew(Operation[list[RenewedDispatch | None]], frozen=True):
    """
    Renew leases (heartbeats), and write the notes that `notes_for` makes. None: the dispatch is stale, ended
    or expired, so nothing was changed. The lease of a dispatch that is ending is not prolonged.
    """

    renewals: Sequence[Renewal]
    notes_for: NotesFor = no_notes

    @property
    def empty(self) -> bool:
        return not self.renewals


class Admit(Operation[list[Grant]], frozen=True):
    """
    Run one round of a host. `run_round` decides on rows that no other process can change until its decision
    is written; it must be quick, and the store may call it again. `terms` apply to every dispatch that this
    round starts.

    The thread that writes may call `preview` with the grants while it waits for the database, so that the
    claimant can prepare the jobs. They are not durable yet: start nothing before the answer. `preview` may be
    called for a commit that then fails, or not at all.

    `spending`: False if no addon has a budget; the round then reads no amounts spent.
    """

    host: HostId
    run_round: Callable[[AdmissionView], RoundResult]
    terms: Terms = Terms()
    preview: Callable[[list[Grant]], None] | None = None
    spending: bool = True


class ResolveDependencies(Operation[int], frozen=True):
    """
    Release or end more children of jobs that had more of them than one transaction may resolve; answered with
    the number of such jobs that remain. While any remain, `alarm` says that maintenance is due.
    """


class SetAddon(Operation[None], frozen=True):
    """Change an addon; a field that is None stays. `by`: the principal, for the trail."""

    addon_id: AddonId
    weight: int | None = None
    paused: bool | None = None
    by: str = ""


class ChangeSchedule(Operation[ScheduleWritten | None], frozen=True):
    """
    Change a schedule and submit the job that the change makes due: all of it in one transaction, or nothing.
    None: the schedule has changed since the decision, so nothing was written. Raises QueueFull and
    KeyConflict.
    """

    change: ScheduleChange
    depth: Depth = NO_LIMIT


class RecordLoad(Operation[None], frozen=True):
    """
    Record how busy the host was in an hour of the week that is over. The store averages it with the same hour
    of earlier weeks.
    """

    host: HostId
    hour: int
    busy: float


class ChangeArray(Operation[ArrayRecord | None], frozen=True):
    """
    Change an array and add the jobs that the change makes, in one transaction. `decide` gets the array as it
    is (None: there is none), the states of its live jobs, and the indices that wait for another attempt. It
    must be quick and pure, and may be called again; if it returns None, nothing changes. Answered with the
    array after the change. `intent`: of the array's jobs, if the caller knows it, so that a store can prepare
    for it. `depth`: the limit for the first jobs of a new array; QueueFull: they have no room. The end of a
    job needs no such operation: the transaction that ends it also starts the next index
    (`common/array_changes.py`).
    """

    array_id: JobId
    decide: ArrayDecision
    intent: Intent | None = None
    depth: Depth = NO_LIMIT


class SubmitBatch(Operation[list[Receipt]], frozen=True):
    """
    Add a batch with its first members and its callback jobs, all or none. `group` has no members yet;
    `intents` are as `groups.member`, `groups.on_end` and `groups.on_failure` make them. Raises what `Submit`
    raises, and KeyConflict if there is a batch of that name.
    """

    group: JobGroup
    intents: Sequence[Intent]
    depth: Depth = NO_LIMIT
    by: str = ""


class ChangeBatch(Operation[JobGroup | None], frozen=True):
    """
    Change a batch, and its callback jobs with it, in one transaction. `decide` must be quick and pure, and
    may be called again; if it returns None, nothing changes. Answered with the batch after the change, or
    None if there is none.
    """

    group_id: JobId
    decide: Callable[[JobGroup, Moment], GroupChange | None]


class Prune(Operation[int], frozen=True):
    """
    Remove at most `limit` settled jobs that ended before a moment; answered with their number. BLOCKED jobs
    stay.
    """

    before: Moment
    limit: int


class Shift(Operation[int], frozen=True):
    """
    Follow a wall clock that was set: shift every lease, every delay of a retry and the age of every queued
    job, so that none grows or shrinks. Moments that a user gave stay. Answered with the number of dispatches
    that were shifted.
    """

    by: Span


class Reorder(Operation[int], frozen=True):
    """
    Compute the order keys of the next `limit` queued jobs after the number `after` anew, by this aging. An
    order key is fixed when its job becomes ready, by the aging of that time. Answered with the number of the
    last job, or 0 if there are no more.
    """

    aging: Aging
    after: int
    limit: int


class RegisterHost(Operation[Host], frozen=True):
    """
    Register that a scheduler of this host is alive until `host.until`; answered with the host as stored.
    Raises DispatcherHeld if another live scheduler has that name. Must be repeated where the store is
    `shared`.
    """

    host: Host


class RemoveHost(Operation[None], frozen=True):
    """Remove a host whose scheduler is closing."""

    host: HostId
    instance: str


class DrainHost(Operation[bool], frozen=True):
    """
    Drain a host: it starts no more jobs until `draining` is set to False. `by`: the principal, for the trail.
    False: no such host.
    """

    host: HostId
    draining: bool
    by: str = ""


class Learn(Operation[bool], frozen=True):
    """
    Store what a host learned from the events after the number `after` up to `upto`, by name, and remove the
    records `forgotten`. Compare-and-set on the number of the last event that was read, so no two hosts learn
    from one event. False: another host was faster.
    """

    after: int
    upto: int
    records: Mapping[str, str]
    forgotten: Sequence[str] = ()


class Learned(NamedTuple):
    """
    All that is learned. `upto`: the number of the last event that was learned from; 0: none yet. `records`:
    JSON by name.
    """

    upto: int
    records: Mapping[str, str]


def committed(store: Writes, operation: Operation[A]) -> A:
    """Commit one operation and wait for its answer. An operation that writes nothing needs no transaction."""
    if operation.empty:
        return cast("A", [])
    answer: Future[A]
    [answer] = store.commit(operation, wait=True)
    return answer.result()


def committed_apart(
    store: Writes, operation_of: Callable[[Sequence[T]], Operation[list[A]]], items: Sequence[T]
) -> list[A | Exception]:
    """
    Commit one operation for all items and wait. If it fails, commit one for each, so that an item that cannot
    be written fails alone. Return the answer to each item, or the exception that the store raised for it.
    Raises Unavailable if nothing can be written now.
    """
    if not items:
        return []
    try:
        return list(committed(store, operation_of(items)))
    except Unavailable:
        raise
    except Exception as error:  # noqa: BLE001 - it belongs to one of the items
        if len(items) == 1:
            return [error]
    outcomes: list[A | Exception] = []
    for answer in store.commit(*(operation_of([item]) for item in items), wait=True):
        try:
            outcomes += answer.result()
        except Unavailable:
            raise
        except Exception as error:  # noqa: BLE001 - it is the outcome
            outcomes.append(error)
    return outcomes


def with_jobs(store: Reads, dispatches: Sequence[Dispatch]) -> list[tuple[Dispatch, Job | None]]:
    """Each dispatch with its job; None for a lease without one."""
    if not dispatches:
        return []
    jobs = {job.job_id: job for job in store.jobs([d.job_id for d in dispatches if d.job_id is not None])}
    return [(d, None if d.job_id is None else jobs.get(d.job_id)) for d in dispatches]


# the protocols


class Writes(Protocol):
    def now(self) -> Moment:
        """The time by the one clock that all writes and comparisons of this store use."""
        ...

    def commit(self, *operations: Operation[Any], wait: bool = False) -> list[Future[Any]]:
        """
        Write the operations in order, and answer each when it is durable: the module's text has the rules.
        """
        ...


@runtime_checkable
class Transactional(Protocol):
    """A store in a database in which its callers have tables of their own."""

    def submit_within(self, connection: Any, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        """
        `Submit` in the caller's own transaction: the jobs exist if it commits, and do not if it rolls back.
        """
        ...


class Reads(Protocol):
    def read_view(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        """
        Call `view` with the rows that a round would see, without locking them: for explain and for trials.
        """
        ...

    def job(self, job_id: JobId) -> Job | None: ...

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        """In the order of the ids; jobs that do not exist are left out."""
        ...

    def find(self, query: Query) -> list[Job]: ...

    def jobs_before(self, nos: Sequence[int], most: int) -> dict[int, int]:
        """
        The number of jobs before each of these jobs in its ready queue, counted up to `most`, by the job's
        number. Jobs that are in no ready queue are left out.
        """
        ...

    def count(self, query: Query) -> dict[JobState, int]:
        """
        The number of jobs in each state among the newest `MOST_SEARCHED` jobs that match the query. Its
        `states`, `after` and `limit` are ignored.
        """
        ...

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None: ...

    def dispatches(self, dispatch_ids: Sequence[DispatchId]) -> dict[DispatchId, Dispatch]:
        """In one read; those that do not exist are left out."""
        ...

    def job_results(self, job_ids: Sequence[JobId]) -> JobResults:
        """Of the jobs that exist."""
        ...

    def attempts(self, job_id: JobId) -> list[Dispatch]: ...

    def live(
        self, *, addon_id: AddonId | None = None, phases: Collection[DispatchPhase] = (), limit: int = 1_000
    ) -> list[Dispatch]:
        """Dispatches that hold units, oldest first."""
        ...

    def checkpoint(self, job_id: JobId) -> str | None: ...

    def dependencies(self, job_id: JobId, limit: int = 1_000) -> list[StoredDependency]:
        """The dependencies of a job by parent, then those on it by child; at most `limit` of each kind."""
        ...

    def events(self, after: int, limit: int, job_id: JobId | None = None) -> list[Event]:
        """
        The events after a number: `seq`, or `n` within one job. No later commit adds an event at or below a
        number that a reader has seen.
        """
        ...

    def events_of(self, kinds: Collection[EventKind], after: int, limit: int) -> list[Event]:
        """`events` of these kinds only. Events of other kinds cost next to nothing."""
        ...

    def newest(self) -> int:
        """The number of the last event: the cursor of a reader that wants only later events."""
        ...

    def schedules(self, due_by: Moment | None = None) -> list[ScheduleRecord]:
        """All schedules in the order of their names. `due_by`: only those that must be checked by then."""
        ...

    def schedule(self, name: str) -> ScheduleRecord | None: ...

    def load_hours(self) -> dict[int, float]:
        """The average load of the hosts by hour of the week; hours without a record are left out."""
        ...

    def array(self, array_id: JobId) -> ArrayRecord | None: ...

    def arrays(self, limit: int, *, only_open: bool = False) -> list[ArrayRecord]:
        """Arrays, newest first. `only_open`: only those that have not ended."""
        ...

    def failed_indices(self, array_id: JobId) -> list[IndexChunk]:
        """The failed indices of an array that do not wait for another attempt, in order."""
        ...

    def group(self, group_id: JobId) -> JobGroup | None:
        """A batch by `batch:NAME`, or an array by its id."""
        ...

    def batches(self, limit: int, addon_id: AddonId | None = None) -> list[JobGroup]:
        """Batches, newest first."""
        ...

    def schedule_alarm(self) -> Moment | None:
        """
        When the next schedule must be checked; 0 (now) if moments of a schedule wait for the end of a job.
        None: no schedule is due at any time.
        """
        ...

    def observed_jobs(self, job_ids: Sequence[JobId]) -> list[ObservedJob]:
        """
        The facts of these jobs that the learner reads, in no order; jobs that do not exist are left out.
        """
        ...

    def learned(self) -> Learned:
        """All that the `Learn` operations have stored."""
        ...

    def learned_upto(self) -> int:
        """The number of the last event that was learned from: cheaper than `learned`."""
        ...

    def ledger(self, host: HostId) -> Ledger: ...

    def addons(self) -> list[Addon]: ...

    def waiting_by_labels(self) -> dict[tuple[str, ...], WaitingWork]:
        """The ready jobs that wait for units, by the labels that a host must have for them."""
        ...


class Upkeep(Protocol):
    def overdue(self, limit: int) -> list[Overdue]: ...

    def alarm(self) -> Moment | None:
        """The next moment at which something becomes ready, urgent or overdue."""
        ...

    def trouble(self) -> str | None:
        """
        Why writes fail at the moment. None: the store knows no reason, but only a write can prove that it
        works.
        """
        ...

    def audit(self) -> list[str]:
        """Recompute every total and check every invariant. Return a sentence for each problem."""
        ...

    def close(self) -> None: ...


class Relay(Protocol):
    def __call__(self, submits: Sequence[Submit], *, stays: bool) -> Callable[[], None] | None:
        """
        Commit submits of other processes; each is answered by its `on_answer`. `stays`: the calling thread is
        free afterwards. It calls the returned function (which runs a job) while another thread receives
        submits.
        """
        ...


class Hosting(Protocol):
    """
    How processes share a store: which one dispatches, and how a process learns of the commits of another.
    """

    #: Whether several hosts may dispatch from the store.
    shared: bool

    def hosts(self) -> list[Host]:
        """
        Hosts in the order of their names: live ones, ones lost in the last `LOST_FOR`, and draining ones.
        """
        ...

    def acquire_dispatch(self, holder: str, relay: Relay | None = None) -> None:
        """
        Acquire the right to dispatch from this store. DispatcherHeld names the process that has it. Where
        other processes send their submits to the dispatching process, that process commits them by `relay`,
        so that it can claim in the same commit.
        """
        ...

    def release_dispatch(self) -> None:
        """Release the right to dispatch. In a process without the right this does nothing."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """
        Call `listener` after every commit of this process and, if this process dispatches, of the others. The
        call is only a hint and may come from any thread.
        """
        ...

    def listen(self) -> None:
        """
        In a process that does not dispatch: notify its listeners of the dispatcher's commits too, for some
        seconds.
        """
        ...


class Store(Writes, Reads, Upkeep, Hosting, Protocol):
    """The whole interface, as a scheduler needs it."""
