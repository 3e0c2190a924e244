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
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

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
    #: The gates before its jobs, if the view has them from an earlier round and nothing has changed for them.
    gates: Gates | None = None


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
    ELSEWHERE = "elsewhere"  # a worker of another host is present for such jobs, and none of this one


#: A member of an enumeration takes longer to look up than the check it is needed for (Python 3.11), and a round
#: checks every ready queue.
_LEASE, _SET_ASIDE = Placement.LEASE, Placement.SET_ASIDE
#: Rounds of this host do nothing with such heads.
LEFT: Final = (Placement.LEAVE, Placement.ELSEWHERE)


def no_place(_: AdmissionClass) -> bool:
    return False


def one_host(_: AdmissionClass) -> bool:
    return False


class RoundInputs(NamedTuple):
    view: AdmissionView
    conditions: Conditions
    limits: AdmissionLimits
    ordering: Ordering
    offer: Callable[[AdmissionClass], Placement]
    #: Takes one place of a free worker outside of the round that may run such a job. False: there is none.
    take_place: Callable[[AdmissionClass], bool] = no_place
    #: Whether a worker of another host is present for such a job, and none of this one. Asked before a
    #: reservation and exact; `offer` may go by what was known one tick ago.
    elsewhere: Callable[[AdmissionClass], bool] = one_host
    #: Whether every refusal is to be recorded. A play needs only those that change what starts.
    records: bool = True

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
    if max_runtime_sec is None and max_active_sec is None:
        return None, None
    limits: list[tuple[Moment, EndReason]] = []
    if max_active_sec is not None:
        limits.append((now + max(0, max_active_sec * SECOND - active), EndReason.HARD_CAP_EXCEEDED))
    if max_runtime_sec is not None:
        limits.append((now + max_runtime_sec * SECOND, EndReason.MAX_RUNTIME_EXCEEDED))
    return min(limits)


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
    #: How many of the picks are leased; the others are reserved.
    leases: int = 0
    #: Jobs that free workers outside of the round will claim. Nothing is written for them.
    set_aside: list[Pick] = field(default_factory=list)
    #: Only those whose reason is not the one already recorded.
    denials: list[Denial] = field(default_factory=list)
    #: Every head that the round refused, with or without a new record.
    refused: list[QueuedJob] = field(default_factory=list)
    #: Heads that were refused for units, for the first time, while a job behind them started.
    passed: list[QueuedJob] = field(default_factory=list)
    kept: Kept | None = None
    #: How many of the picks the round had made when it kept units.
    picks_before_kept: int = 0
    #: The class of a lease without a job, if the round granted one.
    standalone_lease: AdmissionClass | None = None


def run_round(
    inputs: RoundInputs, *, most_leases: int | None = None, most_picks: int = MOST_PICKS
) -> RoundResult:
    """`most_picks` bounds the transaction: the caller runs another round at once when this one reached it."""
    return _Round(inputs).run(most_leases, most_picks)


class _Lane(Struct, gc=False):
    """A ready queue with what holds for all of its jobs during one round."""

    line: ReadyQueue
    offer: Placement
    #: Made when the first of its heads has its turn: many rounds end before that.
    gates: Gates | None = None


#: The head of a ready queue: its `head_key`, which orders the heads, then its lane and the job. A plain tuple,
#: because a round makes and compares one for each ready queue.
_Head: TypeAlias = tuple[int, bool, float, Moment, int, _Lane, QueuedJob]


class _Round:
    def __init__(self, inputs: RoundInputs) -> None:
        self.inputs, self.ordering, self.capacity = inputs, inputs.ordering, inputs.conditions.capacity
        self.now, self.ledger = inputs.view.now, inputs.view.ledger
        self.result = RoundResult()
        self.refused_for_units: list[QueuedJob] = []
        self.closed: set[str] = set()  # addons that start nothing more in this round
        self.shares: dict[str, float] = {}

    def run(self, most_leases: int | None, most_picks: int) -> RoundResult:
        heads = self._heads()
        heapify(heads)
        result, picks, records = self.result, self.result.picks, self.inputs.records
        while heads and len(picks) < most_picks and result.leases != most_leases:
            _, _, share, _, _, lane, waiting = heads[0]
            admission_class, offer = lane.line.admission_class, lane.offer
            if admission_class.addon_id in self.closed or not (records or self._matters(lane, waiting)):
                heappop(heads)
                continue
            if self.shares.get(admission_class.addon_id) != share:
                # A job of its addon has started since the head entered the heap. Shares only grow, so the
                # head can only sink.
                heapreplace(heads, self._keyed(lane, waiting))
                continue
            most = 1
            if len(heads) == 1:
                if offer is _SET_ASIDE:
                    break  # no other job is left that the units could be kept from
                most = most_picks - len(picks) if offer is _LEASE else 1
            if most_leases is not None and offer is _LEASE:
                most = min(most, most_leases - result.leases)
            started = len(picks)
            reason = self._start(lane, waiting, most)
            if reason is not None:
                heappop(heads)
                if self._shuts_everything(reason):
                    break
                continue
            if offer is _LEASE:
                result.leases += len(picks) - started
            following = next(lane.line.jobs, None)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, self._keyed(lane, following))
            if not (records or self._some_head_fits(heads)):
                break
        for pick in result.set_aside:  # the claims of their workers will take these units
            self.ledger.take(pick.admission_class, self.now, self.ordering.sharing, n=-1)
        return result

    def _heads(self) -> list[_Head]:
        inputs, heads = self.inputs, []
        offer_of, missing = inputs.offer, inputs.conditions.missing
        for line in inputs.view.lines():
            admission_class = line.admission_class
            offer = offer_of(admission_class)
            # Jobs for other hosts are skipped without a denial: the rounds of those hosts decide and record.
            if offer in LEFT or (admission_class.labels and missing(admission_class)):
                continue
            waiting = next(line.jobs, None)
            if waiting is not None:
                heads.append(self._keyed(_Lane(line, offer), waiting))
        return heads

    def _keyed(self, lane: _Lane, waiting: QueuedJob) -> _Head:
        line = lane.line
        addon_id = line.admission_class.addon_id
        share = self.shares.get(addon_id)
        if share is None:
            share = self.shares[addon_id] = self.ledger.share(addon_id, self.now, self.ordering.sharing)
        key = head_key(waiting, urgent=line.urgent, share=share, now=self.now, aging=self.ordering.aging)
        return (*key, lane, waiting)

    def _matters(self, lane: _Lane, waiting: QueuedJob) -> bool:
        """
        Whether the head may start, or its refusal changes more than the records: a head that does not fit must
        count as passed over once, and units may be kept for it.
        """
        cost, kept = lane.line.admission_class.cost_units, self.result.kept
        if cost <= self.capacity - self.ledger.units:
            return kept is None or kept.lets_past(cost, waiting.ends_at(self.now))
        return waiting.passed_at is None or (kept is None and self._waited(waiting))

    def _some_head_fits(self, heads: list[_Head]) -> bool:
        """If not, nothing more starts in this round, and no head can be passed over."""
        free = self.capacity - self.ledger.units
        return any(head[5].line.admission_class.cost_units <= free for head in heads)

    def _start(self, lane: _Lane, waiting: QueuedJob, most: int) -> Reason | None:
        """
        Start the head, and up to `most` jobs with those behind it: while the round keeps no units, each is
        decided like the one before it. Otherwise the reason why the head may not start.
        """
        admission_class, gates, kept, n = lane.line.admission_class, lane.gates, self.result.kept, 1
        if gates is None:
            line = lane.line
            gates = line.gates or self.inputs.gates(admission_class, urgent=line.urgent)
            lane.gates = gates
        if kept is None:
            n = min(gates.room_for(), most)
            reason = None if n else gates.refusal()
        else:
            reason = gates.refusal(kept, waiting.ends_at(self.now))
        if reason is not None:
            self._deny(admission_class, waiting, reason)
            return reason
        if not self._has_worker(lane, waiting):
            return AwaitsWorker(self.now)  # no denial is recorded: the job could start
        picks = [
            Pick(job, admission_class, lane.offer, job.ends_at(self.now))
            for job in (waiting, *islice(lane.line.jobs, n - 1))
        ]
        if kept is not None and not kept.ends_before(picks[0].ends_at):
            kept.spare -= admission_class.cost_units
        self.ledger.take(admission_class, self.now, self.ordering.sharing, gates.keys, len(picks))
        self.shares.pop(admission_class.addon_id, None)
        if lane.offer is _SET_ASIDE:
            self.result.set_aside += picks
            return None
        self.result.picks += picks
        self.result.passed += self.refused_for_units
        self.refused_for_units.clear()
        return None

    def _has_worker(self, lane: _Lane, waiting: QueuedJob) -> bool:
        """Whether a worker will take this job up: units that are kept in vain are missing elsewhere."""
        if lane.offer is _LEASE:
            return True
        if lane.offer is _SET_ASIDE:
            return self.inputs.take_place(lane.line.admission_class)
        admission_class, inputs = lane.line.admission_class, self.inputs
        # Each start timeout made a fence.
        late = (
            waiting.fence >= MOST_START_TIMEOUTS
            and inputs.view.start_timeouts(waiting) >= MOST_START_TIMEOUTS
        )
        if late and not inputs.take_place(admission_class):
            return False
        return not inputs.elsewhere(admission_class)

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
        if not self._waited(waiting) or self.result.kept is not None or cost > self.capacity:
            return
        picked = [RunningJob(p.admission_class.cost_units, self.now, p.ends_at) for p in self.result.picks]
        runs = [*self.inputs.view.running(), *picked]
        # Sorted by known end, else by start. The number keeps the order of equal ones.
        ends = [
            (run.ends_at is None, run.started_at if run.ends_at is None else run.ends_at, number, run)
            for number, run in enumerate(runs)
        ]
        ends.sort()
        free = self.capacity - self.ledger.units
        starts_at: Moment | None = self.now
        for *_, run in ends:
            if free >= cost:
                break
            free += run.cost
            starts_at = None if run.ends_at is None else max(self.now, run.ends_at)
        self.result.kept = Kept(waiting.job_id, cost, starts_at, max(0, free - cost))
        self.result.picks_before_kept = len(picked)

    def _waited(self, waiting: QueuedJob) -> bool:
        """Whether it was passed over for so long that units are kept for it."""
        return waiting.passed_at is not None and self.now - waiting.passed_at >= self.ordering.patience

    def _shuts_everything(self, reason: Reason) -> bool:
        if self.ledger.units >= self.capacity:
            return True
        match reason:
            case Draining() | Paused("*") | CapReached(scope="concurrent") | NotQuiet(QuietState.PANIC):
                return True
            case _:
                return False


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
        if inputs.offer(line.admission_class) in LEFT:
            continue  # no free worker of this host could take it
        if inputs.gates(line.admission_class, urgent=line.urgent).refusal() is None:
            return RoundResult(), QueuedAhead(head.job_id, head.priority)
    view.ledger.take(admission_class, view.now, ordering.sharing)
    return RoundResult(standalone_lease=admission_class), None
