"""
One host of several: a scheduler, and two workers that write each run into a journal that nobody's database knows of.

    python daemon.py DSN SCHEMA HOST JOURNAL

`B` before a run's work and `E` after it, with the host, the process, the moment by the machine's monotonic clock, which all processes
share, and until when the lease holds for certain. After that a worker writes nothing: it has lost the right to work, whatever it was
doing while it was stopped.
"""

from __future__ import annotations

import os
import sys
import time
from threading import Thread

from penstock.core.errors import Unavailable
from penstock.core.jobs.admission import AdmissionLimits, Caps
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import MILLISECOND, SECOND
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.job_service import EndReport, GrantedJob
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.postgres.store import PostgresStore

LEASE_SEC = 3.0
WORK_SEC = 0.05
CAPACITY = 100
#: Of the one addon, on all hosts together.
CAP = 150


def main(dsn: str, schema: str, host: str, journal: str) -> None:
    rules = SchedulerRules(
        host=host,
        capacity=Capacity(fixed=CAPACITY),
        limits=AdmissionLimits(Caps(per_addon=CAP)),
        schedules=Schedules(crash=(100 * MILLISECOND,) * 50, start=(100 * MILLISECOND,)),
        lease_for=int(LEASE_SEC * SECOND),
        reserve_for=int(LEASE_SEC * SECOND),
        tick=200 * MILLISECOND,
        prune_every=1 * SECOND,
    )
    service = SchedulerService(PostgresStore(dsn, schema=schema), rules, reserves=False)
    while True:
        try:
            service.start(host)
            break
        except Unavailable:
            time.sleep(0.1)
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    workers = [Thread(target=work, args=(service, host, out)) for _ in range(2)]
    for worker in workers:
        worker.start()


def work(service: SchedulerService, host: str, out: int) -> None:
    while True:
        asked = time.monotonic()
        try:
            claimed = service.job_service.claim(WorkerKinds(), CAPACITY // 2)
            if not claimed:
                time.sleep(0.02)
            elif write(out, "B", claimed, host, asked):
                time.sleep(WORK_SEC)
                if write(out, "E", claimed, host, asked):
                    service.job_service.end_many([EndReport(c.dispatch.dispatch_id) for c in claimed])
        except Unavailable:
            time.sleep(0.05)


def write(out: int, what: str, claimed: list[GrantedJob], host: str, asked: float) -> bool:
    """A lease counts from the moment it was asked for, the only one that is certainly before it was granted."""
    moment, until = time.monotonic(), asked + LEASE_SEC
    if moment < until:
        names = [f"{c.job.job_id} {c.dispatch.fence}" for c in claimed]
        os.write(
            out, "".join(f"{what} {name} {host} {os.getpid()} {moment} {until}\n" for name in names).encode()
        )
    return moment < until


if __name__ == "__main__":
    main(*sys.argv[1:])
