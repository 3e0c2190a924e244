"""Ours: a chain by `after` in one submit, a batch with a callback, and an array."""

from __future__ import annotations

from bench.queues.penstock_ import job, prepare, session, work
from bench.queues.tick import server

__all__ = ["array", "chain", "fan", "prepare", "session", "work"]

if server().startswith("postgresql:"):
    from bench.queues.penstock_pg import prepare


def chain(count: int) -> None:
    with job.scheduler.batch("chain") as batch:
        batch.enqueue(job)
        for position in range(count - 1):
            batch.enqueue(job.options(after=[f"#{position}"]))


def fan(count: int) -> None:
    with job.scheduler.batch("fan", on_end=job) as batch:
        batch.enqueue_many(job, [()] * count)


def array(count: int) -> None:
    job.enqueue_array(range(count))
