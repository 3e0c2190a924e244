"""
The names of a database file's sockets, in the abstract namespace: no length limit by the folder, and nothing left behind.

Any user of the machine can bind such a name, so a name that can be guessed can be taken before the dispatcher starts. Each name
therefore contains a secret, which lies in a file beside the database (`jobs.db-sockets`, mode 0600). Names in use are
visible to all users: a dispatcher that finds its name taken makes a new secret. Programs read the secret again when the
file has changed, at most once a second.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final

__all__ = ["SocketNames"]

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
