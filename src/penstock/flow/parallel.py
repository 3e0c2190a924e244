"""
Flow control at the call site: at most n calls in progress, and items pulled as places become free.

A queue cannot do this. It bounds the calls that it holds, not the payloads that its callers build before they
submit. Only the code that makes the work can wait before it makes more (docs/flow-control.md).
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from penstock.flow.pullers import OnError, Pullers, Settled, checked_errors, checked_fn, checked_n

if TYPE_CHECKING:
    from concurrent.futures import Future


T = TypeVar("T")
R = TypeVar("R")


@overload
def parallel_limit(
    items: Iterable[T] | AsyncIterable[T],
    n: int,
    fn: Callable[[T], Awaitable[R]] | Callable[[T], Future[R]],
    *,
    ordered: bool = False,
    errors: Literal["raise", "skip"] = "raise",
) -> Flow[R]: ...
@overload
def parallel_limit(
    items: Iterable[T] | AsyncIterable[T],
    n: int,
    fn: Callable[[T], Awaitable[R]] | Callable[[T], Future[R]],
    *,
    ordered: bool = False,
    errors: Literal["settled"],
) -> Flow[Settled[T, R]]: ...
@overload
def parallel_limit(
    items: Iterable[T] | AsyncIterable[T],
    n: int,
    fn: Callable[[T], R],
    *,
    ordered: bool = False,
    errors: Literal["raise", "skip"] = "raise",
) -> Flow[R]: ...
@overload
def parallel_limit(
    items: Iterable[T] | AsyncIterable[T],
    n: int,
    fn: Callable[[T], R],
    *,
    ordered: bool = False,
    errors: Literal["settled"],
) -> Flow[Settled[T, R]]: ...
def parallel_limit(
    items: Iterable[Any] | AsyncIterable[Any],
    n: int,
    fn: Callable[[Any], Any],
    *,
    ordered: bool = False,
    errors: OnError = "raise",
) -> Flow[Any]:
    """
    Call `fn` for every item, at most `n` calls in progress, and iterate over the results.

        async for report in parallel_limit(paths, 8, make_report): ...

    `fn` is called on the event loop. If it returns an awaitable or a `concurrent.futures.Future`, that is
    awaited; any other value is the result itself, so a plain function blocks the loop while it runs. A plain
    function is not sent to a thread by itself, because only its result tells a function that blocks from one
    that starts something: use `lambda item: asyncio.to_thread(fn, item)`, or a pool. Every call sees the
    context variables as they were at the first step of the loop, and what a call sets there stays its own.

    Results come as they are ready, or in the order of the items with `ordered=True`. `errors` says what a
    failed call does. `raise` cancels the other calls, waits until they have ended, and raises the first error
    after the results that were ready before it. `skip` leaves the item out (counted in `.skipped`, logged at
    DEBUG). `settled` yields a `Settled` for every item. An error of `items` itself is always raised: at once
    with `raise`, otherwise after the calls in progress have ended and their results were taken.

    Leaving the loop cancels the running calls. `break` requests that and goes on; to know that they have
    ended, write `async with parallel_limit(...) as flow` around the loop, or await `aclose()`.
    """
    limit, call, on_error = checked_n(n), checked_fn(fn), checked_errors(errors)
    source, is_async = _source_of(items)
    return Flow(Pullers(source, is_async=is_async, n=limit, fn=call, ordered=ordered, errors=on_error))


class Flow(AsyncIterator[R]):
    """
    The results of `parallel_limit`, as an async iterator and a context manager.

    The pullers do not refer to this object, so only the loop holds it. That is why `break` acts at once: it
    drops the last reference, and `__del__` cancels the pullers. An async generator would first have to be
    finalized by the event loop in a task of its own.
    """

    __slots__ = ("__weakref__", "_pullers")

    def __init__(self, pullers: Pullers) -> None:
        self._pullers = pullers

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        pullers = self._pullers
        results = pullers.results
        if not results:
            await pullers.more()
        value: R = results.popleft()
        if pullers.free_places > len(results):
            pullers.add_pullers_soon()
        return value

    @property
    def skipped(self) -> int:
        """The number of items that `errors="skip"` has left out so far."""
        return self._pullers.skipped

    async def aclose(self) -> None:
        """Cancel the running calls and wait until they have ended. Results not yet taken are dropped."""
        await self._pullers.end()
        await self._pullers.close_source()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._pullers.abandon()


def _source_of(items: Any) -> tuple[Any, bool]:
    if isinstance(items, AsyncIterable):
        return aiter(items), True
    try:
        return iter(items), False
    except TypeError as error:
        hint = ": call it first" if callable(items) else ": await it first" if isawaitable(items) else ""
        raise TypeError(
            f"items must be a sync or async iterable, not {type(items).__name__}{hint}"
        ) from error
