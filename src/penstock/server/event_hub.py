"""Waiting for something to happen, for any number of clients, without a thread for any of them.

The store rings after each commit, from its own thread. One task then reads what is new and keeps the last few thousand events, so a hundred streams cost
one read and not a hundred; who has fallen further behind reads the store by itself. While nobody waits, nothing is read.

Everybody who waits for jobs of the same kinds, one behind the other.

When something happens the first one looks; those behind it only if it found enough. A thousand idle workers then cost one
look and not a thousand.
"""

#: What was found empty with nothing told since is believed for so long: time alone can change it.
from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, Final, Protocol, Self, TypeVar

from penstock.core.jobs.job import Event, EventKind
from penstock.scheduler.dispatcher import WorkerKinds
from penstock.scheduler.job_service import GrantedJob, JobService
from penstock.stores.api import Store

__all__ = ["STARTABLE", "ClaimQueue", "EventHub", "EventRun"]

log = logging.getLogger("penstock.server")

T = TypeVar("T")


class EventRun(Protocol):
    """Calls something that may block, beside the event loop."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> Awaitable[T]: ...


_KEPT: Final = 5_000
_PAGE: Final = 500
#: After these something may be startable that was not: there is a new job, or room, or leave.
STARTABLE: Final = frozenset(EventKind) - {
    EventKind.DENIED, EventKind.RUNNING, EventKind.CHECKPOINT, EventKind.ADMITTED, EventKind.ALERT, EventKind.TOKEN_MADE, EventKind.TOKEN_REVOKED, EventKind.LOGIN, EventKind.RESTORED
}  # fmt: skip


class _Waiter:
    __slots__ = ("future", "wants")

    def __init__(self, future: asyncio.Future[None], wants: Callable[[Event], bool]) -> None:
        self.future, self.wants = future, wants


class EventHub:
    """Lives on one event loop; only `ring` may be called from elsewhere."""

    def __init__(self, store: Store, run: EventRun, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self._run, self._loop = store, run, loop
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._from = 0  # everything after this number, up to `position`, is in `_events`
        self.position = 0
        self._readers = 0
        self._rung = self._pending = False
        self._pump: asyncio.Task[None] | None = None
        self._waiters: set[_Waiter] = set()
        self._entry = asyncio.Lock()
        self.closed = False

    def ring(self) -> None:
        """From any thread. A ring while one is pending adds nothing."""
        if not self._pending and not self._loop.is_closed():
            self._pending = True
            try:
                self._loop.call_soon_threadsafe(self._heard)
            except RuntimeError:  # the loop closed in between
                self._pending = False

    def _heard(self) -> None:
        self._pending = False
        self._rung = True
        if self._readers and (self._pump is None or self._pump.done()):
            self._pump = self._loop.create_task(self._read_on())

    async def _read_on(self) -> None:
        while self._rung and self._readers:
            self._rung = False
            try:
                while batch := await self._run(self._store.events, self.position, _PAGE):
                    self._take(batch)
            except Exception:  # the store is in trouble; whoever waits polls anyway, and sees for itself
                log.exception("the trail cannot be read")
                return

    def _take(self, batch: list[Event]) -> None:
        if len(self._events) + len(batch) > _KEPT:
            self._from = (
                self._events[len(batch) - 1].seq if len(batch) <= len(self._events) else self.position
            )
        self._events.extend(batch)
        self.position = batch[-1].seq
        for waiter in [w for w in self._waiters if any(map(w.wants, batch))]:
            if not waiter.future.done():
                waiter.future.set_result(None)

    async def __aenter__(self) -> Self:
        """To be a reader. The first one asks where the trail ends; nobody else enters meanwhile."""
        async with self._entry:
            if not self._readers:
                await self._find_end()
            self._readers += 1
        if self._rung:
            self._heard()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._readers -= 1

    async def _find_end(self) -> None:
        end = await self._run(self._store.newest)
        if end > self.position:
            self._events.clear()
            self._from = self.position = end

    async def page(self, after: int, limit: int, run: EventRun | None = None) -> list[Event]:
        """As the store's `events`, from memory where that reaches back far enough; else read by `run`."""
        if self._readers and self._from <= after:
            start = bisect_right(self._events, after, key=lambda event: event.seq)
            return list(islice(self._events, start, start + limit))
        return await (run or self._run)(self._store.events, after, limit)

    async def wait(self, since: int, seconds: float, wants: Callable[[Event], bool] | None = None) -> bool:
        """
        Until such an event is read, the time is over, or the server stops; whether one was. `since`: the `position` before the
        caller last looked, so that what happened while it looked is not missed. For readers.
        """
        wants = wants or _anything
        if self.closed or seconds <= 0:
            return False
        if self._from > since or any(wants(event) for event in await self.page(since, _KEPT)):
            return True
        waiter = _Waiter(self._loop.create_future(), wants)
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter.future
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return not self.closed

    def close(self) -> None:
        self.closed = True
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_result(None)


def _anything(_: Event) -> bool:
    return True


_EMPTY_FOR: Final = 1.0
_MOST_KINDS: Final = 1_000


class ClaimQueue:
    def __init__(self, job_service: JobService, trail: EventHub) -> None:
        self._job_service, self._trail = job_service, trail
        self._locks: dict[WorkerKinds, asyncio.Lock] = {}
        self._empty: dict[WorkerKinds, tuple[int, float]] = {}

    async def take(self, run: EventRun, kinds: WorkerKinds, limit: int, worker: str) -> list[GrantedJob]:
        clock = asyncio.get_running_loop().time
        async with self._lock(kinds):
            position, now = self._trail.position, clock()
            at, until = self._empty.get(kinds, (-1, 0.0))
            if at == position and now < until:
                return []
            claimed = await run(self._job_service.claim, kinds, limit, worker)
            if len(claimed) < limit:
                self._empty[kinds] = (position, now + _EMPTY_FOR)
            return claimed

    def _lock(self, kinds: WorkerKinds) -> asyncio.Lock:
        if len(self._locks) > _MOST_KINDS:
            idle = [known for known, lock in self._locks.items() if not lock.locked()]
            for known in idle:
                del self._locks[known]
                self._empty.pop(known, None)
        return self._locks.setdefault(kinds, asyncio.Lock())
