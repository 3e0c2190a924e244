"""Huey's pipelines: a task and what comes then, a group with a callback, and a call for each index. They need results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import huey
from huey import SqliteHuey
from huey.consumer import Consumer

from bench.queues.tick import server, tick

__all__ = ["array", "chain", "fan", "prepare", "session", "work"]

app = SqliteHuey(filename=server(), fsync=True, results=True)


@app.task()
def job(*_: object) -> int:
    tick()
    return 1


def prepare() -> None:
    app.flush()


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    yield job


def work() -> None:
    import logging

    logging.getLogger("huey").setLevel(logging.ERROR)
    Consumer(
        app,
        workers=2,
        worker_type="thread",
        initial_delay=0.001,
        backoff=1.0,
        max_delay=0.001,
        periodic=False,
    ).run()


def chain(count: int) -> None:
    first = job.s()
    last = first
    for _ in range(count - 1):
        following = job.s()
        last.on_complete = following  # as `then` does, which walks from the first one each time
        last = following
    app.enqueue(first)


def fan(count: int) -> None:
    app.enqueue(huey.group([job.s() for _ in range(count)]).then(job.s()))


def array(count: int) -> None:
    for _ in range(count):
        job()
