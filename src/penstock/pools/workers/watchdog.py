"""A thread that notices when work stalls, where watching all the time costs too much."""

from __future__ import annotations

import logging
import threading
from _thread import allocate_lock
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from penstock.pools.context import never_block_here

log = logging.getLogger("penstock")

#: How often the watchdog checks, in seconds.
CHECK_INTERVAL: Final = 1e-3


class StallWatchdog:
    """
    Calls `check` every millisecond while it is active, and sleeps while it is not. `check` says whether there
    is anything left to watch.

    Short calls are quickest if one thread runs many of them and settles them together; that is safe only if a
    call that turns out to be long is noticed.
    """

    __slots__ = ("_check", "_closing", "_name", "_thread", "_wakeup", "active")

    def __init__(self, name: str, check: Callable[[], bool]) -> None:
        self._name = name
        self._check = check
        self._wakeup = allocate_lock()
        self._wakeup.acquire()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.active = False

    def activate(self) -> None:
        """Called, like `close`, under the owner's lock, so by one thread at a time."""
        self.active = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._wake()

    def close(self) -> None:
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it was woken before, and has not run yet
            self._wakeup.release()

    def _run(self) -> None:
        never_block_here()
        while not self._closing:
            self._wakeup.acquire()
            while not self._closing and self._check_once():
                self._wakeup.acquire(timeout=CHECK_INTERVAL)

    def _check_once(self) -> bool:
        """
        Inactive before the check, and active again if there is something to watch: a worker first leaves its
        ended calls and then checks whether the watchdog is active, so one of the two sees the other.
        """
        self.active = False
        try:
            self.active = self._check()
        except Exception:  # a watchdog that ended would leave every caller waiting
            log.exception("%s failed", self._name)
            self.active = True  # check again
        return self.active
