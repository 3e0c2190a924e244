"""
Schedulers on one database that share a test clock and are killed. This program forks them, because to fork is
quicker than to start an interpreter, and a test wants to kill hundreds.

    python schedule_host.py DSN SCHEMA CLOCK

CLOCK is a file with the moment, eight bytes, which the test moves. For each line on its standard input the
program forks a scheduler and prints its pid. A scheduler fires schedules, does the maintenance, and runs jobs,
until it is killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from contextlib import suppress
from time import sleep

from schedule_clock import SharedClock

from penstock.core.errors import NotFound, StaleDispatch
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.types import HOUR, SECOND, EndReason
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.postgres.store import PostgresStore


def run(dsn: str, schema: str, clock: SharedClock) -> None:
    host = f"host-{os.getpid()}"
    # A job that lost its scheduler is tried again at once, as often as that happens.
    retries = Schedules(crash=(SECOND,) * 1_000, start=(SECOND,) * 1_000)
    rules = SchedulerRules(
        host=host,
        capacity=Capacity(fixed=1_000),
        schedules=retries,
        lease_for=20 * SECOND,
        grace=5 * SECOND,
        retention=100_000 * HOUR,  # the test looks at every job at the end
    )
    service = SchedulerService(PostgresStore(dsn, clock, schema=schema), rules, reserves=False)
    kinds, dice, held = WorkerKinds(own=True), random.Random(os.getpid()), []
    while True:
        service.schedule_firer.step(clock())
        service.maintenance.step(clock())
        claimed = service.job_service.claim(kinds, 5, host)
        held += claimed
        if not claimed:
            sleep(dice.random() * 0.01)  # leaves the machine to the others
        dice.shuffle(held)
        # Some jobs go on for a while, so that the next moment of their schedule finds them running.
        while held and dice.random() < 0.8:
            with suppress(StaleDispatch, NotFound):
                service.job_service.end(held.pop().dispatch.dispatch_id, EndReason.COMPLETED, result="1")


def main() -> None:
    dsn, schema, path = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                run(dsn, schema, SharedClock(path))
            finally:
                traceback.print_exc()
                os._exit(1)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


main()
