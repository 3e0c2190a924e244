"""
A few threads for calls that block, shared fairly: each owner (an addon, or a token that is bound to none) has its own queue, and the owners take turns.

First come, first served would let one owner with hundreds of slow reads delay the heartbeats of all others until their leases are over. One owner also
never has all threads: the others find one free, however slow its calls are.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

__all__ = ["OURS", "FairPool"]

T = TypeVar("T")

#: The server's own calls, on behalf of all: they take turns too, but have no limit.
OURS: Final = ""


class _Waiting(NamedTuple):
    answer: asyncio.Future[Any]
    function: Callable[[], Any]


class FairPool:
    """Lives on one event loop: everything but the calls themselves happens there, so there is no lock. `per_owner`: threads at once."""

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
