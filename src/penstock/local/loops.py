"""
News for event loops.

Waking a loop from another thread takes a system call, so many settled calls share one: the first to arrive in an
empty mailbox rings, the others lie down beside it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

from penstock.core.queue import WAITING

if TYPE_CHECKING:
    from penstock.local.call import Call
    from penstock.local.gate import Gate

R = TypeVar("R")

_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()


def mailbox() -> Mailbox:
    """The one of the running loop."""
    loop = asyncio.get_running_loop()
    box = _mailboxes.get(loop)
    if box is None:
        box = _mailboxes[loop] = Mailbox(loop)
    return box


class Mailbox:
    __slots__ = ("__weakref__", "_letters", "_loop", "_rung", "futures")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # or the table of mailboxes would keep every loop alive
        self._letters: deque[Call[Any]] = deque()
        self._rung = False
        self.futures: dict[Call[Any], asyncio.Future[None]] = {}

    def post(self, call: Call[Any]) -> None:
        """From any thread: whoever awaits this call should look at it now."""
        self._letters.append(call)
        if not self._rung:
            self._rung = True
            loop = self._loop()
            if loop is not None:
                with suppress(RuntimeError):  # the loop is closed; nobody is left to tell
                    loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._rung = False  # before looking: a letter that comes later rings again
        letters, futures = self._letters, self.futures
        while letters:
            future = futures.pop(letters.popleft(), None)
            if future is not None and not future.done():
                future.set_result(None)

    def add_reader(self, fd: int, fn: Callable[[], object]) -> bool:
        """On the loop's own thread. False if this kind of loop cannot."""
        try:
            asyncio.get_running_loop().add_reader(fd, fn)
        except NotImplementedError:
            return False
        return True

    def remove_reader(self, fd: int) -> None:
        """From any thread."""
        loop = self._loop()
        if loop is not None:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(loop.remove_reader, fd)

    async def wait(self, call: Call[Any]) -> None:
        """Until the call is posted: it got its place, or it settled. The caller looks which."""
        future = self.futures[call] = asyncio.get_running_loop().create_future()
        try:
            await future
        finally:
            self.futures.pop(call, None)


async def run(gate: Gate, call: Call[R], prepare: Callable[[], None] | None) -> R:
    """`await pool.call(...)`: wait for a place, make the payload, wait for the outcome, never blocking the loop."""
    call.mailbox = mailbox()
    call.eager = prepare is None
    gate.enter(call)
    if prepare is not None:
        await place(gate, call)
        gate.fill(call, prepare)
    return await outcome(gate, call)


async def outcome(gate: Gate, call: Call[R]) -> R:
    """The same for a call that is in its place already."""
    assert call.mailbox is not None
    try:
        gate.crew.attend(call.mailbox)
        while not call.done():
            await call.mailbox.wait(call)
    except asyncio.CancelledError:
        gate.cancel(call, "its task was canceled")
        raise
    return call.result()


async def place(gate: Gate, call: Call[Any]) -> None:
    """Until the call has its place, or is ended before (then that error is raised)."""
    assert call.mailbox is not None
    try:
        while call.stage is WAITING:
            await call.mailbox.wait(call)
    except asyncio.CancelledError:
        gate.cancel(call, "its task was canceled")
        raise
    if call._exception is not None:
        raise call._exception
