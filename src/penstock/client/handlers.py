"""
The functions of an SDK worker, and the call of one with the payload of its job, here or in a worker process.

A payload that is an object becomes keyword arguments, a list positional ones, null none, any other value the
one argument. The context is the first argument of a function whose first parameter is annotated `JobContext`,
or has no annotation and is called `job` or `ctx`.

A worker process can be ended and cannot starve the heartbeats. It reports progress, spending and checkpoints
to the scheduler by a client of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from penstock.client.client import Client
from penstock.core.jobs.types import DispatchId, Money, moment_of
from penstock.wire import ClaimedJob
from penstock.work.context import CurrentJob, JobFacts, takes_context
from penstock.work.executors import RemoteCall, RemoteOutcome, run_in_process
from penstock.work.json_codec import plain
from penstock.work.leases import FunctionLease
from penstock.work.outcome import call_with

Handler: TypeAlias = Callable[..., Any]
_CONTEXT_NAMES: Final = ("job", "ctx")


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
        None if deadline is None else moment_of(deadline),
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


#: Fraction of the lease from the stop to the end of the process. With it the process is gone before the lease is over.
_GRACE: Final = 0.1


def grace_sec(lease: FunctionLease) -> float:
    return max(0.1, lease.ttl * _GRACE)


class RemoteCalls:
    """Makes the calls that run attempts in worker processes."""

    def __init__(self, client: Client) -> None:
        self._url, self._token = client.url, client.token

    def __call__(self, lease: FunctionLease, yield_file: str) -> RemoteCall:
        return RemoteCall(_run, (lease.function, lease.facts, yield_file, self._url, self._token))


def _run(handler: JobHandler, facts: JobFacts, yield_file: str, url: str, token: str) -> RemoteOutcome:
    reports = _Reports(facts, url, token)
    try:
        return run_in_process(handler.invoke, facts, yield_file, reports)
    finally:
        reports.close()


class _Reports:
    def __init__(self, facts: JobFacts, url: str, token: str) -> None:
        self._facts, self._url, self._token = facts, url, token
        self._client: Client | None = None

    def __call__(self, progress: float | None, spent: Money | None, checkpoint: str | None) -> bool:
        if self._client is None:
            self._client = Client(self._url, token=self._token)
        answer = self._client.heartbeat(
            self._facts.dispatch_id,
            progress=progress,
            spent=None if spent is None else spent / 1_000_000,
            checkpoint=None if checkpoint is None else checkpoint.encode(),
        )
        return not answer.cancel

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
