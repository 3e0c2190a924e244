"""
`map` for a bounded queue.

The standard `map` submits everything at once and so holds a million futures for a million items. This one keeps a
window of calls and pulls the next items as results are taken. Two habits of the standard one remain: calls start when
`map` is called, and a map whose results nobody wants runs to its end all the same (when the pool is shut down). Leaving
a loop over the results early cancels what is left.

Where the pool has much room, items go in and results come out in runs: one hold of the gate's lock and one change of
state for many calls, instead of for each. A run is an eighth of the window, so the workers never run dry for its sake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures._base import FINISHED
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from penstock.pools.future import Call
from penstock.pools.options import whole
from penstock.pools.timers import clock

if TYPE_CHECKING:
    from penstock.pools.pool import WorkerPool

R = TypeVar("R")

_WIDEST: Final = 1024
#: How long items may gather before they are submitted: who waits for a result does not wait for a slow source as well.
_GATHER: Final = 200e-6


class OrderedMap(Iterator[R], Generic[R]):
    def __init__(
        self,
        pool: WorkerPool,
        fn: Callable[..., R],
        iterables: tuple[Iterable[Any], ...],
        *,
        timeout: float | None,
        chunksize: int,
    ) -> None:
        whole("chunksize", chunksize, least=1)
        self._pool = pool
        items: Iterator[tuple[Any, ...]] = zip(*iterables, strict=False)
        self._chunked = chunksize > 1
        self._fn: Callable[..., Any] = _run_chunk if self._chunked else fn
        self._items = ((fn, chunk) for chunk in _chunks(items, chunksize)) if self._chunked else items
        self._deadline = None if timeout is None else clock() + timeout
        self._calls: deque[Call[Any]] = deque()
        self._ready: deque[R] = deque()
        self._keep: Callable[[Any], None] = self._ready.extend if self._chunked else self._ready.append
        self._begun = False
        limits = pool._call_queue.queue.limits
        self._width = int(min(limits.max_in_flight + limits.max_queue_depth, _WIDEST)) + 1
        self._run = max(1, self._width // 8)
        pool._maps.add(self)
        while len(self._calls) < self._width - 1 and self._feed(self._width - 1):
            pass

    def __iter__(self) -> Self:
        self._begun = True
        return self

    def __next__(self) -> R:
        self._begun = True
        if not self._ready:
            try:
                self._take_results()
            except BaseException:  # an iterator that raised is over, as a generator would be
                self.close()
                raise
        return self._ready.popleft()

    def _take_results(self) -> None:
        """Of the next call, once it is done, and of those behind it that are done by then."""
        if self._width - len(self._calls) >= self._run:
            self._feed(self._width)
        calls = self._calls
        if not calls:
            raise StopIteration
        calls[0].result(None if self._deadline is None else max(0.0, self._deadline - clock()))
        for _ in range(self._run):
            self._keep(calls.popleft()._result)
            if not (calls and calls[0]._state is FINISHED and calls[0]._exception is None):
                break

    def _feed(self, width: int) -> bool:
        """Submit what there is room for and can be had at once, at least one. False if there are no more items."""
        room = int(min(self._pool._call_queue.queue.room(), width - len(self._calls)))
        run: list[tuple[Any, ...]] = []
        began = clock()
        for args in islice(self._items, max(1, room)):
            run.append(args)
            if clock() - began > _GATHER:
                break
        if run:
            self._submit(run)
        else:
            self._pool._maps.discard(self)
        return bool(run)

    def _submit(self, run: list[tuple[Any, ...]]) -> None:
        """All at once, as far as they can: a call that has its payload still to be made first needs a place for it."""
        pool, call_queue, fn, describe = (
            self._pool,
            self._pool._call_queue,
            self._fn,
            self._pool._group.describe,
        )
        at = 0
        if pool._plain and pool._tracing is None and len(run) > 1:
            calls: list[Call[Any]] = []
            for args in run:
                call: Call[Any] = Call(call_queue, fn)
                if describe(call, fn, args, {}) is not None:
                    break
                calls.append(call)
            at = call_queue.enter_run(calls)
            self._calls.extend(calls[:at])
        for args in run[at:]:
            self._calls.append(pool.submit(fn, *args))

    def finish(self) -> None:
        """The pool is shutting down: run what is left. If somebody reads the results they do it themselves."""
        if self._begun:
            return
        while self in self._pool._maps:
            self._feed(self._width)
            while len(self._calls) >= self._width:
                with suppress(Exception):  # nobody asked for this result, and the standard map is as silent
                    self._keep(self._calls.popleft().result())

    def close(self) -> None:
        self._pool._maps.discard(self)
        self._items = iter(())  # no more of them
        while self._calls:
            self._calls.popleft().cancel("its map was left")

    def __del__(self) -> None:
        if getattr(self, "_calls", None):
            self.close()


def _chunks(items: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    while chunk := list(islice(items, size)):
        yield chunk


def _run_chunk(fn: Callable[..., R], chunk: list[tuple[Any, ...]]) -> list[R]:
    return [fn(*args) for args in chunk]
