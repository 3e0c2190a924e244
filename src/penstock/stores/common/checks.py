"""
What every store refuses, and in which words: submits, hosts, and commits of which it does not know the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.core.errors import DispatcherHeld, KeyConflict, OutcomeUnknown, QueueFull
from penstock.core.jobs.changes import Note, principal_data
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import Host
from penstock.core.jobs.types import HostId, JobId
from penstock.stores.api import Receipt

__all__ = ["BatchUnknown", "drain_note", "key_conflict", "name_taken", "refuse_beyond", "with_jobs"]


class BatchUnknown(OutcomeUnknown):
    """Of operations that share a transaction. `answers`: the answer to each, if they were written."""

    def __init__(self, error: OutcomeUnknown, answers: Sequence[Any]) -> None:
        super().__init__(str(error), **error.data)
        self.answers = answers


def key_conflict(intent: Intent, job_id: JobId | None) -> KeyConflict:
    return KeyConflict(
        f"idempotency_key {intent.idempotency_key!r} was used for another job",
        field="idempotency_key",
        job_id=job_id,
    )


def refuse_beyond(limit: int, queued: int, more: int, where: str) -> None:
    if queued + more > limit:
        raise QueueFull(
            f"{queued} jobs are queued {where}, the limit is {limit}",
            limit=limit,
            queued=queued,
            retry_after_sec=5,
        )


def with_jobs(error: OutcomeUnknown, answer: Iterable[Any]) -> OutcomeUnknown:
    """A submit whose outcome is unknown is told which jobs exist if it was written."""
    jobs = list(dict.fromkeys(receipt.job_id for receipt in answer if isinstance(receipt, Receipt)))
    if not jobs:
        return error
    more = f" and {len(jobs) - 3} more" if len(jobs) > 3 else ""
    words = f"{error}. Ask for job {', '.join(jobs[:3])}{more}, or submit again with the same idempotency key"
    return OutcomeUnknown(words, **{**error.data, "job_ids": jobs})


def name_taken(host: Host) -> DispatcherHeld:
    return DispatcherHeld(
        f"another scheduler that is alive on this database is called {host.host} too: give this one a name of its own (host.name)",
        holder=host.host,
    )


def drain_note(host: HostId, draining: bool, by: str) -> Note:
    return Note(EventKind.HOST_SET, data={"host": host, "draining": draining, **principal_data(by)})
