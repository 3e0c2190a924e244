"""
`parallel_limit` for programs without an event loop: the calls run on threads, or through any executor.

Items are pulled on the thread that iterates, inside `next()`, and nowhere else. So a source may be a database cursor
or a generator with thread-local state, an interrupt reaches it, and no lock is needed: one thread counts, and two
queues carry the calls to the threads and back. The price is that a source that blocks delays the results that come in
meanwhile; a live feed belongs to the async twin.

A thread cannot be made to stop, so here "cancel" means: what has not started never will, what runs is waited for.
"""

from __future__ import annotations

import contextvars
import weakref
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from inspect import iscoroutinefunction
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from time import monotonic
from typing import Any, Final, Literal, NoReturn, Protocol, Self, TypeVar, overload

from penstock.core.text import is_kind, safe_repr
from penstock.flow.pullers import OnError, Settled, checked_errors, checked_fn, checked_n, log, raisable

__all__ = ["SyncFlow", "parallel_limit_sync"]

T = TypeVar("T")
R = TypeVar("R")


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
) -> SyncFlow[Settled[T, R]]: ...
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
    Call `fn` for every item, at most `n` calls in progress, and iterate over what they return.

        for report in parallel_limit_sync(paths, 8, make_report): ...

    Without an `executor` the calls run on up to `n` threads of their own, each call with the context variables of this
    one; with one (a `WorkerPool`, say) at most `n` of its places are used at a time. `ordered` and `errors` are those
    of `parallel_limit`. An item holds its place from the moment it is pulled until its result is taken, so never more
    than `n` are pulled ahead of the loop.

    Leaving the loop, by `break` or by an error, waits for the calls that run and starts no more. `with` and `close()`
    do the same where a variable keeps the flow alive.
    """
    limit, call, on_error = checked_n(n), checked_fn(fn), checked_errors(errors)
    if iscoroutinefunction(fn) or iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004  # asked for its kind
        raise TypeError("fn must be a plain function, not an async one: parallel_limit is for those")
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(f"executor must be a concurrent.futures.Executor, not {type(executor).__name__}")
    group = _Threads(limit, call) if executor is None else _Through(executor, call)
    return SyncFlow(_source_of(items), n=limit, group=group, ordered=ordered, errors=on_error)


class SyncFlow(Iterator[R]):
    """The results of `parallel_limit_sync`, as an iterator and a context manager, for one thread to use."""

    __slots__ = (
        "__weakref__",
        "_close",
        "_error",
        "_errors",
        "_exhausted",
        "_failed",
        "_group",
        "_held",
        "_line",
        "_n",
        "_ready",
        "_source",
        "skipped",
    )

    def __init__(
        self, source: Iterator[Any], *, n: int, group: _Workers, ordered: bool, errors: OnError
    ) -> None:
        self._source = source
        self._n = n
        self._group = group
        self._errors = errors
        self._held = 0  # places: items pulled whose results have not been taken
        self._ready: deque[R] = deque()
        self._line: deque[_Call] | None = deque() if ordered else None
        self._exhausted = False
        self._failed = False
        self._error: BaseException | None = None
        self.skipped = 0  #: how many items `errors="skip"` has left out so far
        # Unlike __del__ this also happens at interpreter exit, before threads lose the ground under their feet.
        self._close = weakref.finalize(self, group.stop)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        try:
            self._feed()
            while not self._ready:
                if self._at_end():
                    self._finish()
                self._settle(self._group.ended.get())
                if not self._ready:
                    self._feed()
        except BaseException:  # an iterator that raised is over, as a generator would be
            self.close()
            raise
        self._held -= 1
        return self._ready.popleft()

    def close(self) -> None:
        """Start no more calls and wait for those that run. Results not yet taken are dropped."""
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
        """Fill the places; but where a result could be had instead, a slow source gives one item at a time."""
        spent = 0.0
        while not self._exhausted and self._held < self._n:
            if spent > _SLOW and (self._ready or not self._group.ended.empty()):
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
            call = _Call(item)
            if self._line is not None:
                self._line.append(call)
            self._group.start(call)

    def _at_end(self) -> bool:
        if self._failed or not self._held:
            return True
        return self._error is not None and self._errors == "raise" and self._group.ended.empty()

    def _finish(self) -> NoReturn:
        error = self._error
        self.close()
        if error is None:
            raise StopIteration
        try:
            raise raisable(error)
        finally:
            del error  # its traceback holds this frame: together they would wait for the garbage collector

    def _settle(self, call: _Call) -> None:
        error = call.error
        if error is not None and (self._errors == "raise" or not is_kind(error, Exception)):
            self._failed = True
            self._error = error
            return
        call.settled = True
        if self._line is None:
            self._keep(call)
            return
        while self._line and self._line[0].settled:
            self._keep(self._line.popleft())

    def _keep(self, call: _Call) -> None:
        if self._errors == "settled":
            outcome: Any = Settled(call.item, call.value, call.error)
            self._ready.append(outcome)
        elif call.error is None:
            self._ready.append(call.value)
        else:
            self._held -= 1
            self.skipped += 1
            log.debug("skipped %s", safe_repr(call.item), exc_info=call.error)


_SLOW: Final = 0.001  # seconds that the source may take while results wait


class _Call:
    __slots__ = ("error", "item", "settled", "value")

    def __init__(self, item: Any) -> None:
        self.item = item
        self.value: Any = None
        self.error: BaseException | None = None
        self.settled = False


class _Workers(Protocol):
    """Those who make the calls. They know nothing of the flow, or it could never be collected."""

    ended: SimpleQueue[_Call]

    def start(self, call: _Call) -> None: ...

    def stop(self) -> None: ...


class _Threads:
    def __init__(self, n: int, fn: Callable[[Any], Any]) -> None:
        self.ended: SimpleQueue[_Call] = SimpleQueue()
        self._todo: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._n = n
        self._fn = fn
        self._context = contextvars.copy_context()

    def start(self, call: _Call) -> None:
        self._todo.put(call)
        if len(self._threads) < self._n:
            # Daemons, because at exit Python waits for the others before anybody could tell them to end.
            thread = Thread(target=self._work, name=f"parallel_limit-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        fn, context, todo, ended = self._fn, self._context, self._todo, self.ended
        while (call := todo.get()) is not None:
            try:
                call.value = context.copy().run(fn, call.item)
            except BaseException as error:  # noqa: BLE001  # it is raised where the result would have been
                call.error = error
            ended.put(call)
            del call  # a payload must not live on while this thread waits for its next

    def stop(self) -> None:
        with suppress(Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            if thread is not current_thread():  # the garbage collector may have found the flow on one of them
                thread.join()


class _Through:
    """Calls through somebody else's executor, which stays open."""

    def __init__(self, executor: Executor, fn: Callable[[Any], Any]) -> None:
        self.ended: SimpleQueue[_Call] = SimpleQueue()
        self._calls: dict[Future[Any], _Call] = {}
        self._executor = executor
        self._fn = fn

    def start(self, call: _Call) -> None:
        try:
            future = self._executor.submit(self._fn, call.item)
        except Exception as error:  # noqa: BLE001  # refused, as a full pool may: this call's outcome like any other
            call.error = error
            self.ended.put(call)
            return
        self._calls[future] = call
        future.add_done_callback(self._landed)

    def _landed(self, future: Future[Any]) -> None:
        call = self._calls.pop(future)
        try:
            call.value = future.result()
        except BaseException as error:  # noqa: BLE001  # it is raised where the result would have been
            call.error = error
        self.ended.put(call)

    def stop(self) -> None:
        for future in list(self._calls):
            future.cancel()
        wait(list(self._calls))


def _source_of(items: Any) -> Iterator[Any]:
    if isinstance(items, AsyncIterable):
        raise TypeError("items must be a sync iterable, not an async one: parallel_limit is for those")
    try:
        return iter(items)
    except TypeError as error:
        hint = ": call it first" if callable(items) else ""
        raise TypeError(f"items must be an iterable, not {type(items).__name__}{hint}") from error
