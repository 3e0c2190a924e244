"""
HTTP/1.1 over TCP, TLS or a Unix socket; any number of threads share the connections.

Daemon and clients get their default address here, so they cannot differ. A refusal of the scheduler becomes
the error that the library raises for it, such as StaleDispatch or QueueFull, so the same code handles both.
The error has the fields of the problem+json: `status`, `title`, `hint`, `problems`, `retry_after_sec` and
`data`.

The caller decides which requests may be repeated, because only the caller knows what a request does. A
request that certainly did not arrive is repeated in any case.

A stream of server-sent events is an iterator that outlives its connections. The next connection begins after
the last event that the iterator returned, so no event is missed or repeated.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from penstock import wire
from penstock.core import errors
from penstock.core.errors import AccessDenied, PenstockError, Refused, Unavailable, Unreachable
from penstock.wire import ProblemDetails

Answer = TypeVar("Answer")


def data_dir(environ: Mapping[str, str]) -> Path:
    folder = environ.get("PENSTOCK_DATA_DIR")
    return (
        Path(folder).expanduser() if folder else _xdg(environ, "XDG_DATA_HOME", ".local/share") / "penstock"
    )


def config_file(environ: Mapping[str, str]) -> Path:
    return _xdg(environ, "XDG_CONFIG_HOME", ".config") / "penstock" / "penstock.toml"


def local_url(environ: Mapping[str, str]) -> str:
    return f"unix://{data_dir(environ) / 'penstock.sock'}"


def token_of(environ: Mapping[str, str]) -> str:
    """
    The token of this environment; empty without a file, because the Unix socket of the user's daemon needs
    none.
    """
    if token := environ.get("PENSTOCK_TOKEN"):
        return token.strip()
    file = Path(environ.get("PENSTOCK_TOKEN_FILE") or data_dir(environ) / "token")
    try:
        return file.read_text("ascii").strip()
    except FileNotFoundError:
        return ""


def _xdg(environ: Mapping[str, str], name: str, otherwise: str) -> Path:
    """A directory of the XDG standard, which ignores relative paths."""
    folder = environ.get(name, "")
    return (
        Path(folder) if folder.startswith("/") else Path(environ.get("HOME") or "~").expanduser() / otherwise
    )


def from_answer(status: int, body: bytes) -> PenstockError:
    try:
        return error_of(msgspec.json.decode(body, type=ProblemDetails))
    except msgspec.MsgspecError:
        kind = Unavailable if status >= 500 else Refused
        return kind(_foreign(status, body), status=status)


def _foreign(status: int, body: bytes) -> str:
    """A proxy sent this, or another program on that port."""
    text = body[:200].decode("utf-8", "replace")
    return f"the answer {status} does not come from a scheduler: {text!r}"


def decoded(body: bytes, kind: type[Answer]) -> Answer:
    """An answer of status 200. Unavailable: another program sent it, or a scheduler of another version."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise Unavailable(
            f"the scheduler answers as another version of Penstock does ({error}): restart it with this one"
        ) from None
    except msgspec.DecodeError:
        raise Unavailable(_foreign(200, body)) from None


def error_of(problem: ProblemDetails) -> PenstockError:
    otherwise = (
        Unavailable if problem.status >= 500 else AccessDenied if problem.status in (401, 403) else Refused
    )
    kind = _KINDS.get(problem.code, otherwise)
    fields: dict[str, Any] = {
        **problem.data,
        "title": problem.title,
        "hint": problem.hint,
        "problems": [{"field": one.field, "message": one.message} for one in problem.problems],
        "retry_after_sec": problem.retry_after_sec,
    }
    error = kind(problem.detail or problem.title, **fields)
    # Keep a code that this client does not know yet.
    error.__dict__.update(code=problem.code, status=problem.status)
    if problem.hint:
        error.add_note(problem.hint)
    return error


def _kinds(root: type[PenstockError]) -> Iterator[tuple[str, type[PenstockError]]]:
    yield root.code, root
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from _kinds(kind)


_KINDS = dict(_kinds(Refused)) | dict(_kinds(Unavailable))


#: Seconds between tries. The first retry comes at once, because the server may just have closed a kept
#: connection.
_PAUSES = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)


class Reply(NamedTuple):
    status: int
    body: bytes


class Transport:
    def __init__(self, url: str, token: str = "", *, timeout: float = 10.0) -> None:
        self.url = url
        self._token, self._timeout = token, timeout
        parts = urlsplit(url)
        self._scheme, self._host, self._port = parts.scheme, parts.hostname or "", parts.port
        self._socket_path = parts.path if parts.scheme == "unix" else ""
        if parts.scheme not in ("http", "https", "unix") or not (self._host or self._socket_path):
            raise ValueError(
                f"{url!r} must be http://host:port, https://host:port or unix:///path/of/a/socket"
            )
        self._idle: deque[HTTPConnection] = deque()
        self._asking: set[HTTPConnection] = set()
        self._closed = False
        _transports.add(self)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout: float | None = None,
        repeatable: bool = False,
        retry_for: float = 0.0,
    ) -> Reply:
        """
        Send a request and return its reply. `repeatable`: repeating it changes nothing, so without an answer,
        or after 503, it is repeated for `retry_for` seconds.
        """
        until = time.monotonic() + retry_for
        for turn in range(1_000_000):
            try:
                reply = self._once(method, path, body, self._timeout if timeout is None else timeout)
            except Unreachable as lost:
                if (lost.sent and not repeatable) or not self._pause(turn, until):
                    raise
                continue
            if not (repeatable and reply.status == 503 and self._pause(turn, until)):
                return reply
        raise AssertionError("unreachable")

    def _pause(self, turn: int, until: float) -> bool:
        pause = _PAUSES[min(turn, len(_PAUSES) - 1)]
        if self._closed or time.monotonic() + pause >= until:
            return False
        time.sleep(pause)
        return True

    def _once(self, method: str, path: str, body: bytes | None, timeout: float) -> Reply:
        connection = self._take(timeout)
        self._asking.add(connection)
        try:
            answer = self._send(connection, method, path, body, {"Accept": "application/json"})
            data = answer.read()
            answer.close()  # now, and not when the object is freed: a Ctrl-C at that moment would be lost
        except (OSError, HTTPException) as error:
            connection.close()
            raise self._unreachable(error, sent=True) from error
        except BaseException:
            connection.close()  # it may hold half an answer
            raise
        finally:
            self._asking.discard(connection)
        if answer.will_close or self._closed:
            connection.close()
        else:
            self._idle.append(connection)
        return Reply(answer.status, data)

    def stream(
        self, path: str, headers: dict[str, str], timeout: float
    ) -> tuple[HTTPConnection, HTTPResponse]:
        """Open a streamed answer on a connection of its own."""
        connection = self._connect(timeout)
        try:
            wanted = {"Accept": "text/event-stream", **headers}
            return connection, self._send(connection, "GET", path, None, wanted)
        except (OSError, HTTPException) as error:
            connection.close()
            raise self._unreachable(error, sent=True) from error

    def _send(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> HTTPResponse:
        headers = {**headers}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, body, headers)
        return connection.getresponse()

    def _take(self, timeout: float) -> HTTPConnection:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._connect(timeout)
            # Readable while idle: the server has closed its end of the connection.
            if connection.sock is not None and not select.select([connection.sock], [], [], 0)[0]:
                connection.sock.settimeout(timeout)
                return connection
            connection.close()

    def _connect(self, timeout: float) -> HTTPConnection:
        connection: HTTPConnection
        if self._socket_path:
            connection = _UnixConnection(self._socket_path, timeout)
        elif self._scheme == "https":
            connection = HTTPSConnection(self._host, self._port, timeout=timeout)
        else:
            connection = HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            connection.connect()
        except OSError as error:
            raise self._unreachable(error, sent=False) from error
        return connection

    def _unreachable(self, error: Exception, *, sent: bool) -> Unreachable:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if not sent:
            return Unreachable(
                f"No scheduler is running at {self.url} ({why}). Start one with `penstock up`.", sent=False
            )
        return Unreachable(
            f"the connection to the scheduler at {self.url} broke before it answered ({why})", sent=True
        )

    def leave_to_parent(self) -> None:
        """
        In a forked process: forget the connections, which it shares with its parent. On one connection each
        would get answers to requests of the other.
        """
        while self._idle:
            self._idle.pop().close()
        self._asking = set()  # not closed: a thread that stayed in the parent may hold their locks

    def hang_up(self) -> None:
        """
        Close the sending side of every connection that waits for an answer. The scheduler then ends the request
        and takes back jobs that it has granted and not sent. An answer that was sent already still arrives.
        """
        for connection in list(self._asking):
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()


_transports: Final[weakref.WeakSet[Transport]] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in list(_transports):
        transport.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self._path)
        except BaseException:  # Ctrl-C too: leave no half-open socket to the garbage collector
            self.sock.close()
            raise


#: A connection that is silent for this many seconds is dead: the server sends heartbeats more often.
SILENCE: Final = 60.0
PAUSES: Final = (0.1, 0.2, 0.5, 1.0, 2.0)


class EventStream:
    """
    An iterator over events. `close()` ends it; any thread may call it. `give_up_after`: the iterator fails
    after this many seconds without a connection; None: never.
    """

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
        fields: dict[bytes, bytes] = {}
        for line in iter(answer.readline, b""):
            name, colon, value = line.rstrip(b"\r\n").partition(b":")
            if name:
                fields[name] = value.removeprefix(b" ")
            elif not colon:  # an empty line ends an event; a line that begins with a colon is a heartbeat
                if b"data" in fields:
                    yield int(fields[b"id"]), decoded(fields[b"data"], wire.EventInfo)
                fields = {}

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        self.closed = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(2)  # wakes the thread that reads from it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
