"""What every store refuses at the door, in the same words."""

from __future__ import annotations

from penstock.core.intent import Intent
from penstock.core.refusals import KeyConflict, QueueFull
from penstock.core.words import JobId

__all__ = ["key_conflict", "refuse_beyond"]


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
