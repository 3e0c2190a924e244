"""
A call: the Future that its caller holds and the ticket that the queue moves, in one object.

One object instead of two, because a call lives for microseconds and making things is most of what it costs. For the
same reason the parts of a `concurrent.futures.Future` that most calls never need (the condition, the lists of waiters
and callbacks) are made on first use. `wait`, `as_completed` and `asyncio.wrap_future` reach into exactly these
attributes, so they find what they expect.

Why settling without the condition's lock is safe: a sleeper lies down first and looks at the state after, `_settle`
writes the state first and looks for sleepers after; one of the two always sees the other. A condition is different: who
holds its lock and sees the call done will not be told again, and must not be. So `_settle` says that it has begun, then
looks for a condition, and takes its lock to write the state if there is one; and if there was none, whoever asks for one
after that does not get it before the state is written.
"""

from __future__ import annotations

import threading
import time
from _thread import LockType, allocate_lock
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from penstock.core.calls.ticket import ENDING, IN_FLIGHT, Ticket
from penstock.core.errors import CallCanceled
from penstock.core.text import is_kind
from penstock.pools.context import CallContext

if TYPE_CHECKING:
    import asyncio

    from penstock.pools.call_queue import CallQueue
    from penstock.pools.loops import Mailbox
    from penstock.pools.timers import Timer
    from penstock.telemetry.spans import CallSpan

R = TypeVar("R")


class _Crowd:
    """
    What a Future has for those who wait for it. A thread in `result()` sleeps on a lock of its own: to make a condition
    and to wait for it takes several times as long, so only those get one who ask for it.
    """

    __slots__ = ("callbacks", "condition", "sleepers", "waiters")

    def __init__(self) -> None:
        self.condition: threading.Condition | None = None
        self.sleepers: list[LockType] = []
        self.waiters: list[Any] = []
        self.callbacks: list[Callable[[Any], object]] = []


_gathering = threading.Lock()

#: In the place of a call's payload: its outcome is written down without any lock.
_SETTLING: Final = object()


def until_settled(settling: Callable[[], bool]) -> None:
    """Somebody else is between two steps of settling: a moment, or a second if that thread never gets any further."""
    for turn in range(1000):
        if not settling():
            return
        time.sleep(0 if turn < 10 else 0.001)


class Call(Ticket, Future[R], Generic[R]):
    """What `submit` returns: a Future that can also be cancelled while it runs, and can say how long it waited."""

    # What every call writes, and what is looked at for every call, is in slots. What few calls have is a class attribute
    # here, so that the others make no dict for it; to find out that a call has it not takes three times as long.
    __slots__ = (
        "_crowd",
        "_exception",
        "_result",
        "_state",
        "asleep",
        "awaited",
        "body",
        "call_queue",
        "extra",
        "fn",
        "function",
        "guarded",
        "home",
        "mailbox",
        "ran_for",
    )

    span: CallSpan | None = None  # of its caller, while it is traced
    key: Hashable = None
    timeout: float | None = None
    deadline: float | None = None
    timer: Timer | None = None
    signal: CancelSignal | None = None

    def __init__(self, call_queue: CallQueue, fn: Callable[..., R]) -> None:
        # Future.__init__ is left out on purpose: it makes what `_Crowd` makes when somebody comes to wait.
        Ticket.__init__(self)
        self._state: str = PENDING
        self._result: R | None = None
        self._exception: BaseException | None = None
        self._crowd: _Crowd | None = None
        self.call_queue = call_queue
        self.fn = fn
        self.function: Any = None  # how the crew names `fn` to its workers
        self.body: Any = None  # the arguments, in the form in which they travel
        self.extra: Any = None  # what travels beside them, for the few calls that need it
        self.guarded = False  # has a key, a timeout or a signal
        self.asleep: Any = None  # the lock on which its caller's thread sleeps, while it waits for room
        self.mailbox: Mailbox | None = None  # of the event loop that awaits it
        self.awaited: asyncio.Future[None] | None = None  # what its coroutine sleeps on there
        self.home: Any = None  # the worker that has it
        self.ran_for = 0.0

    @property
    def pid(self) -> int | None:
        """Of the worker process that has it. None: no worker has it, or it runs in a thread or on another machine."""
        return getattr(self.home, "pid", None)

    # What the holder of the Future sees

    def cancel(self, reason: str | None = None) -> bool:
        """
        End the call wherever it is. Unlike the standard Future this also works while it runs: the caller is released
        now, the function can see it (`current_call().canceled`), and its worker is ended after a grace period.
        """
        return self.call_queue.cancel(self, reason) or self.cancelled()

    def running(self) -> bool:
        return self.stage is IN_FLIGHT or self.stage is ENDING

    def result(self, timeout: float | None = None) -> R:
        if self._state is PENDING:
            self._wait(timeout)
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                self = None  # type: ignore[assignment]  # noqa: PLW0642  # or the traceback keeps the call alive
        return self._result  # type: ignore[return-value]  # R or None, and None only if R is

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state is PENDING:
            self._wait(timeout)
        if self._state is CANCELLED_AND_NOTIFIED:
            return self.result()  # type: ignore[return-value]  # raises, as the standard Future does
        return self._exception

    def _wait(self, timeout: float | None) -> None:
        if self.call_queue.group.lead(self, timeout):
            if self._state is PENDING:
                raise TimeoutError
            return
        sleeper = allocate_lock()
        sleeper.acquire()
        (self._crowd or self._gather()).sleepers.append(sleeper)
        if self._state is PENDING:
            sleeper.acquire(timeout=-1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX))
            if self._state is PENDING:
                raise TimeoutError

    # What its pool does to it

    def _context(self) -> CallContext:
        return CallContext(self.dispatch, self.key, self.attempt, self.deadline, lambda: self.stage is ENDING)

    def _settle(self, result: R | None, error: BaseException | None) -> None:
        self._result = result
        state = FINISHED
        if error is not None:
            self._exception = error
            if is_kind(error, CallCanceled):
                state = CANCELLED_AND_NOTIFIED
        self.body = _SETTLING  # nor is the payload needed any more, which may be large
        crowd = self._crowd
        if crowd is not None and crowd.condition is not None:
            self.body = None
            self._announce(crowd, crowd.condition, state)
        else:
            self._state = state
            crowd = self._crowd
        if crowd is not None:
            for sleeper in crowd.sleepers:
                sleeper.release()
        if self.mailbox is not None:
            self.mailbox.post(self)

    def _announce(self, crowd: _Crowd, condition: threading.Condition, state: str) -> None:
        with condition:
            self._state = state
            for waiter in crowd.waiters:
                if state is CANCELLED_AND_NOTIFIED:
                    waiter.add_cancelled(self)
                elif self._exception is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            condition.notify_all()
        if crowd.callbacks:
            self._invoke_callbacks()  # type: ignore[attr-defined]  # of Future: logs what a callback raises

    # What the standard library's `wait`, `as_completed` and `add_done_callback` look for

    def _gather(self) -> _Crowd:
        with _gathering:
            if self._crowd is None:
                self._crowd = _Crowd()
            return self._crowd

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]  # Future's own code only reads these
        crowd = self._crowd or self._gather()
        if crowd.condition is None:
            with _gathering:
                if crowd.condition is None:
                    crowd.condition = threading.Condition()
        if self.body is _SETTLING:
            until_settled(lambda: self.body is _SETTLING and self._state is PENDING)
        return crowd.condition

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]  # as above
        return (self._crowd or self._gather()).waiters

    @property
    def _done_callbacks(self) -> list[Callable[[Any], object]]:
        return (self._crowd or self._gather()).callbacks


class CancelSignal:
    """
    One switch for many calls: `signal.cancel()` ends every call that was made with it, and every later one at once.

    The explicit way beside keys, timeouts and asyncio's own cancellation; a call may have all four (DQ-5).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[Call[Any]] = set()
        self.canceled = False
        self.reason: str | None = None

    def cancel(self, reason: str | None = None) -> None:
        with self._lock:
            if self.canceled:
                return
            self.canceled, self.reason = True, reason
            calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel(reason)

    def _watch(self, call: Call[Any]) -> bool:
        """False: it is off already, the call must not begin."""
        with self._lock:
            if not self.canceled:
                self._calls.add(call)
            return not self.canceled

    def _forget(self, call: Call[Any]) -> None:
        with self._lock:
            self._calls.discard(call)
