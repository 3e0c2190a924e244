"""What the runner writes down besides ends: steps of the ladder, and quarantine."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core import changes
from penstock.core.changes import Note
from penstock.core.job import EventKind
from penstock.core.order import AdmissionView, RoundResult
from penstock.core.words import DispatchId
from penstock.engine.house import SchedulerService
from penstock.runner.runs import ActiveDispatch

__all__ = ["quarantine_units", "write_notes"]


def write_notes(service: SchedulerService, told: Sequence[tuple[ActiveDispatch, Note]]) -> None:
    now = service.store.now()
    service.store.apply([changes.remark(run.job, note, now) for run, note in told])


def quarantine_units(service: SchedulerService, run: ActiveDispatch) -> DispatchId:
    """
    The units of a tree that would not die stay taken after its job has moved on: by a lease without a job, taken before the run's own ends,
    so that nobody can get in between.
    """
    admission_class, rules = run.dispatch.admission_class, service.rules

    def take(admission_view: AdmissionView) -> RoundResult:
        admission_view.ledger.take(admission_class, admission_view.now, rules.ordering.sharing)
        return RoundResult(loan=admission_class)

    [held] = service.store.admit(rules.host, take, rules.terms("quarantine"))
    told = {"dispatch_id": run.dispatch_id, "held_by": held.dispatch_id}
    write_notes(service, [(run, Note(EventKind.ALERT, "lost", told))])
    return held.dispatch_id
