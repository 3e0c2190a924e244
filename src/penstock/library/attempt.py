"""
One dispatch that this process holds, from claim to settlement, and the running of its function.

The flags are written by the heartbeat's thread and read by the function's: one word each, so no lock is needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from penstock.core.errors import JobStopped, NotFound, StaleDispatch
from penstock.core.jobs.end_rules import EndReason
from penstock.core.jobs.job import Dispatch, Job
from penstock.core.jobs.types import Moment, Money
from penstock.scheduler.job_service import Answer, GrantedJob
from penstock.work.context import JobFacts

if TYPE_CHECKING:
    from penstock.library.function import JobFunction

__all__ = ["JobAttempt"]

log = logging.getLogger("penstock.library")


class AttemptReports(Protocol):
    """What an attempt needs of the desk."""

    def heartbeat(
        self,
        dispatch_id: Any,
        *,
        progress: float | None = None,
        spent: Money | None = None,
        checkpoint: str | None = None,
        pid: int | None = None,
    ) -> Answer: ...


class JobAttempt:
    """The channel of a function that runs in this process."""

    __slots__ = (
        "_job_service",
        "_now",
        "began",
        "claimed_at",
        "ended_by",
        "expires_at",
        "facts",
        "fresh_progress",
        "function",
        "given_up",
        "lost",
        "pid_told",
        "spent",
        "stop",
        "yielding",
    )  # fmt: skip

    def __init__(
        self,
        claimed: GrantedJob,
        function: JobFunction[..., Any, Any],
        job_service: AttemptReports,
        now: Callable[[], Moment],
    ) -> None:
        self.facts: JobFacts = facts_of(*claimed)
        self.function = function
        self._job_service, self._now = job_service, now
        self.expires_at: Moment = claimed.dispatch.expires_at
        self.claimed_at: Moment = claimed.dispatch.admitted_at
        self.began: float = 0.0  # on the monotonic clock; 0: it waits for a thread
        self.stop: EndReason | None = None
        self.lost = False
        self.given_up = False  # its place is somebody else's
        self.yielding = False
        self.fresh_progress: float | None = None
        self.spent: Money | None = None
        self.ended_by: Any = None  # how the hands can end it: their own business
        self.pid_told = False  # by a heartbeat

    @property
    def canceled(self) -> bool:
        # A lease that could not be renewed ends by the clock alone: without the store no heartbeat can tell.
        return self.stop is not None or self.lost or self._now() >= self.expires_at

    def progress(self, fraction: float) -> None:
        self.fresh_progress = fraction

    def spend(self, total: Money, amount: Money) -> None:  # noqa: ARG002  # of the protocol
        self.spent = total
        self.beat()

    def log_handler(self) -> None:
        return None

    def save_checkpoint(self, text: str) -> None:
        if not self.beat(text):
            raise JobStopped("the lease is lost: this checkpoint was not saved", job_id=self.facts.job_id)

    def beat(self, checkpoint: str | None = None) -> bool:
        """Renews the lease and reports what is new. False: the lease is lost."""
        progress, self.fresh_progress = self.fresh_progress, None
        try:
            answer = self._job_service.heartbeat(
                self.facts.dispatch_id,
                progress=progress,
                spent=self.spent,
                checkpoint=checkpoint,
                pid=self.pid,
            )
        except (StaleDispatch, NotFound):
            self.lost = True
            return False
        self.pid_told = True
        self.expires_at = answer.expires_at
        self.stop = answer.stop
        return True

    @property
    def pid(self) -> int | None:
        """Of the process that runs the function: this one, or the worker that has its call."""
        return self.ended_by.pid if hasattr(self.ended_by, "pid") else os.getpid()


def facts_of(job: Job, dispatch: Dispatch, checkpoint: str | None) -> JobFacts:
    intent = job.intent
    return JobFacts(
        job.job_id,
        intent.job_type,
        dispatch.dispatch_id,
        dispatch.fence,
        job.attempt,
        intent.addon_id,
        intent.tags,
        intent.deadline_at,
        intent.payload,
        checkpoint,
    )
