from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from huey import SqliteHuey
from huey.consumer import Consumer

from bench.queues.tick import server, tick

GUARANTEE = "on disk"  # fsync=True; its default trusts the page cache

app = SqliteHuey(filename=server(), fsync=True, results=False)


@app.task()
def job() -> None:
    tick()


def prepare() -> None:
    app.flush()


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    yield job


def work() -> None:
    _work("thread")


def work_in_processes() -> None:
    _work("process")


def _work(kind: str) -> None:
    logging.getLogger("huey").setLevel(logging.ERROR)
    Consumer(
        app,
        workers=2,
        worker_type=kind,
        initial_delay=0.001,
        backoff=1.0,
        max_delay=0.001,
        periodic=False,
    ).run()
