"""
Forecast: when queued jobs will likely start, from the order, the runs and the expected durations.

A round on a host with endless capacity gives the order; then each job starts, in that order, when its units
are free on the real host. A run without an expected duration never gives its units back here, so jobs that
need them get no moment: a guess that looks like a promise is worse than none. Jobs that could run in kept
units are ignored, so a moment is rather late than early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Final

from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionLimits, Conditions
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.ledger import Account, Ledger
from penstock.core.jobs.ordering import (
    AdmissionView,
    Ordering,
    Pick,
    Placement,
    ReadyQueue,
    RoundResult,
    RunningJob,
    run_round,
)
from penstock.core.jobs.types import SECOND, AddonId, JobId, Moment

#: Readers do not look further, and a queue of a million must not be counted for a sentence.
MOST_COUNTED: Final = 1_000
_ENDLESS: Final = 1 << 40


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
