"""
Wake-ups between processes: a datagram to the dispatcher of a file, and from it to those who wait for what it does.

Wake-ups are hints: they may be lost, and any process that can read the names of the sockets may send one (`socket_names.py`).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Thread
from typing import Final

from penstock.stores.sqlite.socket_names import SocketNames

__all__ = ["WakeupClient", "WakeupServer", "notify", "present"]

#: How long the dispatcher goes on telling an ear that has not asked again.
CLIENT_SEC: Final = 5.0
MOST_EARS: Final = 256


def notify(address: str, sender: socket.socket) -> bool:
    """Whether somebody is there to hear it. By the address: it is rung at every commit, and to find it takes as long as a small one."""
    try:
        sender.sendto(b"1", socket.MSG_DONTWAIT, address)
    except BlockingIOError:
        return True  # so many rings wait that one more adds nothing
    except OSError:
        return False
    return True


def present(path: Path) -> bool:
    """Whether somebody dispatches from this file now. Nobody is disturbed by the question."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as caller:
        try:
            caller.connect(SocketNames(path).wakeups)
        except OSError:
            return False
    return True


class WakeupServer:
    """The dispatcher's end."""

    def __init__(self, names: SocketNames, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._ears: dict[bytes, float] = {}
        self._lock = Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        names.make()
        try:
            self._socket.bind(names.wakeups)
        except OSError:  # taken: only the dispatcher comes here, so the other process is a stranger
            names.renew()
            self._socket.bind(names.wakeups)
        self._thread = Thread(target=self._listen, name="penstock-bell", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """After a commit, to everybody who listens."""
        if not self._ears:
            return
        now = time.monotonic()
        with self._lock:
            self._ears = {
                wakeup_client: until
                for wakeup_client, until in self._ears.items()
                if until > now and self._sent(wakeup_client)
            }

    def _listen(self) -> None:
        while (said := self._socket.recv(128)) != b"0":
            if said.startswith(b"+"):
                self._take(said[1:])
            else:
                self._heard()

    def _take(self, wakeup_client: bytes) -> None:
        with self._lock:
            known = wakeup_client in self._ears
            if known or len(self._ears) < MOST_EARS:
                self._ears[wakeup_client] = time.monotonic() + CLIENT_SEC
        if not known:
            self._sent(wakeup_client)  # what was committed while it asked is news to it

    def _sent(self, wakeup_client: bytes) -> bool:
        try:
            self._socket.sendto(b"1", socket.MSG_DONTWAIT, wakeup_client)
        except BlockingIOError:
            return True  # so many wait there that one more adds nothing
        except OSError:
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendto(b"0", self._socket.getsockname())
        self._thread.join()
        self._socket.close()


class WakeupClient:
    """The end of a process that waits for what the dispatcher does."""

    def __init__(self, names: SocketNames, heard: Callable[[], None]) -> None:
        self._names, self._heard = names, heard
        self._asked = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")  # the kernel finds a name
        self._thread = Thread(target=self._listen, name="penstock-ear", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """To be called again and again: the dispatcher may have changed, and forgets who is silent."""
        now = time.monotonic()
        if now - self._asked > CLIENT_SEC / 10:
            self._asked = now
            with contextlib.suppress(OSError):
                self._socket.sendto(
                    b"+" + self._socket.getsockname(), socket.MSG_DONTWAIT, self._names.wakeups
                )

    def _listen(self) -> None:
        while self._socket.recv(16) != b"0":
            self._heard()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendto(b"0", self._socket.getsockname())
        self._thread.join()
        self._socket.close()
