"""
Forecast: how a queued job stands, which jobs go first, and when it will likely start.

`outlook` uses the same `decide` and the same order as a round, on the same view of the store, and changes
nothing. The round itself may hold a job back: others go first and take the units, or the round keeps units for
one of them. So where no gate refuses, `outlook` tries a round out.

A round on a host with endless capacity gives the order; then each job starts, in that order, when its units
are free on the real host. A run without an expected duration never gives its units back here, so jobs that
need them get no moment: a guess that looks like a promise is worse than none. Jobs that could run in kept
units are ignored, so a moment is rather late than early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.admission import (
    Account,
    AdmissionLimits,
    Admitted,
    Conditions,
    Denied,
    Ledger,
    decide,
)
from penstock.core.jobs.intent import AdmissionClass, Intent
from penstock.core.jobs.ordering import (
    AdmissionView,
    Ordering,
    Pick,
    Placement,
    QueuedJob,
    ReadyQueue,
    RoundResult,
    RunningJob,
    band,
    run_round,
)
from penstock.core.jobs.reasons import (
    BudgetSpent,
    NotEnoughUnits,
    NotQuietLongEnough,
    NotReady,
    QueuedAhead,
    Reason,
    UnitsKept,
)
from penstock.core.jobs.types import SECOND, AddonId, JobId, Moment

#: Readers do not look further, and a queue of a million must not be counted for a sentence.
MOST_COUNTED: Final = 1_000
_ENDLESS: Final = 1 << 40
MOST_NAMED: Final = 5


class Ahead(Struct, frozen=True):
    """A head that goes first. `why`: band, urgent, share or turn, whichever decided."""

    job_id: JobId | None  # None: a job that the reader may not know
    addon_id: AddonId | None
    why: str


class Outlook(Struct, frozen=True):
    """
    How a queued job stands. `head`: it is the first of its ready queue, so rounds decide about it and record
    denials.
    """

    reason: Reason | None
    ahead: tuple[Ahead, ...]
    line_ahead: int
    likely_start_at: Moment | None
    head: bool


class View(NamedTuple):
    """The inputs of a round."""

    admission_view: AdmissionView
    conditions: Conditions
    limits: AdmissionLimits
    ordering: Ordering
    offer: Callable[[AdmissionClass], Placement]


def outlook(view: View, *, job_id: JobId, admission_class: AdmissionClass, ready_at: Moment) -> Outlook:
    """How this job stands now. For a job that is not ready yet, `ready_at` alone decides."""
    admission_view, conditions = view.admission_view, view.conditions
    found, urgent, before = _find(admission_view, job_id, admission_class)
    decision = decide(
        admission_class,
        admission_view.ledger,
        conditions,
        view.limits,
        admission_view.now,
        ready_at=ready_at,
        urgent=urgent,
    )
    reason = None if isinstance(decision, Admitted) else decision.reason
    if reason is None and found is not None and view.offer(admission_class) is not Placement.NOBODY:
        reason = _held_by_others(view, found, admission_class, urgent=urgent)
    if isinstance(reason, NotEnoughUnits):
        reason = replace(reason, until=_room_at(admission_view, conditions, admission_class.cost_units))
    starts = forecast(admission_view, conditions, view.ordering) if _known_from_the_order(reason) else {}
    return Outlook(
        reason,
        () if found is None else _ahead(admission_view, view.ordering, found, admission_class, urgent=urgent),
        before,
        _likely(reason, admission_view.now, starts.get(job_id)),
        found is not None and not before,
    )


def likely_starts(
    view: View, jobs: Sequence[tuple[JobId, AdmissionClass, Moment]]
) -> dict[JobId, Moment | None]:
    """
    The likely starts of many jobs, each given as id, class and the moment it is ready. The order is computed
    once for all.
    """
    admission_view, conditions = view.admission_view, view.conditions
    starts = forecast(admission_view, conditions, view.ordering)
    likely: dict[JobId, Moment | None] = {}
    for job_id, admission_class, ready_at in jobs:
        decision = decide(
            admission_class,
            admission_view.ledger,
            conditions,
            view.limits,
            admission_view.now,
            ready_at=ready_at,
        )
        reason = decision.reason if isinstance(decision, Denied) else None
        likely[job_id] = _likely(reason, admission_view.now, starts.get(job_id))
    return likely


def reachable(intent: Intent, likely_start_at: Moment | None) -> bool | None:
    """
    Whether the job would end by its deadline, or start by it if it has no expected duration. None: unknown.
    """
    if intent.deadline_at is None or likely_start_at is None:
        return None
    return likely_start_at + int((intent.expected_duration_sec or 0) * SECOND) <= intent.deadline_at


def _find(
    admission_view: AdmissionView, job_id: JobId, admission_class: AdmissionClass
) -> tuple[QueuedJob | None, bool, int]:
    """The job, whether it is urgent, and how many jobs of its ready queue are before it."""
    longest = 0
    for line in admission_view.lines():
        if line.admission_class == admission_class:
            position = -1
            for position, waiting in enumerate(islice(line.jobs, MOST_COUNTED)):
                if waiting.job_id == job_id:
                    return waiting, line.urgent, position
            longest = max(longest, position + 1)
    # Further back than MOST_COUNTED, or not ready yet.
    return None, False, longest if longest == MOST_COUNTED else 0


def _held_by_others(
    view: View, me: QueuedJob, admission_class: AdmissionClass, *, urgent: bool
) -> Reason | None:
    admission_view, conditions, limits, ordering, offer = view
    verdict, ledger = try_round(admission_view, conditions, limits, ordering, offer)
    if any(pick.waiting.job_id == me.job_id for pick in verdict.picks):
        return None
    ends_at = None if me.expected_sec is None else admission_view.now + int(me.expected_sec * SECOND)
    after = decide(
        admission_class,
        ledger,
        conditions,
        limits,
        admission_view.now,
        urgent=urgent,
        kept=verdict.kept,
        ends_at=ends_at,
    )
    if isinstance(after, Denied) and isinstance(after.reason, UnitsKept):
        return after.reason
    first = next(iter(verdict.picks), None)
    return None if first is None else QueuedAhead(first.waiting.job_id, first.waiting.priority)


def _ahead(
    admission_view: AdmissionView,
    ordering: Ordering,
    me: QueuedJob,
    admission_class: AdmissionClass,
    *,
    urgent: bool,
) -> tuple[Ahead, ...]:
    mine = _key(admission_view, ordering, me, admission_class, urgent=urgent)
    keys = []
    for line in admission_view.lines():
        head = next(line.jobs, None)
        if head is not None and line.admission_class != admission_class:
            key = _key(admission_view, ordering, head, line.admission_class, urgent=line.urgent)
            if key < mine:
                keys.append((key, head, line.admission_class))
    keys.sort(key=lambda item: item[0])
    return tuple(
        Ahead(head.job_id, other.addon_id, _why(key, mine)) for key, head, other in keys[:MOST_NAMED]
    )


def _key(
    admission_view: AdmissionView,
    ordering: Ordering,
    waiting: QueuedJob,
    admission_class: AdmissionClass,
    *,
    urgent: bool,
) -> tuple[float, ...]:
    share = admission_view.ledger.share(admission_class.addon_id, admission_view.now, ordering.sharing)
    return (
        -band(waiting.turn, admission_view.now, ordering.aging),
        not urgent,
        share,
        waiting.turn,
        waiting.no,
    )


def _why(theirs: Sequence[float], mine: Sequence[float]) -> str:
    """The first part of the keys that differs; beyond the share it is the turn."""
    names = ("band", "urgent", "share")
    return next((name for name, a, b in zip(names, theirs, mine, strict=False) if a != b), "turn")


def _room_at(admission_view: AdmissionView, conditions: Conditions, cost: int) -> Moment | None:
    """When enough runs are expected to have ended, if no other job took their units."""
    if cost > conditions.capacity:
        return None
    free = conditions.capacity - admission_view.ledger.units
    known: list[RunningJob] = [run for run in admission_view.running() if run.ends_at is not None]
    for run in sorted(known, key=lambda run: run.ends_at or 0):
        free += run.cost
        if free >= cost:
            return max(admission_view.now, run.ends_at or 0)
    return None


def _known_from_the_order(reason: Reason | None) -> bool:
    return reason is None or isinstance(reason, NotEnoughUnits | UnitsKept | QueuedAhead)


def _likely(reason: Reason | None, now: Moment, in_order: Moment | None) -> Moment | None:
    """The likely start, only where it follows from known moments."""
    match reason:
        case NotReady(until) | BudgetSpent(until=until):
            return until
        case NotQuietLongEnough(streak, wants):
            return now + int((wants - streak) * SECOND)
        case None | NotEnoughUnits() | UnitsKept() | QueuedAhead():
            return in_order
        case _:
            return None


def try_round(
    admission_view: AdmissionView,
    conditions: Conditions,
    limits: AdmissionLimits,
    ordering: Ordering,
    offer: Callable[[AdmissionClass], Placement],
) -> tuple[RoundResult, Ledger]:
    """What a round would do now, and the ledger after it. The store stays as it is."""
    trial = Trial(admission_view)
    round_result = run_round(trial, conditions, limits, ordering, offer, most_picks=MOST_COUNTED)
    return round_result, trial.ledger


def forecast(
    admission_view: AdmissionView, conditions: Conditions, ordering: Ordering
) -> dict[JobId, Moment | None]:
    """
    The likely starts of the first thousand jobs in order, whatever kind of worker runs them. None: unknown.
    """
    endless = replace(conditions, capacity=_ENDLESS)
    order = run_round(
        Trial(admission_view), endless, AdmissionLimits(), ordering, _anybody, most_picks=MOST_COUNTED
    ).picks
    free = conditions.capacity - admission_view.ledger.units
    return dict(_starts(order, free, admission_view.running(), admission_view.now))


def _anybody(_: AdmissionClass) -> Placement:
    return Placement.RESERVE


def _starts(
    order: Iterable[Pick], free: int, running: Sequence[RunningJob], now: Moment
) -> Iterator[tuple[JobId, Moment | None]]:
    ends = [(max(now, run.ends_at), run.cost) for run in running if run.ends_at is not None]
    heapify(ends)
    moment: Moment | None = now
    for pick in order:
        cost = pick.admission_class.cost_units
        while free < cost and ends:
            ended, units = heappop(ends)
            free, moment = free + units, ended
        if free < cost:
            moment = None
        yield pick.waiting.job_id, moment
        if moment is None:
            continue
        free -= cost
        if pick.waiting.expected_sec is not None:
            heappush(ends, (moment + int(pick.waiting.expected_sec * SECOND), cost))


class Trial:
    """A view of the store with a ledger of its own, for a round that must leave no trace."""

    def __init__(self, admission_view: AdmissionView) -> None:
        self._admission_view, self.now = admission_view, admission_view.now
        ledger = admission_view.ledger
        self.ledger = replace(ledger, counts=dict(ledger.counts), accounts=_Borrowed(ledger.accounts))

    def lines(self) -> Iterable[ReadyQueue]:
        return self._admission_view.lines()

    def running(self) -> Sequence[RunningJob]:
        return self._admission_view.running()


class _Borrowed(dict[AddonId, Account]):
    """Accounts, each copied at its first use: there may be many addons, and a round meets few of them."""

    def __init__(self, lender: dict[AddonId, Account]) -> None:
        super().__init__()
        self._lender = lender

    def get(self, addon_id: AddonId, default: Any = None) -> Any:
        if addon_id not in self:
            account = self._lender.get(addon_id)
            if account is None:
                return default
            self[addon_id] = replace(account)
        return self[addon_id]

    def setdefault(self, addon_id: AddonId, default: Any = None) -> Any:
        if self.get(addon_id) is None:
            self[addon_id] = default
        return self[addon_id]
