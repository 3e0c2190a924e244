"""
A place in the queue, before there is anything to put into it (DQ-4).

A queue bounds what it has accepted, not what its callers have built while they wait. Reserve first and build after, and
there are never more payloads than places.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from penstock.core.calls.ticket import WAIT
from penstock.pools.blocking import may_block
from penstock.pools.context import awaited
from penstock.pools.future import Call

if TYPE_CHECKING:
    from penstock.pools.pool import WorkerPool

P = ParamSpec("P")
R = TypeVar("R")


class Reservation:
    """Good for one call. Left without one, the place goes to the next in line."""

    def __init__(self, pool: WorkerPool, *, timeout: float | None, key: Hashable) -> None:
        self._pool = pool
        self._call: Call[Any] | None = Call(pool._call_queue, _nothing)
        if timeout is not None or key is not None:
            pool._call_queue.guard(self._call, key=key, timeout=timeout, signal=None)

    def __enter__(self) -> Self:
        if not may_block():
            raise RuntimeError("`with pool.reserve()` would block an event loop here; use `async with`")
        call_queue, call = self._pool._call_queue, self._taken()
        if call_queue.enter(call) is WAIT:
            call_queue._sleep(call)
        return self

    async def __aenter__(self) -> Self:
        from penstock.pools import loops  # noqa: PLC0415  # asyncio is slow to import for those who do not use it

        call_queue, call = self._pool._call_queue, self._taken()
        call.mailbox = loops.mailbox()
        call_queue.enter(call)
        try:
            await loops.place(call)
        except BaseException:  # its task was canceled: nobody will use the place
            call_queue.cancel(call, "its task was canceled")
            raise
        return self

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Never waits: the place is there."""
        call = self._taken()
        call.mailbox, self._call = None, None
        self._fill(call, fn, args, kwargs)
        return call

    def call(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        call, self._call = self._taken(), None
        self._fill(call, fn, args, kwargs)
        return awaited(self._pool._call_queue, call, None)

    def _taken(self) -> Call[Any]:
        if self._call is None:
            raise RuntimeError("this place was used already; a reservation is good for one call")
        return self._call

    def _fill(self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.fn = fn
        prepare = self._pool._group.describe(call, fn, args, kwargs)
        if self._pool._tracing is not None:
            self._pool._tracing.begin(call)
        self._pool._call_queue.fill(call, prepare or _nothing)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is not None:
            self._pool._call_queue.cancel(self._call, "the place was not used")
            self._call = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def _nothing() -> None:
    """There is no payload to make."""
