"""
Job functions of an SDK worker in worker processes, which can be ended and cannot starve the heartbeats.

The worker process reports progress, spending and checkpoints to the scheduler by a client of its own.
"""

from __future__ import annotations

from typing import Final

from penstock.client.client import Client
from penstock.client.handlers import JobHandler
from penstock.client.leases import ActiveLease
from penstock.core.jobs.types import Money
from penstock.work.context import JobFacts
from penstock.work.executors import RemoteCall, RemoteOutcome, run_in_process

__all__ = ["RemoteCalls", "grace_sec"]

#: Of the lease: from the stop to the end of the process. With it the process is gone before the lease is.
_GRACE: Final = 0.1


def grace_sec(lease: ActiveLease) -> float:
    return max(0.1, lease.timer.ttl * _GRACE)


class RemoteCalls:
    """Makes the calls that run attempts in worker processes."""

    def __init__(self, client: Client) -> None:
        self._url, self._token = client.url, client.token

    def __call__(self, lease: ActiveLease, yield_file: str) -> RemoteCall:
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
