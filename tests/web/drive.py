"""
Load from a process of its own, so that it takes no time from whoever measures:

    python drive.py URL TOKEN EVENTS_A_SECOND          for ever; 0: as many as it can, for as long as standard input is open

Every job makes four events: submitted, dispatching, running, done. The number of jobs done is printed when it ends.
"""

from __future__ import annotations

import select
import sys
import time

from penstock import Client
from penstock.client.client import job_of
from penstock.wire import OutcomeReport

BATCH = 10
EVENTS = 4


def backlog(client, number):
    """Jobs that stay queued, because their addon is paused."""
    client.submit("backlog", "thumbnail", {"n": -1})
    client.pause("backlog", create=True)
    for begin in range(1, number, 1_000):
        jobs = [job_of("backlog", "thumbnail", {"n": n}) for n in range(begin, min(number, begin + 1_000))]
        client.submit_many(jobs)


def drive(client, rate):
    pause = BATCH * EVENTS / rate if rate else 0.0
    outcomes, done = [], 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        began = time.monotonic()
        client.submit_many([job_of("busy", "step", {"n": n}, cost_units=1) for n in range(BATCH)])
        taken = client.exchange(outcomes, addon_id="busy", limit=BATCH, worker="driver")
        done += len(outcomes)
        outcomes = [OutcomeReport(lease_id=job.lease_id, state="DONE") for job in taken.jobs]
        time.sleep(max(0.0, pause - (time.monotonic() - began)))
    return done


if __name__ == "__main__":
    url, token, events = sys.argv[1:]
    with Client(url, token=token) as scheduler:
        sys.stdout.write(f"{drive(scheduler, float(events))}\n")
