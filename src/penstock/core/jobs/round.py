"""
The round: which jobs start now on one host.

A round looks at the head of each ready queue (one for each admission class), starts the head if the gates let
it, and only then pulls the next job of that queue. It never learns how long the queues are. A head that
another worker will claim takes its units out of the round: it starts first, although not in this round.

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
from msgspec.structs import asdict

from penstock.core.jobs.admission import AdmissionClass, AdmissionLimits, Conditions, Gates, Kept, Ledger
from penstock.core.jobs.load import QuietState
from penstock.core.jobs.ordering import Ordering, QueuedJob, effective, head_key
from penstock.core.jobs.reasons import (
    BudgetSpent,
    CapReached,
    Draining,
    NotEnoughUnits,
    NotQuiet,
    Paused,
    QueuedAhead,
    Reason,
)
from penstock.core.jobs.types import SECOND, EndReason, Moment, Span
from penstock.core.jobs.worker_reasons import AwaitsWorker

#: The most jobs that one transaction starts.
MOST_PICKS: Final = 1_000
#: After so many reservations that no worker took up, a job is reserved only if a worker for it is present.
MOST_START_TIMEOUTS: Final = 3


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

    def start_timeouts(self, waiting: QueuedJob) -> int:
        """How often in a row no worker took up the reservation of this job."""
        ...


class Placement(Enum):
    """What a round may do with a job of this admission class."""

    RESERVE = "reserve"  # its addon is notified, and asks for the lease
    LEASE = "lease"  # the claiming worker takes it at once
    SET_ASIDE = "set aside"  # another worker is present and free: this round keeps the units for its claim
    LEAVE = "leave"  # workers claim such jobs, and none of them is free now


def no_place(_: AdmissionClass) -> bool:
    return False


class RoundInputs(NamedTuple):
    view: AdmissionView
    conditions: Conditions
    limits: AdmissionLimits
    ordering: Ordering
    offer: Callable[[AdmissionClass], Placement]
    #: Takes one place of a free worker outside of the round that may run such a job. False: there is none.
    take_place: Callable[[AdmissionClass], bool] = no_place

    def gates(
        self,
        admission_class: AdmissionClass,
        *,
        urgent: bool = False,
        ready_at: Moment = 0,
        ledger: Ledger | None = None,
    ) -> Gates:
        """The gates before jobs of this class. `ledger`: another than that of the view."""
        ledger = ledger or self.view.ledger
        now = self.view.now
        return Gates(
            admission_class, ledger, self.conditions, self.limits, now, ready_at=ready_at, urgent=urgent
        )


class Pick(Struct, frozen=True):
    waiting: QueuedJob
    admission_class: AdmissionClass
    offer: Placement
    ends_at: Moment | None


def stop_moment(
    max_runtime_sec: int | None, max_active_sec: int | None, active: Span, now: Moment
) -> tuple[Moment | None, EndReason | None]:
    """
    When and why an attempt that starts now must stop: the runtime limit or the hard cap, whichever is first.
    """
    limits: list[tuple[Moment, EndReason]] = []
    if max_active_sec is not None:
        limits.append((now + max(0, max_active_sec * SECOND - active), EndReason.HARD_CAP_EXCEEDED))
    if max_runtime_sec is not None:
        limits.append((now + max_runtime_sec * SECOND, EndReason.MAX_RUNTIME_EXCEEDED))
    return min(limits, default=(None, None))


def running_data(worker: str, waited: Span) -> dict[str, Any]:
    """
    The data of a RUNNING event. It says how long the job had been ready, so that a reader of the trail need
    not look up the job.
    """
    return {"waited": max(0, waited), "worker": worker} if worker else {"waited": max(0, waited)}


class Denial(Struct, frozen=True):
    """`after`: how often the round refused the job for the reason before this one."""

    waiting: QueuedJob
    reason: Reason
    after: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self.reason) | ({"after": self.after} if self.after else {})


class RoundResult(Struct):
    picks: list[Pick] = field(default_factory=list)
    #: Jobs that free workers outside of the round will claim. Nothing is written for them.
    set_aside: list[Pick] = field(default_factory=list)
    #: Only those whose reason is not the one already recorded.
    denials: list[Denial] = field(default_factory=list)
    #: Every head that the round refused, with or without a new record.
    refused: list[QueuedJob] = field(default_factory=list)
    #: Heads that were refused for units, for the first time, while a job behind them started.
    passed: list[QueuedJob] = field(default_factory=list)
    kept: Kept | None = None
    #: The class of a lease without a job, if the round granted one.
    standalone_lease: AdmissionClass | None = None


def run_round(
    inputs: RoundInputs, *, most_leases: int | None = None, most_picks: int = MOST_PICKS
) -> RoundResult:
    """`most_picks` bounds the transaction: the caller runs another round at once when this one reached it."""
    return _Round(inputs).run(most_leases, most_picks)


class _Lane(NamedTuple):
    """A ready queue with what holds for all of its jobs during one round."""

    line: ReadyQueue
    offer: Placement
    gates: Gates


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


class _Round:
    def __init__(self, inputs: RoundInputs) -> None:
        self.inputs, self.ordering, self.capacity = inputs, inputs.ordering, inputs.conditions.capacity
        self.now, self.ledger = inputs.view.now, inputs.view.ledger
        self.result = RoundResult()
        self.refused_for_units: list[QueuedJob] = []
        self.closed: set[str] = set()  # addons that start nothing more in this round
        self.shares: dict[str, float] = {}

    def run(self, most_leases: int | None, most_picks: int) -> RoundResult:
        heads = [head for lane in self._lanes() if (head := self._head(lane)) is not None]
        heapify(heads)
        leases, picks = 0, self.result.picks
        while heads and len(picks) < most_picks and leases != most_leases:
            head = heads[0]
            lane, admission_class = head.lane, head.lane.line.admission_class
            if admission_class.addon_id in self.closed:
                heappop(heads)
                continue
            if (share := self._share(admission_class)) != head.share:
                # A job of its addon has started since the head entered the heap. Shares only grow, so the
                # head can only sink.
                heapreplace(heads, head._replace(share=share))
                continue
            most = 1
            if len(heads) == 1:
                if lane.offer is Placement.SET_ASIDE:
                    break  # no other job is left that the units could be kept from
                most = most_picks - len(picks) if lane.offer is Placement.LEASE else 1
            if most_leases is not None and lane.offer is Placement.LEASE:
                most = min(most, most_leases - leases)
            started = len(picks)
            reason = self._start(head, most)
            if reason is None and lane.offer is Placement.LEASE:
                leases += len(picks) - started
            following = None if reason is not None else self._head(lane)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, following)
            if reason is not None and self._shuts_everything(reason):
                break
        for pick in self.result.set_aside:  # the claims of their workers will take these units
            self.ledger.take(pick.admission_class, self.now, self.ordering.sharing, n=-1)
        return self.result

    def _lanes(self) -> Iterator[_Lane]:
        inputs = self.inputs
        for line in inputs.view.lines():
            offer = inputs.offer(line.admission_class)
            # Jobs for other hosts are skipped without a denial: the rounds of those hosts decide and record.
            if offer is not Placement.LEAVE and not inputs.conditions.missing(line.admission_class):
                yield _Lane(line, offer, inputs.gates(line.admission_class, urgent=line.urgent))

    def _head(self, lane: _Lane) -> _Head | None:
        line = lane.line
        waiting = next(line.jobs, None)
        if waiting is None:
            return None
        share = self._share(line.admission_class)
        key = head_key(waiting, urgent=line.urgent, share=share, now=self.now, aging=self.ordering.aging)
        return _Head(*key, lane, waiting)

    def _share(self, admission_class: AdmissionClass) -> float:
        share = self.shares.get(admission_class.addon_id)
        if share is None:
            share = self.ledger.share(admission_class.addon_id, self.now, self.ordering.sharing)
            self.shares[admission_class.addon_id] = share
        return share

    def _start(self, head: _Head, most: int) -> Reason | None:
        """
        Start the head, and up to `most` jobs with those behind it: while the round keeps no units, each is
        decided like the one before it. Otherwise the reason why the head may not start.
        """
        lane, kept, n = head.lane, self.result.kept, 1
        admission_class = lane.line.admission_class
        if kept is None:
            n = min(lane.gates.room_for(), most)
            reason = None if n else lane.gates.refusal()
        else:
            reason = lane.gates.refusal(kept, head.waiting.ends_at(self.now))
        if reason is not None:
            self._deny(admission_class, head.waiting, reason)
            return reason
        if not self._has_worker(lane, head.waiting):
            return AwaitsWorker(self.now)  # no denial is recorded: the job could start
        picks = [
            Pick(waiting, admission_class, lane.offer, waiting.ends_at(self.now))
            for waiting in (head.waiting, *islice(lane.line.jobs, n - 1))
        ]
        if kept is not None and not kept.ends_before(picks[0].ends_at):
            kept.spare -= admission_class.cost_units
        self.ledger.take(admission_class, self.now, self.ordering.sharing, lane.gates.keys, len(picks))
        self.shares.pop(admission_class.addon_id, None)
        if lane.offer is Placement.SET_ASIDE:
            self.result.set_aside += picks
            return None
        self.result.picks += picks
        self.result.passed += self.refused_for_units
        self.refused_for_units.clear()
        return None

    def _has_worker(self, lane: _Lane, waiting: QueuedJob) -> bool:
        """Whether a worker will take this job up: units that are kept in vain are missing elsewhere."""
        match lane.offer:
            case Placement.SET_ASIDE:
                return self.inputs.take_place(lane.line.admission_class)
            case Placement.RESERVE if waiting.fence >= MOST_START_TIMEOUTS:  # each of them made a fence
                late = self.inputs.view.start_timeouts(waiting) >= MOST_START_TIMEOUTS
                return not late or self.inputs.take_place(lane.line.admission_class)
            case _:
                return True

    def _deny(self, admission_class: AdmissionClass, waiting: QueuedJob, reason: Reason) -> None:
        self.result.refused.append(waiting)
        if reason.code != waiting.denied:
            self.result.denials.append(Denial(waiting, reason))
        match reason:
            case NotEnoughUnits():
                self._keep_units(admission_class, waiting)
            case Paused() | BudgetSpent() | CapReached(scope="addon"):
                self.closed.add(admission_class.addon_id)
            case _:
                pass

    def _keep_units(self, admission_class: AdmissionClass, waiting: QueuedJob) -> None:
        """
        Keep units for a job that was passed over for long, until enough runs are expected to have ended: the
        known ends first, then the oldest of the rest. A job above the present capacity keeps none: the host
        load must fall first.
        """
        cost = admission_class.cost_units
        if waiting.passed_at is None:
            self.refused_for_units.append(waiting)
            return
        waited = self.now - waiting.passed_at >= self.ordering.patience
        if not waited or self.result.kept is not None or cost > self.capacity:
            return
        picked = [RunningJob(p.admission_class.cost_units, self.now, p.ends_at) for p in self.result.picks]
        runs = sorted(
            [*self.inputs.view.running(), *picked],
            key=lambda run: (run.ends_at is None, run.started_at if run.ends_at is None else run.ends_at),
        )
        free = self.capacity - self.ledger.units
        starts_at: Moment | None = self.now
        for run in runs:
            if free >= cost:
                break
            free += run.cost
            starts_at = None if run.ends_at is None else max(self.now, run.ends_at)
        self.result.kept = Kept(waiting.job_id, cost, starts_at, max(0, free - cost))

    def _shuts_everything(self, reason: Reason) -> bool:
        match reason:
            case Draining() | Paused("*") | CapReached(scope="concurrent") | NotQuiet(QuietState.PANIC):
                return True
            case _:
                return self.ledger.units >= self.capacity


def decide_standalone_lease(
    inputs: RoundInputs, admission_class: AdmissionClass, priority: int
) -> tuple[RoundResult, Reason | None]:
    view, ordering = inputs.view, inputs.ordering
    reason = inputs.gates(admission_class).refusal()
    if reason is not None:
        return RoundResult(), reason
    for line in view.lines():
        head = next(line.jobs, None)
        if head is None or effective(head.turn, view.now, ordering.aging) < priority:
            continue
        if inputs.gates(line.admission_class, urgent=line.urgent).refusal() is None:
            return RoundResult(), QueuedAhead(head.job_id, head.priority)
    view.ledger.take(admission_class, view.now, ordering.sharing)
    return RoundResult(standalone_lease=admission_class), None
