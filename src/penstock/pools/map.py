"""
`map` for a bounded queue.

The standard `map` submits everything at once, so a million items hold a million futures. This one keeps a
window of calls and pulls the next items as results are taken. Two habits of the standard one remain: calls
start when `map` is called, and a map whose results are not read still runs to its end, when the pool is shut
down. Leaving a loop over the results early cancels the other calls.

Where the pool has much room, items go in and results come out in batches: one hold of the queue's lock and
one change of state for many calls. A batch is an eighth of the window, so the workers do not run out of calls
for its sake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from penstock.pools.future import Call
from penstock.pools.options import whole
from penstock.pools.timers import clock

if TYPE_CHECKING:
    from penstock.pools.calling import PoolInternals

R = TypeVar("R")

_MAX_WINDOW: Final = 1024
#: How long items may be collected before they are submitted: a caller that waits for a result must not wait
#: for a slow source, too.
_GATHER: Final = 200e-6


class OrderedMap(Iterator[R], Generic[R]):
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
        whole("chunksize", chunksize, least=1)
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
        """Take the result of the next call, once it is done, and of those behind it that are done by then."""
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
        Submit the items that there is room for and that the source gives at once, at least one. False if
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
        Enter as many at once as possible. A call whose payload is still to be made needs a place first, so it
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
