"""One run: a dispatch that this runner has in hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from secrets import token_urlsafe
from typing import NamedTuple

from penstock.core.job import Dispatch, Job
from penstock.core.landing import End
from penstock.core.words import DispatchId, Money
from penstock.runner.links import WardenLink, WorkerLink
from penstock.runner.payload import Work

__all__ = ["Outcome", "Run"]


class Outcome(NamedTuple):
    how: End
    result: str | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Run:
    job: Job
    dispatch: Dispatch  # as we last saw it
    work: Work
    checkpoint: str | None
    #: Good for what this run may say about itself, and for as long as it runs.
    token: str = field(default_factory=lambda: token_urlsafe(32))
    warden: WardenLink | None = None
    worker: WorkerLink | None = None
    #: What it said, while its processes are not all gone or its output not all written.
    outcome: Outcome | None = None
    yielded: bool = False
    spent: Money = 0
    progress: float | None = None
    untold: bool = False  # progress that no heartbeat has carried yet

    @property
    def dispatch_id(self) -> DispatchId:
        return self.dispatch.dispatch_id

    @property
    def folder(self) -> list[str]:
        """Where its output is, below the folder of all runs."""
        return [self.job.job_id, str(self.dispatch.fence)]
