"""
How a queued job stands right now: what holds it, who would be weighed before it, when it will likely start.

The same `decide` and the same order as a round, on the same floor; only nothing is taken. What holds a job may be the round itself:
others go first and take the room, or room is being kept for one of them. So where nothing else holds it, a round is tried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, NamedTuple

from penstock.core.admission import AdmissionLimits, Admitted, Conditions, Denied, decide
from penstock.core.demand import AdmissionClass
from penstock.core.explain import Ahead
from penstock.core.forecast import MOST_COUNTED, forecast, try_round
from penstock.core.intent import Intent
from penstock.core.order import AdmissionView, Ordering, Placement, QueuedJob, RunningJob, band
from penstock.core.reasons import (
    BudgetSpent,
    NotEnoughUnits,
    NotQuietLongEnough,
    NotReady,
    QueuedAhead,
    Reason,
    UnitsKept,
)
from penstock.core.words import SECOND, JobId, Moment

__all__ = ["Outlook", "View", "likely_starts", "outlook", "reachable"]

MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Outlook:
    """`head`: it is the first of its line, so a round weighs it and its denials are on record."""

    reason: Reason | None
    ahead: tuple[Ahead, ...]
    line_ahead: int
    likely_start_at: Moment | None
    head: bool


class View(NamedTuple):
    """All that a round goes by."""

    admission_view: AdmissionView
    conditions: Conditions
    limits: AdmissionLimits
    ordering: Ordering
    offer: Callable[[AdmissionClass], Placement]


def outlook(view: View, *, job_id: JobId, admission_class: AdmissionClass, ready_at: Moment) -> Outlook:
    """For a job that is not in line yet, `ready_at` alone decides."""
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
    """For many at once: the order is walked through a single time. Of each: its id, its demand, when it is ready."""
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
    """Whether it would have ended by its deadline; of a job that does not say how long it takes, whether it would have started."""
    if intent.deadline_at is None or likely_start_at is None:
        return None
    return likely_start_at + int((intent.expected_duration_sec or 0) * SECOND) <= intent.deadline_at


def _find(
    admission_view: AdmissionView, job_id: JobId, admission_class: AdmissionClass
) -> tuple[QueuedJob | None, bool, int]:
    """Itself, whether it is urgent, and how many of its own line are before it."""
    longest = 0
    for line in admission_view.lines():
        if line.admission_class == admission_class:
            position = -1
            for position, waiting in enumerate(islice(line.jobs, MOST_COUNTED)):
                if waiting.job_id == job_id:
                    return waiting, line.urgent, position
            longest = max(longest, position + 1)
    # In line further back than anybody counts, or not in line yet.
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
    """The first part of the key that differs; beyond the share it is the turn."""
    names = ("band", "urgent", "share")
    return next((name for name, a, b in zip(names, theirs, mine, strict=False) if a != b), "turn")


def _room_at(admission_view: AdmissionView, conditions: Conditions, cost: int) -> Moment | None:
    """When enough of what runs is expected to have ended, if nobody else took it."""
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
    """Only where it follows from what is known."""
    match reason:
        case NotReady(until) | BudgetSpent(until=until):
            return until
        case NotQuietLongEnough(streak, wants):
            return now + int((wants - streak) * SECOND)
        case None | NotEnoughUnits() | UnitsKept() | QueuedAhead():
            return in_order
        case _:
            return None
