"""
Which peers may connect, and how many connections each may have.

A client that opens connections and sends nothing must not lock the others out. So a full listener does not refuse a new connection:
it closes one that serves no request, the oldest first, and those whose client has shown a valid token last. What is being served is
limited by token, so only clients with a token can fill a listener for good, and then one peer only up to its own budget.

The event loop's own servers count nothing before a TLS handshake is over, and one of them cannot keep places for another. So each
listener accepts by itself, and takes a place in the budget before TLS and before it reads a byte. The owner's Unix socket has a
budget of its own: whatever happens on TCP, the owner gets in.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import resource
import socket
import ssl
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, Protocol

from penstock.scheduler.permissions import Unsafe
from penstock.server.connection import ConnectionLimits, HttpConnection, refusal


def check_exposure(
    bind: str, *, tls: bool, trusted_proxies: Collection[str] = (), allowed_hosts: Collection[str] = ()
) -> None:
    """Before anything listens: an address that others can reach needs encryption and a list of names."""
    if _is_loopback(bind):
        return
    if not tls and not trusted_proxies:
        raise Unsafe(
            f"listening on {bind} would send tokens in the clear: give a certificate and its key, "
            "or declare the proxy in front that has them",
            bind=bind,
        )
    if not allowed_hosts:
        raise Unsafe(
            f"listening on {bind} needs a list of the host names it is reached by (allowed_hosts)", bind=bind
        )


def _is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        return bind == "localhost"


class Holder(Protocol):
    """What holds a place: a connection, or a TLS handshake."""

    @property
    def peer(self) -> str: ...

    @property
    def idle(self) -> bool:
        """No request is being served."""
        ...

    def give_way(self) -> None: ...


class _Held:
    """The places of one peer, the oldest first. Dicts, because these keep their order and forget one quickly."""

    def __init__(self) -> None:
        self.unproven: dict[Holder, None] = {}
        self.proven: dict[Holder, None] = {}

    def __len__(self) -> int:
        return len(self.unproven) + len(self.proven)

    def idle(self) -> Holder | None:
        for holders in (self.unproven, self.proven):
            for holder in holders:
                if holder.idle:
                    return holder
        return None


class ConnectionBudget:
    """`unlimited`: peers that stand for many others, as a declared proxy does; only the whole limits them."""

    def __init__(self, most: int, per_peer: int, unlimited: frozenset[str] = frozenset()) -> None:
        self._most, self._per_peer, self._unlimited = most, per_peer, unlimited
        self._peers: dict[str, _Held] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, holder: Holder) -> bool:
        """Whether it has a place now, perhaps one that another has just given up."""
        own = self._peers.get(holder.peer)
        if own is not None and len(own) >= self._per_peer and holder.peer not in self._unlimited:
            candidates = [own]
        elif self._count >= self._most:
            candidates = sorted(self._peers.values(), key=len, reverse=True)
        else:
            candidates = []
        if candidates and not self._make_room(candidates):
            return False
        self._peers.setdefault(holder.peer, _Held()).unproven[holder] = None
        self._count += 1
        return True

    def _make_room(self, candidates: list[_Held]) -> bool:
        for held in candidates:
            if (holder := held.idle()) is not None:
                self.leave(holder)
                holder.give_way()
                return True
        return False

    def prove(self, holder: Holder) -> None:
        """Its client has shown a valid token. Called with every request, so that the order is that of the last ones."""
        held = self._peers.get(holder.peer)
        if held is not None and (holder in held.unproven or holder in held.proven):
            held.unproven.pop(holder, None)
            held.proven.pop(holder, None)
            held.proven[holder] = None

    def leave(self, holder: Holder) -> None:
        """May be called again."""
        held = self._peers.get(holder.peer)
        if held is None or (holder not in held.unproven and holder not in held.proven):
            return
        held.unproven.pop(holder, None)
        held.proven.pop(holder, None)
        self._count -= 1
        if not held:
            del self._peers[holder.peer]


log = logging.getLogger("penstock.server")

_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_WAIT_FOR_DESCRIPTORS: Final = 0.2
_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class MostConnections:
    """How many connections there may be: over TCP, and over the Unix socket."""

    tcp: int
    unix: int


def most_connections(limits: ConnectionLimits) -> MostConnections:
    """Half of the descriptors that this process may open are kept back: for jobs, their output and the database."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        return MostConnections(limits.connections, limits.local)
    unix = min(limits.local, max(4, most // 8))
    return MostConnections(min(limits.connections, max(4, most // 2 - unix)), unix)


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
        """Without TLS only this machine and a declared proxy may connect: other peers would send their token for all to read."""
        return self._tls or _plain(address).is_loopback or self.is_proxy(address)

    def is_proxy(self, address: str) -> bool:
        return _plain(address) in self._proxies


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address is the same one when it comes by an IPv6 socket."""
    read = ipaddress.ip_address(address.partition("%")[0])
    return (read.ipv4_mapped or read) if isinstance(read, ipaddress.IPv6Address) else read


def _counted(address: str) -> str:
    """One peer: an IPv4 address, or an IPv6 network, for a single host has as many addresses in it as it likes."""
    read = _plain(address)
    return str(read) if read.version == 4 else str(ipaddress.ip_network((read, 64), strict=False))


@dataclass(slots=True, eq=False)
class _Place:
    """A place in the budget, from the accept on."""

    peer: str
    task: asyncio.Task[None] | None = None
    connection: HttpConnection | None = None

    @property
    def idle(self) -> bool:
        return self.connection is None or self.connection.idle

    def give_way(self) -> None:
        if self.connection is not None and self.connection.made:
            self.connection.give_way()
        elif self.task is not None:
            self.task.cancel()


class SocketListener:
    """`make`: a connection, given whether it came by the Unix socket as the owner, and whether a declared proxy sends it."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[bool, bool], HttpConnection],
        *,
        most: int,
        limits: ConnectionLimits,
        peers: Peers,
        tls: ssl.SSLContext | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._sock, self._make, self._limits, self._peers, self._tls = sock, make, limits, peers, tls
        self._loop = loop
        self._local = sock.family == socket.AF_UNIX
        per_peer = most if self._local else min(limits.per_peer, max(1, most * 3 // 4))
        self.budget = ConnectionBudget(most, per_peer, peers.proxies)
        self._opening = set[asyncio.Task[None]]()
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
        self._loop.add_reader(self._sock, self._accept)

    def _pause(self) -> None:
        if self._again is not None:
            self._again.cancel()
        elif self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)

    def _accept(self) -> None:
        """Accept a few at a time: the event loop serves open connections in between."""
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    log.warning("no connection can be accepted now: %s", error.strerror)
                    self._pause()
                    self._again = self._loop.call_later(_WAIT_FOR_DESCRIPTORS, self._resume)
                return  # no connection waits any more, or it has gone away already
            sock.setblocking(False)
            try:
                self._admit(sock)
            except OSError:
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        if self._local:
            user = peer_uid(sock)
            if user not in (os.geteuid(), 0):
                sock.close()
                return
            self._place(sock, f"user {user}", proxied=False)
            return
        address = peer_address(sock)
        if not self._peers.may_connect(address):
            self._turn_away(
                sock, 403, "forbidden", "plain HTTP is taken from this machine and from declared proxies only",
                "Use HTTPS, or declare the proxy that does TLS in server.trusted_proxies.",
            )  # fmt: skip
            return
        self._place(sock, _counted(address), proxied=self._peers.is_proxy(address))

    def _place(self, sock: socket.socket, peer: str, *, proxied: bool) -> None:
        place = _Place(peer)
        if not self.budget.enter(place):
            self._turn_away(sock, 503, "too_many", "too many connections are open", "Try again in a moment.")
            return
        connection = place.connection = self._make(self._local, proxied)
        connection.on_lost = lambda: self.budget.leave(place)
        connection.on_proven = lambda: self.budget.prove(place)
        place.task = self._loop.create_task(self._open(sock, connection))
        self._opening.add(place.task)
        place.task.add_done_callback(lambda task: self._opened(task, sock, place))

    async def _open(self, sock: socket.socket, connection: HttpConnection) -> None:
        tls: dict[str, Any] = {}
        if self._tls is not None:
            tls = {"ssl": self._tls, "ssl_handshake_timeout": self._limits.head_sec}
        await self._loop.connect_accepted_socket(lambda: connection, sock, **tls)

    def _opened(self, task: asyncio.Task[None], sock: socket.socket, place: _Place) -> None:
        self._opening.discard(task)
        if task.cancelled() or task.exception() is not None:
            # A handshake that failed, took too long, or had to give way: the connection never was.
            self.budget.leave(place)
            sock.close()

    def _turn_away(self, sock: socket.socket, status: int, code: str, detail: str, hint: str) -> None:
        """Without TLS it sends an answer, if the client takes it at once; with TLS there is no connection to send one on."""
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
