"""Ours, as a daemon with an add-on's worker beside it: every claim and every outcome crosses HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.queues import daemon
from bench.queues.tick import tick
from penstock import Client
from penstock.client.client import job_of
from penstock.client.worker import Worker

GUARANTEE = "on disk"


def prepare() -> None:
    daemon.start()


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    daemon.start()
    with Client() as client:
        yield lambda: client.submit("bench", "tick", cost_units=1)


def submit_bulk(count: int) -> None:
    with Client() as client:
        for first in range(0, count, 1_000):
            client.submit_many([job_of("bench", "tick", cost_units=1)] * min(1_000, count - first))


def work() -> None:
    worker = Worker(addon="bench")

    @worker.job("tick")
    def job() -> None:
        tick()

    # A hundred in flight, as in the library: what the units of a host allow.
    worker.run(concurrency=2, prefetch=98)
