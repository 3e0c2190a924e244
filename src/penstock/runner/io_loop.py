"""The sockets that the runner's one thread listens to, and whom to call when there is something to hear."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Protocol


class Readable(Protocol):
    def fileno(self) -> int: ...


class Writable(Protocol):
    """Has more to say than the socket took."""

    @property
    def unsent(self) -> bool: ...

    def push(self) -> None: ...


class IoLoop:
    def __init__(self) -> None:
        self._selector: selectors.BaseSelector
        self._reader = self._writer = -1
        self._unsent: set[Writable] = set()
        self._paused: dict[Readable, tuple[float, Callable[[], None]]] = {}
        self._lock = Lock()

    def open(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._reader, selectors.EVENT_READ, self._woken)

    def add(self, readable: Readable, heard: Callable[[], None]) -> None:
        self._selector.register(readable, selectors.EVENT_READ, heard)

    def drop(self, readable: Readable) -> None:
        if self._paused.pop(readable, None) is None:
            self._selector.unregister(readable)

    def pause(self, readable: Readable, seconds: float) -> None:
        """What it has to say cannot be taken now: it is not listened to for so long."""
        heard = self._selector.get_key(readable).data
        self._selector.unregister(readable)
        self._paused[readable] = monotonic() + seconds, heard

    def mind(self, mouth: Writable) -> None:
        """To be called after saying something: what did not fit is sent as room comes."""
        if mouth.unsent:
            self._unsent.add(mouth)

    def wait(self, at_most_sec: float) -> None:
        """Until something is heard, and everything that was heard is dealt with."""
        if self._unsent:
            at_most_sec = min(at_most_sec, 0.01)
        for readable, (until, heard) in list(self._paused.items()):
            left = until - monotonic()
            at_most_sec = min(at_most_sec, left)
            if left <= 0:
                del self._paused[readable]
                self.add(readable, heard)
        for key, _ in self._selector.select(max(0.0, at_most_sec)):
            if key.fd in self._selector.get_map():  # who was called before may have dropped it
                key.data()
        for mouth in list(self._unsent):
            mouth.push()
            if not mouth.unsent:
                self._unsent.discard(mouth)

    def wake(self) -> None:
        """From any thread."""
        with self._lock, contextlib.suppress(BlockingIOError):  # it is awake
            if self._writer >= 0:
                os.write(self._writer, b"1")

    def _woken(self) -> None:
        try:
            os.read(self._reader, 4_096)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:  # a wake that comes late must not write into what has this number next
            os.close(self._writer)
            self._writer = -1
        self._selector.close()
        os.close(self._reader)
