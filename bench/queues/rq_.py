from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from redis import Redis
from rq import Queue, SimpleWorker

from bench.queues.tick import server, tick

GUARANTEE = "in memory"


def prepare() -> None:
    Redis.from_url(server()).flushall()


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    queue = Queue(connection=Redis.from_url(server()))
    yield lambda: queue.enqueue(tick, result_ttl=0)


def submit_bulk(count: int) -> None:
    queue = Queue(connection=Redis.from_url(server()))
    for first in range(0, count, 1_000):
        queue.enqueue_many([Queue.prepare_data(tick, result_ttl=0)] * min(1_000, count - first))


def work() -> None:
    """Two workers that run jobs in themselves: a fork for each job would be its default, at ten times the cost."""
    logging.disable(logging.WARNING)
    os.fork()
    connection = Redis.from_url(server())
    SimpleWorker([Queue(connection=connection)], connection=connection).work(logging_level="ERROR")
