"""
Room in, dispatches out.

A round is one transaction of the store. Jobs that workers claim in one step are left in line for them; all others are reserved, and their
addon is told by the trail. `engine/fetchers.py` knows which workers are present.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

from penstock.core.demand import Demand
from penstock.core.job import Dispatch
from penstock.core.landing import Phase
from penstock.core.order import MOST_PICKS, Floor, Offer, Verdict, weigh
from penstock.core.outlook import View
from penstock.core.words import HostId, JobId, Moment
from penstock.engine.fetchers import Fetchers, Kinds, Present
from penstock.engine.machine import Machine
from penstock.engine.reserved import Reserved
from penstock.engine.rules import Rules
from penstock.stores.protocol import Ahead, Done, Rest, Ride, Store, Terms

__all__ = ["Dispatcher", "Fetchers", "Kinds", "leased"]

_ALL: Final = 1_000_000


class Dispatcher:
    def __init__(self, store: Store, rules: Rules, machine: Machine, fetchers: Fetchers) -> None:
        self._store, self._rules, self._machine, self._fetchers = store, rules, machine, fetchers
        #: How often each head was refused for its present reason. Told when the reason changes, and not before: it would be
        #: a write per head and tick.
        self.refusals: dict[JobId, int] = {}
        self.reserved = Reserved()
        #: All that the last round of our own saw in line; None: there was none yet.
        self._in_line: list[Demand] | None = None

    def begin(self) -> None:
        """It alone dispatches on this host from now on."""
        left = self._store.live(phases=[Phase.RESERVED], limit=_ALL)
        self.reserved.begin([d for d in left if d.host == self._rules.host], self._store.now())

    def step(self, now: Moment) -> Moment:
        while len(self._round(now)) >= MOST_PICKS:
            pass
        return now + self._rules.tick

    def fetch(self, kinds: Kinds, limit: int, worker: str, now: Moment) -> list[Dispatch]:
        """A round with a worker at hand. What stands before its jobs and is reserved by us is reserved first, so order holds."""
        return leased(self._store.admit(*self._visit(kinds, limit, worker, now)))

    def exchange_soon(
        self, done: Sequence[Done], kinds: Kinds, limit: int, worker: str, ahead: Ahead
    ) -> Future[tuple[list[bool], list[Dispatch]]]:
        """The same, behind what that worker has done. Some that it is answered with may be only reserved (`leased`)."""
        visit = self._visit(kinds, limit, worker, self._store.now())
        return self._store.exchange_soon(done, *visit, ahead)

    def _visit(
        self, kinds: Kinds, limit: int, worker: str, now: Moment
    ) -> tuple[HostId, Callable[[Floor], Verdict], Terms]:
        self._fetchers.came(kinds, now + self._rules.fetch_for)
        return self._rules.host, self._decider(now, kinds, limit), self._rules.terms(worker)

    def offer_to(self, kinds: Kinds, now: Moment) -> None:
        """A two-step worker polls for such jobs. Its first poll reserves those that were left in line for others."""
        if self._fetchers.polled(kinds, now, until=now + self._rules.fetch_for):
            self._round(now)

    def passage(
        self, kinds: Kinds, limit: int, worker: str, landed: Callable[[list[Dispatch], bool], Rest | None]
    ) -> Ride:
        """The same round, for a worker who waits for the next submit and claims in its commit."""
        return Ride(
            *self._visit(kinds, limit, worker, self._store.now()),
            lambda granted, stays: landed(leased(granted or []), stays),
        )

    def _round(self, now: Moment) -> list[Dispatch]:
        return self._store.admit(self._rules.host, self._decider(now), self._rules.terms(""))

    def _decider(
        self, now: Moment, here: Kinds | None = None, limit: int | None = None
    ) -> Callable[[Floor], Verdict]:
        offer = self._offer(now, here)
        seen: list[Demand] = []

        def noting(demand: Demand) -> Offer:
            seen.append(demand)
            return offer(demand)

        def decide(floor: Floor) -> Verdict:
            conditions = self._machine.conditions(floor.now)
            rules = self._rules
            seen.clear()
            asked = noting if here is None else offer
            verdict = weigh(floor, conditions, rules.limits, rules.ordering, asked, most_leases=limit)
            if kinds := {pick.demand for pick in verdict.picks if pick.offer is Offer.RESERVE}:
                self.reserved.made(dict.fromkeys(kinds, floor.now + rules.reserve_for), floor.now)
            if here is not None:
                return verdict
            self._in_line = list(seen)
            return self._counted(verdict)

        return decide

    def _offer(self, now: Moment, here: Kinds | None = None) -> Callable[[Demand], Offer]:
        present: Present | None = None  # asked for when the first comes that is not for who is here

        def offer(demand: Demand) -> Offer:
            nonlocal present
            if here is not None and here.fits(demand):
                return Offer.LEASE
            if present is None:
                present = self._fetchers.at(now)
            return Offer.NOBODY if present.claims(demand) else Offer.RESERVE

        return offer

    def view(self, floor: Floor) -> View:
        """What the next round will go by: for explain, and for trying out."""
        rules = self._rules
        conditions = self._machine.conditions(floor.now)
        return View(floor, conditions, rules.limits, rules.ordering, self._offer(floor.now))

    def awaits(self, kinds: Kinds) -> bool:
        """
        Whether a job may be in line for such a worker, by our last round: one who comes with every tick need not look at all lines again to find none of its own.
        Where others dispatch too a round does not see every line, and nothing can be said.
        """
        if self._in_line is None or self._store.shared:
            return True
        return any(map(kinds.fits, self._in_line))

    def last_fetched_at(self, demand: Demand, now: Moment) -> Moment | None:
        """When somebody last came for such jobs, if that is how they start."""
        if self._offer(now)(demand) is not Offer.NOBODY:
            return None
        return self._fetchers.last_came_at(demand, self._rules.fetch_for)

    def _counted(self, verdict: Verdict) -> Verdict:
        before = self.refusals
        changed = {denial.waiting.job_id for denial in verdict.denials}
        self.refusals = {
            w.job_id: 1 if w.job_id in changed else before.get(w.job_id, 0) + 1 for w in verdict.refused
        }
        verdict.denials = [replace(d, after=before.get(d.waiting.job_id, 0)) for d in verdict.denials]
        return verdict


def leased(granted: list[Dispatch]) -> list[Dispatch]:
    return [dispatch for dispatch in granted if dispatch.started_at is not None]
