"""
What nobody asked for and must happen: what has expired is ended, what runs too long is stopped, what is too late fails, what is
old is forgotten. Every write is a compare-and-set, so any number of keepers may run, and a poisonous row harms itself alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from penstock.core.errors import Refused
from penstock.core.jobs import changes
from penstock.core.jobs.changes import Change
from penstock.core.jobs.end_rules import DispatchPhase, EndReason
from penstock.core.jobs.types import MILLISECOND, Moment, Span
from penstock.scheduler.clock import SteadyClock, comes_later
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Apply, Due, Overdue, Prune, Shift, Store, committed

__all__ = ["Maintenance"]

log = logging.getLogger("penstock.keeper")

#: Every commit rings, and what is looked for here comes by the second.
_LOOK: Final[Span] = 100 * MILLISECOND


class Maintenance:
    """`shifts`: is told when the clock is about to be set, and by how much."""

    def __init__(
        self,
        store: Store,
        rules: SchedulerRules,
        clock: SteadyClock | None = None,
        *,
        shifts: Callable[[Span], None] | None = None,
        batch: int = 200,
    ) -> None:
        self._store, self._rules, self._clock, self._batch = store, rules, clock, batch
        self._shifts = shifts
        self._prune_at: Moment = 0
        #: Where time is moved by hand nothing else happens until it is.
        self._pause = _LOOK if store.shared or clock is not None else 0
        self._look_at: Moment = 0

    def step(self, now: Moment) -> Moment:
        if comes_later(self._look_at, now, self._pause):
            return self._look_at
        now += self._mind_the_clock()
        self._look_at = now + self._pause
        while len(overdue := self._store.overdue(self._batch)) > 0:
            decided = [change for item in overdue if (change := self._decide(item, now)) is not None]
            settled = committed(self._store, Apply(decided))
            if len(overdue) < self._batch or not any(settled):
                break
        if not comes_later(self._prune_at, now, self._rules.prune_every):
            forgotten = committed(self._store, Prune(now - self._rules.retention, self._rules.prune_step))
            # A full step means that there is more: come again soon, but let others write in between.
            self._prune_at = now + (self._rules.tick if forgotten else self._rules.prune_every)
        alarm = self._store.alarm()
        return self._prune_at if alarm is None else min(self._prune_at, max(alarm, now))

    def _mind_the_clock(self) -> int:
        by = 0 if self._clock is None else self._clock.jump()
        if by and self._clock is not None:
            log.warning(
                "the wall clock was set by %+.1f s; leases and delays of retries move with it", by / 1e6
            )
            if self._shifts is not None:
                self._shifts(by)
            self._clock.accept(by)
            committed(self._store, Shift(by))
        return by

    def _decide(self, item: Overdue, now: Moment) -> Change | None:
        try:
            return self._change(item, now)
        except Refused:
            log.exception("cannot settle %s", item)
            return None

    def _change(self, item: Overdue, now: Moment) -> Change | None:
        due, job, dispatch = item
        if dispatch is None:
            return None if job is None else changes.miss_deadline(job, now)
        if due is Due.STOP:
            reason = dispatch.stop_for or EndReason.MAX_RUNTIME_EXCEEDED
            return changes.stop(dispatch, job, reason, now, grace=self._rules.grace)
        how = EndReason.START_TIMEOUT if dispatch.phase is DispatchPhase.RESERVED else EndReason.LEASE_EXPIRED
        if job is None:
            return changes.release(dispatch, now, how)
        schedules, ordering = self._rules.schedules, self._rules.ordering
        return changes.end(job, dispatch, how, now, schedules=schedules, ordering=ordering)
