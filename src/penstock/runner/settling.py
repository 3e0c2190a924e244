"""
What the runner writes down: ends, steps of the ladder, quarantine. Ends go together, one transaction for all that ended since the last.

An end is decided on what was seen when the run was claimed, which is nearly always still true; where it is not, the store says so and the desk
decides anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.core import changes
from penstock.core.changes import Change, Note
from penstock.core.job import Kind
from penstock.core.order import Floor, Verdict
from penstock.core.refusals import Refused
from penstock.core.words import DispatchId
from penstock.engine.house import House
from penstock.runner.runs import Outcome, Run

__all__ = ["Settling"]

log = logging.getLogger("penstock.runner")


class Settling:
    def __init__(self, house: House) -> None:
        self._house, self._store, self._rules = house, house.store, house.rules

    def ends(self, ended: Sequence[tuple[Run, Outcome]]) -> None:
        applied = self._store.apply([self._end(run, outcome) for run, outcome in ended])
        for (run, outcome), done in zip(ended, applied, strict=True):
            if not done:
                self._anew(run, outcome)

    def _end(self, run: Run, outcome: Outcome) -> Change:
        return changes.end(
            run.job,
            run.dispatch,
            outcome.how,
            self._store.now(),
            schedules=self._rules.schedules,
            ordering=self._rules.ordering,
            result=outcome.result,
            error=outcome.error,
            reported=True,
        )

    def _anew(self, run: Run, outcome: Outcome) -> None:
        try:
            self._house.desk.end(run.dispatch_id, outcome.how, result=outcome.result, error=outcome.error)
        except Refused as late:
            log.warning("%s ended too late to count: %s", run.dispatch_id, late)

    def notes(self, told: Sequence[tuple[Run, Note]]) -> None:
        now = self._store.now()
        self._store.apply([changes.remark(run.job, note, now) for run, note in told])

    def quarantine(self, run: Run) -> DispatchId:
        """
        The units of a tree that would not die stay taken after its job has moved on: by a lease without a job, taken before the run's own
        ends, so that nobody can get in between.
        """
        demand, ordering = run.dispatch.demand, self._rules.ordering

        def take(floor: Floor) -> Verdict:
            floor.books.take(demand, floor.now, ordering.sharing)
            return Verdict(loan=demand)

        [held] = self._store.admit(self._rules.host, take, self._rules.terms("quarantine"))
        self.notes(
            [(run, Note(Kind.ALERT, "lost", {"dispatch_id": run.dispatch_id, "held_by": held.dispatch_id}))]
        )
        return held.dispatch_id
