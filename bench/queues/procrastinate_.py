from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import procrastinate
import uvloop

from bench.queues.tick import server, tick

GUARANTEE = "on disk"

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=server()))


@app.task(name="tick")
async def job() -> None:
    tick()


def prepare() -> None:
    async def fresh() -> None:
        async with app.open_async():
            await app.connector.execute_query_async("DROP SCHEMA public CASCADE")
            await app.connector.execute_query_async("CREATE SCHEMA public")
            await app.schema_manager.apply_schema_async()

    uvloop.run(fresh())


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    connector = procrastinate.SyncPsycopgConnector(conninfo=server())
    with app.replace_connector(connector) as synchronous, synchronous.open():
        yield synchronous.tasks["tick"].defer


def submit_bulk(count: int) -> None:
    async def all_of_them() -> None:
        async with app.open_async():
            for first in range(0, count, 1_000):
                await job.batch_defer_async(*[{}] * min(1_000, count - first))

    uvloop.run(all_of_them())


def work() -> None:
    logging.disable(logging.WARNING)

    async def run() -> None:
        async with app.open_async():
            await app.run_worker_async(
                concurrency=30, fetch_job_polling_interval=0.1, delete_jobs="successful"
            )

    uvloop.run(run())
