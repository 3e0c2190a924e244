"""
The state that all requests share: the scheduler, the tokens, the event hub, and threads for blocking calls.

A handler that is a plain function runs in a thread, because the store blocks. A handler that waits for an
event is a coroutine, and runs only its blocking steps in threads.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from penstock import wire
from penstock.core.jobs.changes import admin_event
from penstock.core.jobs.job import Event, EventKind
from penstock.core.jobs.types import SECOND, AddonId, DispatchId, JobId, Moment, when
from penstock.runner.output import Output
from penstock.runner.payload import Functions
from penstock.scheduler.service import SchedulerService
from penstock.server.event_hub import ClaimQueue, EventHub, StatsStream
from penstock.server.problems import TooMany
from penstock.server.stats_history import StatsHistory
from penstock.server.tokens import Principal, Sessions, TokenFile
from penstock.stores.api import Apply, Store, committed

T = TypeVar("T")

#: Threads for blocking calls, and how many of them one addon (or one unbound token) may use at once.
_THREADS: Final = 12
_THREADS_PER_OWNER: Final = 8
#: The owner of the server's own calls. It takes its turn like other owners, but has no limit.
SERVER_OWNER: Final = ""


class RunnerAccess(Protocol):
    """The methods of the runner that the server calls. A token here is that of a running dispatch."""

    def kill(self, dispatch_id: DispatchId) -> None: ...

    def dispatch_of(self, token: str) -> DispatchId | None: ...

    def call(self, token: str, call: dict[str, Any]) -> dict[str, Any]: ...


class AppState:
    """
    The state of one server. `output`, `functions` and `runner` belong to the runner, if there is one;
    `sessions` belong to the page.
    """

    def __init__(
        self,
        service: SchedulerService,
        tokens: TokenFile,
        *,
        loop: asyncio.AbstractEventLoop,
        output: Callable[[DispatchId], Output] | None,
        functions: Functions,
        history: StatsHistory,
    ) -> None:
        self.service, self.tokens, self.loop = service, tokens, loop
        self.store, self.job_service = service.store, service.job_service
        self.started_at: Moment = service.store.now()
        self.pool = FairPool(_THREADS, _THREADS_PER_OWNER, loop)
        self.event_hub = EventHub(service.store, self.run, loop)
        self.claims = ClaimQueue(service.job_service, self.event_hub)
        self.event_addons = EventAddons(service.store)
        self.stats = StatsStream(service, self.run, loop, history)
        self.programs = AttachedPrograms()
        self.output, self.functions = output, functions
        self.runner: RunnerAccess | None = None
        self.sessions: Sessions | None = None
        #: How many requests are being served, by token.
        self.open_requests: Counter[str] = Counter()
        self._health: tuple[float, bool] = (-1e9, True)
        self._probe: asyncio.Future[list[str]] | None = None
        service.store.on_change(self.event_hub.notify)

    def run(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """
        Call `function` in a thread, for the server itself: the store may wait for a disk or a lock, and the
        event loop must not.
        """
        return self.pool.run(SERVER_OWNER, function, *args)

    def record(self, kind: EventKind, reason: str, by: Principal, data: Mapping[str, Any]) -> None:
        """
        Record an administrator's action and its principal in the trail. Tokens that are bound to an addon do
        not see such events. This call blocks.
        """
        committed(self.store, Apply([admin_event(self.store.now(), kind, reason, by.name, data)]))

    async def is_healthy(self) -> bool:
        """
        Whether this host has no problems. Checked at most once a second: a client needs no token to ask, so
        it must be cheap.
        """
        at, healthy = self._health
        now = self.loop.time()
        if now - at > 1.0:
            # A check that hangs must not take a thread for each request.
            if self._probe is None or self._probe.done():
                self._probe = asyncio.ensure_future(self.run(self.problems))
            try:
                async with asyncio.timeout(2.0):
                    healthy = not await asyncio.shield(self._probe)
            except TimeoutError:
                healthy = False
            self._health = (now, healthy)
        return healthy

    def problems(self) -> list[str]:
        """What is wrong with this host now, in words. This call blocks."""
        problems = []
        try:
            self.store.alarm()
        except Exception as error:  # noqa: BLE001 - every error is a part of the answer
            problems.append(f"the store cannot be read: {error}")
        try:
            trouble = self.store.trouble()
            self.service.registration.prove()
        except Exception as error:  # noqa: BLE001 - as above
            trouble = str(error)
        if trouble is not None:
            problems.append(f"the store cannot be written: {trouble}")
        if self.service.machine.draining:
            problems.append("the scheduler is stopping")
        if self.service.machine.drained:
            problems.append("this host is drained: it starts nothing more")
        return problems

    def close(self) -> None:
        self.event_hub.close()
        self.pool.close()


class _Waiting(NamedTuple):
    """A call that waits for a thread, and the future of its result."""

    answer: asyncio.Future[Any]
    function: Callable[[], Any]


class FairPool:
    """
    A few threads for blocking calls, shared fairly: each owner (an addon, or an unbound token) has its own
    queue, and the owners take turns.

    With a single queue, one owner with hundreds of slow reads would delay the heartbeats of all others until
    their leases end. `per_owner`: the most threads that one owner may use at once. Everything but the calls
    runs on one event loop, so there is no lock.
    """

    def __init__(self, threads: int, per_owner: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._free, self._per_owner = loop, threads, per_owner
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="penstock-http")
        self._running: Counter[str] = Counter()
        #: By owner; the next owner comes first.
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()

    def run(self, owner: str, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = self._loop.create_future()
        self._queues.setdefault(owner, deque()).append(_Waiting(answer, partial(function, *args)))
        self._start()
        return answer

    def _start(self) -> None:
        while self._free and (owner := self._next()) is not None:
            queue = self._queues[owner]
            waiting = queue.popleft()
            if queue:
                self._queues.move_to_end(owner)
            else:
                del self._queues[owner]
            if not waiting.answer.done():  # if done, the client has gone away
                self._free -= 1
                self._running[owner] += 1
                self._threads.submit(self._call, owner, waiting)

    def _next(self) -> str | None:
        for owner in self._queues:
            if owner == SERVER_OWNER or self._running[owner] < self._per_owner:
                return owner
        return None

    def _call(self, owner: str, waiting: _Waiting) -> None:
        """Make the call; runs in a thread."""
        result, error = None, None
        try:
            result = waiting.function()
        except BaseException as raised:  # noqa: BLE001 - the caller gets it
            error = raised
        with suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._loop.call_soon_threadsafe(self._ended, owner, waiting.answer, result, error)

    def _ended(
        self, owner: str, answer: asyncio.Future[Any], result: Any, error: BaseException | None
    ) -> None:
        self._free += 1
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        if not answer.done():
            answer.set_result(result) if error is None else answer.set_exception(error)
        self._start()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class EventAddons:
    """
    Finds the addon of an event, which the event itself does not name. A job never changes its addon, so
    addons are cached.
    """

    _KEPT: Final = 50_000

    def __init__(self, store: Store) -> None:
        self._store = store
        self._addons: OrderedDict[str, AddonId | None] = OrderedDict()

    def filter(self, events: Sequence[Event], addon_id: str) -> list[Event]:
        self._learn(events)
        return [event for event in events if self._of(event) == addon_id]

    def _learn(self, events: Iterable[Event]) -> None:
        self.learn_jobs(event.job_id for event in events if event.job_id is not None)

    def learn_jobs(self, job_ids: Iterable[JobId]) -> None:
        """Read the addons of these jobs at once."""
        unknown = {job_id for job_id in job_ids if job_id not in self._addons}
        for job in self._store.jobs(list(unknown)):
            self._addons[job.job_id] = job.intent.addon_id
        while len(self._addons) > self._KEPT:
            self._addons.popitem(last=False)

    def of_job(self, job_id: JobId) -> AddonId | None:
        addon_id = self._addons.get(job_id)
        if addon_id is None and (job := self._store.job(job_id)) is not None:
            addon_id = self._addons[job_id] = job.intent.addon_id
        if addon_id is None and (group := self._store.group(job_id)) is not None:
            addon_id = group.addon_id  # not cached: the name may be that of another batch later
        return addon_id

    def _of(self, event: Event) -> str | None:
        if event.job_id is not None:
            return self._addons.get(event.job_id)
        if event.dispatch_id is not None:
            lease = self._store.dispatch(event.dispatch_id)
            return None if lease is None else lease.addon_id
        return event.data.get("addon_id")


_FORGOTTEN_AFTER: Final = 30 * SECOND
_MOST: Final = 64


class AttachedPrograms:
    """
    Programs that show their pools and graphs on the page. Each sends a snapshot about once a second, and is
    removed soon after its last one.

    Only the latest snapshot is kept, in memory: nothing depends on it.
    """

    def __init__(self) -> None:
        self._snapshots: dict[tuple[str | None, str], tuple[Moment, wire.AttachRequest]] = {}
        self._lock = Lock()

    def update(self, addon_id: str | None, snapshot: wire.AttachRequest, now: Moment) -> None:
        with self._lock:
            self._snapshots = {
                key: kept for key, kept in self._snapshots.items() if kept[0] > now - _FORGOTTEN_AFTER
            }
            if len(self._snapshots) >= _MOST and (addon_id, snapshot.name) not in self._snapshots:
                self._make_room(addon_id)
            self._snapshots[addon_id, snapshot.name] = (now, snapshot)

    def _make_room(self, addon_id: str | None) -> None:
        """
        Remove the oldest snapshot of the addon that has the most programs. Raises TooMany if the new
        program's addon would then have as many. So no addon can take all places.
        """
        held = Counter(owner for owner, _ in self._snapshots)
        [(largest, most)] = held.most_common(1)
        if held[addon_id] + 1 >= most:
            raise TooMany(f"{_MOST} programs are attached already", retry_after_sec=30.0)
        of_largest = [key for key in self._snapshots if key[0] == largest]
        del self._snapshots[min(of_largest, key=lambda key: self._snapshots[key][0])]

    def shown(self, addon_id: str | None, now: Moment) -> list[wire.Program]:
        with self._lock:
            programs = sorted(self._snapshots.items(), key=lambda item: (item[0][1], item[0][0] or ""))
        return [
            wire.Program(kept.name, when(at), kept.tasks)
            for (owner, _), (at, kept) in programs
            if at > now - _FORGOTTEN_AFTER and addon_id in (None, owner)
        ]
