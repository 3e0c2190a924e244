"""A real daemon in a process of its own, and a scheduler over HTTP within this one for what needs no process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tests.daemon import environment
from tests.waiting import LONG

from penstock import Client
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import MILLISECOND, SECOND
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.server.listener import Config, serve
from penstock.stores.memory.store import MemoryStore


class Workers:
    """SDK workers in processes of their own (`programs.py`). They write a journal that no other process writes."""

    def __init__(self, folder):
        self.journal, self._processes, self._log = folder / "journal", [], folder / "workers.log"

    def start(self, daemon, *arguments, addon="photos"):
        command = [sys.executable, str(Path(__file__).parent / "programs.py"), *arguments]
        env = environment(
            PENSTOCK_URL=daemon.url,
            PENSTOCK_TOKEN_FILE=str(daemon.data / "token"),
            PENSTOCK_ADDON=addon,
            JOURNAL=str(self.journal),
        )
        with self._log.open("ab") as log:
            self._processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        return self._processes[-1]

    def lines(self):
        """(moment, what, job, fence, pid)"""
        if not self.journal.exists():
            return []
        return [line.split() for line in self.journal.read_text().splitlines()]

    def started(self):
        return [line for line in self.lines() if line[1] == "begin"]

    def said(self):
        return self._log.read_text()

    def close(self):
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        return [process.wait(LONG) for process in self._processes]


@pytest.fixture
def workers(folder):
    workers = Workers(folder)
    yield workers
    workers.close()


def overlaps(lines):
    """Pairs of attempts at one job that overlapped, by the journal."""
    runs = {}
    for moment, what, job, fence, _pid in lines:
        runs.setdefault((job, fence), {})[what] = float(moment)
    by_job = {}
    for (job, fence), times in runs.items():
        by_job.setdefault(job, []).append((times["begin"], times.get("end", times["begin"]), fence))
    overlapping = []
    for job, spans in by_job.items():
        spans.sort()
        overlapping += [(job, a, b) for a, b in pairwise(spans) if a[1] > b[0]]
    return overlapping


#: Long enough for a machine that does ten other things, short enough to be outlived by a test.
LEASE = 5

RULES = SchedulerRules(
    capacity=Capacity(fixed=100),
    schedules=Schedules(crash=(0,) * 5, unavailable=(0,) * 2),
    lease_for=LEASE * SECOND,
    grace=1 * SECOND,
    tick=200 * MILLISECOND,
)


@pytest.fixture
def scheduler(folder):
    """A scheduler without a process of its own: memory store, service, HTTP on loopback."""
    store = MemoryStore(lambda: time.time_ns() // 1_000)
    service = SchedulerService(store, RULES, preempts=True)
    service.start("the test")
    server = serve(service, Config(directory=folder / "data", socket=folder / "data" / "penstock.sock"))
    server.secret = server.token_file.read_text().strip()
    server.service = service
    yield server
    server.stop()
    service.stop()
    store.close()


@pytest.fixture
def client(scheduler):
    with Client(scheduler.url, token=scheduler.secret) as client:
        yield client
