"""
Which job starts next: the round.

All jobs age alike, so the order within an addon never changes: the `order_key` is fixed when the job becomes
ready. Between addons, heads compare by band, then urgency, then fair share. A round therefore looks at the
head of each ready queue (one for each admission class), starts the head if the gates let it, and only then
pulls the next job of that queue. It never learns how long the queues are.

`decide_standalone_lease` answers a program that asks to run work of its own without a job (SPEC LS-1). The
program is not in a queue, so every queued job that could start now with at least its priority goes first.
Asking often therefore wins nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from msgspec import Struct, field

from penstock.core.jobs.admission import (
    AdmissionLimits,
    Conditions,
    FairShare,
    Gates,
    Kept,
    Ledger,
    decide,
)
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.load import QuietState
from penstock.core.jobs.reasons import (
    BudgetSpent,
    CapReached,
    Draining,
    NotEnoughUnits,
    NotQuiet,
    Paused,
    QueuedAhead,
    Reason,
    as_json,
)
from penstock.core.jobs.types import MINUTE, SECOND, JobId, Moment, Span

#: The most jobs that one transaction starts.
MOST_PICKS: Final = 1_000
#: The band of priority 90 and up, in which only fair share decides.
TOP_BAND: Final = 9


class Aging(Struct, frozen=True):
    """How fast a waiting job gains priority: 10 points for every 10 minutes since it was ready."""

    per_point: Span = 1 * MINUTE


class Ordering(Struct, frozen=True):
    aging: Aging = Aging()
    #: The round keeps units free for a job that was passed over for this long.
    patience: Span = 30 * SECOND
    #: A time-sensitive job is urgent from its deadline minus its expected duration minus this.
    slack: Span = 10 * MINUTE
    sharing: FairShare = field(default_factory=FairShare)


def order_key(priority: int, ready_at: Moment, aging: Aging) -> Moment:
    """The smaller goes first, within an addon, at any moment: both sides of the comparison age alike."""
    return ready_at - priority * aging.per_point


def ready_at(turn: Moment, priority: int, aging: Aging) -> Moment:
    """The inverse of `order_key`."""
    return turn + priority * aging.per_point


def effective(turn: Moment, now: Moment, aging: Aging) -> int:
    return (now - turn) // aging.per_point


def band(turn: Moment, now: Moment, aging: Aging) -> int:
    return min(effective(turn, now, aging) // 10, TOP_BAND)


def urgent_from(
    deadline_at: Moment | None, expected_sec: float | None, time_sensitive: bool, ordering: Ordering
) -> Moment | None:
    if deadline_at is None or not time_sensitive:
        return None
    return deadline_at - int((expected_sec or 0) * SECOND) - ordering.slack


class QueuedJob(Struct, frozen=True, gc=False):
    """A queued job with what a round compares, and no more: a round reads many of them."""

    no: int
    job_id: JobId
    priority: int
    turn: Moment
    fence: int
    expected_sec: float | None = None
    passed_at: Moment | None = None
    denied: str = ""  # the code of its last recorded denial

    def ends_at(self, now: Moment) -> Moment | None:
        """When it is expected to end if it starts now."""
        return None if self.expected_sec is None else now + int(self.expected_sec * SECOND)


def head_key(
    waiting: QueuedJob, *, urgent: bool, share: float, now: Moment, aging: Aging
) -> tuple[int, bool, float, Moment, int]:
    """The order of heads, the smallest first: band, urgency, fair share, turn, number."""
    return -band(waiting.turn, now, aging), not urgent, share, waiting.turn, waiting.no


class ReadyQueue(Struct, frozen=True):
    """The ready jobs of one admission class."""

    admission_class: AdmissionClass
    urgent: bool
    jobs: Iterator[QueuedJob]  # by turn, then number; pulled one by one


class RunningJob(Struct, frozen=True, gc=False):
    cost: int
    started_at: Moment
    ends_at: Moment | None


class AdmissionView(Protocol):
    """What a round sees of the store, inside the admission transaction."""

    @property
    def now(self) -> Moment: ...

    @property
    def ledger(self) -> Ledger: ...

    def lines(self) -> Iterable[ReadyQueue]: ...

    def running(self) -> Sequence[RunningJob]:
        """What is in flight on this host. A round reads it only when it must keep units free."""
        ...


class Placement(Enum):
    """What a round may do with a job of this admission class."""

    RESERVE = "reserve"  # its addon is notified, and asks for the lease
    LEASE = "lease"  # a worker waits here and takes it at once
    LEAVE = "leave"  # pulling workers run such jobs, and none waits here now


class RoundInputs(NamedTuple):
    admission_view: AdmissionView
    conditions: Conditions
    limits: AdmissionLimits
    ordering: Ordering
    offer: Callable[[AdmissionClass], Placement]

    def decide(
        self,
        admission_class: AdmissionClass,
        *,
        ledger: Ledger | None = None,
        ready_at: Moment = 0,
        urgent: bool = False,
        kept: Kept | None = None,
        ends_at: Moment | None = None,
    ) -> Reason | None:
        """`admission.decide` on these inputs. `ledger`: another than that of the view."""
        return decide(
            admission_class,
            ledger or self.admission_view.ledger,
            self.conditions,
            self.limits,
            self.admission_view.now,
            ready_at=ready_at,
            urgent=urgent,
            kept=kept,
            ends_at=ends_at,
        )


class Pick(Struct, frozen=True):
    waiting: QueuedJob
    admission_class: AdmissionClass
    offer: Placement
    ends_at: Moment | None


class Denial(Struct, frozen=True):
    """`after`: how often the round refused the job for the reason before this one."""

    waiting: QueuedJob
    reason: Reason
    after: int = 0

    def as_json(self) -> dict[str, Any]:
        return as_json(self.reason) | ({"after": self.after} if self.after else {})


class RoundResult(Struct):
    picks: list[Pick] = field(default_factory=list)
    #: Only those whose reason is not the one already recorded.
    denials: list[Denial] = field(default_factory=list)
    #: Every head that the round refused, with or without a new record.
    refused: list[QueuedJob] = field(default_factory=list)
    #: Heads that were refused for units, for the first time, while a job behind them started.
    passed: list[QueuedJob] = field(default_factory=list)
    kept: Kept | None = None
    weighed: int = 0
    #: The class of a lease without a job, if the round granted one.
    standalone_lease: AdmissionClass | None = None


def run_round(
    admission_view: AdmissionView,
    conditions: Conditions,
    limits: AdmissionLimits,
    ordering: Ordering,
    offer: Callable[[AdmissionClass], Placement],
    *,
    most_leases: int | None = None,
    most_picks: int = MOST_PICKS,
) -> RoundResult:
    """`most_picks` bounds the transaction: the caller runs another round at once when this one reached it."""
    inputs = RoundInputs(admission_view, conditions, limits, ordering, offer)
    return _Round(inputs).run(most_leases, most_picks)


class _Head(NamedTuple):
    """
    The head of a ready queue. Heads compare as the round orders them: the first field that differs decides.
    """

    band: int  # negated
    calm: bool  # urgent ones first within their band
    share: float
    turn: Moment
    no: int
    lane: _Lane
    waiting: QueuedJob


class _Lane(NamedTuple):
    """A ready queue with what holds for all of its jobs during one round."""

    line: ReadyQueue
    offer: Placement
    gates: Gates


class _Round:
    def __init__(self, inputs: RoundInputs) -> None:
        self.admission_view, self.conditions, self.limits, self.ordering, self.offer = inputs
        self.now, self.ledger = self.admission_view.now, self.admission_view.ledger
        self.round_result = RoundResult()
        self.refused_for_units: list[QueuedJob] = []
        self.closed: set[str] = set()  # addons that start nothing more in this round
        self.shares: dict[str, float] = {}

    def run(self, most_leases: int | None, most_picks: int) -> RoundResult:
        lanes = list(self._lanes())
        if len(lanes) == 1:  # no other head to compare with, so its band and share are not computed
            head = self._only(lanes[0])
            heads = [] if head is None else [head]
        else:
            heads = [head for lane in lanes if (head := self._head(lane)) is not None]
            heapify(heads)
        leases = 0
        while heads and len(self.round_result.picks) < most_picks and leases != most_leases:
            head = heads[0]
            lane, admission_class = head.lane, head.lane.line.admission_class
            if admission_class.addon_id in self.closed:
                heappop(heads)
                continue
            alone = len(heads) == 1  # by now
            most = most_picks - len(self.round_result.picks)
            if most_leases is not None and lane.offer is Placement.LEASE:
                most = min(most, most_leases - leases)
            if alone and (started := self._start_many(head, most)):
                leases += started if lane.offer is Placement.LEASE else 0
                following = self._behind(head)
                heads = [] if following is None else [following]
                continue
            if not alone and (share := self._share(admission_class)) != head.share:
                # A job of its addon has started since the head entered the heap. Shares only grow, so the
                # head can only sink.
                heapreplace(heads, head._replace(share=share))
                continue
            reason = self._try(lane, head.waiting)
            following = None if reason is not None else self._behind(head) if alone else self._head(lane)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, following)
            if reason is None:
                leases += lane.offer is Placement.LEASE
            elif self._shuts_everything(reason):
                break
        return self.round_result

    def _lanes(self) -> Iterator[_Lane]:
        for line in self.admission_view.lines():
            offer = self.offer(line.admission_class)
            # Jobs for other hosts are skipped without a denial: the rounds of those hosts decide and record.
            if offer is not Placement.LEAVE and not self.conditions.missing(line.admission_class):
                gates = Gates(
                    line.admission_class,
                    self.ledger,
                    self.conditions,
                    self.limits,
                    self.now,
                    urgent=line.urgent,
                )
                yield _Lane(line, offer, gates)

    def _head(self, lane: _Lane) -> _Head | None:
        line = lane.line
        waiting = next(line.jobs, None)
        if waiting is None:
            return None
        share = self._share(line.admission_class)
        key = head_key(waiting, urgent=line.urgent, share=share, now=self.now, aging=self.ordering.aging)
        return _Head(*key, lane, waiting)

    def _only(self, lane: _Lane) -> _Head | None:
        waiting = next(lane.line.jobs, None)
        return None if waiting is None else _Head(0, False, 0.0, waiting.turn, waiting.no, lane, waiting)

    def _behind(self, head: _Head) -> _Head | None:
        waiting = next(head.lane.line.jobs, None)
        if waiting is None:
            return None
        return _Head(head.band, head.calm, head.share, waiting.turn, waiting.no, head.lane, waiting)

    def _share(self, admission_class: AdmissionClass) -> float:
        share = self.shares.get(admission_class.addon_id)
        if share is None:
            share = self.ledger.share(admission_class.addon_id, self.now, self.ordering.sharing)
            self.shares[admission_class.addon_id] = share
        return share

    def _try(self, lane: _Lane, waiting: QueuedJob) -> Reason | None:
        admission_class = lane.line.admission_class
        self.round_result.weighed += 1
        ends_at = waiting.ends_at(self.now)
        kept = self.round_result.kept
        reason = lane.gates.refusal(kept, ends_at)
        if reason is not None:
            self._denied(admission_class, waiting, reason)
            return reason
        if kept is not None and not kept.ends_before(ends_at):
            kept.spare -= admission_class.cost_units
        self._started(lane, [Pick(waiting, admission_class, lane.offer, ends_at)])
        return None

    def _start_many(self, head: _Head, most: int) -> int:
        """
        Start as many jobs as may start of a ready queue that competes with no other: each would be decided
        like the one before it. While the round keeps units for a job, each job is decided by itself.
        """
        lane, now = head.lane, self.now
        n = 0 if self.round_result.kept is not None else min(lane.gates.room_for(), most)
        if n <= 0:
            return 0
        admission_class, offer = lane.line.admission_class, lane.offer
        picks = [
            Pick(waiting, admission_class, offer, waiting.ends_at(now))
            for waiting in (head.waiting, *islice(lane.line.jobs, n - 1))
        ]
        self._started(lane, picks)
        self.round_result.weighed += len(picks)
        return len(picks)

    def _started(self, lane: _Lane, picks: list[Pick]) -> None:
        admission_class = lane.line.admission_class
        self.ledger.take(admission_class, self.now, self.ordering.sharing, lane.gates.keys, len(picks))
        self.shares.pop(admission_class.addon_id, None)
        self.round_result.picks += picks
        if self.refused_for_units:
            self.round_result.passed += self.refused_for_units
            self.refused_for_units.clear()

    def _denied(self, admission_class: AdmissionClass, waiting: QueuedJob, reason: Reason) -> None:
        self.round_result.refused.append(waiting)
        if reason.code != waiting.denied:
            self.round_result.denials.append(Denial(waiting, reason))
        match reason:
            case NotEnoughUnits():
                self._no_room(admission_class, waiting)
            case Paused() | BudgetSpent() | CapReached(scope="addon"):
                self.closed.add(admission_class.addon_id)
            case _:
                pass

    def _no_room(self, admission_class: AdmissionClass, waiting: QueuedJob) -> None:
        if waiting.passed_at is None:
            self.refused_for_units.append(waiting)
            return
        waited = self.now - waiting.passed_at >= self.ordering.patience
        # A job above the present capacity keeps no units: the host load must fall first.
        if (
            waited
            and self.round_result.kept is None
            and admission_class.cost_units <= self.conditions.capacity
        ):
            self.round_result.kept = self._keep(admission_class, waiting)

    def _keep(self, admission_class: AdmissionClass, waiting: QueuedJob) -> Kept:
        """
        Keep units until enough runs are expected to have ended: the known ends first, then the oldest of the
        rest.
        """
        picked = [
            RunningJob(p.admission_class.cost_units, self.now, p.ends_at) for p in self.round_result.picks
        ]
        runs = sorted(
            [*self.admission_view.running(), *picked],
            key=lambda run: (run.ends_at is None, run.started_at if run.ends_at is None else run.ends_at),
        )
        free = self.conditions.capacity - self.ledger.units
        starts_at: Moment | None = self.now
        for run in runs:
            if free >= admission_class.cost_units:
                break
            free += run.cost
            starts_at = None if run.ends_at is None else max(self.now, run.ends_at)
        return Kept(
            waiting.job_id, admission_class.cost_units, starts_at, max(0, free - admission_class.cost_units)
        )

    def _shuts_everything(self, reason: Reason) -> bool:
        match reason:
            case Draining() | Paused("*") | CapReached(scope="concurrent") | NotQuiet(QuietState.PANIC):
                return True
            case _:
                return self.ledger.units >= self.conditions.capacity


def decide_standalone_lease(
    inputs: RoundInputs, admission_class: AdmissionClass, priority: int
) -> tuple[RoundResult, Reason | None]:
    view, ordering = inputs.admission_view, inputs.ordering
    reason = inputs.decide(admission_class)
    if reason is not None:
        return RoundResult(), reason
    for line in view.lines():
        head = next(line.jobs, None)
        if head is None or effective(head.turn, view.now, ordering.aging) < priority:
            continue
        if inputs.decide(line.admission_class, urgent=line.urgent) is None:
            return RoundResult(), QueuedAhead(head.job_id, head.priority)
    view.ledger.take(admission_class, view.now, ordering.sharing)
    return RoundResult(standalone_lease=admission_class), None
