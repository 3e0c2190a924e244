"""
A program with `penstock.Scheduler` that submits and runs batches, made to be killed: `batch_program.py DATABASE JOURNAL`.

Its orders are "submitting SEED" and "draining SEED" (see `fork_server.py`). One `write` per line goes to the journal: the
batches that were accepted, and each function that begins.
"""

from __future__ import annotations

import os
import random
import sys
import time

from fork_server import serve_orders
from msgspec.structs import replace
from scheduler_program import RULES

import penstock
from penstock.core.jobs.types import SECOND

SIZE = 3


def run(database: str, journal: str, order: str, seed: int) -> None:
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    scheduler = penstock.Scheduler(database, workers=3, rules=replace(RULES, lease_for=60 * SECOND))

    def note(*words: str) -> None:
        os.write(out, (" ".join(words) + "\n").encode())

    @scheduler.job(name="work")
    def work(ctx: penstock.JobContext, kind: str, batch: str, fails: bool) -> None:
        note(kind, batch, f"{ctx.id}.{ctx.fence}")
        if fails:
            raise ValueError(batch)

    scheduler.start()
    chance = random.Random(seed)
    for number in range(1_000_000 if order == "submitting" else 0):
        fails = chance.random() < 0.5
        name = f"{'failing' if fails else 'well'}-{seed}-{number}"
        callbacks = {kind: (work, kind, name, False) for kind in ("on_end", "on_failure")}
        with scheduler.batch(name, **callbacks) as batch:
            batch.enqueue_many(work, [("member", name, fails and at == 1) for at in range(SIZE)])
        note("accepted", name, "-")
        time.sleep(chance.random() * 0.02)
    while True:
        time.sleep(3_600)


if __name__ == "__main__":
    serve_orders(run, *sys.argv[1:])
