"""
An SDK worker that runs the marking job as a function: `python -m penstock.chaos.sdk_worker FOLDER URL NAME`.

The token comes from PENSTOCK_TOKEN. With `--processes` each function runs in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.chaos.markers import Marking
from penstock.client.worker import Worker
from penstock.work.context import JobContext

JOB_TYPE = "chaos.mark"
#: How many functions one worker runs at once.
CONCURRENCY = 2


def mark(job: JobContext, folder: str, seconds: float) -> None:
    """The job as a function. `check` ends it when its lease is lost, as in any long function."""
    marking = Marking(Path(folder), "function", f"{job.id}.{job.fence}")
    try:
        marking.work(seconds, job.check)
    finally:
        marking.close()


def main(url: str, name: str, *, processes: bool) -> None:
    worker = Worker(url, addon="chaos", name=name, poll_sec=5.0)
    worker.job(JOB_TYPE)(mark)
    worker.run(CONCURRENCY, processes=processes)


if __name__ == "__main__":
    _, _, url, name, *options = sys.argv  # the folder is only there to find the process by its command line
    main(url, name, processes="--processes" in options)
