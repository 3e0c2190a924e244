"""Job functions that every way to run a function runs unchanged: see test_context.py."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import penstock


def use_all(number):
    return _use_all(number)


async def use_all_async(number):
    await asyncio.sleep(0)
    return _use_all(number)


def _use_all(number):
    """The first attempt saves a checkpoint and fails; the second returns what both saw."""
    job = penstock.current_job()
    job.check()
    job.progress(0.25 * job.attempt, "a part")
    job.spend("0.25")
    job.log.info("attempt %d", job.attempt)
    if job.attempt == 1:
        job.save_checkpoint({"number": number, "seen": job.checkpoint})
        raise penstock.Unavailable("something is away")
    return {
        "id": job.id,
        "attempt": job.attempt,
        "fence": job.fence,
        "addon": job.addon,
        "tags": job.tags,
        "deadline": job.deadline,
        "stop": [job.canceled, job.should_yield],
        "checkpoint": job.checkpoint,
        "same": penstock.current_job() is job,
    }


def phases(number):
    """A generator: each phase is a checkpoint."""
    for phase in range(number):
        yield [phase]
    return penstock.current_job().checkpoint


def wait_for_cancel(path):
    job = penstock.current_job()
    assert not job.canceled  # from now on the runner knows that this job asks, and gives it time
    Path(path).with_suffix(".began").touch()
    while not job.canceled:
        time.sleep(0.005)
    _leave(job, path)


async def wait_for_cancel_async(path):
    job = penstock.current_job()
    assert not job.canceled  # from now on the runner knows that this job asks, and gives it time
    Path(path).with_suffix(".began").touch()
    with suppress(asyncio.CancelledError):  # a coroutine on a loop of many is canceled besides
        while not job.canceled:
            await asyncio.sleep(0.005)
    _leave(job, path)


def _leave(job, path):
    try:
        job.check()
    except penstock.JobStopped as error:
        Path(path).write_text(f"{job.canceled} {job.should_yield} {error.job_id}")
        raise
