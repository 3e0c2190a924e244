"""
What a running function can say and ask: `current_job()`.

    def index(path):
        job = current_job()
        done = job.checkpoint or 0
        for n, file in enumerate(files(path)[done:], done):
            ...
            job.progress(n / total)
            if job.should_yield:
                job.yield_now(checkpoint=n + 1)

A function that is a generator does this by phases: each `yield` is a safe place to stop, and what it yields is its checkpoint there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from decimal import Decimal
from typing import Any, NoReturn

from penstock.core.json_text import json_text
from penstock.core.text import storable

__all__ = ["JobContext", "JobRefused", "JobYielded", "current_job"]


class JobYielded(BaseException):
    """How a function that was asked to yield ends. Not an Exception, so that `except Exception` in the job lets it pass."""


class JobRefused(RuntimeError):
    """The scheduler did not take what the job said; the message says why."""


class JobContext:
    def __init__(
        self,
        job_id: str,
        dispatch_id: str,
        checkpoint: Any,
        ask: Callable[[str, dict[str, Any]], dict[str, Any]],
        should_yield: Callable[[], bool],
    ) -> None:
        self.job_id, self.dispatch_id = job_id, dispatch_id
        #: What the job saved last, in this attempt or an earlier one; None if it has saved nothing.
        self.checkpoint = checkpoint
        self._ask, self._should_yield = ask, should_yield

    def save(self, checkpoint: Any) -> None:
        """Durable when it returns: the next attempt begins with it."""
        self._ask("checkpoint", {"checkpoint": json_text(checkpoint, "the checkpoint")})
        self.checkpoint = checkpoint

    def progress(self, fraction: float) -> None:
        self._ask("progress", {"progress": fraction})

    def spend(self, amount: float | Decimal | str) -> None:
        """More was spent, in the job's unit. At the limit the job is told to stop, as by a cancel."""
        self._ask("spend", {"amount": str(amount)})

    def log(self, message: str) -> None:
        """Into the job's output, apart from what it prints."""
        self._ask("log", {"message": storable(message)})

    @property
    def should_yield(self) -> bool:
        """Somebody wants this run to end: a more urgent job, a shutdown, a cancel. Save a checkpoint and call `yield_now`."""
        return self._should_yield()

    def yield_now(self, checkpoint: Any = None) -> NoReturn:
        if checkpoint is not None:
            self.save(checkpoint)
        raise JobYielded


_current: ContextVar[JobContext | None] = ContextVar("penstock_job", default=None)


def current_job() -> JobContext:
    job = _current.get()
    if job is None:
        raise LookupError("no job runs here: current_job() is for functions that the scheduler runs")
    return job
