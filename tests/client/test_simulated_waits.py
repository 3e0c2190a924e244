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
from penstock.cli.db import opened
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
pytestmark = pytest.mark.skipif(SOAK == 1, reason="in real time: make soak runs it")

JOBS = 60


def share_within_a_second_or_a_fifth(place, units, add_runner, *, by_job=True):
    """Of the waits, each job's with its own; or, where real ends let two jobs swap places, in order of length."""
    with opened(str(place)) as store:
        load, hosts, changes, _ = recorded(store)
        waited = {e.job_id: e.data["waited"] for e in feed(store) if e.kind is EventKind.RUNNING}
        jobs = sorted(store.find(Query(limit=1_000)), key=lambda job: (job.created_at, job.no))
    hosts = [add_runner(host) for host in hosts]
    played = play(load, SchedulerRules(capacity=Capacity(fixed=units)), hosts=hosts, changes=changes)

    pairs = [(waited[job.job_id], played.wait(number)) for number, job in enumerate(jobs)]
    assert len(pairs) > 20
    assert all(played_wait is not None for _, played_wait in pairs)
    if not by_job:
        pairs = list(zip(*map(sorted, zip(*pairs, strict=True)), strict=True))
    return sum(abs(a - b) <= max(SECOND, a // 5) for a, b in pairs) / len(pairs)


def test_the_waits_of_the_runner_and_of_sdk_workers_are_spread_as_simulate_plays_them(daemon, workers):
    host, random = daemon("capacity.units=20", "preemption.threshold=none"), Random(1)
    workers.start(host, "--concurrency=4", addon="photos")
    [first] = host.client.submit_many([job_of("photos", "sleep", {"seconds": 0}, cost_units=1)])
    until(lambda: host.client.job(first.job_id).state == "DONE")
    jobs = []
    for _ in range(JOBS):
        length, more = random.choice([1, 2, 4]), {"cost_units": random.choice([2, 5, 8]), "run_when": "any"}
        if random.random() < 0.5:
            jobs.append(job_of("photos", "sleep", {"seconds": length}, **more))
        else:
            jobs.append(job_of("cli", "penstock.shell", {"script": f"sleep {length}"}, **more))
    ids = [receipt.job_id for receipt in host.client.submit_many(jobs)]
    until(lambda: all(host.client.job(job_id).state == "DONE" for job_id in ids), within=600)
    host.end()

    def add_runner(played):
        return with_runner(played, 64, 4)

    assert share_within_a_second_or_a_fifth(host.data / "jobs.db", 20, add_runner, by_job=False) >= 0.95


def test_the_waits_of_an_embedded_program_are_those_that_simulate_plays(tmp_path):
    scheduler = penstock.Scheduler(str(tmp_path / "jobs.db"), capacity=20, workers=4)

    @scheduler.job(cost=5)
    def nap(seconds: float) -> None:
        time.sleep(seconds)

    with scheduler:
        for handle in [nap.enqueue(length) for length in (1, 2, 3) * 8]:
            handle.result(timeout=300)
    scheduler.close()

    assert share_within_a_second_or_a_fifth(tmp_path / "jobs.db", 20, lambda host: host) >= 0.95
