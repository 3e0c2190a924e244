"""
kill -9 of the process that runs batches, at random instants around the end of their last jobs: each callback of a
batch becomes ready once, after all jobs of the batch, and is run until one attempt completes.

The process is a program with `penstock.Scheduler`, or the daemon, whose batches are commands. Each job writes a line to
a journal outside of the database when it begins; the database must agree with it. PENSTOCK_SOAK=10 kills ten times as often.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path
from time import sleep

import pytest
from tests.crash.fork_server import ForkServer
from tests.daemon import Daemon
from tests.waiting import until

pytest.importorskip("apsw")

from penstock.client.client import job_of
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.types import CALLBACK_TAG
from penstock.scheduler.driver import SteadyClock
from penstock.stores.api import Query
from penstock.stores.sqlite.store import SqliteStore

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
PROGRAM = Path(__file__).with_name("batch_program.py")
SIZE = 3
#: How an attempt ends that its process did not survive.
LOST = {"scheduler_restarted", "lease_expired", "worker_crashed", "host_lost"}


class Journal:
    """What the jobs wrote: the kind of the job, its batch, and its dispatch id."""

    def __init__(self, path):
        self.path = path
        path.touch()

    def lines(self):
        return [tuple(line.split()) for line in self.path.read_text().splitlines()]

    def complete(self):
        """The batches of which every job has begun."""
        begun = {
            (name, dispatch.rpartition(".")[0]) for kind, name, dispatch in self.lines() if kind == "member"
        }
        return {name for name, count in Counter(name for name, _ in begun).items() if count == SIZE}

    def between(self):
        """The batches of which every job has begun, and `on_end` has not."""
        return self.complete() - {name for kind, name, _ in self.lines() if kind == "on_end"}


@pytest.mark.long
@pytest.mark.timeout(600 + 30 * SOAK)
def test_a_killed_program_loses_no_callback_and_runs_none_twice(tmp_path):
    chance, kills, hits = random.Random(19), 20 * SOAK, 0
    with closing(ForkServer(PROGRAM, tmp_path)) as server:
        journal = Journal(server.journal)
        for seed in range(kills):
            before, pid = journal.complete(), server.begin("submitting", seed)
            until(lambda before=before: journal.complete() - before)
            sleep(chance.random() * 0.01)  # a random instant for the kill, and nothing that is waited for
            server.kill(pid)
            hits += bool(journal.between())
        pid = server.begin("draining", 0)
        with closing(SqliteStore(server.database, SteadyClock())) as store:
            until(lambda: not unsettled(store.count(Query())))
            server.kill(pid)
            check(store, journal, {name for kind, name, _ in journal.lines() if kind == "accepted"})
            assert len(store.batches(1_000_000)) >= kills
    assert hits > 0


@pytest.mark.long
@pytest.mark.timeout(600 + 60 * SOAK)
def test_a_killed_daemon_loses_no_callback_and_runs_none_twice(tmp_path):
    chance, kills, hits = random.Random(20), 3 * SOAK, 0
    journal, daemon = Journal(tmp_path / "journal"), Daemon(tmp_path).start()
    accepted = set()
    with closing(daemon):
        for number in range(kills):
            before = journal.complete()
            for at in range(4):
                name = f"{chance.choice(['failing', 'well'])}-{number}-{at}"
                submit(daemon.client, journal.path, name)
                accepted.add(name)
            until(lambda before=before: journal.complete() - before)
            sleep(chance.random() * 0.03)  # a random instant for the kill, and nothing that is waited for
            daemon.end(signal.SIGKILL)
            hits += bool(journal.between())
            daemon.start()
        until(lambda: not unsettled(daemon.client.count()))
    with closing(SqliteStore(daemon.data / "jobs.db", SteadyClock())) as store:
        check(store, journal, accepted)
    assert hits > 0


def submit(client, journal, name):
    def job(kind, code=0):
        script = f'echo {kind} {name} "$PENSTOCK_DISPATCH_ID" >> {journal}; exit {code}'
        return job_of("a", "penstock.shell", {"script": script}, cost_units=5)

    members = [job("member", code=int("failing" in name and at == 1)) for at in range(SIZE)]
    client.submit_batch(name, "a", members, on_end=job("on_end"), on_failure=job("on_failure"))


def unsettled(counts):
    return sum(n for state, n in counts.items() if state not in {"DONE", "FAILED", "CANCELED"})


def check(store, journal, accepted):
    lines = journal.lines()
    assert max(Counter(line for line in lines if line[0] != "accepted").values()) == 1
    events = store.events(0, 1_000_000)
    ready = Counter(event.job_id for event in events if event.kind is EventKind.READY)
    ended = Counter(event.data["batch"] for event in events if event.kind is EventKind.BATCH_ENDED)
    assert store.audit() == []
    batches = store.batches(1_000_000)
    assert accepted <= {batch.name for batch in batches}
    for batch in batches:
        name, fails = batch.name, batch.name.startswith("failing")
        assert (batch.state, batch.total, batch.live) == ("FAILED" if fails else "DONE", SIZE, 0)
        assert ended[name] == 1
        on_end, on_failure = store.find(Query(tag=f"{CALLBACK_TAG}{name}", limit=10))
        begun = [
            [d for kind, batch, d in lines if (kind, batch) == (k, name)] for k in ("on_end", "on_failure")
        ]
        check_callback(store, on_end, begun[0], ready)
        if fails:
            check_callback(store, on_failure, begun[1], ready)
        else:
            assert (on_failure.state, begun[1], ready[on_failure.job_id]) == ("CANCELED", [], 0)
        order = [kind for kind, batch, _ in lines if batch == name and kind in ("member", "on_end")]
        assert order == sorted(order, key=["member", "on_end"].index), name


def check_callback(store, job, begun, ready):
    """One attempt completed; those before it were lost with their process."""
    attempts = store.attempts(job.job_id)
    assert (job.state, ready[job.job_id]) == ("DONE", 1)
    *lost, last = [str(attempt.end) for attempt in attempts]
    assert last == "completed"
    assert set(lost) <= LOST
    assert attempts[-1].dispatch_id in begun
    assert set(begun) <= {attempt.dispatch_id for attempt in attempts}
