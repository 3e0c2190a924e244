"""
Where a running command says and asks things: a Unix socket, one JSON object a line in each direction.

    {"token": "...", "op": "progress", "progress": 0.5}
    {}

The name is in the abstract namespace, so there is no path to grow too long and no file to leave behind. Only processes of our own user and of those in `runner.users` get an answer, and
only with the token of a run that is still running.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

from penstock.runner.frames import Frame
from penstock.runner.watch import IoLoop

__all__ = ["ControlSocket"]

_MOST_LINE: Final = 4_000_000
_MOST_VISITORS: Final = 256


class ControlSocket:
    def __init__(
        self, name: str, watch: IoLoop, answer: Callable[[str, Frame], Frame], users: Collection[int] = ()
    ) -> None:
        """`answer`: to a token and what was said with it. `users`: further ones whose processes get an answer."""
        self._users = {os.getuid(), 0, *users}
        self.address = f"@{name}"
        self._watch, self._answer = watch, answer
        self._visitors: dict[socket.socket, bytearray] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{name}")
        self._socket.listen(64)
        self._socket.setblocking(False)
        watch.add(self._socket, self._knocked)

    def _knocked(self) -> None:
        try:
            visitor, _ = self._socket.accept()
        except OSError:
            return  # gone again, or no descriptor left: it stays in line
        if len(self._visitors) >= _MOST_VISITORS or _user(visitor) not in self._users:
            visitor.close()
            return
        visitor.setblocking(False)
        self._visitors[visitor] = bytearray()
        self._watch.add(visitor, partial(self._hear, visitor))

    def _hear(self, visitor: socket.socket) -> None:
        said = self._visitors[visitor]
        try:
            data = visitor.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        *lines, rest = bytes(said).split(b"\n")
        self._visitors[visitor] = bytearray(rest)
        answers = b"".join(json.dumps(self._reply(line)).encode() + b"\n" for line in lines)
        if not data or len(rest) > _MOST_LINE or not _send(visitor, answers):
            self._dismiss(visitor)

    def _reply(self, line: bytes) -> Frame:
        try:
            said: Any = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict) or not isinstance(said.get("token"), str):
            return {"error": "say one JSON object a line, with the token of the job"}
        return self._answer(said["token"], said)

    def _dismiss(self, visitor: socket.socket) -> None:
        del self._visitors[visitor]
        self._watch.drop(visitor)
        visitor.close()

    def close(self) -> None:
        for visitor in list(self._visitors):
            self._dismiss(visitor)
        self._watch.drop(self._socket)
        self._socket.close()


def _send(visitor: socket.socket, data: bytes) -> bool:
    """False: it does not read its answers. Who asks little and reads them never fills a socket."""
    try:
        return visitor.send(data) == len(data) if data else True
    except OSError:
        return False


def _user(visitor: socket.socket) -> int:
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
