"""What the runner writes down besides ends: steps of the ladder, and quarantine."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core import changes
from penstock.core.changes import Note
from penstock.core.job import Kind
from penstock.core.order import Floor, Verdict
from penstock.core.words import DispatchId
from penstock.engine.house import House
from penstock.runner.runs import Run

__all__ = ["hold_units", "write_notes"]


def write_notes(house: House, told: Sequence[tuple[Run, Note]]) -> None:
    now = house.store.now()
    house.store.apply([changes.remark(run.job, note, now) for run, note in told])


def hold_units(house: House, run: Run) -> DispatchId:
    """
    The units of a tree that would not die stay taken after its job has moved on: by a lease without a job, taken before the run's own ends,
    so that nobody can get in between.
    """
    demand, rules = run.dispatch.demand, house.rules

    def take(floor: Floor) -> Verdict:
        floor.books.take(demand, floor.now, rules.ordering.sharing)
        return Verdict(loan=demand)

    [held] = house.store.admit(rules.host, take, rules.terms("quarantine"))
    told = {"dispatch_id": run.dispatch_id, "held_by": held.dispatch_id}
    write_notes(house, [(run, Note(Kind.ALERT, "lost", told))])
    return held.dispatch_id
