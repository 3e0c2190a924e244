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
from typing import Any, Final

from penstock.client.client import Client
from penstock.client.context import JobContext, LeaseFacts
from penstock.client.handlers import Ending, Failed, Handler, Released, call
from penstock.client.leases import ActiveLease
from penstock.core.errors import CallCanceled, NotPicklable, WorkerCrashedError
from penstock.core.text import error_text, safe_str
from penstock.pools.pool import WorkerPool
from penstock.wire import Failure

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

    def run(self, handler: Handler, lease: ActiveLease) -> Ending:
        pool = self._pool_for(lease)
        self._page.clear()
        try:
            running = pool.submit(_in_process, handler, lease.facts, self._page.name, self._url, self._token)
        except NotPicklable as error:
            return Failed(f"the function cannot be run in a process: {safe_str(error)}")
        while not running.done():
            lease.pid = running.pid or lease.pid
            self._page.tell(yielding=lease.yielding, cancelled=lease.cancelled)
            self._pass_on(lease)
            if lease.cancelled:
                running.cancel()
                self._until_gone(pool)
                return Released()
            try:
                running.exception(timeout=LOOK_EVERY)
            except TimeoutError:
                continue
        self._pass_on(lease)
        try:
            ending: Ending = running.result()
        except WorkerCrashedError as error:
            return Failed(f"its process died: {safe_str(error)}", Failure.WORKER_CRASHED)
        except CallCanceled:
            return Released()
        except BaseException as error:  # noqa: BLE001  # what the process could not even turn into an ending
            return Failed(error_text(error))
        return ending

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
            lease.spend(spent)

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

    def tell(self, *, yielding: bool, cancelled: bool) -> None:
        self._map[0], self._map[1] = yielding, cancelled

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


class _FromAfar:
    """The ties of a function whose lease is held by another process."""

    def __init__(self, page: SharedFlags, facts: LeaseFacts, url: str, token: str) -> None:
        self._page, self._facts, self._url, self._token = page, facts, url, token
        self._client: Client | None = None

    @property
    def yielding(self) -> bool:
        return self._page.told[0]

    @property
    def cancelled(self) -> bool:
        return self._page.told[1]

    def progress(self, fraction: float) -> None:
        self._page.say(progress=fraction)

    def spend(self, total: float) -> None:
        self._page.say(spent=total)

    def save(self, checkpoint: bytes) -> None:
        if self._client is None:
            self._client = Client(self._url, token=self._token)
        self._client.heartbeat(self._facts.lease_id, checkpoint=checkpoint)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _in_process(handler: Handler, facts: LeaseFacts, page_name: str, url: str, token: str) -> Any:
    page = SharedFlags(page_name)
    ties = _FromAfar(page, facts, url, token)
    try:
        return call(handler, JobContext(facts, ties))
    finally:
        ties.close()
        page.close()
