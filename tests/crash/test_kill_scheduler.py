"""
kill -9, a hundred times at random instants: of the service, of a second process that submits and works, or of both.

The processes write the answers that they get to a journal outside of the database; the database must agree with it.
`make soak` kills two thousand times, in ten parts with a database each, so that several processes can share them.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.crash.fork_server import ForkServer
from tests.waiting import until

apsw = pytest.importorskip("apsw")

from penstock.scheduler.driver import SteadyClock  # noqa: E402 - after importorskip
from penstock.stores.api import Query  # noqa: E402
from penstock.stores.sqlite.store import SqliteStore  # noqa: E402

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
KILLS, PARTS = (100, 1) if SOAK == 1 else (200, SOAK)  # kills in one part
PROGRAM = Path(__file__).with_name("scheduler_program.py")
CAPACITY = 100


@pytest.fixture
def server(tmp_path):
    server = ForkServer(PROGRAM, tmp_path)
    yield server
    server.close()


@pytest.mark.long
@pytest.mark.timeout(600 + KILLS * 3)
@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_is_killed_at_whatever_instant_nothing_accepted_is_lost_or_run_twice_at_once(server, part):
    chance = random.Random(20_240_229 + part)
    service, worker = server.begin("service", 1), server.begin("worker", 2)
    for seed in range(3, 3 + KILLS):
        wait_for(server, chance.randint(0, 1_200), chance.random() * 0.004)
        which = chance.choice(["service", "service", "worker", "both"])
        if which != "worker":
            server.kill(service)
        if which != "service":
            server.kill(worker)
            worker = server.begin("worker", -seed)
        if which != "worker":
            service = server.begin("service", seed)
    server.kill(worker)
    server.kill(service)
    draining = server.begin("draining", 0)
    store = SqliteStore(server.database, SteadyClock())
    try:
        until(lambda: unsettled(store) == 0)
        server.kill(draining)
        check(store, server.lines())
    finally:
        store.close()
    assert apsw.Connection(str(server.database)).pragma("integrity_check") == "ok"


def wait_for(server, more, then):
    """Wait for lines in the journal, not for a time: a slow machine is then killed as deep in its work as a fast one."""
    goal, last = server.written() + more, time.monotonic() + 2
    while server.written() < goal and time.monotonic() < last:
        time.sleep(0.001)
    time.sleep(then)


def unsettled(store):
    return sum(
        n for addon in store.addons() for state, n in addon.jobs.items() if state not in {"DONE", "FAILED"}
    )


def check(store, journal):
    told = {}
    for kind, *words in journal:
        told.setdefault(kind, []).append(words)
    jobs = {job.job_id: job for job in store.find(Query(limit=1_000_000))}

    assert len(told["accepted"]) > KILLS
    assert len(told["runs"]) > KILLS
    assert {job_id for [job_id] in told["accepted"]} <= jobs.keys()
    assert Counter(str(job.state) for job in jobs.values()) == {"DONE": len(jobs)}
    assert store.audit() == []
    replay(store, jobs)
    for dispatch_id, answer in told["ended"]:
        if answer == "DONE":
            attempt = store.dispatch(dispatch_id)
            assert (str(attempt.end), attempt.fence) == ("completed", jobs[attempt.job_id].fence)
    assert max(Counter(dispatch_id for [dispatch_id] in told["runs"]).values()) == 1


def replay(store, jobs):
    """The trail alone: who held what, when. A job is held by one at a time, and never by more than there is room for."""
    held, fences, seq = {}, Counter(), 0
    while events := store.events(seq, 10_000):
        for event in events:
            assert event.seq == seq + 1
            seq, job_id = event.seq, event.job_id
            if event.kind == "DISPATCHING":
                assert job_id not in held, f"{job_id} was dispatched while it was in flight"
                fence = int(event.dispatch_id.rpartition(".")[2])
                assert fence == fences[job_id] + 1
                fences[job_id], held[job_id] = fence, jobs[job_id].intent.cost_units
                assert sum(held.values()) <= CAPACITY
            elif event.kind in {"DONE", "REQUEUED", "FAILED", "CANCELED"}:
                assert held.pop(job_id, None) is not None, f"{job_id} ended without having been dispatched"
    assert held == {}
