"""Ours on the PostgreSQL that the peers use too, as a library: any number of hosts could share it, and every claim is fenced and audited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from bench.queues.tick import server, tick
from penstock import Scheduler

GUARANTEE = "on disk"

scheduler = Scheduler(server(), workers=2, capacity=100)


@scheduler.job(cost=1, name="tick")
def job() -> None:
    tick()


def prepare() -> None:
    with psycopg.connect(server(), autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS penstock CASCADE")


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    yield job.enqueue
    scheduler.close()


def submit_bulk(count: int) -> None:
    for first in range(0, count, 1_000):
        job.enqueue_many([()] * min(1_000, count - first))


def work() -> None:
    scheduler.run()
