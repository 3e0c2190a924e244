"""
What the runner and its processes say to each other: JSON objects, each behind its length.

Never pickle: the other end may run somebody's function. A frame that is too long, is no JSON or is no object ends the conversation.
"""

from __future__ import annotations

import json
import socket
from struct import Struct
from typing import Any, Final, TypeAlias

Frame: TypeAlias = dict[str, Any]
#: Bytes of one frame: a payload of 1,000,000 characters, whatever they are, and what is around it.
MOST: Final = 8_000_000
#: Bytes of a ticket: the number of a call that its worker may begin.
TICKET: Final = 8
_LENGTH: Final = Struct("<I")


class BadFrame(Exception):  # it says what it is
    pass


def pack(message: Frame) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MOST:
        raise BadFrame(f"a frame of {len(body)} bytes; at most {MOST}")
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Cuts a stream into frames; keeps the beginning of one whose rest has not come."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        self._rest += data
        frames: list[Frame] = []
        at = 0
        while len(self._rest) - at >= _LENGTH.size:
            length = _LENGTH.unpack_from(self._rest, at)[0]
            if length > MOST:
                raise BadFrame(f"a frame of {length} bytes is announced; at most {MOST}")
            stop = at + _LENGTH.size + length
            if len(self._rest) < stop:
                break
            frames.append(_parse(self._rest[at + _LENGTH.size : stop]))
            at = stop
        del self._rest[:at]
        return frames


def _parse(body: bytearray) -> Frame:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a frame that is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadFrame("a frame that is no object")
    return message


class Channel:
    """One end that never waits: what does not fit is kept and sent when `push` is called."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self._inbox, self._out = sock, Inbox(), bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, *messages: Frame) -> None:
        for message in messages:
            self._out += pack(message)
        self.push()

    @property
    def unsent(self) -> bool:
        return bool(self._out)

    def push(self) -> None:
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except BlockingIOError:
                return
            except OSError:
                self._out.clear()  # the other end is gone, which reading finds out
                return
            del self._out[:sent]

    def receive(self) -> list[Frame] | None:
        """What has come; None: nothing will come any more."""
        try:
            data = self._sock.recv(262_144)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._inbox.feed(data) if data else None

    def close(self) -> None:
        self._sock.close()
