"""
What runs in this process, to look at (OB-3): `snapshot()` now, `subscribe()` again and again.

Pools and graphs register themselves and are held weakly; nobody has to remember to take one out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from penstock.pools.timers import Timer, call_at, clock

if TYPE_CHECKING:
    from penstock.pools.pool import WorkerPool


class TaskSnapshot(NamedTuple):
    """One pool or graph at one moment."""

    name: str
    kind: str
    workers: dict[str, int]  # how many are running, restarting, stopped, halted
    in_flight: int
    pending_queue_depth: int
    waiting_queue_depth: int
    max_in_flight: int
    max_queue_depth: float
    policy: str
    paused: bool
    load_by_worker: tuple[int, ...]
    settled_by_worker: tuple[int, ...]
    totals: dict[str, int]
    last_crash: str | None


class Registered(Protocol):
    name: str

    def snapshot(self) -> Any: ...


_lock = threading.Lock()
_things: weakref.WeakSet[Registered] = weakref.WeakSet()
_watchers: list[Callable[[Any], object]] = []
_numbers = count(1)


def register(thing: Registered) -> None:
    with _lock:
        _things.add(thing)
        watchers = list(_watchers)
    for fn in watchers:
        fn(thing)


def watch(fn: Callable[[Any], object]) -> None:
    """Call `fn` with every pool and graph executor of this process, those to come as well."""
    with _lock:
        _watchers.append(fn)
        things = list(_things)
    for thing in things:
        fn(thing)


def name_for(name: str | None, kind: str) -> str:
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"name is {name!r}; it must be a string, or None for one made up")
    return name or f"{kind}-{next(_numbers)}"


def snapshot() -> list[Any]:
    """Every pool and graph of this process, by name."""
    return [thing.snapshot() for thing in registered()]


def registered() -> list[Registered]:
    with _lock:
        things = list(_things)
    return sorted(things, key=lambda thing: thing.name)


def subscribe(interval: float, fn: Callable[[list[Any]], object]) -> Subscription:
    """Call `fn` with a snapshot every `interval` seconds, on a thread of Penstock's, until it is closed."""
    if not isinstance(interval, (int, float)) or interval <= 0:
        raise ValueError(f"interval is {interval!r}; it must be a number of seconds above 0")
    return Subscription(interval, fn)


class Subscription:
    def __init__(self, interval: float, fn: Callable[[list[Any]], object]) -> None:
        self._interval = interval
        self._fn = fn
        self._timer: Timer | None = call_at(clock(), self._tell)

    def _tell(self) -> None:
        try:
            self._fn(snapshot())
        finally:
            if self._timer is not None:
                self._timer = call_at(clock() + self._interval, self._tell)

    def close(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe(pool: WorkerPool) -> TaskSnapshot:
    call_queue, group = pool._call_queue, pool._group
    with call_queue.lock:
        state = call_queue.queue.state()
        return TaskSnapshot(
            name=pool.name,
            kind=group.kind,
            workers=group.census(),
            in_flight=state.in_flight,
            pending_queue_depth=state.pending,
            waiting_queue_depth=state.waiting,
            max_in_flight=state.max_in_flight,
            max_queue_depth=state.max_queue_depth,
            policy=str(state.policy),
            paused=state.paused,
            load_by_worker=group.loads(),
            settled_by_worker=tuple(worker.settled for worker in group.workers),
            totals=call_queue.totals.as_dict(),
            last_crash=group.last_crash,
        )
