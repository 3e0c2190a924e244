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
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import pytest
from tests.postgres.daemon import CAP, CAPACITY, LEASE_SEC
from tests.postgres.namespaces import SERVER, Hub, Refused, isolated
from tests.postgres_server import PostgresServer
from tests.waiting import until

from penstock.core.errors import StoreFailed
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.states import JobState
from penstock.stores.api import Depth, Submit, committed
from penstock.stores.postgres.store import PostgresStore

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
DAEMON = Path(__file__).with_name("daemon.py")
HOSTS = ("one", "two", "three", "four")
COST = 1
JOB = Intent(addon_id="a", job_type="t", cost_units=COST)
JOBS = 20_000  # in one part
BULK = 1_000
KINDS = ("kill", "cut off", "stop", "restart", "crash")


class Run(NamedTuple):
    job_id: str
    fence: int
    host: str
    begin: float
    end: float


class Journal:
    """What the workers wrote, read as it grows."""

    def __init__(self, path):
        self.path, self._rest, self._at = path, "", 0
        path.touch()
        self.began, self.ended = {}, {}

    def read(self):
        with self.path.open() as file:
            file.seek(self._at)
            *lines, self._rest = (self._rest + file.read()).split("\n")
            self._at = file.tell()
        for line in lines:
            what, job_id, fence, host, pid, moment, lease_ends = line.split()
            if what == "B":
                self.began[job_id, int(fence)] = (host, int(pid), float(moment), float(lease_ends))
            else:
                self.ended[job_id, int(fence)] = float(moment)
        return self


class Daemons:
    """`hub`: each host is a machine of its own on it, and its cable can be pulled."""

    def __init__(self, server, folder, hub=None):
        self.server, self.hub, self.journal = server, hub, Journal(folder / "journal")
        self.processes, self.killed, self.seen = {}, {}, 0

    def start(self, host):
        dsn = (
            self.server.dsn
            if self.hub is None
            else f"postgresql://penstock@{SERVER}:{self.server.port}/penstock"
        )
        command = [sys.executable, str(DAEMON), dsn, "penstock", host, str(self.journal.path)]
        if self.hub is None:
            self.processes[host] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            return
        daemon = self.processes[host] = isolated(["sh", "-c", 'read _; exec "$@"', "sh", *command])
        self.hub.join(HOSTS.index(host) + 1, daemon.pid)
        with daemon.stdin:
            daemon.stdin.write(b"\n")

    def kill(self, host):
        daemon = self.processes.pop(host)
        daemon.kill()
        daemon.wait()
        self.killed[daemon.pid] = monotonic()

    def wait_for(self, more):
        """Until so many runs have ended since the last time, whoever is at work."""
        until(lambda: len(self.journal.read().ended) >= self.seen + more)
        self.seen = len(self.journal.ended)

    def at_work(self):
        """Hosts with a run that has begun and not ended, lately."""
        lately, journal = monotonic() - LEASE_SEC, self.journal.read()
        open_runs = journal.began.keys() - journal.ended.keys()
        found = {journal.began[run][0] for run in open_runs if journal.began[run][2] > lately}
        return found & self.processes.keys()

    def close(self):
        for host in list(self.processes):
            self.kill(host)

    def runs(self):
        """A run without an end was over when its process was killed, or when its lease was."""
        journal = self.journal.read()
        for key, (host, pid, moment, lease_ends) in journal.began.items():
            given_up = min(lease_ends, self.killed.get(pid, lease_ends))
            yield Run(*key, host, moment, journal.ended.get(key, given_up))


@pytest.fixture
def daemons(tmp_path):
    with PostgresServer() as server:
        daemons = Daemons(server, tmp_path)
        yield daemons
        daemons.close()


def disturb(daemons, how, rng):
    """Whoever is at work just now."""
    until(lambda: daemons.at_work())
    host = rng.choice(sorted(daemons.at_work() or HOSTS))
    match how:
        case "kill":
            daemons.kill(host)
            daemons.start(host)
        case "stop":
            os.kill(daemons.processes[host].pid, signal.SIGSTOP)
            sleep(LEASE_SEC * 1.3)
            os.kill(daemons.processes[host].pid, signal.SIGCONT)
        case "cut off":
            daemons.server.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'penstock'"
            )
        case "restart":
            daemons.server.restart(signal.SIGINT)
        case "crash":
            daemons.server.restart(signal.SIGQUIT)
        case "unplug":
            daemons.hub.pull(HOSTS.index(host) + 1)
            sleep(LEASE_SEC * 1.3)
            daemons.hub.plug(HOSTS.index(host) + 1)


def left(store):
    try:
        jobs = store.addons()[0].jobs
    except StoreFailed:
        return -1
    return sum(n for state, n in jobs.items() if state is not JobState.DONE)


@pytest.mark.long
@pytest.mark.parametrize("part", range(max(1, SOAK // 2)))
def test_whatever_happens_to_hosts_and_server_every_job_runs_and_none_beside_itself(daemons, part):
    trouble(daemons, random.Random(11 + part * 100), JOBS, KINDS)


@pytest.mark.long
@pytest.mark.parametrize("part", range(SOAK))
def test_hosts_that_the_network_cuts_off_lose_their_runs_and_nothing_else(tmp_path, part):
    """In the midst of whatever they were doing, with the server's locks in their hands perhaps; and they come back unharmed."""
    try:
        hub = Hub()
    except Refused as why:
        pytest.skip(f"no network namespaces here: {why}")
    with closing(hub), PostgresServer(port=5432, within=hub.within, listen=SERVER) as server:
        daemons = Daemons(server, tmp_path, hub)
        with closing(daemons):
            trouble(daemons, random.Random(12 + part * 100), JOBS // 8, ("unplug",) * 2)


def trouble(daemons, rng, jobs, kinds):
    """Fed while it is disturbed, and each disturbance waits until the one before it has been got over."""
    store, kept = PostgresStore(daemons.server.dsn), set()
    for host in HOSTS:
        daemons.start(host)
    for how in kinds:
        for _ in range(max(1, jobs // len(kinds) // BULK)):
            kept |= feed(store)
        daemons.wait_for(100)
        disturb(daemons, how, rng)
    while len(kept) < jobs:
        kept |= feed(store)
    until(lambda: left(store) == 0, within=120)
    daemons.close()
    runs = sorted(daemons.runs(), key=lambda run: run.begin)

    assert kept <= {run.job_id for run in runs}
    assert [] == overlaps(runs)
    assert [] == excesses(runs)
    assert [] == store.audit()
    assert len(runs) > len(kept)  # some were interrupted, or nothing was tested
    store.close()


def feed(store):
    """Jobs that were acknowledged; what was not may be there or not."""
    try:
        return {receipt.job_id for receipt in committed(store, Submit([JOB] * BULK, Depth()))}
    except StoreFailed:
        return set()


def overlaps(runs):
    before, found = {}, []
    for run in runs:
        last = before.get(run.job_id)
        if last is not None and run.begin < last.end:
            found.append((last, run))
        before[run.job_id] = run
    return found


def excesses(runs):
    """Of a host's units, and of the cap that all hosts share."""
    moments = defaultdict(list)
    for run in runs:
        for where in (run.host, "all hosts"):
            moments[where] += [(run.begin, COST), (run.end, -COST)]
    found = []
    for where, changes in moments.items():
        held, most = 0, CAP if where == "all hosts" else CAPACITY
        for moment, units in sorted(changes):
            held += units
            if held > most:
                found.append((where, moment, held))
    return found
