from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from bench.fresh import ROOT
from bench.queues.tick import server, tick

GUARANTEE = "in memory"

broker = RedisBroker(url=server(), middleware=[])
dramatiq.set_broker(broker)


@dramatiq.actor
def job() -> None:
    tick()


def prepare() -> None:
    broker.client.flushall()


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    yield job.send


def work() -> None:
    logging.disable(logging.WARNING)
    dramatiq.Worker(broker, worker_threads=4).start()
    threading.Event().wait()


def work_in_processes() -> None:
    os.environ["PYTHONPATH"] = str(ROOT)
    quiet = ["--log-file", os.devnull, "--skip-logging"]
    command = ["-m", "dramatiq", "bench.queues.dramatiq_", "--processes", "2", "--threads", "4", *quiet]
    os.execv(sys.executable, [sys.executable, *command])
