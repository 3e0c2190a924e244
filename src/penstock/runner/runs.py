"""One run: a dispatch that this runner has in hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.job import Dispatch, Job
from penstock.core.landing import EndReason
from penstock.core.words import DispatchId, Money
from penstock.runner.links import WardenLink, WorkerLink
from penstock.runner.payload import Work

__all__ = ["ActiveDispatch", "ProcessOutcome"]


class ProcessOutcome(NamedTuple):
    how: EndReason
    result: str | None = None
    error: str | None = None


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
    outcome: ProcessOutcome | None = None
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
