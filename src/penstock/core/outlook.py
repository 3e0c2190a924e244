"""
How a queued job stands right now: what holds it, who would be weighed before it, when it will likely start.

The same `decide` and the same order as a round, on the same floor; only nothing is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from penstock.core.admission import Admitted, Conditions, Limits, decide
from penstock.core.demand import Demand
from penstock.core.explain import Ahead
from penstock.core.order import Floor, Ordering, Running, Waiting, band
from penstock.core.reasons import BudgetSpent, NoRoom, NotQuietLongEnough, NotReady, Reason
from penstock.core.words import SECOND, JobId, Moment

__all__ = ["Outlook", "outlook"]

#: Nobody reads further; and a line of a million must not be counted for a sentence.
MOST_COUNTED: Final = 1_000
MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Outlook:
    """`head`: it is the first of its line, so a round weighs it and its denials are on record."""

    reason: Reason | None
    ahead: tuple[Ahead, ...]
    line_ahead: int
    likely_start_at: Moment | None
    head: bool


def outlook(
    floor: Floor,
    conditions: Conditions,
    limits: Limits,
    ordering: Ordering,
    *,
    job_id: JobId,
    demand: Demand,
    ready_at: Moment,
) -> Outlook:
    """For a job that is not in line yet, `ready_at` alone decides."""
    found, urgent, before = _find(floor, job_id, demand)
    decision = decide(demand, floor.books, conditions, limits, floor.now, ready_at=ready_at, urgent=urgent)
    reason = None if isinstance(decision, Admitted) else decision.reason
    ahead = () if found is None else _ahead(floor, ordering, found, demand, urgent=urgent)
    if isinstance(reason, NoRoom):
        reason = NoRoom(
            reason.needs, reason.free, reason.capacity, _room_at(floor, conditions, demand.cost_units)
        )
    return Outlook(
        reason,
        ahead,
        before,
        _likely(reason, floor.now, before or len(ahead)),
        found is not None and not before,
    )


def _find(floor: Floor, job_id: JobId, demand: Demand) -> tuple[Waiting | None, bool, int]:
    for line in floor.lines():
        if line.demand == demand:
            for position, waiting in enumerate(islice(line.jobs, MOST_COUNTED)):
                if waiting.job_id == job_id:
                    return waiting, line.urgent, position
    return None, False, 0


def _ahead(
    floor: Floor, ordering: Ordering, me: Waiting, demand: Demand, *, urgent: bool
) -> tuple[Ahead, ...]:
    mine = _key(floor, ordering, me, demand, urgent=urgent)
    keys = []
    for line in floor.lines():
        head = next(line.jobs, None)
        if head is not None and line.demand != demand:
            key = _key(floor, ordering, head, line.demand, urgent=line.urgent)
            if key < mine:
                keys.append((key, head, line.demand))
    keys.sort(key=lambda item: item[0])
    return tuple(
        Ahead(head.job_id, other.addon_id, _why(key, mine)) for key, head, other in keys[:MOST_NAMED]
    )


def _key(
    floor: Floor, ordering: Ordering, waiting: Waiting, demand: Demand, *, urgent: bool
) -> tuple[float, ...]:
    share = floor.books.share(demand.addon_id, floor.now, ordering.sharing)
    return (-band(waiting.turn, floor.now, ordering.aging), not urgent, share, waiting.turn, waiting.no)


def _why(theirs: Sequence[float], mine: Sequence[float]) -> str:
    """The first part of the key that differs; beyond the share it is the turn."""
    names = ("band", "urgent", "share")
    return next((name for name, a, b in zip(names, theirs, mine, strict=False) if a != b), "turn")


def _room_at(floor: Floor, conditions: Conditions, cost: int) -> Moment | None:
    """When enough of what runs is expected to have ended, if nobody else took it."""
    if cost > conditions.capacity:
        return None
    free = conditions.capacity - floor.books.units
    known: list[Running] = [run for run in floor.running() if run.ends_at is not None]
    for run in sorted(known, key=lambda run: run.ends_at or 0):
        free += run.cost
        if free >= cost:
            return max(floor.now, run.ends_at or 0)
    return None


def _likely(reason: Reason | None, now: Moment, before: int) -> Moment | None:
    """Only where it follows from what is known: a guess that looks like a promise is worse than none."""
    match reason:
        case None:
            return now if not before else None
        case NotReady(until) | BudgetSpent(until=until):
            return until
        case NoRoom(until=until):
            return until
        case NotQuietLongEnough(streak, wants):
            return now + int((wants - streak) * SECOND)
        case _:
            return None
