"""
Connections: how many each peer may have, and the limits that hold before the application gets a request.

A client that opens connections and sends nothing must not lock others out. So a full listener accepts a new
connection and closes an idle one: the oldest first, and those whose client has shown a valid token last. The
application limits requests by token, so only clients with a token can fill a listener for good, and each peer
only up to its own budget.

The servers of asyncio count a connection only after its TLS handshake. So each listener accepts connections
itself, and takes a place in the budget before TLS and before it reads a byte. The Unix socket has a budget of
its own, so its owner can always connect, whatever happens on TCP.

The head of a request has a fixed deadline and size, so a client gains no time by sending a byte now and then.
There is a deadline for reading an answer too.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import ssl
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import Any, Final

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.scheduler.permissions import Unsafe
from penstock.wire import ProblemDetails

log = logging.getLogger("penstock.server")

_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_WAIT_FOR_DESCRIPTORS: Final = 0.2
_AT_ONCE: Final = 32
_MAX_HEAD: Final = 16_384
_MAX_HEADERS: Final = 100


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """
    `connections`: the most over TCP, of which one peer may have `per_peer`. `local`: the most over the Unix
    socket.

    `head_sec`: the time for a TLS handshake, and for the head of a request from its first byte or from the
    connection. `body_sec`: the time for the body. `unread_sec`: the time in which a client must read the
    bytes that wait to be sent.
    """

    connections: int = 1_000
    per_peer: int = 750
    local: int = 250
    head_sec: float = 10.0
    body_sec: float = 30.0
    unread_sec: float = 30.0


class SocketListener:
    """Accepts connections on one socket, within a budget."""

    def __init__(
        self,
        sock: socket.socket,
        config: Config,
        state: ServerState,
        *,
        most: int,
        limits: ConnectionLimits,
        peers: Peers,
        tls: ssl.SSLContext | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._sock, self._peers, self._tls = sock, peers, tls
        self.config, self.state, self.limits, self.loop = config, state, limits, loop
        self.local = sock.family == socket.AF_UNIX
        per_peer = most if self.local else min(limits.per_peer, max(1, most * 3 // 4))
        self.budget = ConnectionBudget(most, per_peer, peers.proxies)
        self._opening = set[asyncio.Task[Any]]()
        sock.setblocking(False)
        sock.listen(512)
        self._again: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """Stop listening. May be called again."""
        self._pause()
        for task in self._opening:
            task.cancel()
        self._sock.close()

    def _resume(self) -> None:
        self._again = None
        self.loop.add_reader(self._sock, self._accept)

    def _pause(self) -> None:
        if self._again is not None:
            self._again.cancel()
        elif self._sock.fileno() >= 0:
            self.loop.remove_reader(self._sock)

    def _accept(self) -> None:
        """Accept a few connections at a time, so that the event loop can serve open ones in between."""
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    log.warning("no connection can be accepted now: %s", error.strerror)
                    self._pause()
                    self._again = self.loop.call_later(_WAIT_FOR_DESCRIPTORS, self._resume)
                return  # no further connection waits
            sock.setblocking(False)
            try:
                self._admit(sock)
            except OSError:
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        if self.local:
            user = peer_uid(sock)
            if user not in (os.geteuid(), 0):
                sock.close()
                return
            self._open(sock, f"user {user}", proxied=False)
            return
        address = peer_address(sock)
        if not self._peers.may_connect(address):
            why = "plain HTTP is taken from this machine and from declared proxies only"
            fix = "Use HTTPS, or declare the proxy that does TLS in server.trusted_proxies."
            self._turn_away(sock, 403, "forbidden", why, fix)
            return
        self._open(sock, _limited(address), proxied=self._peers.is_proxy(address))

    def _open(self, sock: socket.socket, peer: str, *, proxied: bool) -> None:
        connection = HttpConnection(self, peer, proxied=proxied)
        if not self.budget.enter(connection):
            self._turn_away(sock, 503, "too_many", "too many connections are open", "Try again in a moment.")
            return
        tls: dict[str, Any] = {}
        if self._tls is not None:
            tls = {"ssl": self._tls, "ssl_handshake_timeout": self.limits.head_sec}
        opening = self.loop.connect_accepted_socket(lambda: connection, sock, **tls)
        connection.opening = task = self.loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(lambda task: self._opened(task, sock, connection))

    def _opened(self, task: asyncio.Task[Any], sock: socket.socket, connection: HttpConnection) -> None:
        self._opening.discard(task)
        if task.cancelled() or task.exception() is not None:
            # The handshake failed, took too long, or was canceled to make room.
            self.budget.leave(connection)
            sock.close()

    def _turn_away(self, sock: socket.socket, status: int, code: str, detail: str, hint: str) -> None:
        """
        Close a connection at once. Without TLS, send an answer first if the client takes it immediately.
        """
        if self._tls is None:
            try:
                sock.send(refusal(status, code, detail, hint))
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the client has gone away
        sock.close()


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel reports it."""
    credentials: tuple[int, ...] = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return credentials[1]


def peer_address(sock: socket.socket) -> str:
    address: str = sock.getpeername()[0]
    return address


class Peers:
    """Which peers may connect. `proxies`: the addresses of proxies that do TLS for this server."""

    def __init__(self, proxies: Collection[str], *, tls: bool) -> None:
        self._tls = tls
        for address in proxies:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise Unsafe(
                    f"{address} is not an IP address: a trusted proxy is named by its address"
                ) from None
        self.proxies = frozenset(_limited(address) for address in proxies)
        self._proxies = frozenset(map(_plain, proxies))

    def may_connect(self, address: str) -> bool:
        """
        Whether a peer may connect. Without TLS only this machine and declared proxies may: the tokens of
        other peers would travel unencrypted.
        """
        return self._tls or _plain(address).is_loopback or self.is_proxy(address)

    def is_proxy(self, address: str) -> bool:
        return _plain(address) in self._proxies


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address. An IPv4 address that an IPv6 socket reports becomes IPv4 again."""
    read = ipaddress.ip_address(address.partition("%")[0])
    return (read.ipv4_mapped or read) if isinstance(read, ipaddress.IPv6Address) else read


def _limited(address: str) -> str:
    """
    The peer that a connection counts for: an IPv4 address, or an IPv6 network, because one host may use all
    addresses of its network.
    """
    read = _plain(address)
    return str(read) if read.version == 4 else str(ipaddress.ip_network((read, 64), strict=False))


class ConnectionBudget:
    """
    Counts connections, in all and per peer. `unlimited`: declared proxies, which have no limit of their own
    because many clients come through them.
    """

    def __init__(self, most: int, per_peer: int, unlimited: frozenset[str] = frozenset()) -> None:
        self._most, self._per_peer, self._unlimited = most, per_peer, unlimited
        #: The connections of each peer, oldest first, and whether the client has shown a token.
        self._peers: dict[str, dict[HttpConnection, bool]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._peers.values()))

    def enter(self, connection: HttpConnection) -> bool:
        """Take a place; if all are taken, close an idle connection for it. False: no connection is idle."""
        own = self._peers.get(connection.peer, {})
        if len(own) >= self._per_peer and connection.peer not in self._unlimited:
            candidates = [own]
        elif len(self) >= self._most:
            candidates = sorted(self._peers.values(), key=len, reverse=True)
        else:
            candidates = []
        if candidates and not self._make_room(candidates):
            return False
        self._peers.setdefault(connection.peer, {})[connection] = False
        return True

    def _make_room(self, candidates: list[dict[HttpConnection, bool]]) -> bool:
        for connections in candidates:
            for has_shown_token in (False, True):
                for connection, has_proven in connections.items():
                    if has_proven is has_shown_token and connection.idle:
                        self.leave(connection)
                        connection.give_way()
                        return True
        return False

    def prove(self, connection: HttpConnection) -> None:
        """
        Note that the client has shown a valid token. Called with every request, so that connections are
        ordered by their last request.
        """
        connections = self._peers.get(connection.peer, {})
        if connections.pop(connection, None) is not None:
            connections[connection] = True

    def leave(self, connection: HttpConnection) -> None:
        """Give up the place. May be called again."""
        connections = self._peers.get(connection.peer, {})
        connections.pop(connection, None)
        if not connections:
            self._peers.pop(connection.peer, None)


class HttpConnection(HttpToolsProtocol):
    """One HTTP connection. `local`: it is on the Unix socket. `proxied`: a declared proxy opened it."""

    def __init__(self, listener: SocketListener, peer: str, *, proxied: bool) -> None:
        super().__init__(listener.config, listener.state, {}, listener.loop)
        self._limits, self._budget, self.peer = listener.limits, listener.budget, peer
        self.local, self.proxied = listener.local, proxied
        #: The task that opens the connection, with its TLS handshake.
        self.opening: asyncio.Task[Any] | None = None
        self._made = self._had_request = False
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        #: Bytes since the head began; the number of headers, and the bytes in them and in the path.
        self._head_size = self._headers = self._parsed = 0
        self._in_head, self._in_body = True, False
        self._refusal: tuple[int, str, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._made = True
        self._start_deadline(self._limits.head_sec)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._note_progress()
        super().connection_lost(exc)
        self._budget.leave(self)

    @property
    def idle(self) -> bool:
        """Whether no request is being served: its head has not arrived, or its answer has been sent."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def give_way(self) -> None:
        """
        Close, to make room for another connection. A client that has sent no request gets an answer first.
        """
        if self._made:
            if not self._had_request:
                self._refuse(503, "too_many", "too many connections are open")
            self.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def prove(self) -> None:
        """Note that the client has shown a token: connections without one are closed first to make room."""
        self._budget.prove(self)

    def abort(self) -> None:
        """Close at once, and drop the bytes that wait to be sent."""
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._limits.unread_sec, self.transport.abort)

    def resume_writing(self) -> None:
        self._note_progress()
        super().resume_writing()

    def _note_progress(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head:
            self._head_size += len(data)
            if self._head_size > _MAX_HEAD and not self.transport.is_closing():
                self._refuse(
                    431, "head_too_large", f"the head of the request is larger than {_MAX_HEAD} bytes"
                )
        if self.transport.is_closing():
            return
        if self._in_body and not self.cycle.response_complete:
            self._start_deadline(self._limits.body_sec)
        elif self._in_head or self.cycle.response_complete:
            # Between requests too: a client may send the rest of an answered request slowly, or line feeds
            # before the next request.
            self._start_deadline(self._limits.head_sec)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_size, self._headers, self._parsed = True, 0, 0, 0
        self.scope["penstock.connection"] = self  # type: ignore[typeddict-unknown-key]  # a key of ours
        self.server_state.default_headers = _dated(int(time.time()))

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        self._count(len(name) + len(value))
        # After the head these are trailers, which are ignored: the application checks headers alone.
        if self._in_head:
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._headers > _MAX_HEADERS or self._parsed > _MAX_HEAD:
            self._refusal = (
                431,
                "head_too_large",
                f"at most {_MAX_HEADERS} headers and {_MAX_HEAD} bytes are accepted",
            )
            raise ValueError("the head is too large")  # ends the parser and the connection

    def on_headers_complete(self) -> None:
        self._stop_deadline()
        self._had_request = True
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_deadline()
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._refusal is not None:
            self._refuse(*self._refusal)
        else:
            self._refuse(400, "bad_http", msg.rstrip("."), "Send a request in HTTP/1.1.")

    def _start_deadline(self, seconds: float) -> None:
        """Start the deadline, unless it runs: later bytes do not move it."""
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self._on_deadline)

    def _stop_deadline(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_deadline(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete and not self._in_body:
            return  # the server itself is slow: it still serves a request
        self._refuse(408, "too_slow", "the request did not arrive in time")

    def _refuse(
        self, status: int, code: str, detail: str, hint: str = "Send a smaller request, at once."
    ) -> None:
        """Send a refusal without the application, and close the connection."""
        self.transport.write(refusal(status, code, detail, hint))
        self.transport.close()


def refusal(status: int, code: str, detail: str, hint: str) -> bytes:
    """The bytes of a whole answer, after which the connection is closed."""
    body = msgspec.json.encode(ProblemDetails(f"urn:penstock:{code}", detail, status, detail, code, hint))
    return (
        STATUS_LINE[status]
        + b"content-type: application/problem+json\r\nconnection: close\r\n"
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )


@lru_cache(maxsize=1)
def _dated(second: int) -> list[tuple[bytes, bytes]]:
    """
    The Date header, made on the first request of each second: a timer for it would wake an idle machine.
    """
    return [(b"date", formatdate(second, usegmt=True).encode())]
