"""
One host of three on a database whose server crashes: a scheduler, threads that submit, and threads that run jobs.

    python crash_host.py DSN HOST JOURNAL

Everything that counts goes into the journal, a file that no database knows of. The host writes `H` when it is ready. Submitters write `A` for each job that was acknowledged. A job
writes `B` when it begins, `R` when its lease was renewed, and `E` when it ends, each with the moment by the machine's monotonic clock, which all
processes share, and with the moment until which the lease certainly holds. After that a job writes nothing: it has lost the right to work.
Submitters stop when the standard input is closed, and the host writes `S` when all of them have.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterable
from itertools import count
from threading import Event, Thread
from uuid import uuid4

from penstock.core.errors import PenstockError, QueueFull, Refused, Unavailable
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import MILLISECOND, SECOND
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.job_service import EndReport, GrantedJob
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Depth
from penstock.stores.postgres.store import PostgresStore

LEASE_SEC = 2.0
WORK_SEC = 0.005
DEPTH = 1_000
WORKERS, SUBMITTERS = 2, 4
#: How many jobs a worker runs together.
TOGETHER = 25


class Host:
    def __init__(self, dsn: str, host: str, journal: str) -> None:
        rules = SchedulerRules(
            host=host,
            capacity=Capacity(fixed=1_000),
            schedules=Schedules(crash=(100 * MILLISECOND,) * 1_000, start=(100 * MILLISECOND,)),
            depth=Depth(total=DEPTH),
            lease_for=int(LEASE_SEC * SECOND),
            reserve_for=int(LEASE_SEC * SECOND),
            tick=200 * MILLISECOND,
        )
        self._service = SchedulerService(PostgresStore(dsn), rules, reserves=False)
        until_it_works(lambda: self._service.start(host))
        self._name, self._runs = host, count(1)
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._enough = Event()
        self._write(f"H {host}\n")

    def submit(self) -> None:
        """With a key, so that a submit whose outcome is unknown can be made again."""
        again: list[Intent] = []
        while again or not self._enough.is_set():
            more = again or [
                Intent(addon_id=self._name, job_type="t", cost_units=1, idempotency_key=str(uuid4()))
                for _ in range(random.randint(1, 3))  # no secret
            ]
            try:
                receipts = self._service.job_service.submit(more)
            except QueueFull:
                again = []
                time.sleep(WORK_SEC)
            except Unavailable:
                again = more
                time.sleep(WORK_SEC)
            else:
                again = []
                self._write("".join(f"A {receipt.job_id}\n" for receipt in receipts))

    def stop(self, submitters: Iterable[Thread]) -> None:
        self._enough.set()
        for thread in submitters:
            thread.join()
        self._write(f"S {self._name}\n")

    def work(self) -> None:
        while True:
            asked = time.monotonic()
            try:
                claimed = self._service.job_service.claim(WorkerKinds(), TOGETHER)
            except PenstockError:
                claimed = []
            if not claimed:
                time.sleep(WORK_SEC)
            elif ended := self._run(claimed, asked + LEASE_SEC):
                until_it_works(lambda: self._service.job_service.end_many(ended))  # called at once

    def _run(self, claimed: list[GrantedJob], until: float) -> list[EndReport]:
        """Those that kept their lease to the end. The first one renews its own."""
        runs = {one.dispatch.dispatch_id: self._named(one) for one in claimed}
        first, *_ = runs
        if not self._note("B", runs.values(), until):
            return []
        time.sleep(WORK_SEC)
        asked = time.monotonic()
        try:
            self._service.job_service.heartbeat(first)
        except Unavailable:
            pass  # the lease that it has is good until it ends
        except Refused:
            del runs[first]
        else:
            self._note("R", [runs[first]], asked + LEASE_SEC)
        time.sleep(WORK_SEC)
        return (
            [EndReport(dispatch_id) for dispatch_id in runs] if self._note("E", runs.values(), until) else []
        )

    def _named(self, claimed: GrantedJob) -> str:
        return f"{self._name}-{next(self._runs)} {claimed.job.job_id} {claimed.dispatch.fence}"

    def _note(self, what: str, runs: Iterable[str], until: float) -> bool:
        """A lease counts from the moment it was asked for, the only one that is certainly before it was granted."""
        moment = time.monotonic()
        if moment < until:
            self._write("".join(f"{what} {run} {moment} {until}\n" for run in runs))
        return moment < until

    def _write(self, lines: str) -> None:
        os.write(self._journal, lines.encode())


def until_it_works(call) -> None:
    while True:
        try:
            call()
        except Unavailable:
            time.sleep(0.05)
        else:
            return


def die(args: threading.ExceptHookArgs) -> None:
    """So that the test sees it."""
    threading.__excepthook__(args)
    print("a thread has died", file=sys.stderr, flush=True)  # noqa: T201  # the test keeps it as a log
    os._exit(1)


def main(dsn: str, name: str, journal: str) -> None:
    threading.excepthook = die
    host = Host(dsn, name, journal)
    submitters = [Thread(target=host.submit) for _ in range(SUBMITTERS)]
    for thread in submitters + [Thread(target=host.work) for _ in range(WORKERS)]:
        thread.start()
    sys.stdin.read()
    host.stop(submitters)


if __name__ == "__main__":
    main(*sys.argv[1:])
