"""
A scheduler with submitters and workers, made to be killed: `python scheduler_program.py DATABASE JOURNAL`.

Its orders are "service SEED", "worker SEED" and "draining SEED" (see `fork_server.py`). One `write` per line goes to the
journal, so a line that was written before a SIGKILL is there after it.
"""

from __future__ import annotations

import os
import random
import sys
import time
from threading import Thread

from fork_server import serve_orders

from penstock.core.errors import PenstockError
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import SECOND, EndReason
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.job_service import EndReport
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.sqlite.store import SqliteStore

MS = SECOND // 1_000
SOON = (MS,) * 100_000  # a killed attempt is retried at once, without end
RULES = SchedulerRules(
    capacity=Capacity(fixed=100),
    schedules=Schedules(crash=SOON, start=SOON),
    lease_for=400 * MS,
    reserve_for=200 * MS,
    grace=50 * MS,
    tick=50 * MS,
)


def main(database: str, journal: str, order: str, seed: int) -> None:
    ChildProcess(database, journal, seed).run_threads(
        service=order == "service", draining=order == "draining"
    )


class ChildProcess:
    def __init__(self, database: str, journal: str, seed: int) -> None:
        self.seed = seed
        self.journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.store = SqliteStore(database, SteadyClock())
        self.service = SchedulerService(self.store, RULES)
        self.job_service = self.service.job_service

    def run_threads(self, *, service: bool, draining: bool) -> None:
        """`draining`: a service that accepts no more jobs and runs the rest."""
        if service or draining:
            self.service.start(f"life {self.seed}")
        parts = [self.work, self.work] if draining else [self.submit, self.work, self.work]
        threads = [
            Thread(target=part, args=(random.Random(f"{self.seed}-{i}"),)) for i, part in enumerate(parts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def note(self, *words: object) -> None:
        os.write(self.journal, (" ".join(map(str, words)) + "\n").encode())

    def submit(self, chance: random.Random) -> None:
        while True:
            intents = [
                Intent(addon_id=chance.choice("ab"), job_type="t", cost_units=chance.choice([5, 20, 60]))
                for _ in range(chance.randint(1, 3))
            ]
            for receipt in self.job_service.submit(intents):
                self.note("accepted", receipt.job_id)
            time.sleep(chance.random() * 0.004)

    def work(self, chance: random.Random) -> None:
        over: list[EndReport] = []
        while True:
            answers, claimed = self.job_service.exchange(
                over, WorkerKinds(), chance.randint(1, 4), f"life-{self.seed}"
            )
            for report, answer in zip(over, answers, strict=True):
                self.note(
                    "ended",
                    report.dispatch_id,
                    type(answer).__name__ if isinstance(answer, PenstockError) else answer,
                )
            for item in claimed:
                self.note("runs", item.dispatch.dispatch_id)
            over = [self.run(item.dispatch.dispatch_id, chance) for item in claimed]
            if not claimed:
                time.sleep(0.003)

    def run(self, dispatch_id: str, chance: random.Random) -> EndReport:
        if chance.random() < 0.2:
            try:
                self.job_service.heartbeat(dispatch_id, progress=0.5)
            except PenstockError as refusal:
                self.note("refused", dispatch_id, type(refusal).__name__)
        how = EndReason.RELEASED if chance.random() < 0.1 else EndReason.COMPLETED
        return EndReport(dispatch_id, how)


if __name__ == "__main__":
    serve_orders(main, *sys.argv[1:])
