"""
A wake-up between processes: a datagram to the dispatcher of a file.

A hint and no more: it may be lost, and anybody on the host may ring. The abstract namespace is used because such a socket
has no length limit by its folder, leaves nothing behind, and vanishes with its process.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from threading import Thread

__all__ = ["Bell", "ring"]


def _address(path: Path) -> str:
    return "\0penstock-" + blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()


def ring(path: Path, sender: socket.socket) -> None:
    with contextlib.suppress(OSError):  # nobody listens, or so many rings wait that one more adds nothing
        sender.sendto(b"1", socket.MSG_DONTWAIT, _address(path))


class Bell:
    def __init__(self, path: Path, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(path))
        self._thread = Thread(target=self._listen, name="penstock-bell", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while self._socket.recv(16) == b"1":
            self._heard()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendto(b"0", self._socket.getsockname())
        self._thread.join()
        self._socket.close()
