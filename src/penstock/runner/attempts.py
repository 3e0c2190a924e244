"""One run: a dispatch that this runner has in hand.

What the runner writes down besides ends: steps of the ladder, and quarantine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.jobs import changes
from penstock.core.jobs.changes import Note
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.ordering import AdmissionView, RoundResult
from penstock.core.jobs.types import DispatchId, Money
from penstock.runner.links import WardenLink, WorkerLink
from penstock.runner.payload import Work
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Admit, Apply, committed
from penstock.work.outcome import Outcome


@dataclass(slots=True, eq=False)
class ActiveDispatch:
    job: Job
    dispatch: Dispatch  # as we last saw it
    work: Work
    checkpoint: str | None
    #: Who runs it without having heard from us ends it at this moment, of the clock that counts from boot.
    until: float = 0.0
    #: Good for what a command may say about itself, and for as long as it runs. A function has its worker to talk to.
    token: str = ""
    warden: WardenLink | None = None
    worker: WorkerLink | None = None
    call: int = 0  # its number among those of its worker
    waits_since: float = 0.0  # for a worker
    #: What it said, while its processes are not all gone or its output not all written.
    outcome: Outcome | None = None
    yielded: bool = False
    noted: bool = False  # it logged something, which its warden writes down in its own time
    spent: Money = 0
    progress: float | None = None
    untold: bool = False  # progress that no heartbeat has carried yet

    @property
    def dispatch_id(self) -> DispatchId:
        return self.dispatch.dispatch_id

    @property
    def pid(self) -> int | None:
        """Of the command, or of the worker that has the function; None: neither has begun."""
        return (self.warden.root or None) if self.warden is not None else None

    @property
    def folder(self) -> list[str]:
        """Where its output is, below the folder of all runs."""
        return [self.job.job_id, str(self.dispatch.fence)]


def write_notes(service: SchedulerService, told: Sequence[tuple[ActiveDispatch, Note]]) -> None:
    now = service.store.now()
    committed(service.store, Apply([changes.remark(run.job, note, now) for run, note in told]))


def quarantine_units(service: SchedulerService, run: ActiveDispatch) -> DispatchId:
    """
    The units of a tree that would not die stay taken after its job has moved on: by a lease without a job, taken before the run's own ends,
    so that nobody can get in between.
    """
    admission_class, rules = run.dispatch.admission_class, service.rules

    def take(admission_view: AdmissionView) -> RoundResult:
        admission_view.ledger.take(admission_class, admission_view.now, rules.ordering.sharing)
        return RoundResult(loan=admission_class)

    [held] = [
        grant.dispatch
        for grant in committed(service.store, Admit(rules.host, take, rules.terms("quarantine")))
    ]
    told = {"dispatch_id": run.dispatch_id, "held_by": held.dispatch_id}
    write_notes(service, [(run, Note(EventKind.ALERT, "lost", told))])
    return held.dispatch_id
