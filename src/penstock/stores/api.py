"""
The seam between the engine and a store: few verbs, each one transaction, the same for memory, SQLite and PostgreSQL.

`admit` is the only verb that calls back, because admission must see locked rows: it is a transaction over the ledger, not a
compare-and-set on one job. Everything else that happens to a job is a `Change`, and `apply` is the one way to make it true.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from msgspec import Struct, field

from penstock.core.jobs.changes import Change, Note, Renewal
from penstock.core.jobs.end_rules import DispatchPhase, EndReason
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, Event, EventKind, Job
from penstock.core.jobs.ledger import Ledger
from penstock.core.jobs.load import Host
from penstock.core.jobs.ordering import AdmissionView, Aging, RoundResult
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import HOUR, SECOND, AddonId, DispatchId, HostId, JobId, Moment, Money, Span

__all__ = [
    "LOST_FOR",
    "NOTHING_SPENT",
    "Addon",
    "Ahead",
    "Clock",
    "Depth",
    "Due",
    "Overdue",
    "Query",
    "Receipt",
    "Rest",
    "Ride",
    "Standing",
    "Store",
    "Tell",
    "Terms",
    "Transactional",
    "not_waited_for",
    "say_nothing",
]

Clock: TypeAlias = Callable[[], Moment]
T = TypeVar("T")


class Depth(Struct, frozen=True):
    """How many may be queued. Requeues are never refused, so they may exceed it."""

    total: int | None = None
    per_addon: int | None = None


class Receipt(Struct, frozen=True, gc=False):
    """
    `created`: False when the idempotency key had been used before, and this is that job. For a job with a deadline the desk adds
    whether it looks reachable, and from which likely start that follows; None: it cannot be said.
    """

    job_id: JobId
    state: JobState
    created: bool
    deadline_reachable: bool | None = None
    likely_start_at: Moment | None = None


class Terms(Struct, frozen=True):
    """What a dispatch is made with."""

    reserve_for: Span = 30 * SECOND
    lease_for: Span = 30 * SECOND
    worker: str = ""


class CompletedDispatch(NamedTuple):
    """A worker's word that the job it has under this lease is done."""

    dispatch_id: DispatchId
    result: str | None = None


#: What is left to do for the thread that wrote something, when everybody has been answered.
Rest: TypeAlias = Callable[[], None]


class Ride(NamedTuple):
    """
    An `admit` for somebody who is idle, in the transaction of the submit that brings the job: one commit where there would be two.
    `landed` is called once, when it is on disk; None: nothing came of it, and nothing was written. It also hears whether the thread that
    calls it could stay with what it brings, and may answer with what that thread shall do then: to wake another one takes as long as a commit.
    """

    host: HostId
    run_round: Callable[[AdmissionView], RoundResult]
    terms: Terms
    landed: Callable[[list[Dispatch] | None, bool], Rest | None]


NOTHING_SPENT: Final[Mapping[str, Money]] = MappingProxyType({})


#: How long a host that was lost is remembered.
LOST_FOR: Final[Span] = 24 * HOUR


class Standing(Struct, frozen=True, gc=False):
    """Where a dispatch stands after its heartbeat: the answer can tell it to stop, and the desk can judge its spending."""

    dispatch_id: DispatchId
    job_id: JobId | None
    addon_id: AddonId
    phase: DispatchPhase
    reason: EndReason | None
    expires_at: Moment
    spent_before: Money
    spent: Money
    cost_limit: Money | None
    #: What its addon has spent with it, by window (day, month); only when this heartbeat added something.
    addon_spent: Mapping[str, Money] = NOTHING_SPENT


#: What a heartbeat gives occasion to tell, written in its transaction. Pure, and perhaps called twice.
Tell: TypeAlias = Callable[[Standing], Sequence[Note]]


def say_nothing(_: Standing) -> Sequence[Note]:
    return ()


#: What will start if it comes to be written, told while it is being written by a store that has time then, in its thread: `claimed` can be asked for it from
#: then on, to get ready, but nothing may begin. Perhaps told in vain, perhaps twice.
Ahead: TypeAlias = Callable[[list[Dispatch]], None]


def not_waited_for(_: list[Dispatch]) -> None:
    pass


class Due(StrEnum):
    EXPIRED = "expired"  # a reservation nobody took up, a lease nobody renewed, a stop nobody confirmed
    STOP = "stop"  # a run past its runtime limit or hard cap
    DEADLINE = "deadline"  # a queued job that can no longer start in time


class Overdue(NamedTuple):
    due: Due
    job: Job | None
    dispatch: Dispatch | None


class Query(Struct, frozen=True):
    states: Collection[JobState] = ()
    addon_id: AddonId | None = None
    job_type: str | None = None
    tag: str | None = None
    part: str | None = None  # of the job's id; people type the end of one
    after: int = 0  # the number of the last job seen; by number, newest first when 0 < limit
    newest_first: bool = False
    limit: int = 50


class Addon(Struct, frozen=True):
    addon_id: AddonId
    weight: int = 100
    paused: bool = False
    average: float = 0.0
    units: int = 0
    jobs: Mapping[JobState, int] = field(default_factory=dict)


@runtime_checkable
class Transactional(Protocol):
    """A store in a database that its callers use too."""

    def submit_within(self, connection: Any, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        """`submit` as part of a transaction of the caller's own: there with its commit, gone with its rollback."""
        ...


class Store(Protocol):
    #: Whether others may dispatch from it too.
    shared: bool

    def now(self) -> Moment:
        """The one clock. Everything that is written or judged here is by it."""
        ...

    def submit(self, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        """All or none, durable when it returns. QueueFull, KeyConflict."""
        ...

    def submit_soon(self, intents: Sequence[Intent], depth: Depth) -> Future[list[Receipt]]:
        """The same for who must not wait here: an event loop. Durable when the Future has its result."""
        ...

    def admit(
        self, host: HostId, run_round: Callable[[AdmissionView], RoundResult], terms: Terms
    ) -> list[Dispatch]:
        """`run_round` sees rows that nobody else can change until its verdict is written. It must be quick, and may be called again."""
        ...

    def claimed(self, dispatches: Sequence[Dispatch]) -> list[Job]:
        """The jobs of what `admit` has just leased: as they were then, for a store may have read them along with it."""
        ...

    def ride(self, board: Callable[[], Ride | None]) -> Callable[[], None]:
        """
        `board` is asked with each submit, inside its transaction, until the answer is called. A hint: where it would save nothing nobody
        is asked, and a rider whose round fails is left behind, so that it cannot harm the submit.
        """
        ...

    def look(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        """The same floor, to read only: for explain and for trying out."""
        ...

    def apply(self, changes: Sequence[Change]) -> list[bool]:
        """One transaction; each on its own merits. False: decided on stale knowledge, nothing was changed by it."""
        ...

    def apply_soon(self, changes: Sequence[Change]) -> Future[list[bool]]:
        """Before whatever the same thread asks for next; perhaps in one commit with it."""
        ...

    def complete_soon(self, done: Sequence[CompletedDispatch]) -> Future[list[bool]]:
        """`apply_soon` of what `changes.completed` says about each: by far the most frequent change of all, so it has a way of its own."""
        ...

    def exchange_soon(
        self,
        done: Sequence[CompletedDispatch],
        host: HostId,
        run_round: Callable[[AdmissionView], RoundResult],
        terms: Terms,
        ahead: Ahead = not_waited_for,
    ) -> Future[tuple[list[bool], list[Dispatch]]]:
        """`complete_soon`, then `admit`, in one commit where that can be: what is done makes room for what starts."""
        ...

    def renew(self, beats: Sequence[Renewal], tell: Tell = say_nothing) -> list[Standing | None]:
        """None: stale, ended or expired; nothing was changed. A dispatch that is ending is not prolonged."""
        ...

    def renew_soon(
        self, beats: Sequence[Renewal], tell: Tell = say_nothing
    ) -> Future[list[Standing | None]]: ...

    def overdue(self, limit: int) -> list[Overdue]: ...

    def alarm(self) -> Moment | None:
        """The next moment at which something becomes ready, urgent or overdue."""
        ...

    def trouble(self) -> str | None:
        """Why writes fail at the moment, as far as that is known without a write. None: a write will tell."""
        ...

    def job(self, job_id: JobId) -> Job | None: ...

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        """In the order asked for; what does not exist is left out."""
        ...

    def find(self, query: Query) -> list[Job]: ...

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None: ...

    def attempts(self, job_id: JobId) -> list[Dispatch]: ...

    def live(
        self, *, addon_id: AddonId | None = None, phases: Collection[DispatchPhase] = (), limit: int = 1_000
    ) -> list[Dispatch]:
        """Dispatches that hold units, oldest first."""
        ...

    def checkpoint(self, job_id: JobId) -> str | None: ...

    def events(self, after: int, limit: int, job_id: JobId | None = None) -> list[Event]:
        """By `seq`, or by `n` within one job. Nothing ever appears at or below a number that was seen."""
        ...

    def events_of(self, kinds: Collection[EventKind], after: int, limit: int) -> list[Event]:
        """The same, for who wants few of them: what is of another kind costs next to nothing."""
        ...

    def newest(self) -> int:
        """The number of the last event: where somebody begins who wants to hear only what is to come."""
        ...

    def ledger(self, host: HostId) -> Ledger: ...

    def addons(self) -> list[Addon]: ...

    def set_addon(
        self, addon_id: AddonId, *, weight: int | None = None, paused: bool | None = None, by: str = ""
    ) -> None:
        """`by`: the principal, for the trail."""
        ...

    def prune(self, before: Moment, limit: int) -> int:
        """Forget at most so many settled jobs that ended before then. BLOCKED ones stay."""
        ...

    def shift(self, by: Span) -> int:
        """
        The clock was set: move every lease, every delay of a retry and the age of every queued job along, so that none grows or shrinks. Moments
        that a user gave stay. Returns how many dispatches were moved.
        """
        ...

    def reorder(self, aging: Aging, after: int, limit: int) -> int:
        """
        The turns of queued jobs are fixed when they become ready, under the aging of that day. Looks at so many behind the number
        `after`, sets them by this one, and answers with the last number it looked at; 0: there are no more.
        """
        ...

    def audit(self) -> list[str]:
        """Recompute every sum and check every invariant; what is wrong, in words."""
        ...

    def register_host(self, host: Host) -> Host:
        """
        "I am here", until `host.until`; answered with what is known of it. DispatcherHeld: somebody else bears that name, and lives.
        To be told again and again where `shared`.
        """
        ...

    def leave(self, host: HostId, instance: str) -> None:
        """It ends, and says so."""
        ...

    def hosts(self) -> list[Host]:
        """By name: those that live, those that were lost of late, and those that somebody wants drained."""
        ...

    def drain(self, host: HostId, draining: bool, by: str = "") -> bool:
        """It starts nothing more, until the opposite is said. `by`: the principal, for the trail. False: there is no such host."""
        ...

    def acquire_dispatch(self, holder: str) -> None:
        """The right to dispatch from this store. DispatcherHeld names who has it."""
        ...

    def release_dispatch(self) -> None:
        """Somebody else may have it now. Nothing, for who does not hold it."""
        ...

    def on_change(self, ring: Callable[[], None]) -> None:
        """Called after any commit, here or (by the holder of the dispatch right) in another process. A hint, from any thread."""
        ...

    def listen(self) -> None:
        """For some seconds from now `on_change` also tells who does not dispatch of what the dispatching process commits."""
        ...

    def close(self) -> None: ...
