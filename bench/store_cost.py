"""
What a job costs the SQLite store: `python -m bench.store_cost [queued ...]`, by default with 1,000 and 100,000 queued.

Claim to completion of jobs that do nothing, in one program and without a runner, and submits one by one, in bulk and from eight processes at
once. All of it durable (`synchronous=FULL`) and with the whole audit trail. Time on a shared machine says little, so CPU is printed beside it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import AddonId
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.job_service import EndReport
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Depth, Submit, committed
from penstock.stores.sqlite.store import SqliteStore

BATCH = 100
PROCESSES = 8
JOB = Intent(addon_id=AddonId("bench"), job_type="noop", cost_units=1)


def main(depths: list[int]) -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for depth in depths:
            store = SqliteStore(Path(folder) / f"{depth}.db", SteadyClock())
            fill(store, depth + 20_000)
            print(f"{depth:,} queued")
            claim_and_complete(store, 10_000)
            exchange(store, 10_000)
            submit_one_by_one(store, 1_000)
            submit_in_bulk(store, 20_000)
            store.close()
            submit_from_processes(Path(folder) / f"{depth}.db", 500)


def fill(store: SqliteStore, jobs: int) -> None:
    for first in range(0, jobs, 5_000):
        committed(store, Submit([JOB] * min(5_000, jobs - first), Depth()))


@contextmanager
def measured(what: str, jobs: int) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"  {what:<34} {jobs / wall:>9,.0f} jobs/s {1e6 * cpu / jobs:>8.1f} us of CPU a job", flush=True)


def claim_and_complete(store: SqliteStore, jobs: int) -> None:
    job_service = SchedulerService(
        store, SchedulerRules(capacity=Capacity(fixed=100), depth=Depth())
    ).job_service
    with measured(f"claim and complete, {BATCH} at a time", jobs):
        left = jobs
        while left > 0:
            claimed = job_service.claim(WorkerKinds(), BATCH)
            job_service.end_many([EndReport(item.dispatch.dispatch_id) for item in claimed])
            left -= len(claimed)


def exchange(store: SqliteStore, jobs: int) -> None:
    job_service, done = (
        SchedulerService(store, SchedulerRules(capacity=Capacity(fixed=100), depth=Depth())).job_service,
        list[EndReport](),
    )
    with measured(f"exchange, {BATCH} at a time", jobs):
        left = jobs
        while left > 0:
            _, claimed = job_service.exchange(done, WorkerKinds(), BATCH)
            done = [EndReport(item.dispatch.dispatch_id) for item in claimed]
            left -= len(claimed)
        job_service.end_many(done)


def submit_one_by_one(store: SqliteStore, jobs: int) -> None:
    with measured("submit, one by one", jobs):
        for _ in range(jobs):
            committed(store, Submit([JOB], Depth()))


def submit_in_bulk(store: SqliteStore, jobs: int) -> None:
    with measured("submit, 1,000 at a time", jobs):
        for _ in range(0, jobs, 1_000):
            committed(store, Submit([JOB] * 1_000, Depth()))


def submit_from_processes(path: Path, jobs: int) -> None:
    """Each waits for its own answer before it submits the next; measured from the moment all are ready."""
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.store_cost", "submitter", str(path), str(jobs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(PROCESSES)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    wall = time.perf_counter()
    for child in children:
        child.communicate(b"go\n")
    wall = time.perf_counter() - wall
    print(f"  {f'submit, {PROCESSES} processes':<34} {PROCESSES * jobs / wall:>9,.0f} jobs/s", flush=True)


def submitter(path: str, jobs: int) -> None:
    store = SqliteStore(path, SteadyClock())
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(jobs):
        committed(store, Submit([JOB], Depth()))
    store.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["submitter"]:
        submitter(sys.argv[2], int(sys.argv[3]))
    else:
        main([int(word) for word in sys.argv[1:]] or [1_000, 100_000])
