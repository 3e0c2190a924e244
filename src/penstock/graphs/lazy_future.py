"""
A Future that costs little until somebody waits for it, and that can be awaited.

Runs and scheduled calls are `concurrent.futures.Future`s, so `wait`, `as_completed` and `asyncio.wrap_future` take
them. Made the same way as a pool's call, and safe for the reasons given there: the condition is made on first use; the
one who settles says so, then looks for a condition and takes its lock; and if there was none, whoever asks for one after
that does not get it before the state is written.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from contextlib import suppress
from typing import Any, Generic, TypeVar

from penstock.core.errors import CallCanceled
from penstock.core.text import is_kind
from penstock.pools.future import until_settled

__all__ = ["LazyFuture"]

T = TypeVar("T")


class _Lazy:
    """An attribute that the first look makes; afterwards the instance's own dict answers."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, promise: object, owner: type) -> Any:
        return promise.__dict__.setdefault(self._name, self._make())


class LazyFuture(Future[T], Generic[T]):
    _state: str = PENDING
    _result: T | None = None
    _exception: BaseException | None = None
    _settling = False
    _waiters = _Lazy(list)
    _done_callbacks = _Lazy(list)

    def __init__(self) -> None:
        """Future's own is left out on purpose: it makes what the lazy attributes above make when needed."""

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]  # Future's own code only reads it
        condition: threading.Condition | None = self.__dict__.get("condition")
        if condition is None:
            condition = self.__dict__.setdefault("condition", threading.Condition())
        if self._settling:
            until_settled(lambda: self._settling and self._state in (PENDING, RUNNING))
        return condition

    def __await__(self) -> Generator[Any, None, T]:
        """
        From any event loop. Cancelling the one who awaits cancels this; the other way round the one who awaits gets
        CallCanceled, which `asyncio.wrap_future` would turn into the cancellation of its task.
        """
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def ring(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed; nobody is left to tell
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(ring)
        try:
            yield from woken
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()

    def result(self, timeout: float | None = None) -> T:
        if self._state in (PENDING, RUNNING):
            with self._condition:
                if not self._condition.wait_for(self.done, timeout):
                    raise TimeoutError
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                self = None  # type: ignore[assignment]  # noqa: PLW0642  # or the traceback keeps it alive
        return self._result  # type: ignore[return-value]  # T or None, and None only if T is

    def _settle(self, result: T | None, error: BaseException | None) -> None:
        """Once only: whoever calls this has made sure of that."""
        self._result = result
        self._exception = error
        state = CANCELLED_AND_NOTIFIED if is_kind(error, CallCanceled) else FINISHED
        self._settling = True
        condition: threading.Condition | None = self.__dict__.get("condition")
        if condition is None:
            self._state = state
            return
        self._settling = False
        with condition:
            self._state = state
            for waiter in self._waiters:
                if state is CANCELLED_AND_NOTIFIED:
                    waiter.add_cancelled(self)
                elif error is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            condition.notify_all()
        if "_done_callbacks" in self.__dict__:
            self._invoke_callbacks()  # type: ignore[attr-defined]  # Future's own: logs what a callback raises
