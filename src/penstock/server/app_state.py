"""
What every handler has at hand: the scheduler, the tokens, the trail, threads for calls that block, and the request itself.

A handler that is a plain function runs in a thread, because the store blocks. A handler that waits for something to happen is a
coroutine, and hands only its single steps to the threads.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from penstock import wire
from penstock.core.errors import NotFound
from penstock.core.jobs.changes import admin_event
from penstock.core.jobs.explain import Viewer
from penstock.core.jobs.job import Dispatch, Event, EventKind, Job
from penstock.core.jobs.types import SECOND, AddonId, DispatchId, JobId, Moment
from penstock.runner.output import Output
from penstock.runner.payload import Functions
from penstock.scheduler.service import SchedulerService
from penstock.server.event_hub import ClaimQueue, EventHub, StatsStream
from penstock.server.page import CODE_LASTS, Opened, Sessions
from penstock.server.problems import OverLimit, TooMany
from penstock.server.tokens import Principal, TokenFile
from penstock.server.views import when
from penstock.stores.api import Apply, Store, committed
from penstock.wire import Scope

T = TypeVar("T")

#: The server's own calls, on behalf of all: they take turns too, but have no limit.
OURS: Final = ""


class _Waiting(NamedTuple):
    answer: asyncio.Future[Any]
    function: Callable[[], Any]


class FairPool:
    """
    A few threads for calls that block, shared fairly: each owner (an addon, or a token that is bound to none) has its own queue, and
    the owners take turns.

    First come, first served would let one owner with hundreds of slow reads delay the heartbeats of all others until their leases are over.
    `per_owner`: threads at once, so that other owners find one free. Lives on one event loop: everything but the calls themselves happens
    there, so there is no lock.
    """

    def __init__(self, threads: int, per_owner: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._free, self._per_owner = loop, threads, per_owner
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="penstock-http")
        self._running: Counter[str] = Counter()
        #: The owner whose turn is next comes first.
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
            if not waiting.answer.done():  # else its client has gone away
                self._free -= 1
                self._running[owner] += 1
                self._threads.submit(self._call, owner, waiting)

    def _next(self) -> str | None:
        return next((o for o in self._queues if o == OURS or self._running[o] < self._per_owner), None)

    def _call(self, owner: str, waiting: _Waiting) -> None:
        """In a thread."""
        result, error = None, None
        try:
            result = waiting.function()
        except BaseException as raised:  # noqa: BLE001 - it belongs to the caller
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


_FORGOTTEN_AFTER: Final = 30 * SECOND
_MOST: Final = 64


class Programs:
    """
    Programs that show their pools and graphs on the page. Each sends a snapshot about once a second, and is forgotten soon after it stops.

    Only the latest is kept, in memory: nothing is decided by it, so nothing is lost with it.
    """

    def __init__(self) -> None:
        self._snapshots: dict[tuple[str | None, str], tuple[Moment, wire.Attach]] = {}
        self._lock = Lock()

    def update(self, addon_id: str | None, snapshot: wire.Attach, now: Moment) -> None:
        with self._lock:
            self._snapshots = {
                key: kept for key, kept in self._snapshots.items() if kept[0] > now - _FORGOTTEN_AFTER
            }
            if len(self._snapshots) >= _MOST and (addon_id, snapshot.name) not in self._snapshots:
                self._make_room(addon_id)
            self._snapshots[addon_id, snapshot.name] = (now, snapshot)

    def _make_room(self, addon_id: str | None) -> None:
        """The addon with the most programs gives one up, unless the newcomer would then have as many: no addon can take all places."""
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


Q = TypeVar("Q")
B = TypeVar("B")


class Runs(Protocol):
    """What the server needs of the runner: the dispatch of a run's own token, its calls, and a kill."""

    def kill(self, dispatch_id: DispatchId) -> None: ...

    def dispatch_of(self, token: str) -> DispatchId | None: ...

    def call(self, token: str, call: dict[str, Any]) -> dict[str, Any]: ...


def bearer(headers: Mapping[bytes, bytes]) -> str | None:
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    return secret.strip().decode("latin-1") if scheme.lower() == b"bearer" else None


class AppState:
    def __init__(
        self,
        service: SchedulerService,
        tokens: TokenFile,
        *,
        threads: int,
        per_owner: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.service, self.tokens, self.loop = service, tokens, loop
        self.store, self.job_service = service.store, service.job_service
        self.started_at: Moment = service.store.now()
        self._pool = FairPool(threads, per_owner, loop)
        self.trail = EventHub(service.store, self.run, loop)
        self.claims = ClaimQueue(service.job_service, self.trail)
        self.owners = Owners(service.store)
        #: Of the runner beside the scheduler, if there is one.
        self.output: Callable[[DispatchId], Output] | None = None
        self.functions = Functions()
        self.runs: Runs | None = None
        self.beats = StatsStream(service, self.run, loop)
        self.programs = Programs()
        #: Set by the server when it has a page; there is nothing to log in to otherwise.
        self.sessions: Sessions | None = None
        self.page_url = ""
        service.store.on_change(self.trail.notify)

    def run(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Run a call in one of a few threads, on behalf of all clients: a store may wait for a disk or a lock, and the event loop must not."""
        return self._pool.run(OURS, function, *args)

    def run_for(self, principal: Principal, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """On behalf of one client, which shares the threads with the others. The tokens of an addon count as one."""
        return self._pool.run(principal.addon_id or principal.name, function, *args)

    def run_of(self, headers: Mapping[bytes, bytes]) -> Principal | None:
        """A client that shows the token of a running dispatch is that dispatch."""
        token = bearer(headers)
        dispatch_id = None if self.runs is None or token is None else self.runs.dispatch_of(token)
        return None if dispatch_id is None else Principal(f"run {dispatch_id}", frozenset({Scope.RUN_SELF}))

    def record(self, kind: EventKind, reason: str, who: Principal, data: Mapping[str, Any]) -> None:
        """An act of administration, for the trail, with its principal. It is no addon's event: no bound token sees it. It blocks."""
        committed(self.store, Apply([admin_event(self.store.now(), kind, reason, who.name, data)]))

    async def opened(self, session: Opened) -> None:
        """A login link was opened."""
        data = {"token_id": session.token_id}
        await self.run(self.record, EventKind.LOGIN, "session_opened", session.who, data)

    def login(self, who: Principal) -> wire.Login:
        if self.sessions is None:
            raise NotFound("this scheduler has no page: it was started without one")
        now = self.store.now()
        return wire.Login(f"{self.page_url}/#code={self.sessions.code(who, now)}", when(now + CODE_LASTS))

    def close(self) -> None:
        self.trail.close()
        self._pool.close()


class Owners:
    """Whose an event is. An event does not say, and a job never changes hands, so what was looked up once is kept."""

    _KEPT: Final = 50_000

    def __init__(self, store: Store) -> None:
        self._store = store
        self._addons: OrderedDict[str, AddonId | None] = OrderedDict()

    def only(self, events: Sequence[Event], addon_id: str) -> list[Event]:
        self._learn(events)
        return [event for event in events if self._of(event) == addon_id]

    def _learn(self, events: Iterable[Event]) -> None:
        unknown = {e.job_id for e in events if e.job_id is not None and e.job_id not in self._addons}
        for job in self._store.jobs(list(unknown)):
            self._addons[job.job_id] = job.intent.addon_id
        while len(self._addons) > self._KEPT:
            self._addons.popitem(last=False)

    def of_job(self, job_id: JobId) -> AddonId | None:
        addon_id = self._addons.get(job_id)
        if addon_id is None and (job := self._store.job(job_id)) is not None:
            addon_id = self._addons[job_id] = job.intent.addon_id
        return addon_id

    def _of(self, event: Event) -> str | None:
        if event.job_id is not None:
            return self._addons.get(event.job_id)
        if event.dispatch_id is not None:
            lease = self._store.dispatch(event.dispatch_id)
            return None if lease is None else lease.addon_id
        return event.data.get("addon_id")


@dataclass(slots=True)
class Request(Generic[Q, B]):
    """One request, understood: its path, query and body are of the types that its route declares."""

    app_state: AppState
    principal: Principal
    path: str
    query: Q
    body: B
    headers: dict[bytes, bytes]
    #: Completes when the client has gone away or its token has ended. Made on demand: only handlers that wait need it.
    watch: Callable[[], asyncio.Future[Any]]
    store: Store = field(init=False)
    #: Takes the names of other addons out of what a token may see that is bound to one. None: it may see all.
    viewer: Viewer | None = field(init=False)

    def __post_init__(self) -> None:
        self.store, self.viewer = self.app_state.store, None
        if (addon_id := self.principal.addon_id) is not None:
            owners = self.app_state.owners
            self.viewer = Viewer(AddonId(addon_id), lambda job_id: owners.of_job(job_id) == addon_id)

    def run(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Beside the event loop, in the caller's share of the threads."""
        return self.app_state.run_for(self.principal, function, *args)

    @property
    def job_id(self) -> JobId:
        return JobId(self.path)

    async def sooner(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Until that has come, or the client has gone."""
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait((self.watch(), task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()

    def addon(self, name: str | None) -> AddonId | None:
        """The addon to search: the one that the token is bound to, else the one that the request names."""
        bound = self.principal.addon_id
        if bound is not None and name is not None and name != bound:
            raise NotFound(f"there is no addon {name}", addon_id=name)
        chosen = name if bound is None else bound
        return None if chosen is None else AddonId(chosen)

    def own_job(self, job_id: JobId) -> Job:
        """A job that does not exist and a job of another addon get the same answer, to the letter."""
        job = self.store.job(job_id)
        if job is None or not self.owns(job.intent.addon_id):
            raise NotFound(f"there is no job {job_id}", job_id=job_id)
        return job

    def own_lease(self, lease_id: str) -> Dispatch:
        lease = self.store.dispatch(DispatchId(lease_id))
        if lease is None or not self.owns(lease.addon_id):
            raise NotFound(f"there is no lease {lease_id}", lease_id=lease_id)
        return lease

    def owns(self, addon_id: str) -> bool:
        return self.principal.addon_id in (None, addon_id)

    def check_limits(self, cost_units: int, priority: int, at: str = "") -> None:
        """What the token may ask for at most."""
        who, problems = self.principal, []
        if who.max_cost_units is not None and cost_units > who.max_cost_units:
            message = f"must be at most {who.max_cost_units} with this token"
            problems.append({"field": f"{at}cost_units", "message": message})
        if who.max_priority is not None and priority > who.max_priority:
            message = f"must be at most {who.max_priority} with this token"
            problems.append({"field": f"{at}priority", "message": message})
        if problems:
            raise OverLimit(f"{problems[0]['field']} {problems[0]['message']}", problems=problems)
