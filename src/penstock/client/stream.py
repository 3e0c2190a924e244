"""
Server-sent events as an iterator that outlives its connections.

The number of the last event that was handed out is what the next connection begins after, so nothing is missed and nothing comes twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Final, Self

import msgspec

from penstock import wire
from penstock.client.transport import Transport, from_answer
from penstock.core.errors import Unavailable, Unreachable

__all__ = ["EventStream"]

#: The server says something at least every so often; silence for longer means that the connection is dead.
SILENCE: Final = 60.0
PAUSES: Final = (0.1, 0.2, 0.5, 1.0, 2.0)


class EventStream:
    """Iterate, and `close()` from anywhere to end the iteration. `give_up_after`: seconds without a connection; None: never."""

    def __init__(
        self, transport: Transport, path: str, after: int | None, *, give_up_after: float | None = 30.0
    ) -> None:
        self._transport, self._path, self._give_up_after = transport, f"{wire.PREFIX}/{path}", give_up_after
        self.last_seen = after
        self._connection: HTTPConnection | None = None
        self.closed = False

    def __iter__(self) -> Iterator[wire.EventInfo]:
        heard_at, turn = time.monotonic(), 0
        while not self.closed:
            try:
                for number, event in self._read(self._open()):
                    heard_at, turn, self.last_seen = time.monotonic(), 0, number
                    yield event
            except (OSError, HTTPException, Unavailable) as error:
                if not self.closed and self._too_long(heard_at):
                    raise Unreachable(f"the stream of events was lost: {error}", sent=True) from error
            finally:
                self._drop()
            if not self.closed:
                time.sleep(PAUSES[min(turn, len(PAUSES) - 1)])
                turn += 1

    def _too_long(self, heard_at: float) -> bool:
        return self._give_up_after is not None and time.monotonic() - heard_at > self._give_up_after

    def _open(self) -> HTTPResponse:
        headers = {} if self.last_seen is None else {"Last-Event-ID": str(self.last_seen)}
        self._connection, answer = self._transport.stream(self._path, headers, SILENCE)
        if answer.status >= 400:
            raise from_answer(answer.status, answer.read())
        return answer

    def _read(self, answer: HTTPResponse) -> Iterator[tuple[int, wire.EventInfo]]:
        said: dict[bytes, bytes] = {}
        for line in iter(answer.readline, b""):
            name, colon, value = line.rstrip(b"\r\n").partition(b":")
            if name:
                said[name] = value.removeprefix(b" ")
            elif (
                not colon
            ):  # an empty line ends an event; one that begins with a colon only says that somebody is there
                if b"data" in said:
                    yield int(said[b"id"]), msgspec.json.decode(said[b"data"], type=wire.EventInfo)
                said = {}

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        self.closed = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(2)  # wakes whoever reads from it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
