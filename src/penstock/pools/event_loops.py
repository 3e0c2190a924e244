"""
Calls from event loops.

A loop that awaits calls reads the workers' replies itself if it can (see `workers/replies.py`), and wakes the
coroutine of a settled call at once. Other threads notify the loop through its `LoopNotifier`. Waking a loop
takes a system call, so only the first notification wakes it, and further ones are delivered with it.
"""

from __future__ import annotations

import asyncio
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

from penstock.core.calls.ticket import NEW, WAIT, WAITING

if TYPE_CHECKING:
    from penstock.pools.call_queue import CallQueue
    from penstock.pools.future import Call

R = TypeVar("R")


async def run(call_queue: CallQueue, call: Call[R], prepare: Callable[[], None] | None) -> R:
    """
    The body of `await pool.call(...)`: wait for a place, make the payload, wait for the outcome, without
    blocking the loop. A call that has its place already, by a reservation, only waits for the outcome.

    This is one coroutine, because each further one costs every call an object for the garbage collector.
    """
    try:
        if call.stage is NEW:
            call.notifier = loop_notifier()
            call.eager = prepare is None
            enter_result = call_queue.enter(call)
            if prepare is not None:
                if enter_result is WAIT:
                    await wait_for_place(call)
                call_queue.fill(call, prepare)
        notifier = call.notifier
        if notifier is not None and not call.done():
            if call_queue.group.reader is not None:
                call_queue.group.reader.read_on_loop(notifier)
            while not call.done():
                await notifier.wakeup_for(call)
    except asyncio.CancelledError:
        call_queue.cancel(call, "its task was canceled")
        raise
    return call.result()


async def wait_for_place(call: Call[Any]) -> None:
    """Return when the call has its place; raise its error if it ended before."""
    assert call.notifier is not None
    while call.stage is WAITING:
        await call.notifier.wakeup_for(call)
    if call.error is not None:
        raise call.error


class LoopNotifier:
    """Wakes the coroutines of one event loop. Its thread is the one that made it."""

    __slots__ = ("__weakref__", "_calls_to_wake", "_loop", "_scheduled", "thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # weak: the table of notifiers must not keep every loop alive
        self.thread = get_ident()
        self._calls_to_wake: deque[Call[Any]] = deque()
        self._scheduled = False

    def wakeup_for(self, call: Call[Any]) -> asyncio.Future[None]:
        """
        The future that `notify` settles; called on the loop's own thread.
        """
        loop = self._loop()
        assert loop is not None
        call.awaited = future = loop.create_future()
        return future

    def notify(self, call: Call[Any]) -> None:
        """Make the coroutine that awaits this call check it now. May be called from any thread."""
        if get_ident() == self.thread:
            future = call.awaited
            if future is not None and not future.done():
                future.set_result(None)
            return
        self._calls_to_wake.append(call)
        if not self._scheduled:
            self._scheduled = True
            loop = self._loop()
            if loop is not None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._notify_all)

    def _notify_all(self) -> None:
        self._scheduled = False  # before the calls are read, so that a later notification schedules again
        calls = self._calls_to_wake
        while calls:
            call = calls.popleft()
            future = call.awaited
            if future is not None and not future.done():
                future.set_result(None)
            reader = call.call_queue.group.reader
            if not calls and reader is not None and call.call_queue.queue.in_flight:
                # Another thread had to read; now this loop can again.
                reader.read_on_loop(self)

    def add_reader(self, fd: int, fn: Callable[[], object]) -> bool:
        """Watch a descriptor; called on the loop's own thread. False: this kind of loop cannot."""
        try:
            asyncio.get_running_loop().add_reader(fd, fn)
        except NotImplementedError:
            return False
        return True

    def remove_reader(self, fd: int, still: Callable[[], bool], then: Callable[[], object]) -> bool:
        """
        Let the loop's thread remove the reader, if `still()` is true by then, and call `then`. May be called
        from any thread. False: the loop is gone.
        """

        def remove(loop: asyncio.AbstractEventLoop) -> None:
            if still():
                loop.remove_reader(fd)
            then()

        loop = self._loop()
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(remove, loop)
        except RuntimeError:  # it is closed
            return False
        return True


_notifiers: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopNotifier] = WeakKeyDictionary()


def loop_notifier() -> LoopNotifier:
    """The notifier of the running loop."""
    loop = asyncio.get_running_loop()
    notifier = _notifiers.get(loop)
    if notifier is None or notifier.thread != get_ident():
        notifier = _notifiers[loop] = LoopNotifier(loop)
    return notifier
