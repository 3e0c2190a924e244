"""
The ways to make calls: `Task` (a function bound to its pool), `Reservation` (a place in the queue before
there is a payload) and `OrderedMap` (the results of `map`); and `PoolInternals`, the parts of a pool that
these use.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, Self, TypeVar

from penstock.core.calls.ticket import WAIT, check_count
from penstock.core.text import safe_repr
from penstock.pools.call_queue import CallQueue
from penstock.pools.context import may_block
from penstock.pools.future import AwaitableFuture, Call
from penstock.pools.guards import CancelSignal
from penstock.pools.options import WorkerOptions, seconds
from penstock.pools.timers import clock
from penstock.pools.workers.base import WorkerGroup

if TYPE_CHECKING:
    from penstock.telemetry.spans import CallSpans

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class PoolInternals:
    """
    The parts of a pool that its tasks, reservations, maps and telemetry share.

    `WorkerPool` itself has few names of its own, because the methods of a singleton's object are reached
    through it.
    """

    name: str
    call_queue: CallQueue
    group: WorkerGroup
    options: WorkerOptions
    timeout: float | None
    key_of: Callable[..., Hashable] | None
    tracing: CallSpans | None = None  # OpenTelemetry's spans for its calls
    maps: set[OrderedMap[Any]] = field(default_factory=set)  # those with items left to submit

    @property
    def needs_guards(self) -> bool:
        """Whether every call has a timeout or a key."""
        return self.timeout is not None or self.key_of is not None

    def make_call(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float | None = None,
        key: Hashable = None,
        signal: CancelSignal | None = None,
    ) -> tuple[Call[Any], Callable[[], None] | None]:
        """
        A new call with its guards and its trace, and the function that makes its payload (see
        `WorkerGroup.pack_call`).
        """
        call: Call[Any] = Call(self.call_queue, fn)
        if self.needs_guards or timeout is not None or key is not None or signal is not None:
            timeout = self.timeout if timeout is None else timeout
            if key is None and self.key_of is not None:
                key = self.key_of(*args, **kwargs)
            self.call_queue.guard(call, key=key, timeout=timeout, signal=signal)
        return call, self.pack(call, args, kwargs)

    def pack(
        self, call: Call[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Name the call's function and begin its trace, on the caller's thread. See `WorkerGroup.pack_call`."""
        prepare = self.group.pack_call(call, call.fn, args, kwargs)
        if self.tracing is not None:
            self.tracing.begin(call)
        return prepare


class Task(Generic[P, R]):
    """
    A function bound to a pool. `task(...)` waits for the result, `task.submit(...)` returns a Future, `await
    task.call(...)` waits in a coroutine.

    For example:

        resize = pool.task(thumbnail, timeout=5)
        small = resize("a.jpg")
        call = resize.submit("b.jpg")
        small = await resize.call("c.jpg")
    """

    __slots__ = ("_fn", "_internals", "_key_of", "_signal", "_timeout", "name")

    def __init__(
        self,
        internals: PoolInternals,
        fn: Callable[P, R] | str,
        *,
        timeout: float | None = None,
        key_of: Callable[..., Hashable] | None = None,
        signal: CancelSignal | None = None,
    ) -> None:
        seconds("timeout", timeout, or_none=True)
        if not callable(fn) and not isinstance(fn, str):
            raise TypeError(f"fn is {fn!r}; it must be a function")
        check_key_of(key_of)
        self._internals = internals
        self._fn: Any = fn
        self._timeout = timeout
        self._key_of = key_of
        self._signal = signal
        self.name = fn if isinstance(fn, str) else getattr(fn, "__qualname__", None) or safe_repr(fn, 200)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        call, prepare = self._make_call(args, kwargs)
        self._internals.call_queue.submit(call, prepare)
        return call

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        return awaited()(self._internals.call_queue, *self._make_call(args, kwargs))

    def _make_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call[R], Callable[[], None] | None]:
        key = self._key_of(*args, **kwargs) if self._key_of is not None else None
        return self._internals.make_call(
            self._fn, args, kwargs, timeout=self._timeout, key=key, signal=self._signal
        )

    def __repr__(self) -> str:
        return f"<Task {self.name} on {self._internals.name!r}>"


class Reservation:
    """
    A place in the queue for one call (DQ-4). A reservation without a call gives its place to the next caller
    at the end of its block.

    A queue bounds the calls that it has accepted, not the payloads that callers build while they wait.
    Reserve first and build after, and there are never more payloads than places.
    """

    def __init__(self, internals: PoolInternals, *, timeout: float | None, key: Hashable) -> None:
        self._internals = internals
        self._call: Call[Any] | None = Call(internals.call_queue, _no_payload)
        if timeout is not None or key is not None:
            internals.call_queue.guard(self._call, key=key, timeout=timeout, signal=None)

    def __enter__(self) -> Self:
        if not may_block():
            raise RuntimeError("`with pool.reserve()` would block an event loop here; use `async with`")
        call_queue, call = self._internals.call_queue, self._unused_call()
        if call_queue.enter(call) is WAIT:
            call_queue.wait_for_place(call)
        return self

    async def __aenter__(self) -> Self:
        from penstock.pools import event_loops  # noqa: PLC0415  # imports asyncio, which many programs never need

        call_queue, call = self._internals.call_queue, self._unused_call()
        call.notifier = event_loops.loop_notifier()
        call_queue.enter(call)
        try:
            await event_loops.wait_for_place(call)
        except BaseException:  # the task was canceled: the place will not be used
            call_queue.cancel(call, "its task was canceled")
            raise
        return self

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Submit the call. It never waits, because it has its place."""
        call = self._unused_call()
        call.notifier, self._call = None, None
        self._fill(call, fn, args, kwargs)
        return call

    def call(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        call, self._call = self._unused_call(), None
        self._fill(call, fn, args, kwargs)
        return awaited()(self._internals.call_queue, call, None)

    def _unused_call(self) -> Call[Any]:
        if self._call is None:
            raise RuntimeError("this place was used already; a reservation is good for one call")
        return self._call

    def _fill(self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.fn = fn
        prepare = self._internals.pack(call, args, kwargs)
        self._internals.call_queue.fill(call, prepare or _no_payload)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is not None:
            self._internals.call_queue.cancel(self._call, "the place was not used")
            self._call = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def _no_payload() -> None:
    """There is no payload to make."""


def check_key_of(key_of: Any) -> None:
    if key_of is not None and not callable(key_of):
        raise TypeError(f"key_of is {key_of!r}; it must be a function of the call's arguments, or None")


@cache
def awaited() -> Callable[..., Awaitable[Any]]:
    """
    The function `event_loops.run`, imported on first use: asyncio takes longer to import than the whole
    package, and many programs never need it. Cached, because an import statement in each call takes 1 us of
    its 25.
    """
    from penstock.pools.event_loops import run  # noqa: PLC0415  # see above

    return run


async def in_daemon(fn: Callable[[], object]) -> None:
    """
    Await a blocking function in a daemon thread. The end of the program would wait for the loop's own
    executor, and Ctrl-C must not wait for `fn`.
    """
    done: AwaitableFuture[None] = AwaitableFuture()

    def run() -> None:
        try:
            fn()
        except BaseException as error:  # noqa: BLE001  # raised in the awaiting task
            done.set_outcome(None, error)
        else:
            done.set_outcome(None, None)

    threading.Thread(target=run, name="penstock-closer", daemon=True).start()
    await done


_MAX_WINDOW: Final = 1024
#: Seconds for which items may be collected before they are submitted: a caller that waits for a result must
#: not also wait for a slow source.
_GATHER: Final = 200e-6


class OrderedMap(Iterator[R], Generic[R]):
    """
    `map` for a bounded queue. The standard `map` submits everything at once, so a million items hold a
    million futures. This one keeps a window of calls and pulls the next items as results are taken. Two
    habits of the standard one remain: calls start when `map` is called, and a map whose results are not read
    still runs to its end, when the pool is shut down. Leaving a loop over the results early cancels the other
    calls.

    In a pool with much room, items enter and results leave in batches, with one acquisition of the lock and
    one change of state for many calls. A batch is an eighth of the window, so the workers do not run out of
    calls.
    """

    def __init__(
        self,
        internals: PoolInternals,
        submit: Callable[..., Call[Any]],
        fn: Callable[..., R],
        iterables: tuple[Iterable[Any], ...],
        *,
        timeout: float | None,
        chunksize: int,
    ) -> None:
        check_count("chunksize", chunksize, least=1)
        self._internals = internals
        self._submit_one = submit
        items: Iterator[tuple[Any, ...]] = zip(*iterables, strict=False)
        self._chunked = chunksize > 1
        self._fn: Callable[..., Any] = _run_chunk if self._chunked else fn
        self._items = ((fn, chunk) for chunk in _chunks(items, chunksize)) if self._chunked else items
        self._deadline = None if timeout is None else clock() + timeout
        self.calls: deque[Call[Any]] = deque()
        self._ready: deque[R] = deque()
        self._add_result: Callable[[Any], None] = self._ready.extend if self._chunked else self._ready.append
        self._iterated = False
        limits = internals.call_queue.queue.limits
        self._window = int(min(limits.max_in_flight + limits.max_queue_depth, _MAX_WINDOW)) + 1
        self._batch = max(1, self._window // 8)
        internals.maps.add(self)
        while len(self.calls) < self._window - 1 and self._feed(self._window - 1):
            pass

    def __iter__(self) -> Self:
        self._iterated = True
        return self

    def __next__(self) -> R:
        self._iterated = True
        if not self._ready:
            try:
                self._take_results()
            except BaseException:  # an iterator that raised has ended, as a generator would have
                self.close()
                raise
        return self._ready.popleft()

    def _take_results(self) -> None:
        """
        Take the result of the next call when it is done, and those of the following calls that are done by
        then.
        """
        if self._window - len(self.calls) >= self._batch:
            self._feed(self._window)
        calls = self.calls
        if not calls:
            raise StopIteration
        calls[0].result(None if self._deadline is None else max(0.0, self._deadline - clock()))
        for _ in range(self._batch):
            self._add_result(calls.popleft().result())
            if not (calls and calls[0].succeeded()):
                break

    def _feed(self, width: int) -> bool:
        """
        Submit as many items as there is room for and the source yields at once, but at least one. False:
        there are no more items.
        """
        places = int(min(self._internals.call_queue.queue.free_places(), width - len(self.calls)))
        batch: list[tuple[Any, ...]] = []
        began = clock()
        for args in islice(self._items, max(1, places)):
            batch.append(args)
            if clock() - began > _GATHER:
                break
        if batch:
            self._submit(batch)
        else:
            self._internals.maps.discard(self)
        return bool(batch)

    def _submit(self, batch: list[tuple[Any, ...]]) -> None:
        """
        Submit a batch, as many calls at once as possible. A call without a payload needs a place first, so it
        is submitted alone.
        """
        internals, fn = self._internals, self._fn
        call_queue, pack_call = internals.call_queue, internals.group.pack_call
        at = 0
        if not internals.needs_guards and internals.tracing is None and len(batch) > 1:
            calls: list[Call[Any]] = []
            for args in batch:
                call: Call[Any] = Call(call_queue, fn)
                if pack_call(call, fn, args, {}) is not None:
                    break
                calls.append(call)
            at = call_queue.enter_run(calls)
            self.calls.extend(calls[:at])
        for args in batch[at:]:
            self.calls.append(self._submit_one(fn, *args))

    def finish(self) -> None:
        """
        Called when the pool shuts down: run the remaining items. A loop that reads the results does that
        itself.
        """
        if self._iterated:
            return
        while self in self._internals.maps:
            self._feed(self._window)
            while len(self.calls) >= self._window:
                with suppress(Exception):  # this result is not read; the standard map is as silent
                    self._add_result(self.calls.popleft().result())

    def close(self) -> None:
        self._internals.maps.discard(self)
        self._items = iter(())
        while self.calls:
            self.calls.popleft().cancel("its map was left")

    def __del__(self) -> None:
        if getattr(self, "calls", None):
            self.close()


def _chunks(items: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    while chunk := list(islice(items, size)):
        yield chunk


def _run_chunk(fn: Callable[..., R], chunk: list[tuple[Any, ...]]) -> list[R]:
    return [fn(*args) for args in chunk]
