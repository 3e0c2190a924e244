"""
`parallel_limit`: at most n calls in progress, and items are pulled when places become free.

A queue cannot do this: it bounds its calls, but not the payloads that callers build before they submit
(docs/flow-control.md).

`parallel_limit` is for event loops; its implementation is in `pullers.py`. `parallel_limit_sync` is for
programs without one: calls run on threads or through any executor. It pulls items only in `next()`, on the
iterating thread. So the source may be a database cursor or a generator with thread-local state, Ctrl-C
interrupts it, and no lock is needed: one thread counts, and two queues carry the calls to the threads and
back. But a source that blocks delays results, so use the async variant for a live feed. A thread cannot be
stopped from outside, so canceling means: calls that have not started never start, and running calls are
waited for.
"""

from __future__ import annotations

import contextvars
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from inspect import isawaitable, iscoroutinefunction
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from time import monotonic
from typing import Any, Final, Literal, NoReturn, Self, TypeVar, cast, overload

from penstock.core.text import is_kind, safe_repr
from penstock.flow.pullers import (
    OnError,
    Outcome,
    Pullers,
    Raised,
    Returned,
    checked_errors,
    checked_fn,
    checked_n,
    log,
    raisable,
)

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
) -> Flow[Outcome[T, R]]: ...
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
) -> Flow[Outcome[T, R]]: ...
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
    function is not sent to a thread by itself, because only its result distinguishes a function that blocks
    from one that starts something: use `lambda item: asyncio.to_thread(fn, item)`, or a pool. Every call sees
    the context variables as they were at the first step of the loop, and what a call sets there stays its own.

    Results come as they are ready, or in the order of the items with `ordered=True`. `errors` says what a
    failed call does. `raise` cancels the other calls, waits until they have ended, and raises the first error
    after the results that were ready before it. `skip` leaves the item out (counted in `.skipped`, logged at
    DEBUG). `settled` yields a `Settled` for every item. An error of `items` itself is always raised: at once
    with `raise`, otherwise after the calls in progress have ended and their results were taken.

    Leaving the loop cancels the running calls. `break` requests that and goes on; to know that they have
    ended, write `async with parallel_limit(...) as flow` around the loop, or await `aclose()`.
    """
    limit, call, on_error = checked_n(n), checked_fn(fn), checked_errors(errors)
    is_async = isinstance(items, AsyncIterable)
    source = aiter(cast("Any", items)) if is_async else _source_of(items, "a sync or async iterable")
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


def _source_of(items: Any, kinds: str) -> Iterator[Any]:
    try:
        return iter(items)
    except TypeError as error:
        hint = ": call it first" if callable(items) else ": await it first" if isawaitable(items) else ""
        raise TypeError(f"items must be {kinds}, not {type(items).__name__}{hint}") from error


@overload
def parallel_limit_sync(
    items: Iterable[T],
    n: int,
    fn: Callable[[T], R],
    *,
    ordered: bool = False,
    errors: Literal["raise", "skip"] = "raise",
    executor: Executor | None = None,
) -> SyncFlow[R]: ...
@overload
def parallel_limit_sync(
    items: Iterable[T],
    n: int,
    fn: Callable[[T], R],
    *,
    ordered: bool = False,
    errors: Literal["settled"],
    executor: Executor | None = None,
) -> SyncFlow[Outcome[T, R]]: ...
def parallel_limit_sync(
    items: Iterable[Any],
    n: int,
    fn: Callable[[Any], Any],
    *,
    ordered: bool = False,
    errors: OnError = "raise",
    executor: Executor | None = None,
) -> SyncFlow[Any]:
    """
    Call `fn` for every item, at most `n` calls in progress, and iterate over the results.

        for report in parallel_limit_sync(paths, 8, make_report): ...

    Without an `executor` the calls run on up to `n` threads of their own, each call with the caller's context
    variables. With one (for example a `WorkerPool`) at most `n` of its places are used at a time. `ordered`
    and `errors` are those of `parallel_limit`. An item holds its place from the moment it is pulled until its
    result is taken, so at most `n` items are pulled ahead of the loop.

    Leaving the loop, by `break` or by an error, waits for the running calls and starts no more. `with` and
    `close()` do the same where a variable keeps the flow alive.
    """
    limit, call, on_error = checked_n(n), checked_fn(fn), checked_errors(errors)
    # An object may have an async `__call__`.
    if iscoroutinefunction(fn) or iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004
        raise TypeError("fn must be a plain function, not an async one: parallel_limit is for those")
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(f"executor must be a concurrent.futures.Executor, not {type(executor).__name__}")
    if isinstance(items, AsyncIterable):
        raise TypeError("items must be a sync iterable, not an async one: parallel_limit is for those")
    source = _source_of(items, "an iterable")
    workers = ThreadCalls(limit, call) if executor is None else ExecutorCalls(executor, call)
    return SyncFlow(source, n=limit, workers=workers, ordered=ordered, errors=on_error)


class SyncFlow(Iterator[R]):
    """The results of `parallel_limit_sync`, as an iterator and a context manager, for use by one thread."""

    def __init__(
        self,
        source: Iterator[Any],
        *,
        n: int,
        workers: ThreadCalls | ExecutorCalls,
        ordered: bool,
        errors: OnError,
    ) -> None:
        self._source = source
        self._n = n
        self._workers = workers
        self._errors = errors
        self._held = 0  # items pulled whose results have not been taken
        self._ready: deque[R] = deque()
        self._in_order: deque[SyncCall] | None = deque() if ordered else None
        self._exhausted = False
        self._failed = False
        self._error: BaseException | None = None
        self.skipped = 0  #: the number of items that `errors="skip"` has left out so far
        # Unlike __del__ this also runs at interpreter exit, while threads still work.
        self._close = weakref.finalize(self, workers.stop)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        try:
            self._feed()
            while not self._ready:
                if self._at_end():
                    self._finish()
                self._settle(self._workers.ended.get())
                if not self._ready:
                    self._feed()
        except BaseException:  # an iterator that raised has ended, as a generator would have
            self.close()
            raise
        self._held -= 1
        return self._ready.popleft()

    def close(self) -> None:
        """Start no more calls and wait for the running ones. Results not yet taken are dropped."""
        self._exhausted = True
        self._held = 0
        self._error = None
        self._ready.clear()
        self._source = iter(())
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _feed(self) -> None:
        """
        Fill the free places. If a result is ready meanwhile, a slow source gives only one item at a time.
        """
        spent = 0.0
        while not self._exhausted and self._held < self._n:
            if spent > _SLOW and (self._ready or not self._workers.ended.empty()):
                return
            since = monotonic()
            try:
                item = next(self._source)
            except StopIteration:
                self._exhausted = True
                return
            except Exception as error:  # noqa: BLE001  # the source is the caller's and may raise anything
                self._exhausted = True
                self._error = error
                return
            spent += monotonic() - since
            self._held += 1
            call = SyncCall(item)
            if self._in_order is not None:
                self._in_order.append(call)
            self._workers.start(call)

    def _at_end(self) -> bool:
        if self._failed or not self._held:
            return True
        return self._error is not None and self._errors == "raise" and self._workers.ended.empty()

    def _finish(self) -> NoReturn:
        error = self._error
        self.close()
        if error is None:
            raise StopIteration
        try:
            raise raisable(error)
        finally:
            del error  # its traceback holds this frame: together they would wait for the garbage collector

    def _settle(self, call: SyncCall) -> None:
        error = call.error
        if error is not None and (self._errors == "raise" or not is_kind(error, Exception)):
            self._failed = True
            self._error = error
            return
        call.settled = True
        if self._in_order is None:
            self._add_result(call)
            return
        while self._in_order and self._in_order[0].settled:
            self._add_result(self._in_order.popleft())

    def _add_result(self, call: SyncCall) -> None:
        if self._errors == "settled":
            outcome: Any = (
                Returned(call.item, call.value) if call.error is None else Raised(call.item, call.error)
            )
            self._ready.append(outcome)
        elif call.error is None:
            self._ready.append(call.value)
        else:
            self._held -= 1
            self.skipped += 1
            log.debug("skipped %s", safe_repr(call.item), exc_info=call.error)


_SLOW: Final = 0.001  # seconds that the source may take while results wait


class SyncCall:
    __slots__ = ("error", "item", "settled", "value")

    def __init__(self, item: Any) -> None:
        self.item = item
        self.value: Any = None
        self.error: BaseException | None = None
        self.settled = False


class ThreadCalls:
    """
    Makes the calls on threads of its own. Like `ExecutorCalls` it does not refer to the flow, which could
    then never be freed.
    """

    def __init__(self, n: int, fn: Callable[[Any], Any]) -> None:
        self.ended: SimpleQueue[SyncCall] = SimpleQueue()
        self._todo: SimpleQueue[SyncCall | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._n = n
        self._fn = fn
        self._context = contextvars.copy_context()

    def start(self, call: SyncCall) -> None:
        self._todo.put(call)
        if len(self._threads) < self._n:
            # Daemon threads: at exit Python joins the others before any code could tell them to end.
            thread = Thread(target=self._work, name=f"parallel_limit-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        fn, context, todo, ended = self._fn, self._context, self._todo, self.ended
        while (call := todo.get()) is not None:
            try:
                call.value = context.copy().run(fn, call.item)
            except BaseException as error:  # noqa: BLE001  # raised where the result would have been
                call.error = error
            ended.put(call)
            del call  # a payload must not live on while this thread waits for its next call

    def stop(self) -> None:
        with suppress(Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            if thread is not current_thread():  # the garbage collector may finalize the flow on one of them
                thread.join()


class ExecutorCalls:
    """Makes the calls in the caller's executor, which stays open."""

    def __init__(self, executor: Executor, fn: Callable[[Any], Any]) -> None:
        self.ended: SimpleQueue[SyncCall] = SimpleQueue()
        self._calls: dict[Future[Any], SyncCall] = {}
        self._executor = executor
        self._fn = fn

    def start(self, call: SyncCall) -> None:
        try:
            future = self._executor.submit(self._fn, call.item)
        except Exception as error:  # noqa: BLE001  # refused, as a full pool may do: the outcome of this call
            call.error = error
            self.ended.put(call)
            return
        self._calls[future] = call
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[Any]) -> None:
        call = self._calls.pop(future)
        try:
            call.value = future.result()
        except BaseException as error:  # noqa: BLE001  # raised where the result would have been
            call.error = error
        self.ended.put(call)

    def stop(self) -> None:
        for future in list(self._calls):
            future.cancel()
        wait(list(self._calls))
