from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import uvloop
from redis import Redis
from taskiq.receiver import Receiver
from taskiq_redis import ListQueueBroker

from bench.fresh import ROOT
from bench.queues.tick import server, tick

GUARANTEE = "in memory"

broker = ListQueueBroker(server())


@broker.task(task_name="tick")
async def job() -> None:
    tick()


def prepare() -> None:
    Redis.from_url(server()).flushall()


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(broker.startup())
        yield lambda: runner.run(job.kiq())
        runner.run(broker.shutdown())


def work() -> None:
    logging.disable(logging.WARNING)

    async def run() -> None:
        broker.is_worker_process = True
        await broker.startup()
        with ThreadPoolExecutor(1) as executor:
            receiver = Receiver(broker, executor, max_async_tasks=100, max_prefetch=100, run_startup=False)
            await receiver.listen(asyncio.Event())

    uvloop.run(run())


def work_in_processes() -> None:
    os.environ["PYTHONPATH"] = str(ROOT)
    command = ["worker", "bench.queues.taskiq_:broker", "--workers", "2", "--log-level", "CRITICAL"]
    module = ["-m", "taskiq", *command, "--max-async-tasks", "100", "--max-prefetch", "100"]
    os.execv(sys.executable, [sys.executable, *module])
