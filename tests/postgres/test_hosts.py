"""Processes that share a database: capacity of a host, and a cap over all hosts, with nobody to lead them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import JobState
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Depth, Submit, committed

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
CLAIMER = Path(__file__).with_name("claimer.py")


def claimers(place, hosts, capacity, cap):
    started = [
        subprocess.Popen(
            [sys.executable, CLAIMER, place.dsn, place.schema, host, str(capacity), str(cap)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in hosts
    ]
    for process in started:
        process.stdout.readline()
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate(timeout=100)[0]) for process in started]
    assert [0] * len(started) == [process.returncode for process in started]
    return answers


@pytest.mark.parametrize(
    ("hosts", "capacity", "cap"),
    [
        (["one"] * 4, 5, 100),  # one host's capacity, claimed from by four processes
        (["one", "two", "three", "four"], 100, 5),  # one cap over four hosts
    ],
)
def test_four_processes_never_take_more_than_there_is_and_nothing_twice(
    opened, postgres_emptied, hosts, capacity, cap
):
    store = opened()
    jobs = 150 * SOAK
    committed(store, Submit([Intent(addon_id="a", job_type="t", cost_units=1)] * jobs, Depth()))
    answers = claimers(postgres_emptied.place, hosts, capacity, cap)

    assert [] == [breach for answer in answers for breach in answer["excess"]]
    done = [job_id for answer in answers for job_id in answer["done"]]
    assert jobs == len(done) == len(set(done))
    assert jobs == store.addons()[0].jobs[JobState.DONE]


def test_a_worker_takes_up_what_is_reserved_on_its_own_host_and_not_on_another(opened):
    houses = [
        SchedulerService(opened(), SchedulerRules(host=host, capacity=Capacity(fixed=30)))
        for host in ("one", "two")
    ]
    [receipt] = houses[0].job_service.submit([Intent(addon_id="a", job_type="t", cost_units=20)])
    houses[0].dispatcher.step(houses[0].store.now())

    assert [] == houses[1].job_service.claim(WorkerKinds())
    assert [receipt.job_id] == [claimed.job.job_id for claimed in houses[0].job_service.claim(WorkerKinds())]
