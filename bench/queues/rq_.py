from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from redis import Redis
from rq import Queue, SimpleWorker, Worker

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
    """A worker that runs jobs in itself."""
    _work(SimpleWorker)


def work_in_processes() -> None:
    """The default: a process for each job, so that one can be ended without its worker. Two workers."""
    os.fork()
    _work(Worker)


def _work(kind: type[Worker]) -> None:
    logging.disable(logging.WARNING)
    connection = Redis.from_url(server())
    kind([Queue(connection=connection)], connection=connection).work(logging_level="ERROR")
