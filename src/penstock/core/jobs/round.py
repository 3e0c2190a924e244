"""
The round: which jobs start now on one host.

A round looks at the head of each ready queue (one for each admission class), starts the head if the gates let
it, and only then pulls the next job of that queue. It never learns how long the queues are. If another worker
will claim the head, the round sets units aside for that claim.

`decide_standalone_lease` decides whether a program may run work of its own without a job (SPEC LS-1). The
program is not in a queue, so every queued job that could start now with at least its priority goes first.
A program that asks often therefore gains nothing.
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
#: After this many reservations that no worker took up, a job is reserved only if a worker for it is present.
MOST_START_TIMEOUTS: Final = 3


class ReadyQueue(Struct):
    """The ready jobs of one admission class."""

    admission_class: AdmissionClass
    urgent: bool
    jobs: Iterator[QueuedJob]  # by turn, then number; the round pulls them one by one
    #: The gates for its jobs. The round makes them at the turn of the first head: many rounds end before
    #: that. A view may show the same `ReadyQueue` again as long as its gates do not change.
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

    def ready_queues(self) -> Iterable[ReadyQueue]: ...

    def running(self) -> Sequence[RunningJob]:
        """The dispatches in flight on this host. A round reads them only when it must keep units free."""
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


#: Looked up once: in Python 3.11 the lookup takes longer than the check, and a round checks every ready
#: queue.
_LEASE, _SET_ASIDE = Placement.LEASE, Placement.SET_ASIDE
_LEAVE, _ELSEWHERE = Placement.LEAVE, Placement.ELSEWHERE
#: Rounds of this host skip such heads.
LEFT: Final = (_LEAVE, _ELSEWHERE)


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
    #: Takes one free place of a worker outside of the round that can run such a job. False: there is none.
    take_place: Callable[[AdmissionClass], bool] = no_place
    #: Whether a worker of another host is present for such a job, and none of this host. A round checks this
    #: before a reservation: it is exact, while `offer` may be one tick old.
    elsewhere: Callable[[AdmissionClass], bool] = one_host
    #: Whether the round records every refusal. A simulated play needs only those that change what starts.
    records: bool = True

    def gates(
        self,
        admission_class: AdmissionClass,
        *,
        urgent: bool = False,
        ready_at: Moment = 0,
        ledger: Ledger | None = None,
    ) -> Gates:
        """The gates for jobs of this class. `ledger`: to use instead of the view's."""
        ledger = ledger or self.view.ledger
        now = self.view.now
        return Gates(
            admission_class, ledger, self.conditions, self.limits, now, ready_at=ready_at, urgent=urgent
        )


class Pick(Struct, frozen=True):
    """A job that the round starts or sets aside."""

    waiting: QueuedJob
    admission_class: AdmissionClass
    offer: Placement
    ends_at: Moment | None


def stop_moment(
    max_runtime_sec: int | None, max_active_sec: int | None, active: Span, now: Moment
) -> tuple[Moment | None, EndReason | None]:
    """When and why an attempt that starts now must stop: by its runtime limit or its hard cap."""
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
    The data of a RUNNING event. It says how long the job was ready, so that readers need not look up the job.
    """
    return {"waited": max(0, waited), "worker": worker} if worker else {"waited": max(0, waited)}


class Denial(Struct, frozen=True):
    """A refusal to record. `after`: how often the job was refused for its previous reason."""

    waiting: QueuedJob
    reason: Reason
    after: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self.reason) | ({"after": self.after} if self.after else {})


class RoundResult(Struct):
    """What a round decided, for the store to write."""

    picks: list[Pick] = field(default_factory=list)
    #: How many of the picks are leased; the others are reserved.
    leases: int = 0
    #: Jobs that free workers outside of the round will claim. Nothing is written for them.
    set_aside: list[Pick] = field(default_factory=list)
    #: The refusals whose reason differs from the recorded one.
    denials: list[Denial] = field(default_factory=list)
    #: Every head that the round refused, also for the recorded reason.
    refused: list[QueuedJob] = field(default_factory=list)
    #: Heads that were refused for units, for the first time, while a job behind them started.
    passed: list[QueuedJob] = field(default_factory=list)
    kept: Kept | None = None
    #: How many picks the round had made when it began to keep units.
    picks_before_kept: int = 0
    #: The class of a lease without a job, if the round granted one.
    standalone_lease: AdmissionClass | None = None


def run_round(
    inputs: RoundInputs, *, most_leases: int | None = None, most_picks: int = MOST_PICKS
) -> RoundResult:
    """
    Decide which jobs start now. `most_picks` bounds the transaction; a caller whose round reached it runs
    another round at once.
    """
    return _Round(inputs).run(most_leases, most_picks)


#: The head of a ready queue: its `head_key`, which orders the heads, then the queue, what the round may do
#: with its jobs, and the job. A plain tuple, because a round makes and compares one for each ready queue.
_Head: TypeAlias = tuple[int, bool, float, Moment, int, ReadyQueue, Placement, QueuedJob]


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
            _, _, share, _, _, queue, offer, waiting = heads[0]
            admission_class = queue.admission_class
            if admission_class.addon_id in self.closed or not (
                records or self._matters(admission_class.cost_units, waiting)
            ):
                heappop(heads)
                continue
            if self.shares.get(admission_class.addon_id) != share:
                # A job of its addon has started since the head entered the heap. Shares only grow, so the
                # head can only sink.
                heapreplace(heads, self._keyed(queue, offer, waiting))
                continue
            most = 1
            if len(heads) == 1:
                if offer is _SET_ASIDE:
                    break  # no other job could take these units
                most = most_picks - len(picks) if offer is _LEASE else 1
            if most_leases is not None and offer is _LEASE:
                most = min(most, most_leases - result.leases)
            started = len(picks)
            reason = self._start(queue, offer, waiting, most)
            if reason is not None:
                heappop(heads)
                if self._shuts_everything(reason):
                    break
                continue
            if offer is _LEASE:
                result.leases += len(picks) - started
            following = next(queue.jobs, None)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, self._keyed(queue, offer, following))
            if not (records or self._some_head_fits(heads)):
                break
        for pick in result.set_aside:  # the claims of their workers will take these units
            self.ledger.take(pick.admission_class, self.now, self.ordering.sharing, n=-1)
        return result

    def _heads(self) -> list[_Head]:
        inputs, heads = self.inputs, []
        offer_of, missing = inputs.offer, inputs.conditions.missing
        for queue in inputs.view.ready_queues():
            admission_class = queue.admission_class
            offer = offer_of(admission_class)
            # Jobs for other hosts are skipped without a denial: the rounds of those hosts decide and record.
            if (
                offer is _LEAVE
                or offer is _ELSEWHERE
                or (admission_class.labels and missing(admission_class))
            ):
                continue
            waiting = next(queue.jobs, None)
            if waiting is not None:
                heads.append(self._keyed(queue, offer, waiting))
        return heads

    def _keyed(self, queue: ReadyQueue, offer: Placement, waiting: QueuedJob) -> _Head:
        addon_id = queue.admission_class.addon_id
        share = self.shares.get(addon_id)
        if share is None:
            share = self.shares[addon_id] = self.ledger.share(addon_id, self.now, self.ordering.sharing)
        key = head_key(waiting, queue.urgent, share, self.now, self.ordering.aging)
        return (*key, queue, offer, waiting)

    def _matters(self, cost: int, waiting: QueuedJob) -> bool:
        """
        Whether the head may start, or its refusal changes more than the records. A head that does not fit
        counts as passed over once, and later the round may keep units for it.
        """
        kept = self.result.kept
        if cost <= self.capacity - self.ledger.units:
            return kept is None or kept.lets_past(cost, waiting.ends_at(self.now))
        return waiting.passed_at is None or (kept is None and self._waited(waiting))

    def _some_head_fits(self, heads: list[_Head]) -> bool:
        """Whether a head may still start. If not, the round is over: it can pass over no head either."""
        free = self.capacity - self.ledger.units
        for _, _, _, _, _, queue, _, _ in heads:  # noqa: SIM110 - `any` takes twice as long, and every start asks
            if queue.admission_class.cost_units <= free:
                return True
        return False

    def _start(self, queue: ReadyQueue, offer: Placement, waiting: QueuedJob, most: int) -> Reason | None:
        """
        Start the head, or return the reason why it may not start. While the round keeps no units, jobs behind
        the head start with it, `most` in all: they get the same decision.
        """
        admission_class, gates, kept, n = queue.admission_class, queue.gates, self.result.kept, 1
        if gates is None:
            gates = queue.gates = self.inputs.gates(admission_class, urgent=queue.urgent)
        if kept is None:
            n = min(gates.room_for(), most)
            reason = None if n else gates.refusal()
        else:
            reason = gates.refusal(kept, waiting.ends_at(self.now))
        if reason is not None:
            self._deny(admission_class, waiting, reason)
            return reason
        if not self._has_worker(admission_class, offer, waiting):
            return AwaitsWorker(self.now)  # not recorded as a denial: admission lets the job start
        picks = [
            Pick(job, admission_class, offer, job.ends_at(self.now))
            for job in (waiting, *islice(queue.jobs, n - 1))
        ]
        if kept is not None and not kept.ends_before(picks[0].ends_at):
            kept.spare -= admission_class.cost_units
        self.ledger.take(admission_class, self.now, self.ordering.sharing, gates.keys, len(picks))
        self.shares.pop(admission_class.addon_id, None)
        if offer is _SET_ASIDE:
            self.result.set_aside += picks
            return None
        self.result.picks += picks
        self.result.passed += self.refused_for_units
        self.refused_for_units.clear()
        return None

    def _has_worker(self, admission_class: AdmissionClass, offer: Placement, waiting: QueuedJob) -> bool:
        """Whether a worker will take this job up. Units reserved in vain would be missing elsewhere."""
        if offer is _LEASE:
            return True
        inputs = self.inputs
        if offer is _SET_ASIDE:
            return inputs.take_place(admission_class)
        # Each start timeout raised the fence, so a lower fence needs no query.
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
        Keep units for a job that was passed over for long, until enough runs are expected to have ended:
        first the runs with an expected end, then the others, the oldest first. No units are kept for a job
        that costs more than the present capacity: the host load must fall first.
        """
        cost = admission_class.cost_units
        if waiting.passed_at is None:
            self.refused_for_units.append(waiting)
            return
        if not self._waited(waiting) or self.result.kept is not None or cost > self.capacity:
            return
        picked = [RunningJob(p.admission_class.cost_units, self.now, p.ends_at) for p in self.result.picks]
        runs = [*self.inputs.view.running(), *picked]
        # Sorted by expected end, else by start; the number keeps runs from being compared.
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
        """Whether the job was passed over for so long that units are kept for it."""
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
    """Decide on a lease without a job: the result to write, or the reason of the refusal."""
    view, ordering = inputs.view, inputs.ordering
    reason = inputs.gates(admission_class).refusal()
    if reason is not None:
        return RoundResult(), reason
    for queue in view.ready_queues():
        head = next(queue.jobs, None)
        if head is None or effective(head.turn, view.now, ordering.aging) < priority:
            continue
        if inputs.offer(queue.admission_class) in LEFT:
            continue  # no free worker of this host could take it
        if inputs.gates(queue.admission_class, urgent=queue.urgent).refusal() is None:
            return RoundResult(), QueuedAhead(head.job_id, head.priority)
    view.ledger.take(admission_class, view.now, ordering.sharing)
    return RoundResult(standalone_lease=admission_class), None
