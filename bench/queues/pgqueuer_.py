from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.adapters.persistence.queries import Queries
from pgqueuer.domain.models import Job

from bench.queues.tick import server, tick

GUARANTEE = "on disk"


def prepare() -> None:
    async def fresh() -> None:
        connection = await asyncpg.connect(server())
        await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    uvloop.run(fresh())


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        connection = runner.run(asyncpg.connect(server()))
        queries = Queries(AsyncpgDriver(connection))
        yield lambda: runner.run(queries.enqueue("tick", None))
        runner.run(connection.close())


def submit_bulk(count: int) -> None:
    async def all_of_them() -> None:
        connection = await asyncpg.connect(server())
        queries = Queries(AsyncpgDriver(connection))
        for first in range(0, count, 1_000):
            portion = min(1_000, count - first)
            await queries.enqueue(["tick"] * portion, [None] * portion, [0] * portion)
        await connection.close()

    uvloop.run(all_of_them())


def work() -> None:
    logging.disable(logging.WARNING)

    async def run() -> None:
        app = PgQueuer.from_asyncpg_connection(await asyncpg.connect(server()))

        @app.entrypoint("tick")
        async def job(_: Job) -> None:
            tick()

        await app.qm.run(batch_size=300)

    uvloop.run(run())
