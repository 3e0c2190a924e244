"""RQ's dependencies: each job names the jobs before it."""

from __future__ import annotations

from redis import Redis
from rq import Queue

from bench.queues.rq_ import prepare, session, submit_bulk, work
from bench.queues.tick import server, tick

__all__ = ["array", "chain", "fan", "prepare", "session", "work"]

array = submit_bulk


def _queue() -> Queue:
    return Queue(connection=Redis.from_url(server()))


def chain(count: int) -> None:
    queue = _queue()
    last = queue.enqueue(tick, result_ttl=600)
    for _ in range(count - 1):
        last = queue.enqueue(tick, result_ttl=600, depends_on=last)


def fan(count: int) -> None:
    queue = _queue()
    jobs = queue.enqueue_many([Queue.prepare_data(tick, result_ttl=600)] * count)
    queue.enqueue(tick, result_ttl=600, depends_on=jobs)
