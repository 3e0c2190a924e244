"""
Jobs after other jobs, on a SQLite file in a temporary folder: a chain of 100, a fan of 1,000 with a join, and what a waiting
family costs plain jobs. Our own figures only.

    python -m bench.job_families
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import penstock

CHAIN, FAN, PLAIN = 100, 1_000, 5_000


def main() -> None:
    load = os.getloadavg()[0]
    print(f"load average {load:.1f} on {os.cpu_count()} cores")
    for name, measure in (
        ("chain of 100", chain),
        ("fan of 1,000 with a join", fan),
        ("5,000 plain jobs", plain),
    ):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name:26} {measure(Path(folder))}")
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'5,000 plain jobs, 5,000 wait':26} {plain(Path(folder), waiting=5_000)}")


def opened(folder: Path) -> tuple[penstock.Scheduler, Any]:
    scheduler = penstock.Scheduler(folder / "jobs.db", workers=4)

    @scheduler.job(cost=1, run_when="any")
    def nothing() -> None: ...

    return scheduler, nothing


def chain(folder: Path) -> str:
    scheduler, nothing = opened(folder)
    last = nothing.enqueue()
    for _ in range(CHAIN - 1):
        last = nothing.options(after=[last]).enqueue()
    began = time.perf_counter()
    with scheduler:
        last.result(timeout=300)
        took = time.perf_counter() - began
    return f"{took * 1_000 / CHAIN:.2f} ms a step, {CHAIN / took:.0f} jobs/s"


def fan(folder: Path) -> str:
    scheduler, nothing = opened(folder)
    began = time.perf_counter()
    first = nothing.enqueue()
    jobs = nothing.options(after=[first]).enqueue_many([()] * FAN)
    join = nothing.options(after=jobs).enqueue()
    submitted = time.perf_counter() - began
    began = time.perf_counter()
    with scheduler:
        join.result(timeout=300)
        took = time.perf_counter() - began
    return f"{(FAN + 2) / took:.0f} jobs/s, submitted in {submitted * 1_000:.0f} ms"


def plain(folder: Path, waiting: int = 0) -> str:
    scheduler, nothing = opened(folder)
    if waiting:
        [parent] = nothing.options(not_before=3_600).enqueue_many([()])
        nothing.options(after=[parent]).enqueue_many([()] * waiting)
    *_, last = nothing.enqueue_many([()] * PLAIN)
    began = time.perf_counter()
    with scheduler:
        last.result(timeout=300)
        took = time.perf_counter() - began
    return f"{PLAIN / took:.0f} jobs/s"


if __name__ == "__main__":
    main()
