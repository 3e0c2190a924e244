"""
A function in a process of its own: it can be ended, and it cannot starve the heartbeats.

The process and the worker share one page of memory: what the worker knows (yield, cancel) is read by the function without a system call, and what the
function says (progress, spending) is read by the heart. A checkpoint must be on disk when the call returns, so that one goes to the scheduler directly.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
import time
from pathlib import Path
from typing import Final

from penstock.client.client import Client
from penstock.client.handlers import JobHandler
from penstock.client.leases import ActiveLease
from penstock.core.errors import (
    CallCanceled,
    JobStopped,
    NotFound,
    NotPicklable,
    StaleDispatch,
    WorkerCrashedError,
)
from penstock.core.jobs.end_rules import EndReason
from penstock.core.jobs.types import Money
from penstock.core.text import safe_str
from penstock.pools.pool import WorkerPool
from penstock.work.context import CurrentJob, JobFacts
from penstock.work.outcome import RELEASED, Outcome, failure, run

__all__ = ["ProcessExecutorThread"]

#: Of the lease: from being told to stop to being ended. With it the process is gone before the lease is.
GRACE: Final = 0.1
LOOK_EVERY: Final = 0.05


class ProcessExecutorThread:
    """One process at a time, kept warm from job to job. Used by one thread."""

    def __init__(self, client: Client) -> None:
        self._url, self._token = client.url, client.token
        self._pool: WorkerPool | None = None
        self._page = SharedFlags()

    def run(self, handler: JobHandler, lease: ActiveLease) -> Outcome:
        pool = self._pool_for(lease)
        self._page.clear()
        try:
            running = pool.submit(_in_process, handler, lease.facts, self._page.name, self._url, self._token)
        except NotPicklable as error:
            return Outcome(
                EndReason.JOB_ERROR, error=f"the function cannot be run in a process: {safe_str(error)}"
            )
        while not running.done():
            lease.pid = running.pid or lease.pid
            self._page.tell(yielding=lease.yielding, canceled=lease.canceled)
            self._pass_on(lease)
            if lease.canceled:
                running.cancel()
                self._until_gone(pool)
                return RELEASED
            try:
                running.exception(timeout=LOOK_EVERY)
            except TimeoutError:
                continue
        self._pass_on(lease)
        try:
            outcome: Outcome = running.result()
        except WorkerCrashedError as error:
            return Outcome(EndReason.WORKER_CRASHED, error=f"its process died: {safe_str(error)}")
        except CallCanceled:
            return RELEASED
        except BaseException as error:  # noqa: BLE001  # what the process could not even turn into an ending
            return failure(error)
        return outcome

    def _pool_for(self, lease: ActiveLease) -> WorkerPool:
        """Made with the first job, for only then is it known how long a lease is."""
        if self._pool is None:
            grace = max(0.1, lease.timer.ttl * GRACE)
            self._pool = WorkerPool(
                workers=1, max_queue_depth=1, grace=grace, name=None, crash_max_retries=1_000_000
            )
        return self._pool

    def _pass_on(self, lease: ActiveLease) -> None:
        progress, spent = self._page.said()
        if progress is not None:
            lease.progress(progress)
        if spent is not None:
            lease.spend(round(spent * 1_000_000), 0)

    def _until_gone(self, pool: WorkerPool) -> None:
        """The lease may be given back when nothing runs under it any more."""
        while pool.state.in_flight:
            time.sleep(LOOK_EVERY)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._page.close()


class SharedFlags:
    """Two flags for the function, two numbers from it, each with a count of how often it was said."""

    _LAYOUT: Final = struct.Struct("=BBxxxxxxdqdq")

    def __init__(self, name: str | None = None) -> None:
        if name is None:
            with tempfile.NamedTemporaryFile(prefix="penstock-hand-", delete=False) as made:
                made.write(bytes(mmap.PAGESIZE))
            self.name, self._mine = made.name, True
        else:
            self.name, self._mine = name, False
        with Path(self.name).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._heard = (0, 0)

    def clear(self) -> None:
        self._map[: self._LAYOUT.size] = bytes(self._LAYOUT.size)
        self._heard = (0, 0)

    def tell(self, *, yielding: bool, canceled: bool) -> None:
        self._map[0], self._map[1] = yielding, canceled

    @property
    def told(self) -> tuple[bool, bool]:
        return bool(self._map[0]), bool(self._map[1])

    def say(self, *, progress: float | None = None, spent: float | None = None) -> None:
        for offset, value in ((8, progress), (24, spent)):
            if value is not None:
                (count,) = struct.unpack_from("=q", self._map, offset + 8)
                struct.pack_into("=dq", self._map, offset, value, count + 1)

    def said(self) -> tuple[float | None, float | None]:
        """What is new since the last look."""
        _, _, progress, first, spent, second = self._LAYOUT.unpack_from(self._map)
        new = (progress if first != self._heard[0] else None, spent if second != self._heard[1] else None)
        self._heard = (first, second)
        return new

    def close(self) -> None:
        self._map.close()
        if self._mine:
            Path(self.name).unlink(missing_ok=True)


class _ProcessChannel:
    """The channel of a function whose lease is held by another process."""

    def __init__(self, page: SharedFlags, facts: JobFacts, url: str, token: str) -> None:
        self._page, self._facts, self._url, self._token = page, facts, url, token
        self._client: Client | None = None
        self._lost = False

    @property
    def yielding(self) -> bool:
        return self._page.told[0]

    @property
    def canceled(self) -> bool:
        return self._lost or self._page.told[1]

    def progress(self, fraction: float) -> None:
        self._page.say(progress=fraction)

    def spend(self, total: Money, amount: Money) -> None:  # noqa: ARG002  # of the protocol
        self._page.say(spent=total / 1_000_000)

    def log_handler(self) -> None:
        return None

    def save_checkpoint(self, text: str) -> None:
        if self._client is None:
            self._client = Client(self._url, token=self._token)
        try:
            self._client.heartbeat(self._facts.dispatch_id, checkpoint=text.encode())
        except (StaleDispatch, NotFound) as error:
            self._lost = True
            words = "the lease is lost: this checkpoint was not saved"
            raise JobStopped(words, job_id=self._facts.job_id) from error

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _in_process(handler: JobHandler, facts: JobFacts, page_name: str, url: str, token: str) -> Outcome:
    page = SharedFlags(page_name)
    channel = _ProcessChannel(page, facts, url, token)
    try:
        return run(handler.invoke, CurrentJob(facts, channel))
    finally:
        channel.close()
        page.close()
