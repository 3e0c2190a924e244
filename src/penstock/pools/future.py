"""
The Futures of pools and graphs. They are `concurrent.futures.Future`s, so `wait`, `as_completed` and
`asyncio.wrap_future` accept them. The parts that most calls never need (the condition, the lists of waiters
and callbacks), which the standard library accesses directly, are made on first use.

`Call` is the Future that a caller of a pool holds and the ticket that its queue moves, in one object: a call
lives for microseconds, and making objects is most of its cost. `AwaitableFuture` is the base of graph runs
and of calls on lanes.

Setting an outcome without the condition's lock is safe. A thread in `result()` first adds its lock to
`sleepers` and then reads the state; `set_outcome` first writes the state and then reads `sleepers`; so one of
the two always sees the other. With a condition, a thread that holds its lock and sees the call done must not
be notified. So `set_outcome` marks that it has begun, and if there is a condition it takes its lock to write
the state. If there is none, a thread that makes one afterwards gets it only when the state is written.
"""

from __future__ import annotations

import threading
import time
from _thread import LockType, allocate_lock
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.core.calls.ticket import ENDING, IN_FLIGHT, Ticket
from penstock.core.errors import CallCanceled
from penstock.core.text import is_kind
from penstock.pools.context import CallContext

if TYPE_CHECKING:
    import asyncio

    from penstock.pools.call_queue import CallQueue
    from penstock.pools.event_loops import LoopNotifier
    from penstock.pools.guards import CancelSignal
    from penstock.pools.timers import Timer
    from penstock.telemetry.spans import CallSpan

R = TypeVar("R")


class _WaitState:
    """
    The state of a Future for waiting threads. A thread in `result()` sleeps on a lock of its own: a condition
    takes several times as long, so it is made only on demand.
    """

    __slots__ = ("callbacks", "condition", "sleepers", "waiters")

    def __init__(self) -> None:
        self.condition: threading.Condition | None = None
        self.sleepers: list[LockType] = []
        self.waiters: list[Any] = []
        self.callbacks: list[Callable[[Any], object]] = []


_making_wait_state = threading.Lock()


def until_settled(settling: Callable[[], bool]) -> None:
    """Wait while another thread sets an outcome: a moment, or at most a second if that thread is stuck."""
    for turn in range(1000):
        if not settling():
            return
        time.sleep(0 if turn < 10 else 0.001)


class LazyFuture(Future[R], Generic[R]):
    """A Future whose condition and lists are made on first use."""

    # Defaults; a subclass may have slots of these names.
    _state: str = PENDING
    _result: R | None = None
    _exception: BaseException | None = None
    _wait_state: _WaitState | None = None
    _settling = False  # its outcome is being written, or was written, without any lock
    notifier: LoopNotifier | None = None  # of the event loop that awaits it

    def __init__(self) -> None:
        """Does not call Future's own `__init__`: `_WaitState` makes the same parts on demand."""

    def done(self) -> bool:
        return self._state is not PENDING

    def result(self, timeout: float | None = None) -> R:
        if self._state is PENDING:
            self._wait(timeout)
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                self = None  # type: ignore[assignment]  # noqa: PLW0642  # or the traceback keeps the future alive
        return self._result  # type: ignore[return-value]  # R or None, and None only if R is

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state is PENDING:
            self._wait(timeout)
        if self._state is CANCELLED_AND_NOTIFIED:
            return self.result()  # type: ignore[return-value]  # raises, as the standard Future does
        return self._exception

    def _wait(self, timeout: float | None) -> None:
        """Sleep until the Future is done. Raises TimeoutError."""
        sleeper = allocate_lock()
        sleeper.acquire()
        (self._wait_state or self._make_wait_state()).sleepers.append(sleeper)
        if self._state is PENDING:
            sleeper.acquire(timeout=-1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX))
            if self._state is PENDING:
                raise TimeoutError

    def set_outcome(self, result: R | None, error: BaseException | None) -> None:
        """Set the outcome and wake waiting threads. The caller makes sure that this happens once."""
        self._result = result
        state = FINISHED
        if error is not None:
            self._exception = error
            if is_kind(error, CallCanceled):
                state = CANCELLED_AND_NOTIFIED
        self._settling = True
        wait_state = self._wait_state
        if wait_state is not None and wait_state.condition is not None:
            self._settling = False
            self._notify_waiters(wait_state, wait_state.condition, state)
        else:
            self._state = state
            wait_state = self._wait_state
        if wait_state is not None:
            for sleeper in wait_state.sleepers:
                sleeper.release()
        if self.notifier is not None:
            self.notifier.notify(self)  # type: ignore[arg-type]  # only calls of pools have one

    def _notify_waiters(self, wait_state: _WaitState, condition: threading.Condition, state: str) -> None:
        """As `Future.set_result` does; the waiters are those of `concurrent.futures.wait` and `as_completed`."""
        with condition:
            self._state = state
            for waiter in wait_state.waiters:
                if state is CANCELLED_AND_NOTIFIED:
                    waiter.add_cancelled(self)
                elif self._exception is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
        if wait_state.callbacks:
            self._invoke_callbacks()  # type: ignore[attr-defined]  # of Future: logs what a callback raises

    # For the standard library's `wait`, `as_completed` and `add_done_callback`

    def _make_wait_state(self) -> _WaitState:
        with _making_wait_state:
            if self._wait_state is None:
                self._wait_state = _WaitState()
            return self._wait_state

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]  # Future's own code only reads these
        wait_state = self._wait_state or self._make_wait_state()
        if wait_state.condition is None:
            with _making_wait_state:
                if wait_state.condition is None:
                    wait_state.condition = threading.Condition()
        if self._settling:
            until_settled(lambda: self._settling and self._state is PENDING)
        return wait_state.condition

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]  # as above
        return (self._wait_state or self._make_wait_state()).waiters

    @property
    def _done_callbacks(self) -> list[Callable[[Any], object]]:
        return (self._wait_state or self._make_wait_state()).callbacks


class Call(Ticket, LazyFuture[R], Generic[R]):
    """
    The Future that `submit` returns. It can be canceled while it runs, and it knows how long it waited.

    For example:

        call = pool.submit(pow, 2, 10)
        print(call.result(timeout=5))  # or: await asyncio.wrap_future(call)
        call.cancel()
    """

    # Fields that every call writes or reads are slots. Rare ones are class attributes, so that the common
    # call needs no `__dict__`; reading one that a call does not have is three times slower than a slot.
    __slots__ = (
        "_exception", "_result", "_settling", "_state", "_wait_state", "asleep", "awaited", "body",
        "call_queue", "extra", "fn", "function", "guarded", "notifier", "ran_for", "worker",
    )  # fmt: skip

    span: CallSpan | None = None  # of its caller, while it is traced
    key: Hashable = None
    timeout: float | None = None
    deadline: float | None = None
    timer: Timer | None = None
    signal: CancelSignal | None = None

    def __init__(self, call_queue: CallQueue, fn: Callable[..., R]) -> None:
        Ticket.__init__(self)
        self._state = PENDING
        self._result = None
        self._exception = None
        self._wait_state = None
        self._settling = False
        self.call_queue = call_queue
        self.fn = fn
        self.function: Any = None  # how the worker group names `fn` to its workers
        self.body: Any = None  # the arguments, in the form in which they travel
        self.extra: Any = None  # what travels beside them, for the few calls that need it
        self.guarded = False  # has a key, a timeout or a signal
        self.asleep: Any = None  # the lock on which its caller's thread sleeps while it waits for a place
        self.notifier = None
        self.awaited: asyncio.Future[None] | None = None  # what its coroutine awaits there
        self.worker: Any = None  # the worker that has it
        self.ran_for = 0.0

    @property
    def pid(self) -> int | None:
        """
        The worker process that has the call. None: no worker has it, or it runs in a thread or on another
        machine.
        """
        return getattr(self.worker, "pid", None)

    def cancel(self, reason: str | None = None) -> bool:
        """
        Cancel the call in any stage. Unlike the standard Future this works while the call runs: the caller is
        released now, the function can read it (`current_call().canceled`), and its worker is ended after a
        grace period.
        """
        return self.call_queue.cancel(self, reason) or self.cancelled()

    def running(self) -> bool:
        return self.stage is IN_FLIGHT or self.stage is ENDING

    def _wait(self, timeout: float | None) -> None:
        """Wait; the waiting thread reads the workers' replies, if it may."""
        reader = self.call_queue.group.reader
        if reader is None or not reader.read_while_waiting(self, timeout):
            super()._wait(timeout)
        elif self._state is PENDING:
            raise TimeoutError

    # For its pool

    @property
    def error(self) -> BaseException | None:
        """The error of the call. None: it has not ended, or succeeded."""
        return self._exception

    def succeeded(self) -> bool:
        return self._state is FINISHED and self._exception is None

    def make_context(self) -> CallContext:
        return CallContext(self.dispatch, self.key, self.attempt, self.deadline, lambda: self.stage is ENDING)


class AwaitableFuture(LazyFuture[R], Generic[R]):
    """A Future that can be awaited from any event loop."""

    def __await__(self) -> Generator[Any, None, R]:
        """
        Await it from any event loop. Canceling the awaiting task cancels this Future. If this Future is
        canceled, the task gets CallCanceled; `asyncio.wrap_future` would cancel the task.
        """
        import asyncio  # noqa: PLC0415  # takes longer to import than the pools, which never come here

        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake_loop(_: Future[R]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(wake_loop)
        try:
            yield from woken
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()
