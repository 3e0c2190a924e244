"""
The functions of a worker, and the call of one with the payload of its job.

A payload that is an object becomes keyword arguments, a list positional ones, null none, any other value the one
argument. The context is the first argument of a function whose first parameter is annotated `JobContext`, or has no
annotation and is called `job` or `ctx`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from penstock.core.jobs.types import DispatchId, Moment
from penstock.wire import ClaimedJob
from penstock.work.context import CurrentJob, JobFacts, takes_context
from penstock.work.json_codec import plain
from penstock.work.outcome import call_with

__all__ = ["Handler", "JobHandler", "facts_of"]

Handler: TypeAlias = Callable[..., Any]
_CONTEXT_NAMES: Final = ("job", "ctx")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def facts_of(job: ClaimedJob) -> JobFacts:
    deadline = job.deadline_at
    checkpoint = bytes(job.checkpoint).decode()
    return JobFacts(
        job.job_id,
        job.job_type,
        DispatchId(job.lease_id),
        job.fence,
        job.attempt,
        job.addon_id,
        job.tags,
        None if deadline is None else Moment((deadline - _EPOCH) // timedelta(microseconds=1)),
        bytes(job.payload).decode() or "null",
        None if checkpoint in ("", "null") else checkpoint,
    )


class JobHandler:
    """It travels to worker processes."""

    def __init__(self, function: Handler) -> None:
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        self._takes_context = takes_context(function, _CONTEXT_NAMES)

    def invoke(self, job: CurrentJob) -> Any:
        context = (job.context,) if self._takes_context else ()
        match plain(job.facts.payload):
            case dict() as named:
                return call_with(self.function, context, named)
            case list() as listed:
                return call_with(self.function, (*context, *listed), {})
            case None:
                return call_with(self.function, context, {})
            case value:
                return call_with(self.function, (*context, value), {})
