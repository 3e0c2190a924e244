"""
The event hub, the claim queue and the stats stream: new events, jobs and live stats for the clients that wait
for them. Each is read once for all clients, and no waiting client takes a thread.

The store calls `notify` after each commit, from its own thread. One task then reads the new events and keeps
the last few thousand in memory, so a hundred streams cost one read. A client that is further behind reads the
store. While no client waits, nothing is read.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, Protocol, Self, TypeVar

import msgspec

from penstock import wire
from penstock.core.jobs.admission import EVERYTHING
from penstock.core.jobs.intent import title_of
from penstock.core.jobs.job import Event, EventKind
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, Moment, seconds, when
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.job_service import GrantedJob, JobService
from penstock.scheduler.service import SchedulerService
from penstock.scheduler.stats import Frame, LiveStats, Second, percentiles
from penstock.server.stats_history import StatsHistory
from penstock.stores.api import Query, Store

log = logging.getLogger("penstock.server")

T = TypeVar("T")


class EventRun(Protocol):
    """A function that makes a blocking call in a thread."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> Awaitable[T]: ...


_KEPT: Final = 5_000
_PAGE: Final = 500
#: Events after which another job may start.
STARTABLE: Final = frozenset(EventKind) - {
    EventKind.DENIED, EventKind.RUNNING, EventKind.CHECKPOINT, EventKind.ADMITTED, EventKind.ALERT,
    EventKind.TOKEN_MADE, EventKind.TOKEN_REVOKED, EventKind.LOGIN, EventKind.RESTORED,
}  # fmt: skip


class EventHub:
    """
    Delivers new events to the requests and streams that wait for them. It belongs to one event loop; only
    `notify` may be called from other threads.
    """

    def __init__(self, store: Store, run: EventRun, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self._run, self._loop = store, run, loop
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._after = 0  # `_events` has all events after this number, up to `position`
        self.position = 0
        self._readers = 0
        self._stale = self._pending = False
        self._pump: asyncio.Task[None] | None = None
        #: For each waiting client a future, and the events that it wants.
        self._waiters: dict[asyncio.Future[None], Callable[[Event], bool]] = {}
        self._entry = asyncio.Lock()
        self.closed = False

    def notify(self) -> None:
        """Read new events soon. May be called from any thread; calls before that read add nothing."""
        if not self._pending and not self._loop.is_closed():
            self._pending = True
            try:
                self._loop.call_soon_threadsafe(self._on_commit)
            except RuntimeError:  # the loop closed in between
                self._pending = False

    def _on_commit(self) -> None:
        self._pending = False
        self._stale = True
        if self._readers and (self._pump is None or self._pump.done()):
            self._pump = self._loop.create_task(self._read_on())

    async def _read_on(self) -> None:
        while self._stale and self._readers:
            self._stale = False
            try:
                batch = await self._run(self._store.events, self.position, _PAGE)
            except Exception:  # waiting clients read again after a time, and get the store's error themselves
                log.exception("the trail cannot be read")
                return
            if batch:
                self._take(batch)
            self._stale = self._stale or len(batch) == _PAGE

    def _take(self, batch: list[Event]) -> None:
        if len(self._events) + len(batch) > _KEPT:
            self._after = (
                self._events[len(batch) - 1].seq if len(batch) <= len(self._events) else self.position
            )
        self._events.extend(batch)
        self.position = batch[-1].seq
        self._wake(waiter for waiter, wants in self._waiters.items() if any(map(wants, batch)))

    def _wake(self, waiters: Iterable[asyncio.Future[None]]) -> None:
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def waiting(self) -> int:
        """How many clients wait for an event now."""
        return len(self._waiters)

    async def __aenter__(self) -> Self:
        """Become a reader. The first reader finds the end of the trail, and the others wait until it has."""
        async with self._entry:
            if not self._readers:
                await self._find_end()
            self._readers += 1
        if self._stale:
            self._on_commit()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._readers -= 1

    async def _find_end(self) -> None:
        end = await self._run(self._store.newest)
        if end > self.position:
            self._events.clear()
            self._after = self.position = end

    async def page(self, after: int, limit: int, run: EventRun | None = None) -> list[Event]:
        """
        A page of events: from memory if that has all events after `after`, else from the store by `run`.
        """
        if self._readers and self._after <= after:
            start = bisect_right(self._events, after, key=lambda event: event.seq)
            return list(islice(self._events, start, start + limit))
        return await (run or self._run)(self._store.events, after, limit)

    async def wait(self, since: int, seconds: float, wants: Callable[[Event], bool]) -> bool:
        """
        Wait until the hub reads an event that `wants` accepts, the time is over, or the server stops. Returns
        whether there is one. `since`: the `position` before the caller's last read, so that no event in
        between is missed. Only for readers.
        """
        if self.closed or seconds <= 0:
            return False
        if self._after > since or any(wants(event) for event in await self.page(since, _KEPT)):
            return True
        waiter = self._loop.create_future()
        self._waiters[waiter] = wants
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            return False
        finally:
            del self._waiters[waiter]
        return not self.closed

    def close(self) -> None:
        self.closed = True
        self._wake(self._waiters)


#: Without an event, "no job for these kinds" stays valid for this many seconds: only the time can change it.
_EMPTY_FOR: Final = 1.0
_MOST_KINDS: Final = 1_000


class ClaimQueue:
    """
    The clients that wait for jobs, in a queue for each combination of addon and types.

    After an event the first client claims. The next one claims only if the first got as many jobs as it
    wanted. So a thousand idle workers cost one claim and not a thousand.
    """

    def __init__(self, job_service: JobService, hub: EventHub) -> None:
        self._job_service, self._hub = job_service, hub
        self._locks: dict[WorkerKinds, asyncio.Lock] = {}
        self._empty: dict[WorkerKinds, tuple[int, float]] = {}

    async def take(self, run: EventRun, kinds: WorkerKinds, limit: int, worker: str) -> list[GrantedJob]:
        """
        Claim jobs when it is this client's turn. Without a new event since an empty claim, return none at
        once.
        """
        clock = asyncio.get_running_loop().time
        async with self._lock(kinds):
            position, now = self._hub.position, clock()
            at, until = self._empty.get(kinds, (-1, 0.0))
            if at == position and now < until:
                return []
            claimed = await run(self._job_service.claim, kinds, limit, worker)
            if len(claimed) < limit:
                self._empty[kinds] = (position, now + _EMPTY_FOR)
            return claimed

    def _lock(self, kinds: WorkerKinds) -> asyncio.Lock:
        if len(self._locks) > _MOST_KINDS:
            idle = [kind for kind, lock in self._locks.items() if not lock.locked()]
            for kind in idle:
                del self._locks[kind]
                self._empty.pop(kind, None)
        return self._locks.setdefault(kinds, asyncio.Lock())


def event_view(event: Event) -> wire.EventInfo:
    return wire.EventInfo(
        event.seq,
        when(event.at),
        event.kind,
        event.job_id,
        event.n,
        event.state,
        event.reason,
        event.dispatch_id,
        dict(event.data),
    )


_EVERY: Final = 1.0
#: After this many seconds without a commit the store is read anyway: a notification may have been lost.
_UNNOTIFIED: Final = 10


class StatsStream:
    """
    The live stats for all clients that watch: one frame a second, encoded once, so ten open pages cost as
    much as one.

    It runs on the server's event loop, and reads the store in a thread.
    """

    def __init__(
        self,
        service: SchedulerService,
        run: EventRun,
        loop: asyncio.AbstractEventLoop,
        history: StatsHistory | None = None,
    ) -> None:
        self._service, self._run, self._loop = service, run, loop
        self.history = history or StatsHistory(None)
        self.live = LiveStats(service.store, service.machine, service.rules.host)
        self.line = b""
        #: Whether there was a commit since the store was last read.
        self.changed, self._rested = True, 0
        service.store.on_change(self._on_commit)
        self._made = asyncio.Condition()
        self.watchers = 0
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    def _on_commit(self) -> None:
        """Note a commit; called from any thread."""
        self.changed = True

    def start(self) -> None:
        self._task = self._loop.create_task(self._beat())

    async def _beat(self) -> None:
        while not self.closed:
            try:
                await self.measure_second()
            except Exception:  # other parts report the store's error; the next second may succeed
                log.exception("the live stats of this second are missing")
                self.changed = True
            async with self._made:
                self._made.notify_all()
            await asyncio.sleep(_EVERY)

    async def measure_second(self) -> None:
        """
        Measure one second. A frame is encoded only while a client watches, and the store is not read without
        a commit since the last second.
        """
        if self.watchers:
            self.line = await self._run(self._step)
            return
        self.line = b""  # so that the next client does not begin with an old frame
        if self.changed or self._rested >= _UNNOTIFIED:
            await self._run(self._count)
        elif self._service.store.shared or self.history.is_due(self._service.store.now() / 1e6):
            await self._run(self._skip_second)  # in a thread: reading a database server's clock may block
        else:
            self._skip_second()

    def _count(self) -> None:
        # Cleared before the read, so that a commit during the read counts for the next second.
        self.changed, self._rested = False, 0
        self._measure(changed=True)

    def _skip_second(self) -> None:
        self._rested += 1
        self._measure(changed=False)

    def _measure(self, *, changed: bool) -> None:
        self.live.measure(self._service.store.now(), changed=changed)
        if (second := self.live.newest()) is not None:
            self.history.add(second_view(second))

    def _step(self) -> bytes:
        self._count()
        frame = self.live.frame()
        assert frame is not None
        return b"id: %d\ndata: %b\n\n" % (frame.number, msgspec.json.encode(frame_view(self._service, frame)))

    async def next(self) -> bytes:
        self.watchers += 1
        try:
            async with self._made:
                await self._made.wait()
        finally:
            self.watchers -= 1
        return self.line

    async def close(self) -> None:
        self.closed = True
        if self._task is not None:
            self._task.cancel()
        async with self._made:
            self._made.notify_all()


def _names(store: Store, events: Sequence[Event]) -> dict[str, tuple[str, str]]:
    jobs = store.jobs(list({event.job_id: None for event in events if event.job_id is not None}))
    return {str(job.job_id): (str(job.intent.addon_id), title_of(job.intent)) for job in jobs}


def all_paused(store: Store) -> bool:
    return any(addon.paused for addon in store.addons() if addon.addon_id == EVERYTHING)


def oldest_queued_sec(store: Store, now: Moment, addon_id: AddonId | None = None) -> float | None:
    """The age of the job that has been queued longest; None: no job is queued."""
    oldest = store.find(Query(states=[JobState.QUEUED], addon_id=addon_id, limit=1))
    return seconds(max(0, now - oldest[0].created_at)) if oldest else None


def frame_view(service: SchedulerService, frame: Frame) -> wire.StatsFrame:
    store, now = service.store, frame.second.at
    conditions = service.machine.conditions(now)
    return wire.StatsFrame(
        now=when(now),
        second=second_view(frame.second),
        jobs=frame.jobs,
        waiting=len(service.waitlist.waiters),
        quiet=conditions.quiet,
        paused=all_paused(store),
        oldest_queued_sec=oldest_queued_sec(store, now) if frame.second.queued else None,
        wait=_pair(frame.wait),
        attempt=_pair(frame.attempt),
        events=[event_view(event) for event in frame.events],
        names=_names(store, frame.events),
        denials=dict(frame.denials),
    )


def _pair(spans: tuple[int, int] | None) -> tuple[float, float] | None:
    return None if spans is None else (seconds(spans[0]), seconds(spans[1]))


def second_view(second: Second) -> wire.StatsSecond:
    wait, attempt = _pair(percentiles(second.waits)), _pair(percentiles(second.attempts))
    return wire.StatsSecond(
        at=second.at / 1e6,
        submitted=second.counts["submitted"],
        started=second.counts["started"],
        done=second.counts["done"],
        failed=second.counts["failed"],
        queued=second.queued,
        in_use=second.in_use,
        capacity=second.capacity,
        busy=second.busy,
        wait_p50=wait and wait[0],
        wait_p95=wait and wait[1],
        attempt_p50=attempt and attempt[0],
        attempt_p95=attempt and attempt[1],
    )
