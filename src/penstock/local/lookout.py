"""
Somebody who looks in now and then, where to watch all the time costs too much.

Brief calls are quickest if one thread runs many of them and settles them together; that is safe only if somebody notices
when one of them turns out to be long. The lookout is that somebody: a thread that sleeps a millisecond at a time while it
is on duty, and for good while it is not.
"""

from __future__ import annotations

import logging
import threading
from _thread import allocate_lock
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from penstock.local.blocking import never_block_here

log = logging.getLogger("penstock")

#: How often it looks in.
LOOK: Final = 1e-3


class StallWatchdog:
    """`look` is called every millisecond; it says whether there is anything left to look out for."""

    __slots__ = ("_closing", "_look", "_name", "_thread", "_wakeup", "on_duty")

    def __init__(self, name: str, look: Callable[[], bool]) -> None:
        self._name = name
        self._look = look
        self._wakeup = allocate_lock()
        self._wakeup.acquire()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.on_duty = False

    def call_up(self) -> None:
        """One thread at a time may call this, and `close`: they happen under the owner's lock."""
        self.on_duty = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name=self._name, daemon=True)
            self._thread.start()
        self._ring()

    def close(self) -> None:
        self._closing = True
        self._ring()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it was rung before, and has not heard it yet
            self._wakeup.release()

    def _keep(self) -> None:
        never_block_here()
        while not self._closing:
            self._wakeup.acquire()
            while not self._closing and self._look_in():
                self._wakeup.acquire(timeout=LOOK)

    def _look_in(self) -> bool:
        """
        Off duty before looking, and on again if there is something to look out for: whoever relies on the lookout leaves
        its work first and looks for the lookout after, so one of the two sees the other.
        """
        self.on_duty = False
        try:
            self.on_duty = self._look()
        except Exception:  # a lookout that ended would leave every caller waiting
            log.exception("%s stumbled", self._name)
            self.on_duty = True  # to look again is all that it can do about it
        return self.on_duty
