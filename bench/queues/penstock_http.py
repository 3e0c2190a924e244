"""Ours, as a daemon with an add-on's worker beside it: every claim and every outcome crosses HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.queues.tick import server, tick
from penstock.client import Client
from penstock.client.client import job_of
from penstock.client.worker import Worker

GUARANTEE = "on disk"

_HOME = Path(server()).parent / "daemon"
os.environ["PENSTOCK_DATA_DIR"] = str(_HOME)
_daemon: subprocess.Popen[bytes] | None = None


def prepare() -> None:
    """The daemon belongs to the turn's own process; workers and submitters find it by its data directory."""
    global _daemon  # noqa: PLW0603 - a turn has one
    if _daemon is not None:
        return
    _HOME.mkdir(mode=0o700, exist_ok=True)
    flags = [
        f"--set=data_dir={_HOME}",
        "--set=server.listen=none",
        "--set=capacity.units=100",
        "--set=log.level=error",
    ]
    _daemon = subprocess.Popen([sys.executable, "-m", "penstock.daemon", *flags])
    until = time.monotonic() + 20
    while not (_HOME / "daemon.json").exists() and time.monotonic() < until:
        time.sleep(0.01)


@contextmanager
def session() -> Iterator[Callable[[], object]]:
    prepare_if_alone()
    with Client() as client:
        yield lambda: client.submit("bench", "tick", cost_units=1)


def prepare_if_alone() -> None:
    with suppress(FileExistsError):
        if not (_HOME / "daemon.json").exists():
            prepare()


def submit_bulk(count: int) -> None:
    with Client() as client:
        for first in range(0, count, 1_000):
            client.submit_many([job_of("bench", "tick", cost_units=1)] * min(1_000, count - first))


def work() -> None:
    worker = Worker(addon="bench")

    @worker.job("tick")
    def job(_: object) -> None:
        tick()

    worker.run(concurrency=2)
