"""
`map` for a bounded queue.

The standard `map` submits everything at once and so holds a million futures for a million items. This one keeps a
window of calls and pulls the next item when a result is taken. Two habits of the standard one remain: calls start when
`map` is called, and a map whose results nobody wants runs to its end all the same (when the pool is shut down). Leaving
a loop over the results early cancels what is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from penstock.local.call import Call
from penstock.local.options import whole
from penstock.local.timers import clock

if TYPE_CHECKING:
    from penstock.local.pool import WorkerPool

R = TypeVar("R")

_WIDEST = 1024


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
        self._fn = fn
        self._items = zip(*iterables, strict=False)
        self._chunksize = chunksize
        self._deadline = None if timeout is None else clock() + timeout
        self._calls: deque[Call[Any]] = deque()
        self._ready: deque[R] = deque()
        self._begun = False
        limits = pool._gate.queue.limits
        self._width = int(min(limits.max_in_flight + limits.max_queue_depth, _WIDEST)) + 1
        pool._maps.add(self)
        self._feed(self._width - 1)

    def __iter__(self) -> Self:
        self._begun = True
        return self

    def __next__(self) -> R:
        self._begun = True
        if not self._ready:
            try:
                self._ready.extend(self._next_results())
            except BaseException:  # an iterator that raised is over, as a generator would be
                self.close()
                raise
        return self._ready.popleft()

    def _next_results(self) -> Iterable[R]:
        self._feed(1)
        if not self._calls:
            raise StopIteration
        call = self._calls[0]
        results = call.result(None if self._deadline is None else max(0.0, self._deadline - clock()))
        self._calls.popleft()
        return results if self._chunksize > 1 else (results,)

    def _feed(self, count: int) -> None:
        """Submit that many more, as far as there are items and the window allows."""
        while count > 0 and len(self._calls) < self._width:
            count -= 1
            if self._chunksize == 1:
                for item in self._items:
                    self._calls.append(self._pool.submit(self._fn, *item))
                    break
                else:
                    self._end_of_items()
                    return
            elif chunk := list(islice(self._items, self._chunksize)):
                self._calls.append(self._pool.submit(_run_chunk, self._fn, chunk))
            else:
                self._end_of_items()
                return

    def _end_of_items(self) -> None:
        self._pool._maps.discard(self)

    def finish(self) -> None:
        """The pool is shutting down: run what is left. If somebody reads the results they do it themselves."""
        if self._begun:
            return
        while self in self._pool._maps:
            self._feed(1)
            while len(self._calls) >= self._width:
                self._ready.extend(self._settled(self._calls.popleft()))

    def _settled(self, call: Call[Any]) -> Iterable[R]:
        try:
            results = call.result()
        except Exception:  # noqa: BLE001  # nobody asked for this result, and the standard map is as silent
            return ()
        return results if self._chunksize > 1 else (results,)

    def close(self) -> None:
        self._pool._maps.discard(self)
        self._items = iter(())  # type: ignore[assignment]  # no more of them
        while self._calls:
            self._calls.popleft().cancel("its map was left")

    def __del__(self) -> None:
        if getattr(self, "_calls", None):
            self.close()


def _run_chunk(fn: Callable[..., R], chunk: list[tuple[Any, ...]]) -> list[R]:
    return [fn(*args) for args in chunk]
