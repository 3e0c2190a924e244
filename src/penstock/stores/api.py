"""
The seam between the scheduler and a store: one verb that writes, and reads beside it; the same for memory, SQLite and PostgreSQL.

Every write is an `Operation`, a frozen value that names what shall become true: `Submit`, `Apply`, `Complete`, `Renew`, `Admit`,
and the upkeep (`ResolveDependencies`, `SetAddon`, `ChangeSchedule`, `ChangeArray`, `SubmitBatch`, `ChangeBatch`, `RecordLoad`, `Prune`, `Shift`, `Reorder`, `RegisterHost`,
`RemoveHost`, `DrainHost`, `Learn`).
`commit` takes any number of operations and answers each with a Future of its own:

    receipts, grants = store.commit(Submit([intent], depth), Admit(host, run_round, terms))

1. The operations of one commit take effect in order and share a transaction, together with what other callers commit at that
   moment: a sync to disk costs as much as a hundred inserts. An `Admit` comes last in its commit, because a store may
   write what others end in the same transaction before it.
2. A Future has its result when the operation is durable, and never before.
3. Each operation is a savepoint. One that raises fails alone: the store rolls the transaction back and writes the others of it
   again, one by one. So no operation may count on the success of the one before it. A bulk `Submit` is one operation: all of
   its jobs or none.
4. A commit whose outcome is unknown (the sync failed, the server did not answer) is never tried again: every operation of the
   transaction fails with OutcomeUnknown, and a `Submit` learns which jobs to look for.
5. `Admit` and `ChangeArray` have a function in them that decides, because it must see rows that no other process can change
   until its verdict is written: admission the ledger and the heads of the queues, an array its row and the states of its jobs.
   The function must be quick, and the store may call it again. Everything else that happens to a job is a `Change`, decided
   beforehand and applied by compare-and-set: False says that it was decided on stale knowledge, and that nothing was changed.
   What follows for the children of a job that ends is decided in the same transaction (`common/dependencies.py`), and so is what
   follows for its array (`common/array_changes.py`).
6. `commit` does not block, so an event loop may call it. `wait=True` says that the calling thread will wait for the answers
   at once: the store may then write in that thread, which saves waking another (`committed` does so). Upkeep may block.

"Complete and claim" is `commit(Complete(...), Admit(...))`: the completed jobs free units for those that start. A worker that is idle
claims in the commit of a submit because the service appends its `Admit` to the `Submit`.

Memory writes under one lock. SQLite has one writer thread and one transaction for all that arrived together
(`common/group_commit.py`). PostgreSQL has three such writers, so a commit that mixes their operations becomes several
transactions there, one behind the other: `postgres/store.py` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from enum import StrEnum
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

#: How long a host that was lost is remembered.
LOST_FOR: Final[Span] = 24 * HOUR

# what operations carry, and what they are answered with


class DepthReached(NamedTuple):
    """A depth limit that new jobs would exceed; without an addon the total limit."""

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


#: A hint for a submitter that was refused: about as long as it takes some jobs to start.
RETRY_AFTER_SEC: Final = 5


class Depth(Struct, frozen=True):
    """How many jobs may be queued. Requeues are never refused, so they may exceed it."""

    total: int | None = None
    per_addon: int | None = None

    def reached(
        self, addons: Sequence[AddonId], queued: Callable[[AddonId | None], int]
    ) -> DepthReached | None:
        """
        The limit that new jobs, one for each of `addons`, would exceed. `queued`: how many are queued of an addon, or in
        all (None).
        """
        if self.total is not None and addons and (before := queued(None)) + len(addons) > self.total:
            return DepthReached(None, self.total, before)
        if self.per_addon is not None:
            for addon_id, more in Counter(addons).items():
                if (before := queued(addon_id)) + more > self.per_addon:
                    return DepthReached(addon_id, self.per_addon, before)
        return None

    def check(self, fresh: Sequence[Intent], queued: Callable[[AddonId | None], int]) -> None:
        """QueueFull if these jobs would exceed it."""
        full = self.reached([intent.addon_id for intent in fresh], queued)
        if full is not None:
            raise full.refusal()


NO_LIMIT: Final = Depth()


def key_conflict(intent: Intent, job_id: JobId | None) -> KeyConflict:
    return KeyConflict(
        f"idempotency_key {intent.idempotency_key!r} was used for another job",
        field="idempotency_key",
        job_id=job_id,
    )


def name_taken(host: Host) -> DispatcherHeld:
    return DispatcherHeld(
        f"another scheduler that is alive on this database is called {host.host} too: "
        "give this one a name of its own (host.name)",
        holder=host.host,
    )


class Receipt(Struct, frozen=True, gc=False):
    """
    `created`: False when the idempotency key had been used before, and this is that job. For a job with a deadline the service
    adds whether the deadline looks reachable, and the likely start; None: the service cannot tell.
    """

    job_id: JobId
    state: JobState
    created: bool
    deadline_reachable: bool | None = None
    likely_start_at: Moment | None = None


class ScheduleWritten(NamedTuple):
    """The schedule from now on (None: removed), and the receipt of the job that was submitted with the change."""

    record: ScheduleRecord | None
    receipt: Receipt | None


class Terms(Struct, frozen=True):
    """What a round makes its dispatches with."""

    reserve_for: Span = 30 * SECOND
    lease_for: Span = 30 * SECOND
    worker: str = ""


class Grant(NamedTuple):
    """What a round started. `job`: as it is from then on; None for a reservation and for a lease without a job."""

    dispatch: Dispatch
    job: Job | None = None


class CompletedDispatch(NamedTuple):
    """A worker's report that the job it has under this lease is done."""

    dispatch_id: DispatchId
    result: str | None = None


#: The notes that a heartbeat gives occasion to. Pure, and perhaps called twice.
NotesFor: TypeAlias = Callable[[RenewedDispatch], Sequence[Note]]


def no_notes(_: RenewedDispatch) -> Sequence[Note]:
    return ()


# parameters and results of reads


class Due(StrEnum):
    EXPIRED = (
        "expired"  # a reservation that no worker took up, a lease without heartbeats, a stop without an end
    )
    STOP = "stop"  # a run past its runtime limit or hard cap
    DEADLINE = "deadline"  # a queued job that can no longer start in time


class Overdue(NamedTuple):
    due: Due
    job: Job | None
    dispatch: Dispatch | None


#: How many jobs a search by text, or a count by filters, looks at.
MOST_SEARCHED: Final = 100_000


class Query(Struct, frozen=True):
    states: Collection[JobState] = ()
    addon_id: AddonId | None = None
    job_type: str | None = None
    tag: str | None = None
    part: str | None = None  # of the job's id; people type the end of one
    since: Moment | None = None  # created at or after this moment
    before: Moment | None = None  # created before this moment
    #: A part of the job's type, payload, tags or last error, without regard to the case of A to Z. Only the newest
    #: `MOST_SEARCHED` jobs are searched: such a search reads every job on its way.
    text: str | None = None
    after: int = 0  # the number of the last job seen; by number, newest first when 0 < limit
    newest_first: bool = False
    limit: int = 50


def among_newest(query: Query) -> Query:
    """The query of `Reads.count`: the newest jobs that match, whatever their state."""
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
    One write, answered with a `A_co`.

    `on_answer` is called with the answer in the thread that writes, before that thread notifies any listener of the commit:
    a job that starts need not wait for threads that only look.
    """

    on_answer: Callable[[Future[Any]], None] | None = None

    @property
    def empty(self) -> bool:
        """Whether it writes nothing."""
        return False


class Submit(Operation[list[Receipt]], frozen=True):
    """New jobs, all or none. QueueFull, KeyConflict."""

    intents: Sequence[Intent]
    depth: Depth = NO_LIMIT


class Apply(Operation[list[bool]], frozen=True):
    """Changes, each on its own merits. False: decided on stale knowledge, nothing was changed by it."""

    changes: Sequence[Change]

    @property
    def empty(self) -> bool:
        return not self.changes


class Complete(Operation[list[bool]], frozen=True):
    """`Apply` of what `changes.completed` makes of each: by far the most frequent change, so the stores have a short way for it."""

    done: Sequence[CompletedDispatch]

    @property
    def empty(self) -> bool:
        return not self.done


class Renew(Operation[list[RenewedDispatch | None]], frozen=True):
    """
    Heartbeats. None: the dispatch is stale, ended or expired, and nothing was changed; one that is ending is not prolonged.
    The notes that `notes_for` makes are written along.
    """

    renewals: Sequence[Renewal]
    notes_for: NotesFor = no_notes

    @property
    def empty(self) -> bool:
        return not self.renewals


class Admit(Operation[list[Grant]], frozen=True):
    """
    One round of a host. `run_round` decides on rows that no other process can change until its verdict is written; it must be
    quick, and the store may call it again. `terms` hold for all that this round starts.

    `preview` is called while the round is being written, in the thread that writes, by a store that has time then: the
    claimant can make ready what it will run, but nothing may begin before the answer. Perhaps called in vain, perhaps never.

    `spending`: False if no addon has a budget, so that the round needs no ledger of what they spent.
    """

    host: HostId
    run_round: Callable[[AdmissionView], RoundResult]
    terms: Terms = Terms()
    preview: Callable[[list[Grant]], None] | None = None
    spending: bool = True


class ResolveDependencies(Operation[int], frozen=True):
    """
    Release or end more children of jobs that had more of them than one transaction may resolve; answered with how many such
    jobs are left. While there are some, `alarm` says that maintenance is due.
    """


class SetAddon(Operation[None], frozen=True):
    """Change an addon; a field that is None stays. `by`: the principal, for the trail."""

    addon_id: AddonId
    weight: int | None = None
    paused: bool | None = None
    by: str = ""


class ChangeSchedule(Operation[ScheduleWritten | None], frozen=True):
    """
    A decision about a schedule, with the job that it submits: all of it in one transaction, or nothing. None: decided on stale
    knowledge, nothing was changed. QueueFull, KeyConflict.
    """

    change: ScheduleChange
    depth: Depth = NO_LIMIT


class RecordLoad(Operation[None], frozen=True):
    """An hour of the week is over, and the host was so busy in it: blended with what was recorded before."""

    host: HostId
    hour: int
    busy: float


class ChangeArray(Operation[ArrayRecord | None], frozen=True):
    """
    A decision about an array, with the jobs that it makes, in one transaction. `decide` gets the array as it is (None: there is
    none), the states of its live jobs, and which indices wait for another run. It must be quick and pure, and may be called again; None changes nothing. Answered with
    the array from then on. `intent`: of the jobs, if the caller knows it: a store may have to prepare for it. The ends of its
    jobs need no such operation: an array goes on in the transaction that ends them (`common/array_changes.py`).
    """

    array_id: JobId
    decide: ArrayDecision
    intent: Intent | None = None


class SubmitBatch(Operation[list[Receipt]], frozen=True):
    """
    A batch with its first members and its callbacks, all or none. `group`: without members; `intents`: as `groups.member`,
    `groups.on_end` and `groups.on_failure` make them. Refusals as of `Submit`; KeyConflict: there is a batch of that name.
    """

    group: JobGroup
    intents: Sequence[Intent]
    depth: Depth = NO_LIMIT
    by: str = ""


class ChangeBatch(Operation[JobGroup | None], frozen=True):
    """
    A decision about a batch, in one transaction with what follows from it. `decide` must be quick and pure, and may be called
    again; None changes nothing. Answered with the batch from then on; None: there is none.
    """

    group_id: JobId
    decide: Callable[[JobGroup, Moment], GroupChange | None]


class Prune(Operation[int], frozen=True):
    """Forget at most `limit` settled jobs that ended before then; answered with how many. BLOCKED jobs stay."""

    before: Moment
    limit: int


class Shift(Operation[int], frozen=True):
    """
    The clock was set: every lease, every delay of a retry and the age of every queued job move along, so that none grows or
    shrinks. Moments that a user gave stay. Answered with how many dispatches moved.
    """

    by: Span


class Reorder(Operation[int], frozen=True):
    """
    The order keys of queued jobs are fixed when the jobs become ready, under the aging of that day. Sets those of `limit` jobs
    behind the number `after` by this aging; answered with the last number it looked at, 0 when there are no more.
    """

    aging: Aging
    after: int
    limit: int


class RegisterHost(Operation[Host], frozen=True):
    """
    A scheduler of this host is alive until `host.until`; answered with the host as stored. DispatcherHeld: another live scheduler
    has that name. To be repeated where the store is `shared`.
    """

    host: Host


class RemoveHost(Operation[None], frozen=True):
    """The host ends, and says so."""

    host: HostId
    instance: str


class DrainHost(Operation[bool], frozen=True):
    """The host starts no more jobs, until it is set to False. `by`: the principal, for the trail. Answered False: no such host."""

    host: HostId
    draining: bool
    by: str = ""


class Learn(Operation[bool], frozen=True):
    """
    What was learned from the events behind `after` up to `upto`, by name, and the names to forget. Compare-and-set on the
    number of the last event that was read, so no two hosts learn from one event. Answered False: another host has read on.
    """

    after: int
    upto: int
    records: Mapping[str, str]
    forgotten: Sequence[str] = ()


class Learned(NamedTuple):
    """`upto`: the number of the last event that was learned from; 0: none yet. `records`: JSON by name."""

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
    Commit one operation for all items and wait. If it fails, commit one for each, so that an item that cannot be written fails
    alone: the answer to each, or what the store raised for it. Unavailable: nothing can be written now.
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
        """The one clock: everything that is written or judged here goes by it."""
        ...

    def commit(self, *operations: Operation[Any], wait: bool = False) -> list[Future[Any]]:
        """Write the operations in order, and answer each when it is durable: see the module."""
        ...


@runtime_checkable
class Transactional(Protocol):
    """A store in a database that its callers use too."""

    def submit_within(self, connection: Any, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        """`Submit` as part of a transaction of the caller's own: there with its commit, gone with its rollback."""
        ...


class Reads(Protocol):
    def look(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        """What a round would see, to read only: for explain and for trying out."""
        ...

    def job(self, job_id: JobId) -> Job | None: ...

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        """In the order of the ids; jobs that do not exist are left out."""
        ...

    def find(self, query: Query) -> list[Job]: ...

    def jobs_before(self, nos: Sequence[int], most: int) -> dict[int, int]:
        """
        Of queued jobs that are ready, by their numbers: how many are before each in its ready queue, counted up to
        `most`.
        """
        ...

    def count(self, query: Query) -> dict[JobState, int]:
        """
        How many jobs of each state the query finds, whatever its `states`, `after` and `limit`, among the newest
        `MOST_SEARCHED` that match its other fields.
        """
        ...

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None: ...

    def dispatches(self, dispatch_ids: Sequence[DispatchId]) -> dict[DispatchId, Dispatch]:
        """In one read; those that do not exist are left out."""
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
        """By `seq`, or by `n` within one job. No event ever appears at or below a number that was seen."""
        ...

    def events_of(self, kinds: Collection[EventKind], after: int, limit: int) -> list[Event]:
        """`events` for readers of few kinds: events of other kinds cost next to nothing."""
        ...

    def newest(self) -> int:
        """The number of the last event: the cursor of a reader that wants only later events."""
        ...

    def schedules(self, due_by: Moment | None = None) -> list[ScheduleRecord]:
        """By name. `due_by`: only those that must be looked at by then."""
        ...

    def schedule(self, name: str) -> ScheduleRecord | None: ...

    def load_hours(self) -> dict[int, float]:
        """How busy the hosts are on average, by the hours of the week that were recorded."""
        ...

    def array(self, array_id: JobId) -> ArrayRecord | None: ...

    def arrays(self, limit: int, *, only_open: bool = False) -> list[ArrayRecord]:
        """The newest first. `only_open`: those that have not ended."""
        ...

    def failed_indices(self, array_id: JobId) -> list[IndexChunk]:
        """The indices of an array that failed and do not wait for another run, in order."""
        ...

    def group(self, group_id: JobId) -> JobGroup | None:
        """A batch by `batch:NAME`, or an array by its id."""
        ...

    def batches(self, limit: int, addon_id: AddonId | None = None) -> list[JobGroup]:
        """The newest first."""
        ...

    def schedule_alarm(self) -> Moment | None:
        """When the first schedule must be looked at: 0 if moments of one wait for the end of a job. None: there is none."""
        ...

    def observed_jobs(self, job_ids: Sequence[JobId]) -> list[ObservedJob]:
        """What learning reads of jobs, in no order; jobs that do not exist are left out."""
        ...

    def learned(self) -> Learned:
        """What the last `Learn` left."""
        ...

    def learned_upto(self) -> int:
        """The number of the last event that was learned from: cheaper than `learned`."""
        ...

    def ledger(self, host: HostId) -> Ledger: ...

    def addons(self) -> list[Addon]: ...

    def waiting_by_labels(self) -> dict[tuple[str, ...], WaitingWork]:
        """What is ready and waits for units, by the labels that a host must have for it."""
        ...


class Upkeep(Protocol):
    def overdue(self, limit: int) -> list[Overdue]: ...

    def alarm(self) -> Moment | None:
        """The next moment at which something becomes ready, urgent or overdue."""
        ...

    def trouble(self) -> str | None:
        """Why writes fail at the moment, as far as the store knows without a write. None: only a write can show it."""
        ...

    def audit(self) -> list[str]:
        """Recompute every total and check every invariant. Returns each problem in words."""
        ...

    def close(self) -> None: ...


class Relay(Protocol):
    def __call__(self, submits: Sequence[Submit], *, stays: bool) -> Callable[[], None] | None:
        """
        Commit submits that other processes handed in; each is answered by its `on_answer`. `stays`: the calling thread is
        free after that. It calls what this returns, while another thread takes submits.
        """
        ...


class Hosting(Protocol):
    """The processes that share a store: which one dispatches, and how one learns of the commits of another."""

    #: Whether several hosts may dispatch from it.
    shared: bool

    def hosts(self) -> list[Host]:
        """By name: hosts that live, hosts that were lost of late, and hosts that are to be drained."""
        ...

    def acquire_dispatch(self, holder: str, relay: Relay | None = None) -> None:
        """
        The right to dispatch from this store. DispatcherHeld names its holder. Where other processes hand their submits to
        the one that dispatches, it commits them by `relay`, so that it can claim in the same commit.
        """
        ...

    def release_dispatch(self) -> None:
        """Another process may have the right now. A process without it releases nothing."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Called after any commit, here or (for the holder of the dispatch right) in another process. A hint, from any thread."""
        ...

    def listen(self) -> None:
        """For some seconds from now `on_change` also hears, in a process that does not dispatch, of the dispatcher's commits."""
        ...


class Store(Writes, Reads, Upkeep, Hosting, Protocol):
    """All of it: what a scheduler needs."""
