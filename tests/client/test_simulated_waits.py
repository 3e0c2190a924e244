"""
simulate against real runs, in real time: `make soak` alone runs these. That the player agrees with the real
dispatcher on the virtual clock is in tests/scheduler/test_playing.py.
"""

from __future__ import annotations

import os
import time
from random import Random

import pytest
from tests.waiting import until

import penstock
from penstock.cli.db import opened_store
from penstock.client.client import job_of
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import SECOND
from penstock.scheduler.job_service import feed
from penstock.scheduler.rules import SchedulerRules
from penstock.simulation import play, recorded
from penstock.simulation.recorded import with_runner
from penstock.stores.api import Query

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
pytestmark = [
    pytest.mark.skipif(SOAK == 1, reason="in real time: make soak runs it"),
    pytest.mark.timeout(900),
]

JOBS = 80
UNITS = 20


def share_within_a_second_or_a_fifth(place, functions=4):
    """Of the waits, each job's with its own. `functions`: how many the runner runs at once."""
    with opened_store(str(place)) as store:
        load, hosts, changes, _ = recorded(store)
        waited = {e.job_id: e.data["waited"] for e in feed(store) if e.kind is EventKind.RUNNING}
        jobs = sorted(store.find(Query(limit=1_000)), key=lambda job: (job.created_at, job.no))
    # An embedded program has no runner.
    hosts = [with_runner(host, 64, functions) if host.reserves else host for host in hosts]
    played = play(load, SchedulerRules(capacity=Capacity(fixed=UNITS)), hosts=hosts, changes=changes)

    # The probe waited for the start of its worker, which no trail has.
    numbered = [(number, job) for number, job in enumerate(jobs) if job.intent.cost_units > 1]
    pairs = [(waited[job.job_id], played.wait(number)) for number, job in numbered]
    assert len(pairs) > 20
    assert sum(real > SECOND for real, _ in pairs) > 10
    assert all(played_wait is not None for _, played_wait in pairs)
    return sum(abs(a - b) <= max(SECOND, a // 5) for a, b in pairs) / len(pairs)


@pytest.fixture
def server():
    """A PostgreSQL server with nothing in it."""
    pytest.importorskip("psycopg")
    from tests.postgres_server import PostgresServer, find_binaries

    if find_binaries() is None:
        pytest.skip("no PostgreSQL here")
    with PostgresServer() as server:
        yield server


def await_worker(client):
    [probe] = client.submit_many([job_of("photos", "sleep", {"seconds": 0}, cost_units=1)])
    until(lambda: client.job(probe.job_id).state == "DONE")


def run_jobs(client, kinds, hosts=1):
    """
    Four times a load of 0.8, until the last job has ended: when two workers swap places by chance, the later starts
    follow from it until the queue is empty. `kinds`: functions that submit a job of some length and cost.
    """
    for seed in (13, 21, 22, 23):
        random, ids = Random(seed), []
        for _ in range(JOBS):
            length, cost = round(random.lognormvariate(0.5, 0.7), 2), random.choice([2, 5, 8])
            ids.append(random.choice(kinds)(length, cost))
            time.sleep(random.expovariate(1.5 * hosts))
        until(lambda ids=ids: all(client.job(job_id).state == "DONE" for job_id in ids), within=600)


def of_client(client):
    def submit(addon, job_type, payload, cost):
        return client.submit(addon, job_type, payload, cost_units=cost, run_when="any").job_id

    return (
        lambda length, cost: submit("photos", "sleep", {"seconds": length}, cost),
        lambda length, cost: submit("cli", "penstock.shell", {"script": f"sleep {length}"}, cost),
        lambda length, cost: submit(
            "fn", "penstock.function", {"function": "time:sleep", "args": [length]}, cost
        ),
    )


def test_the_waits_of_commands_functions_and_sdk_workers_are_those_that_simulate_plays(daemon, workers):
    flags = ("preemption.threshold=none", "runner.workers=3", "runner.functions=time:sleep")
    host = daemon(f"capacity.units={UNITS}", *flags)
    workers.start(host, "--concurrency=4", addon="photos")
    await_worker(host.client)
    run_jobs(host.client, of_client(host.client))
    host.end()

    assert share_within_a_second_or_a_fifth(host.data / "jobs.db", functions=3) >= 0.95


def test_the_waits_on_two_hosts_with_three_kinds_of_workers_are_those_that_simulate_plays(
    daemon, workers, server
):
    place = server.dsn
    host = daemon(f"capacity.units={UNITS}", f"database={place}", "preemption.threshold=none")
    workers.start(host, "--concurrency=4", addon="photos")
    await_worker(host.client)
    # The label keeps the daemon from reserving such jobs for a worker of its own.
    scheduler = penstock.Scheduler(place, capacity=UNITS, workers=4, labels=("app",))

    @scheduler.job(labels=("app",))
    def nap(seconds: float) -> None:
        time.sleep(seconds)

    with scheduler:
        photos, commands, _ = of_client(host.client)
        embedded = lambda length, cost: nap.options(cost=cost).enqueue(length).id  # noqa: E731
        run_jobs(host.client, [photos, commands, embedded, embedded], hosts=2)
    scheduler.close()
    host.end()

    assert share_within_a_second_or_a_fifth(place) >= 0.95


def test_the_waits_of_an_embedded_program_are_those_that_simulate_plays(tmp_path):
    scheduler = penstock.Scheduler(str(tmp_path / "jobs.db"), capacity=UNITS, workers=4)

    @scheduler.job(cost=5)
    def nap(seconds: float) -> None:
        time.sleep(seconds)

    with scheduler:
        for handle in [nap.enqueue(length) for length in (1, 2, 3) * 8]:
            handle.result(timeout=300)
    scheduler.close()

    assert share_within_a_second_or_a_fifth(tmp_path / "jobs.db") >= 0.95
