"""
Two add-ons for the demo of the scheduler, each one worker process: `python -m examples.demo.addons photos`.
"""

from __future__ import annotations

import logging
import random
import sys
import time

from penstock import Client, JobContext, Worker
from penstock.client.client import job_of

__all__ = ["submit_samples"]

photos, mail = Worker(addon="photos", name="photos"), Worker(addon="mail", name="mail")


@photos.job("thumbnail")
def thumbnail(job: JobContext, name: str) -> str:
    _take_time(job, random.uniform(0.5, 1.5))  # no secret
    return name.replace(".jpg", ".small.jpg")


@photos.job("album")
def album(job: JobContext, pictures: int) -> dict[str, int]:
    """A long, expensive job: after a stop it continues with the next picture."""
    first = job.checkpoint or 0
    for picture in range(first, pictures):
        time.sleep(0.2)
        job.spend(0.01)
        job.progress((picture + 1) / pictures)
        job.save_checkpoint(picture + 1)
        job.check()
    return {"pictures": pictures, "went_on_at": first}


@mail.job("send")
def send(job: JobContext, to: str) -> str:
    _take_time(job, random.uniform(0.2, 0.6))  # no secret
    return f"sent to {to}"


@mail.job("digest")
def digest(job: JobContext) -> str:
    """Fails at the first attempt, to show a retry."""
    _take_time(job, 0.3)
    if job.checkpoint is None:
        job.save_checkpoint("tried")
        raise ConnectionError("the mail server hung up")
    return "sent"


def _take_time(job: JobContext, seconds: float) -> None:
    for step in range(10):
        time.sleep(seconds / 10)
        job.progress((step + 1) / 10)
        job.check()


def submit_samples(client: Client) -> list[str]:
    """Submit sample jobs of different costs and priorities, more than fit at once."""
    jobs = [
        job_of("photos", "thumbnail", {"name": f"{n:02}.jpg"}, expected_duration_sec=1.5) for n in range(16)
    ]
    jobs.append(job_of("photos", "album", {"pictures": 15}, cost_units=30, cost_limit=5.0, tags=("long",)))
    jobs += [job_of("mail", "send", {"to": f"user{n}@example.org"}, cost_units=5) for n in range(8)]
    jobs.append(job_of("mail", "send", {"to": "boss@example.org"}, cost_units=5, priority="URGENT"))
    jobs.append(job_of("mail", "digest", priority="LOW", retry_delays_sec=(1,)))
    return [submitted.job_id for submitted in client.submit_many(jobs)]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    worker = {"photos": photos, "mail": mail}[sys.argv[1]]
    worker.run(concurrency=4, stop_within=5.0)


if __name__ == "__main__":
    main()
