"""
Wake-ups between processes: a datagram to the dispatcher of a file, and from it to the processes that wait for
its commits.

Wake-ups are hints: they may be lost, and any process that can read the names of the sockets may send one.

The names are in the abstract namespace: the folder does not limit their length, and nothing is left behind.
Any user of the machine can bind such a name, so a name that can be guessed could be taken before the
dispatcher starts. Each name therefore contains a secret, which lies in a file beside the database
(`jobs.db-sockets`, mode 0600). Names in use are visible to all users: a dispatcher that finds its name taken
makes a new secret. Programs read the secret again when the file has changed, at most once a second.
"""

#: How long the dispatcher goes on telling an ear that has not asked again.
from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock, Thread
from typing import Final

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


_LOOK_SEC: Final = 1.0
_BYTES: Final = 16


class SocketNames:
    def __init__(self, database: Path) -> None:
        self._file = database.with_name(database.name + "-sockets")
        self._database = database
        self._secret = ""
        self._seen: tuple[int, int] | None = None
        self._look_at = 0.0
        self._read()

    @property
    def wakeups(self) -> str:
        """Of the dispatcher's socket for wake-ups."""
        return self._name("wakeups")

    @property
    def relay(self) -> str:
        """Of the dispatcher's submit relay. Of the file itself and not of its path: a job must not be relayed into a file that was replaced."""
        return self._name("relay") + self._identity

    @property
    def stand_in(self) -> str:
        """Of the submit relay of a process that does not dispatch."""
        return self._name("stand-in") + self._identity

    @cached_property
    def _identity(self) -> str:
        state = self._database.stat()
        return f"-{state.st_dev:x}-{state.st_ino:x}"

    def make(self) -> None:
        """For a process that is going to bind a name: make a secret if there is none."""
        self._read()
        if not self._secret:
            self._write(replace=False)

    def renew(self) -> None:
        """For the dispatcher whose name is taken: make a new secret."""
        self._write(replace=True)

    def _name(self, purpose: str) -> str:
        if not self._secret or time.monotonic() >= self._look_at:
            self._read()
        # Without a secret nothing is bound: a random name that leads nowhere.
        return f"\0penstock-{purpose}-{self._secret or secrets.token_hex(_BYTES)}"

    def _read(self) -> None:
        self._look_at = time.monotonic() + _LOOK_SEC
        try:
            state = self._file.stat()
            if (seen := (state.st_ino, state.st_mtime_ns)) != self._seen:
                self._secret, self._seen = self._file.read_text("ascii").strip(), seen
        except (OSError, ValueError):
            self._secret, self._seen = "", None

    def _write(self, *, replace: bool) -> None:
        """In one step. Of several processes that make the first secret at once, the first one's counts for all."""
        part = self._file.with_name(f"{self._file.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with suppress(
            OSError
        ):  # a folder that may not be written: no names, and others find changes by polling
            part.touch(0o600, exist_ok=False)
            part.write_text(secrets.token_hex(_BYTES), "ascii")
            if replace:
                part.replace(self._file)
            else:
                with suppress(FileExistsError):
                    os.link(part, self._file)
                part.unlink()
        self._read()
