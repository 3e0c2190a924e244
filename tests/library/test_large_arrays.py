"""An array of 100,000 indices on a file: what it costs, and how soon it can be stopped. In real time, so `make soak` runs it."""

from __future__ import annotations

import os
import resource
import sys
import time
from statistics import median

import pytest
from tests.waiting import until

import penstock
from penstock.core.jobs.states import JobState

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
pytestmark = pytest.mark.skipif(SOAK == 1, reason="in real time: make soak runs it")
SIZE = 100_000


@pytest.fixture
def file(tmp_path):
    return tmp_path / "jobs.db"


def scheduler_on(file):
    return penstock.Scheduler(str(file), capacity=100)


def report(line):
    sys.stdout.write(f"\n{line}")


def size_of(file):
    return sum(path.stat().st_size for path in file.parent.glob("jobs.db*"))


def test_all_of_100000_indices_are_canceled_within_two_seconds(file, capsys):
    scheduler = scheduler_on(file)

    @scheduler.job(cost=1)
    def nothing() -> None:
        pass

    empty = size_of(file) if file.exists() else 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    array = nothing.enqueue_array(range(SIZE), at_once=8)
    grown, memory = size_of(file) - empty, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    began = time.monotonic()
    state = array.cancel()
    took = time.monotonic() - began

    with capsys.disabled():
        report(f"file +{grown / 1024:.0f} KiB, memory +{memory / 1024:.1f} MiB, cancel {took:.3f} s")
    assert (state, array.record.progress.canceled) == (JobState.CANCELED, SIZE)
    assert took < 2
    assert grown < 2_000_000
    scheduler.close()


def test_an_array_runs_about_as_fast_as_plain_jobs(file, capsys):
    """In turns, by the processor time of this program: other programs on the machine disturb it less than the clock."""
    jobs, turns = 5_000, 5
    costs = {"plain jobs": [], "an array": [], "an array, 8 at once": []}
    with scheduler_on(file) as scheduler:

        @scheduler.job(cost=1)
        def nothing() -> None:
            pass

        def done(expected):
            return lambda: scheduler.counts()[JobState.DONE] == expected

        def run(kind, expected):
            if kind == "plain jobs":
                for _ in range(jobs // 1_000):
                    nothing.enqueue_many([()] * 1_000)
            else:
                nothing.enqueue_array(range(jobs), at_once=8 if kind.endswith("once") else None)
            until(done(expected), within=600)

        expected = 0
        for _ in range(turns):
            for kind, spent in costs.items():
                expected += jobs
                began = time.process_time(), time.monotonic()
                run(kind, expected)
                spent.append(((time.process_time() - began[0]) / jobs, (time.monotonic() - began[1]) / jobs))
    cpu, wall = ({kind: median(each[i] for each in spent) for kind, spent in costs.items()} for i in (0, 1))
    with capsys.disabled():
        for kind in costs:
            report(
                f"{kind}: {cpu[kind] * 1e6:.0f} us of processor time a job, {1 / wall[kind]:,.0f} jobs a second"
            )
    assert cpu["an array"] < 1.5 * cpu["plain jobs"]
