"""Ours, as a library: one file, workers in the process that dispatches. A batch in flight is what fits 100 units at 1 each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.queues import backlog
from bench.queues.tick import server, tick
from penstock import Scheduler

GUARANTEE = "on disk"

scheduler = Scheduler(server(), workers=2, capacity=100)


@scheduler.job(cost=1, name="tick")
def job() -> None:
    tick()


def prepare() -> None:
    """The file is new in every turn."""
    backlog.lay(Path(server()))


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    yield job.enqueue
    scheduler.close()


def submit_bulk(count: int) -> None:
    for first in range(0, count, 1_000):
        job.enqueue_many([()] * min(1_000, count - first))


def work() -> None:
    scheduler.run()
