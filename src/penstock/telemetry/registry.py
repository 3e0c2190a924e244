"""
The pools and graphs of this process (OB-1, OB-3): `snapshot()` returns their state, `subscribe()` calls a
function with it at intervals, `instrument()` shows them to OpenTelemetry. docs/telemetry.md has the names.

Pools and graphs register themselves and are held weakly, so they never have to be removed. OpenTelemetry is
imported only by `instrument()`: a program that does not use it needs no extra and pays nothing.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from penstock.pools.timers import Timer, call_at, clock

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from penstock.graphs.executor import GraphExecutor
    from penstock.pools.calling import PoolInternals
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
    """Call `fn` with every pool and graph executor of this process, present and future."""
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
    """
    Every pool and graph of this process, by name.

    For example:

        for task in penstock.snapshot():
            print(task)
    """
    return [thing.snapshot() for thing in registered()]


def registered() -> list[Registered]:
    with _lock:
        things = list(_things)
    return sorted(things, key=lambda thing: thing.name)


def subscribe(interval: float, fn: Callable[[list[Any]], object]) -> Subscription:
    """
    Call `fn` with a snapshot every `interval` seconds, on a thread of Penstock's, until the subscription is
    closed.

    For example:

        subscription = penstock.subscribe(5, print)
        subscription.close()
    """
    if not isinstance(interval, (int, float)) or interval <= 0:
        raise ValueError(f"interval is {interval!r}; it must be a number of seconds above 0")
    return Subscription(interval, fn)


class Subscription:
    def __init__(self, interval: float, fn: Callable[[list[Any]], object]) -> None:
        self._interval = interval
        self._fn = fn
        self._timer: Timer | None = call_at(clock(), self._call)

    def _call(self) -> None:
        try:
            self._fn(snapshot())
        finally:
            if self._timer is not None:
                self._timer = call_at(clock() + self._interval, self._call)

    def close(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pool_snapshot(pool: PoolInternals) -> TaskSnapshot:
    call_queue, group = pool.call_queue, pool.group
    with call_queue.lock:
        state = call_queue.queue.state()
        return TaskSnapshot(
            name=pool.name,
            kind=group.kind,
            workers=group.worker_counts(),
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


#: The names that `name_for` makes.
_made_up = re.compile(r"(pool|singleton)-\d+")


def labels_of(pool: PoolInternals) -> dict[str, str]:
    """
    The labels of a pool.

    Every label value becomes a time series that costs money, so labels come only from the source code: the
    qualified names of functions, and the given names of pools. Pools without a name share one label, because
    a program may make thousands of them.
    """
    made_up = _made_up.fullmatch(pool.name)
    return {
        "pool": made_up[1] if made_up else pool.name,
        "kind": pool.group.kind,
        "policy": str(pool.call_queue.queue.limits.policy),
    }


def task_name(fn: Any, target: Any = None) -> str:
    """
    The label of a function. `target` makes the object of a singleton, where `fn` is only the name of a
    method.
    """
    if isinstance(fn, str):
        return f"{task_name(target)}.{fn}" if target is not None else fn
    while isinstance(fn, functools.partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"


def instrument(
    pool: WorkerPool | GraphExecutor | None = None,
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
    histograms: bool = True,
    spans: bool = True,
) -> None:
    """
    Send the metrics of a pool or a graph executor to OpenTelemetry, with a span for each call or run; without
    an argument, of all present and future ones. By default the providers are the global ones, even if they
    are set later.

    Gauges and counters are read at collection and cost a call nothing. Histograms and spans cost many times
    as much as a short call; pools of very short calls may leave them out.

    For example:

        penstock.instrument()  # every pool and graph of this program
    """
    from penstock.pools.pool import WorkerPool  # noqa: PLC0415  # pools import this module

    if pool is not None and not isinstance(pool, WorkerPool) and not hasattr(pool, "attach_telemetry"):
        raise TypeError(
            f"pool is {pool!r}; it must be a WorkerPool or a GraphExecutor, or None for all of them"
        )
    try:
        from penstock.telemetry.meters import meters_for  # noqa: PLC0415  # only on demand
        from penstock.telemetry.spans import trace_calls  # noqa: PLC0415  # as above
    except ModuleNotFoundError as missing:
        if missing.name is None or not missing.name.startswith("opentelemetry"):
            raise
        raise ModuleNotFoundError(
            "OpenTelemetry is not installed; pip install 'penstock[otel]'", name=missing.name
        ) from missing
    meters = meters_for(meter_provider)

    def attach(thing: Any) -> None:
        if isinstance(thing, WorkerPool):
            meters.watch(thing.internals, histograms=histograms)
            if spans:
                trace_calls(thing.internals, tracer_provider)
        elif hasattr(thing, "attach_telemetry"):
            thing.attach_telemetry(meters, tracer_provider, histograms=histograms, spans=spans)

    if pool is not None:
        attach(pool)
    else:
        watch(attach)
