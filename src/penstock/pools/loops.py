"""
Calls from event loops.

A loop that awaits calls reads the workers' answers itself where it can (see `watch`), and then a settled call is told
to its coroutine on the spot. News from other threads goes through the loop's mailbox: waking a loop takes a system
call, so the first letter in an empty box rings and the others lie down beside it.
"""

from __future__ import annotations

import asyncio
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from concurrent.futures._base import PENDING
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
    `await pool.call(...)`: wait for a place, make the payload, wait for the outcome, never blocking the loop. A call that
    has its place already, by a reservation, is only waited for.

    All in one coroutine: each one more would be made, kept alive and looked at by the garbage collector for every call.
    """
    try:
        if call.stage is NEW:
            call.mailbox = mailbox()
            call.eager = prepare is None
            enter_result = call_queue.enter(call)
            if prepare is not None:
                if enter_result is WAIT:
                    await place(call)
                call_queue.fill(call, prepare)
        box = call.mailbox
        if call._state is PENDING and box is not None:
            call_queue.group.attend(box)
            while call._state is PENDING:
                await box.letter_for(call)
    except asyncio.CancelledError:
        call_queue.cancel(call, "its task was canceled")
        raise
    return call._result if call._exception is None else call.result()  # type: ignore[return-value]  # as in `result`


async def place(call: Call[Any]) -> None:
    """Until the call has its place, or is ended before (then that error is raised)."""
    assert call.mailbox is not None
    while call.stage is WAITING:
        await call.mailbox.letter_for(call)
    if call._exception is not None:
        raise call._exception


class Mailbox:
    """One for each event loop; its thread is the one that made it."""

    __slots__ = ("__weakref__", "_letters", "_loop", "_rung", "_thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # or the table of mailboxes would keep every loop alive
        self._thread = get_ident()
        self._letters: deque[Call[Any]] = deque()
        self._rung = False

    def letter_for(self, call: Call[Any]) -> asyncio.Future[None]:
        """On the loop's own thread: what `post` settles. The loop is known here; to ask for the running one is a system call."""
        loop = self._loop()
        assert loop is not None
        call.awaited = future = loop.create_future()
        return future

    def post(self, call: Call[Any]) -> None:
        """From any thread: whoever awaits this call should look at it now."""
        if get_ident() == self._thread:
            future = call.awaited
            if future is not None and not future.done():
                future.set_result(None)
            return
        self._letters.append(call)
        if not self._rung:
            self._rung = True
            loop = self._loop()
            if loop is not None:
                with suppress(RuntimeError):  # the loop is closed; nobody is left to tell
                    loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._rung = False  # before looking: a letter that comes later rings again
        letters = self._letters
        while letters:
            call = letters.popleft()
            future = call.awaited
            if future is not None and not future.done():
                future.set_result(None)
            if not letters and not call.call_queue.queue_is_idle():
                call.call_queue.group.attend(
                    self
                )  # somebody else had to read for us; from now on we can again

    def add_reader(self, fd: int, fn: Callable[[], object]) -> bool:
        """On the loop's own thread. False if this kind of loop cannot."""
        try:
            asyncio.get_running_loop().add_reader(fd, fn)
        except NotImplementedError:
            return False
        return True

    def remove_reader(self, fd: int, still: Callable[[], bool], then: Callable[[], object] | None) -> bool:
        """From any thread; it happens on the loop's, if by then it is `still` wanted. False if the loop is gone."""

        def remove(loop: asyncio.AbstractEventLoop) -> None:
            if still():
                loop.remove_reader(fd)
            if then is not None:
                then()

        loop = self._loop()
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(remove, loop)
        except RuntimeError:  # it is closed
            return False
        return True


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()
_latest: tuple[ref[asyncio.AbstractEventLoop], Mailbox] | None = None


def mailbox() -> Mailbox:
    """The one of the running loop."""
    global _latest  # noqa: PLW0603  # most programs have one loop, and a look at a weak dictionary takes a microsecond
    loop = asyncio.get_running_loop()
    latest = _latest
    if latest is not None and latest[0]() is loop and latest[1]._thread == get_ident():
        return latest[1]
    box = _mailboxes.get(loop)
    if box is None or box._thread != get_ident():
        box = _mailboxes[loop] = Mailbox(loop)
    _latest = ref(loop), box
    return box
