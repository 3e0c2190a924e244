"""
An add-on with the Python SDK: it submits jobs of two types, and its worker runs them.

    python examples/addon.py                 submits, works until all jobs are done, and prints the results

Address and token come from PENSTOCK_URL and PENSTOCK_TOKEN_FILE, or from this user's own daemon.
"""

from __future__ import annotations

import logging
import sys
import time

import penstock

worker = penstock.Worker(addon="photos")


@worker.job("thumbnail")
def thumbnail(job: penstock.JobContext, path: str, size: int = 128) -> str:
    for step in range(4):
        time.sleep(0.05)
        job.progress((step + 1) / 4)
        job.check()  # raises here if the job was canceled or this worker must stop
    return path.replace(".jpg", f".{size}.jpg")


@worker.job("describe")
def describe(job: penstock.JobContext, pages: int) -> dict[str, int]:
    """A long job that reports spending. After an interruption it continues from its checkpoint."""
    done = job.checkpoint or 0
    for page in range(done, pages):
        job.spend(0.002)
        job.save_checkpoint(page + 1)
        job.check()
    return {"pages": pages, "resumed_at": done}


def main() -> int:
    client = worker.client
    jobs = [client.submit("photos", "thumbnail", {"path": f"{n}.jpg"}, cost_units=5) for n in range(6)]
    jobs.append(client.submit("photos", "describe", {"pages": 3}, cost_limit=1.0))

    worker.run(concurrency=3, until_idle=True)

    settled = [client.job(job.job_id) for job in jobs]
    for job in settled:
        print(job.job_type, job.state, bytes(job.result).decode(), f"${job.spent:.3f}")
    return 0 if all(job.state == "DONE" for job in settled) else 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main())
