"""
When jobs will likely start, from what is known: who is before whom, who runs, and how long each says it takes.

The order is a round's own, on a machine without end; then the jobs are put on the real one in that order, each when its units are free.
A run whose length nobody told never gives its units back here, so what waits for them has no moment: a guess that looks like a
promise is worse than none. Slipping past is not reckoned with, so a moment is rather late than early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Any, Final

from penstock.core.admission import Conditions, Limits
from penstock.core.books import Books
from penstock.core.demand import Demand
from penstock.core.order import Floor, Line, Offer, Ordering, Pick, Running, Verdict, weigh
from penstock.core.share import Account
from penstock.core.words import SECOND, AddonId, JobId, Moment

__all__ = ["MOST_COUNTED", "Trial", "forecast", "try_round"]

#: Nobody reads further; and a line of a million must not be counted for a sentence.
MOST_COUNTED: Final = 1_000
_ENDLESS: Final = 1 << 40


def try_round(
    floor: Floor,
    conditions: Conditions,
    limits: Limits,
    ordering: Ordering,
    offer: Callable[[Demand], Offer],
) -> tuple[Verdict, Books]:
    """What a round would do now, and the books after it. Nothing is taken."""
    trial = Trial(floor)
    verdict = weigh(trial, conditions, limits, ordering, offer, most_picks=MOST_COUNTED)
    return verdict, trial.books


def forecast(floor: Floor, conditions: Conditions, ordering: Ordering) -> dict[JobId, Moment | None]:
    """For the first thousand in order, whether their addons are told or come by themselves. None: it cannot be said."""
    endless = replace(conditions, capacity=_ENDLESS)
    order = weigh(Trial(floor), endless, Limits(), ordering, _anybody, most_picks=MOST_COUNTED).picks
    free = conditions.capacity - floor.books.units
    return dict(_starts(order, free, floor.running(), floor.now))


def _anybody(_: Demand) -> Offer:
    return Offer.RESERVE


def _starts(
    order: Iterable[Pick], free: int, running: Sequence[Running], now: Moment
) -> Iterator[tuple[JobId, Moment | None]]:
    ends = [(max(now, run.ends_at), run.cost) for run in running if run.ends_at is not None]
    heapify(ends)
    moment: Moment | None = now
    for pick in order:
        cost = pick.demand.cost_units
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
    """The same floor, with books of its own: what is tried out on it leaves no trace."""

    def __init__(self, floor: Floor) -> None:
        self._floor, self.now = floor, floor.now
        books = floor.books
        self.books = replace(books, counts=dict(books.counts), accounts=_Borrowed(books.accounts))

    def lines(self) -> Iterable[Line]:
        return self._floor.lines()

    def running(self) -> Sequence[Running]:
        return self._floor.running()


class _Borrowed(dict[AddonId, Account]):
    """Copied when first looked at: there may be many addons, and a round meets few of them."""

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
