"""
A server that crashes again and again under three daemons: no acknowledged job is lost, and none runs beside itself. The judge is a journal that
the jobs themselves write.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.postgres_server import PostgresServer
from tests.waiting import until

from penstock.core.errors import StoreFailed
from penstock.core.jobs.states import JobState
from penstock.stores.postgres.store import PostgresStore

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
HOST = Path(__file__).with_name("crash_host.py")
HOSTS = ("one", "two", "three")
#: Of one part. There are two parts, and PENSTOCK_SOAK times as many.
CRASHES = 10


class Run(NamedTuple):
    name: str
    job_id: str
    fence: str
    begin: float
    end: float


class Journal:
    """What the hosts wrote, read as it grows."""

    def __init__(self, path):
        path.touch()
        self.path, self._rest, self._at = path, "", 0
        self.ready, self.stopped, self.acknowledged = set(), set(), set()
        self._runs, self.ended = {}, 0

    def read(self):
        with self.path.open() as file:
            file.seek(self._at)
            *lines, self._rest = (self._rest + file.read()).split("\n")
            self._at = file.tell()
        for line in lines:
            what, name, *rest = line.split()
            if what in "HS":
                (self.ready if what == "H" else self.stopped).add(name)
                continue
            if what == "A":
                self.acknowledged.add(name)
                continue
            job_id, fence, moment, lease_ends = rest
            begin = self._runs[name].begin if name in self._runs else float(moment)
            self.ended += what == "E"
            # A run without an end was over when its lease was.
            self._runs[name] = Run(name, job_id, fence, begin, float(moment if what == "E" else lease_ends))
        return self

    def wait_for(self, more):
        """Until so many more jobs were acknowledged, and so many ended."""
        acknowledged, ended = len(self.read().acknowledged) + more, self.ended + more
        until(lambda: len(self.read().acknowledged) >= acknowledged and self.ended >= ended)

    @property
    def runs(self):
        return sorted(self._runs.values(), key=lambda run: run.begin)


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal")


@pytest.fixture
def server(journal):
    """With three hosts at work on it."""
    with PostgresServer(fsync=True) as server, ExitStack() as hosts:
        PostgresStore(server.dsn).close()
        processes = []
        for host in HOSTS:
            command = [sys.executable, str(HOST), server.dsn, host, str(journal.path)]
            with journal.path.with_name(host).open("wb") as log:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log)
            hosts.callback(process.wait)
            hosts.callback(process.kill)
            hosts.callback(process.stdin.close)
            processes.append(process)
        server.hosts = processes
        until(lambda: set(HOSTS) == journal.read().ready)
        yield server


def unfinished(store):
    try:
        return sum(
            n for addon in store.addons() for state, n in addon.jobs.items() if state is not JobState.DONE
        )
    except StoreFailed:
        return -1


def overlaps(runs):
    last, found = {}, []
    for run in runs:
        before = last.get(run.job_id)
        if before is not None and run.begin < before.end:
            found.append((before, run))
        last[run.job_id] = run
    return found


@pytest.mark.long
@pytest.mark.parametrize("part", range(2 * SOAK))
def test_a_server_that_crashes_loses_no_acknowledged_job_and_none_runs_beside_itself(server, journal, part):
    rng = random.Random(16 + part)
    for _ in range(CRASHES):
        journal.wait_for(rng.randint(1, 100))
        server.restart(signal.SIGQUIT)
    for host in server.hosts:
        host.stdin.close()
    store = PostgresStore(server.dsn)
    until(lambda: set(HOSTS) == journal.read().stopped)
    until(lambda: unfinished(store) == 0)
    runs = journal.read().runs

    print(f"{CRASHES} crashes, {len(journal.acknowledged)} acknowledged, {len(runs)} runs")  # noqa: T201  # for `-s`
    assert [None] * len(HOSTS) == [host.poll() for host in server.hosts], (
        f"see the logs beside {journal.path}"
    )
    assert set() == journal.acknowledged - {run.job_id for run in runs}
    assert [] == overlaps(runs)
    assert [] == store.audit()
    store.close()
