"""
Four schedulers on one database, killed, stopped past their leases, cut off, with the server restarted under them: nothing is lost,
nothing runs twice at once by an outside journal, no host holds more than its capacity, and in the end everything is done.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import pytest
from tests.postgres.daemon import CAPACITY, LEASE_SEC

from penstock.core.intent import Intent
from penstock.core.refusals import StoreFailed
from penstock.core.states import State
from penstock.stores.postgres import PostgresStore
from penstock.stores.protocol import Depth
from penstock.testing.postgres import PostgresServer

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
DAEMON = Path(__file__).with_name("daemon.py")
HOSTS = ("one", "two", "three", "four")
COST = 2
JOB = Intent(addon_id="a", job_type="t", cost_units=COST)
BATCH = 300
KINDS = ("kill", "cut off", "stop", "restart", "crash")


class Run(NamedTuple):
    job_id: str
    fence: int
    host: str
    begin: float
    end: float


class Yard:
    def __init__(self, server, folder):
        self.server, self.journal = server, folder / "journal"
        self.journal.touch()
        self.daemons, self.killed, self.seen = {}, {}, 0

    def start(self, host):
        command = [sys.executable, DAEMON, self.server.dsn, "penstock", host, self.journal]
        self.daemons[host] = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def kill(self, host):
        daemon = self.daemons.pop(host)
        daemon.kill()
        daemon.wait()
        self.killed[daemon.pid] = monotonic()

    def wait_for(self, more):
        """Until so many runs have ended since the last time, whoever is at work."""
        wait_until(lambda: self.journal.read_text().count("\nE ") >= self.seen + more)
        self.seen = self.journal.read_text().count("\nE ")

    def at_work(self):
        """Hosts with a run that has begun and not ended."""
        open_runs = {}
        for line in self.journal.read_text().splitlines():
            what, job_id, fence, host, *_ = line.split()
            if what == "B":
                open_runs[job_id, fence] = host
            else:
                open_runs.pop((job_id, fence), None)
        return {host for host in open_runs.values() if host in self.daemons}

    def close(self):
        for host in list(self.daemons):
            self.kill(host)

    def runs(self):
        """A run without an end was over when its process was killed, or when its lease was."""
        began, ended = {}, {}
        for line in self.journal.read_text().splitlines():
            what, job_id, fence, host, pid, moment, until = line.split()
            if what == "B":
                given_up = min(float(until), self.killed.get(int(pid), float(until)))
                began[job_id, int(fence)] = (host, float(moment), given_up)
            else:
                ended[job_id, int(fence)] = float(moment)
        for key, (host, moment, given_up) in began.items():
            yield Run(*key, host, moment, ended.get(key, given_up))


@pytest.fixture
def yard(tmp_path):
    with PostgresServer() as server:
        yard = Yard(server, tmp_path)
        yield yard
        yard.close()


def disturb(yard, how, rng):
    """Whoever is at work just now."""
    wait_until(lambda: yard.at_work())
    host = rng.choice(sorted(yard.at_work() or HOSTS))
    match how:
        case "kill":
            yard.kill(host)
            yard.start(host)
        case "stop":
            os.kill(yard.daemons[host].pid, signal.SIGSTOP)
            sleep(LEASE_SEC * 1.3)
            os.kill(yard.daemons[host].pid, signal.SIGCONT)
        case "cut off":
            yard.server.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'penstock'"
            )
        case "restart":
            yard.server.restart(signal.SIGINT)
        case "crash":
            yard.server.restart(signal.SIGQUIT)


def left(store):
    try:
        jobs = store.addons()[0].jobs
    except StoreFailed:
        return -1
    return sum(n for state, n in jobs.items() if state is not State.DONE)


def test_whatever_happens_to_hosts_and_server_every_job_runs_and_none_beside_itself(yard):
    """Fed while it is disturbed, and each disturbance waits until the one before it has been got over."""
    rng, store, kept = random.Random(11), PostgresStore(yard.server.dsn), set()
    for host in HOSTS:
        yard.start(host)
    for how in (*KINDS, *rng.choices(KINDS, k=len(KINDS) * (SOAK - 1))):
        kept |= feed(store)
        yard.wait_for(100)
        disturb(yard, how, rng)
    wait_until(lambda: left(store) == 0)
    yard.close()
    runs = sorted(yard.runs(), key=lambda run: run.begin)

    assert kept <= {run.job_id for run in runs}
    assert [] == overlaps(runs)
    assert [] == excesses(runs)
    assert [] == store.audit()
    assert len(runs) > len(kept)  # some were interrupted, or nothing was tested
    store.close()


def feed(store):
    """Jobs that were acknowledged; what was not may be there or not."""
    try:
        return {receipt.job_id for receipt in store.submit([JOB] * BATCH, Depth())}
    except StoreFailed:
        return set()


def wait_until(true, seconds=120):
    until = monotonic() + seconds
    while not true():
        assert monotonic() < until
        sleep(0.05)


def overlaps(runs):
    before, found = {}, []
    for run in runs:
        last = before.get(run.job_id)
        if last is not None and run.begin < last.end:
            found.append((last, run))
        before[run.job_id] = run
    return found


def excesses(runs):
    moments = defaultdict(list)
    for run in runs:
        moments[run.host] += [(run.begin, COST), (run.end, -COST)]
    found = []
    for host, changes in moments.items():
        held = 0
        for moment, units in sorted(changes):
            held += units
            if held > CAPACITY:
                found.append((host, moment, held))
    return found
