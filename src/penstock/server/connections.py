"""
Connections: how many each peer may have, and the limits that hold before the application sees anything of a
request.

A client that opens connections and sends nothing must not lock the others out. So a full listener does not
refuse a new connection: it closes one that serves no request, the oldest first, and those whose client has
shown a valid token last. What is being served is limited by token, so only clients with a token can fill a
listener for good, and then one peer only up to its own budget.

The event loop's own servers count nothing before a TLS handshake is over, and one of them cannot keep places
for another. So each listener accepts by itself, and takes a place in the budget before TLS and before it
reads a byte. The owner's Unix socket has a budget of its own: whatever happens on TCP, the owner gets in.

The whole head of a request has a deadline and a size, both absolute: a client that sends a byte now and then
gains nothing by it. Nor does one that does not read its answer.
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
    `connections`: over TCP, of which one peer may have `per_peer`; `local`: over the owner's Unix socket.

    `head_sec`: from the first byte of a request, or from the connection, to the end of its head, and for a
    TLS handshake; `body_sec`: from there to its end; `unread_sec`: for a client to take what waits to be
    sent.
    """

    connections: int = 1_000
    per_peer: int = 750
    local: int = 250
    head_sec: float = 10.0
    body_sec: float = 30.0
    unread_sec: float = 30.0


class SocketListener:
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
        """May be called again."""
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
        """Accept a few at a time: the event loop serves open connections in between."""
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    log.warning("no connection can be accepted now: %s", error.strerror)
                    self._pause()
                    self._again = self.loop.call_later(_WAIT_FOR_DESCRIPTORS, self._resume)
                return  # no connection waits any more, or it has gone away already
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
        self._open(sock, _counted(address), proxied=self._peers.is_proxy(address))

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
            # A handshake that failed, took too long, or had to give way: the connection never was.
            self.budget.leave(connection)
            sock.close()

    def _turn_away(self, sock: socket.socket, status: int, code: str, detail: str, hint: str) -> None:
        """
        Without TLS it sends an answer, if the client takes it at once; with TLS there is no connection to
        send one on.
        """
        if self._tls is None:
            try:
                sock.send(refusal(status, code, detail, hint))
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it has gone away
        sock.close()


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, from the kernel."""
    credentials: tuple[int, ...] = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return credentials[1]


def peer_address(sock: socket.socket) -> str:
    address: str = sock.getpeername()[0]
    return address


class Peers:
    """The peers that may connect. `proxies`: addresses of the proxies that do TLS for us."""

    def __init__(self, proxies: Collection[str], *, tls: bool) -> None:
        self._tls = tls
        for address in proxies:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise Unsafe(
                    f"{address} is not an IP address: a trusted proxy is named by its address"
                ) from None
        self.proxies = frozenset(_counted(address) for address in proxies)
        self._proxies = frozenset(map(_plain, proxies))

    def may_connect(self, address: str) -> bool:
        """
        Without TLS only this machine and a declared proxy may connect: other peers would send their token for
        all to read.
        """
        return self._tls or _plain(address).is_loopback or self.is_proxy(address)

    def is_proxy(self, address: str) -> bool:
        return _plain(address) in self._proxies


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address is the same one when it comes by an IPv6 socket."""
    read = ipaddress.ip_address(address.partition("%")[0])
    return (read.ipv4_mapped or read) if isinstance(read, ipaddress.IPv6Address) else read


def _counted(address: str) -> str:
    """
    One peer: an IPv4 address, or an IPv6 network, for a single host has as many addresses in it as it likes.
    """
    read = _plain(address)
    return str(read) if read.version == 4 else str(ipaddress.ip_network((read, 64), strict=False))


class ConnectionBudget:
    """`unlimited`: peers that stand for many others, as a declared proxy does; only the whole limits them."""

    def __init__(self, most: int, per_peer: int, unlimited: frozenset[str] = frozenset()) -> None:
        self._most, self._per_peer, self._unlimited = most, per_peer, unlimited
        #: The connections of each peer, the oldest first, and whether the client of one has shown a token.
        self._peers: dict[str, dict[HttpConnection, bool]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._peers.values()))

    def enter(self, connection: HttpConnection) -> bool:
        """Whether it has a place now, perhaps one that another has just given up."""
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
            for proven in (False, True):
                for connection, has_proven in connections.items():
                    if has_proven is proven and connection.idle:
                        self.leave(connection)
                        connection.give_way()
                        return True
        return False

    def prove(self, connection: HttpConnection) -> None:
        """
        Its client has shown a valid token. Called with every request, so that the order is that of the last
        ones.
        """
        connections = self._peers.get(connection.peer, {})
        if connections.pop(connection, None) is not None:
            connections[connection] = True

    def leave(self, connection: HttpConnection) -> None:
        """May be called again."""
        connections = self._peers.get(connection.peer, {})
        connections.pop(connection, None)
        if not connections:
            self._peers.pop(connection.peer, None)


class HttpConnection(HttpToolsProtocol):
    """`local`: it came by the Unix socket, as the owner. `proxied`: a declared proxy sends it."""

    def __init__(self, listener: SocketListener, peer: str, *, proxied: bool) -> None:
        super().__init__(listener.config, listener.state, {}, listener.loop)
        self._limits, self._budget, self.peer = listener.limits, listener.budget, peer
        self.local, self.proxied = listener.local, proxied
        #: Until the connection is made: the TLS handshake.
        self.opening: asyncio.Task[Any] | None = None
        self._made = self._had_request = False
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        #: What has arrived since the head began; how many headers the parser found, and the bytes in them and
        #: in the path.
        self._head_size = self._headers = self._parsed = 0
        self._in_head, self._in_body = True, False
        self._refusal: tuple[int, str, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._made = True
        self._arm(self._limits.head_sec)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._has_read()
        super().connection_lost(exc)
        self._budget.leave(self)

    @property
    def idle(self) -> bool:
        """No request is being served: its head has not arrived, or its answer has been sent."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def give_way(self) -> None:
        if self._made:
            if not self._had_request:
                self._refuse(503, "too_many", "too many connections are open")
            self.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def prove(self) -> None:
        """The client has shown a token: the connection gives way after those that have shown none."""
        self._budget.prove(self)

    def abort(self) -> None:
        """Not closed in good order: what waits to be sent would wait for ever."""
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._limits.unread_sec, self.transport.abort)

    def resume_writing(self) -> None:
        self._has_read()
        super().resume_writing()

    def _has_read(self) -> None:
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
            self._arm(self._limits.body_sec)
        elif self._in_head or self.cycle.response_complete:
            # Between requests too: a client may dribble the rest of an answered request, or line feeds before
            # the next.
            self._arm(self._limits.head_sec)

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
        # After the head these are trailers: not checked with it, so they must not be mixed with what was.
        if self._in_head:
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._headers > _MAX_HEADERS or self._parsed > _MAX_HEAD:
            self._refusal = (
                431,
                "head_too_large",
                f"at most {_MAX_HEADERS} headers and {_MAX_HEAD} bytes are taken",
            )
            raise ValueError("the head is too large")  # ends the parsing, and with it the connection

    def on_headers_complete(self) -> None:
        self._disarm()
        self._had_request = True
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._refusal or (400, "bad_http", msg)))

    def _arm(self, seconds: float) -> None:
        """Start the deadline once: bytes that arrive later do not move it."""
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete and not self._in_body:
            return  # a request is being served; the next one is late because of us
        self._refuse(408, "too_slow", "the request did not arrive in time")

    def _refuse(self, status: int, code: str, detail: str) -> None:
        """Answer before there is a request, by hand, and close the connection."""
        self.transport.write(refusal(status, code, detail, "Send a smaller request, at once."))
        self.transport.close()


def refusal(status: int, code: str, detail: str, hint: str) -> bytes:
    """A whole answer, for a connection that ends with it."""
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
    The Date header, made anew on the first request of a second: a timer for it would wake an idle machine for
    nothing.
    """
    return [(b"date", formatdate(second, usegmt=True).encode())]
