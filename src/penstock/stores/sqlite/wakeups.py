"""
Wake-ups between processes: datagrams to the dispatcher of a file, and from the dispatcher to the processes
that wait for its commits.

Wake-ups are hints: they may be lost, and any process that knows the name of a socket may send one.

The names are in the abstract namespace: the folder does not limit their length, and no files remain. Any user
of the machine can bind such a name, so another user could take a name that can be guessed before the
dispatcher starts. Each name therefore contains a secret, which is in a file beside the database
(`jobs.db-sockets`, mode 0600). Names in use are visible to all users, so a dispatcher whose name is taken
makes a new secret. Programs read the secret again when the file has changed, at most once a second.
"""

from __future__ import annotations

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

#: How long the dispatcher notifies a client after its last request.
CLIENT_SEC: Final = 5.0
MOST_CLIENTS: Final = 256


def notify(address: str | bytes, sender: socket.socket) -> bool:
    """Send one wake-up. False: no process listens there."""
    try:
        sender.sendto(b"1", socket.MSG_DONTWAIT, address)
    except BlockingIOError:
        return True  # enough wake-ups wait there already
    except OSError:
        return False
    return True


def present(path: Path) -> bool:
    """Whether a process dispatches from this file now. The check does not wake it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as caller:
        try:
            caller.connect(SocketNames(path).wakeups)
        except OSError:
            return False
    return True


class WakeupServer:
    """The dispatcher's socket for wake-ups."""

    def __init__(self, names: SocketNames, on_wakeup: Callable[[], None]) -> None:
        self._on_wakeup = on_wakeup
        #: By the name of a client's socket: until when the client is notified.
        self.clients: dict[bytes, float] = {}
        self._lock = Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        names.make()
        try:
            self._socket.bind(names.wakeups)
        except OSError:  # taken by another program: this process has the dispatch lock
            names.renew()
            self._socket.bind(names.wakeups)
        self._thread = Thread(target=self._listen, name="penstock-wakeups", daemon=True)
        self._thread.start()

    def notify_clients(self) -> None:
        """Wake the clients, after a commit."""
        now = time.monotonic()
        with self._lock:
            self.clients = {
                client: until
                for client, until in self.clients.items()
                if until > now and notify(client, self._socket)
            }

    def _listen(self) -> None:
        while (message := self._socket.recv(128)) != b"0":
            if message.startswith(b"+"):
                self._add(message[1:])
            else:
                self._on_wakeup()

    def _add(self, client: bytes) -> None:
        with self._lock:
            is_new = client not in self.clients
            if not is_new or len(self.clients) < MOST_CLIENTS:
                self.clients[client] = time.monotonic() + CLIENT_SEC
        if is_new:
            notify(client, self._socket)  # a commit may have come before its request

    def close(self) -> None:
        _end(self._socket, self._thread)

    def leave_to_parent(self) -> None:
        """In a forked process, which has no thread that listens: else the name would outlive the parent."""
        self._socket.close()


class WakeupClient:
    """The socket of a process that waits for the dispatcher's commits."""

    def __init__(self, names: SocketNames, on_wakeup: Callable[[], None]) -> None:
        self._names, self._on_wakeup = names, on_wakeup
        self._asked_at = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")  # the kernel chooses a name
        self._thread = Thread(target=self._listen, name="penstock-wakeup-client", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """
        Ask the dispatcher for wake-ups. Callers repeat it: the dispatcher may have changed, and forgets a
        silent client.
        """
        now = time.monotonic()
        if now - self._asked_at > CLIENT_SEC / 10:
            self._asked_at = now
            with suppress(OSError):
                self._socket.sendto(
                    b"+" + self._socket.getsockname(), socket.MSG_DONTWAIT, self._names.wakeups
                )

    def _listen(self) -> None:
        while self._socket.recv(16) != b"0":
            self._on_wakeup()

    def close(self) -> None:
        _end(self._socket, self._thread)


def _end(listening: socket.socket, thread: Thread) -> None:
    with suppress(OSError):
        listening.sendto(b"0", listening.getsockname())
    thread.join()
    listening.close()


_LOOK_SEC: Final = 1.0
_BYTES: Final = 16


class SocketNames:
    """The names of the sockets of one database, made from its secret."""

    def __init__(self, database: Path) -> None:
        self._file = database.with_name(database.name + "-sockets")
        self._database = database
        self._secret = ""
        self._seen: tuple[int, int] | None = None
        self._look_at = 0.0
        self._read()

    @property
    def in_use(self) -> bool:
        """
        Whether a process has ever bound one of these names. If not, a submit need not look for a socket: that
        takes a tenth of its processor time.
        """
        if not self._secret:
            self._read()
        return bool(self._secret)

    @property
    def wakeups(self) -> str:
        """The name of the dispatcher's socket for wake-ups."""
        return self._name("wakeups")

    @property
    def relay(self) -> str:
        """
        The name of the dispatcher's submit relay. It contains the file's identity, so that no submit is
        relayed into a file that has replaced this one.
        """
        return self._name("relay") + self._identity

    @property
    def stand_in(self) -> str:
        """The name of the submit relay of a process that does not dispatch."""
        return self._name("stand-in") + self._identity

    @cached_property
    def _identity(self) -> str:
        state = self._database.stat()
        return f"-{state.st_dev:x}-{state.st_ino:x}"

    def make(self) -> None:
        """Make a secret if there is none, before a name is bound."""
        self._read()
        if not self._secret:
            self._write(replace=False)

    def renew(self) -> None:
        """Make a new secret, for a dispatcher whose name is taken."""
        self._write(replace=True)

    def _name(self, purpose: str) -> str:
        if not self._secret or time.monotonic() >= self._look_at:
            self._read()
        # Without a secret no process has bound a name: a random name leads nowhere.
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
        """
        Write a new secret in one step. If several processes make the first secret at once, one of them counts
        for all.
        """
        part = self._file.with_name(f"{self._file.name}.{os.getpid()}.{secrets.token_hex(4)}")
        # In a folder without the right to write there are no names, and other processes find changes by
        # polling.
        with suppress(OSError):
            part.touch(0o600, exist_ok=False)
            part.write_text(secrets.token_hex(_BYTES), "ascii")
            if replace:
                part.replace(self._file)
            else:
                with suppress(FileExistsError):
                    os.link(part, self._file)
                part.unlink()
        self._read()
