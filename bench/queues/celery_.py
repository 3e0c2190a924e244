from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery import Celery
from redis import Redis

from bench.queues.tick import server, tick

GUARANTEE = "in memory"

app = Celery(broker=server())
app.conf.update(
    worker_prefetch_multiplier=64,
    task_ignore_result=True,
    task_store_errors_even_if_ignored=False,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)


@app.task(name="tick")
def job() -> None:
    tick()


def prepare() -> None:
    Redis.from_url(server()).flushall()


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    yield job.delay


def work() -> None:
    """Threads: quicker than its processes for a job this small."""
    _work("threads", 4)


def work_in_processes() -> None:
    _work("prefork", 2)


def _work(pool: str, workers: int) -> None:
    quiet = ["-l", "CRITICAL", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["worker", "-P", pool, "-c", str(workers), *quiet])
