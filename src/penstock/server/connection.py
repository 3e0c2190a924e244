"""
One connection: the limits that hold before the application sees anything of it.

The whole head of a request has a deadline and a size, both absolute: a client that sends a byte now and then gains nothing by it. Nor does one that
does not read its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Final

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.wire import ProblemDetails

_MAX_HEAD: Final = 16_384
_MAX_HEADERS: Final = 100


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """
    `connections`: over TCP, of which one peer may have `per_peer`; `local`: over the owner's Unix socket.

    `head_sec`: from the first byte of a request, or from the connection, to the end of its head, and for a TLS handshake; `body_sec`: from there to its
    end; `unread_sec`: for a client to take what waits to be sent.
    """

    connections: int = 1_000
    per_peer: int = 750
    local: int = 250
    head_sec: float = 10.0
    body_sec: float = 30.0
    unread_sec: float = 30.0


class HttpConnection(HttpToolsProtocol):
    """`local`: it came by the Unix socket, as the owner. `proxied`: a declared proxy sends it."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        limits: ConnectionLimits,
        loop: asyncio.AbstractEventLoop,
        *,
        local: bool,
        proxied: bool,
    ) -> None:
        super().__init__(config, server_state, {}, loop)
        self._limits, self._local, self._proxied = limits, local, proxied
        self.made = self._had_request = False
        self.on_lost: Callable[[], None] = _nothing
        self.on_proven: Callable[[], None] = _nothing
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        #: What has arrived since the head began; how many headers the parser found, and the bytes in them and in the path.
        self._head_size = self._headers = self._parsed = 0
        self._in_head, self._in_body = True, False
        self._refusal: tuple[int, str, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self.made = True
        self._arm(self._limits.head_sec)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._has_read()
        super().connection_lost(exc)
        self.on_lost()

    @property
    def idle(self) -> bool:
        """No request is being served: its head has not arrived, or its answer has been sent."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def give_way(self) -> None:
        if not self._had_request:
            self._refuse(503, "too_many", "too many connections are open")
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
            # Between requests too: a client may dribble the rest of an answered request, or line feeds before the next.
            self._arm(self._limits.head_sec)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_size, self._headers, self._parsed = True, 0, 0, 0
        self.scope["penstock.local"] = self._local  # type: ignore[typeddict-unknown-key]  # ASGI allows more keys
        self.scope["penstock.proxied"] = self._proxied  # type: ignore[typeddict-unknown-key]  # as above
        self.scope["penstock.proven"] = self.on_proven  # type: ignore[typeddict-unknown-key]  # as above
        self.scope["penstock.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]  # as above
        self.server_state.default_headers = _dated()

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


def _nothing() -> None:
    pass


_date: tuple[int, list[tuple[bytes, bytes]]] = (0, [])


def _dated() -> list[tuple[bytes, bytes]]:
    """The Date header, made anew on the first request of a second: a timer for it would wake an idle machine for nothing."""
    global _date  # noqa: PLW0603 - a cache of one entry
    now = int(time.time())
    if _date[0] != now:
        _date = (now, [(b"date", formatdate(now, usegmt=True).encode())])
    return _date[1]
