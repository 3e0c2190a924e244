"""A worker as a program, for tests that kill, stop and continue it. Each run writes down when it began and when it ended."""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

import penstock

worker = penstock.Worker()


def note(job, what):
    line = f"{time.monotonic():.6f} {what} {job.id} {job.fence} {os.getpid()}\n"
    with Path(os.environ["JOURNAL"]).open("a") as journal:
        journal.write(line)


@worker.job("sleep")
def sleep(job, seconds, later=None):
    """Looks at nothing: what the worker does around it must be enough. `later`: for how long in its second run and after it."""
    note(job, "begin")
    time.sleep(seconds if later is None or job.fence == 1 else later)
    note(job, "end")
    return [job.fence, os.getpid()]


@worker.job("attentive")
def attentive(job, seconds):
    note(job, "begin")
    ends = time.monotonic() + seconds
    try:
        while time.monotonic() < ends:
            time.sleep(0.02)
            job.check()
    finally:
        note(job, "end")
    return [job.fence, os.getpid()]


@worker.job("pages")
def pages(job, count, seconds):
    """Goes on where it was."""
    note(job, "begin")
    first = job.checkpoint or 0
    try:
        for page in range(first, count):
            time.sleep(seconds)
            job.save_checkpoint(page + 1)
            job.check()
    finally:
        note(job, "end")
    return {"first": first, "count": count}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--stop-within", type=float, default=30.0)
    options = parser.parse_args()
    worker.run(
        options.concurrency,
        prefetch=options.prefetch,
        processes=options.processes,
        stop_within=options.stop_within,
    )
