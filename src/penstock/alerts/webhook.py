"""
A POST to an address that was checked, signed, within seconds, and not one step further: no redirect, no proxy, no long answer.

The signature is that of the Standard Webhooks convention, for which most languages have a library: HMAC-SHA256 over id, time and body, so
that nobody can make up a message, alter one, or send an old one again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import secrets
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any, Final, cast
from urllib.parse import urlsplit

from penstock.alerts.messenger import MessageRefused, ReceiverAway, Stopped
from penstock.alerts.reader import Message
from penstock.core.jobs.outbound import refusal
from penstock.core.jobs.types import SECOND, Moment
from penstock.scheduler.private_files import Unsafe, private_file, replace_file

__all__ = ["Webhook", "secrets_in", "signatures"]

_WITHIN: Final = 5.0
_ANSWER: Final = 64 * 1024
_PREFIX: Final = "whsec_"
_SHORTEST: Final = 16


class Webhook:
    """`private`: the own machine and network may be called. The secret is read at each delivery, so that it can be changed."""

    def __init__(
        self, url: str, secret_file: Path, *, private: bool = False, within: float = _WITHIN
    ) -> None:
        parts = urlsplit(url)
        self._scheme, self._host = parts.scheme, parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._netloc, self.name = parts.netloc, f"{parts.scheme}://{parts.netloc}"
        self._secret_file, self._private, self._within = secret_file, private, within
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._line: socket.socket | None = None
        self._stopped = Event()

    def deliver(self, message: Message, now: Moment) -> None:
        request = self._request(message, now)
        try:
            with self._connected() as line:
                line.sendall(request)
                sips = _Sips(line, _ANSWER)
                answer = HTTPResponse(cast("socket.socket", sips), method="POST")
                answer.begin()
                sips.in_head = False
                self._judge(answer)
        except (OSError, HTTPException) as error:
            if self._stopped.is_set():
                raise Stopped from None
            raise ReceiverAway(f"no answer: {str(error) or type(error).__name__}") from error

    def cut(self) -> None:
        self._stopped.set()
        self._hang_up()

    def _request(self, message: Message, now: Moment) -> bytes:
        body, at = message.body, now // SECOND
        name = str(message.told["id"])
        try:
            signed = " ".join(signatures(secrets_in(self._secret_file), name, at, body))
        except (OSError, Unsafe) as error:
            raise MessageRefused(f"it cannot be signed: {error}") from error
        head = {
            "Host": self._netloc,
            "User-Agent": "penstock",
            "Content-Type": "application/json",
            "Content-Length": len(body),
            "Connection": "close",
            "Webhook-Id": name,
            "Webhook-Timestamp": at,
            "Webhook-Signature": signed,
        }
        lines = [f"POST {self._path} HTTP/1.1", *(f"{key}: {value}" for key, value in head.items())]
        return "\r\n".join([*lines, "", ""]).encode("ascii") + body

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """The time is for all of it: a receiver that sends a byte a second gets no more of it than one that sends none."""
        until = time.monotonic() + self._within
        line = self._connect(self._resolve(until), until)
        timer = Timer(_left(until), self._hang_up)
        timer.daemon = True
        timer.start()
        try:
            if self._tls is not None:
                line = self._tls.wrap_socket(line, server_hostname=self._host, do_handshake_on_connect=False)
                self._line = line
                line.do_handshake()
            if self._stopped.is_set():
                raise Stopped
            yield line
        finally:
            timer.cancel()
            self._line = None
            line.close()

    def _connect(self, addresses: list[str], until: float) -> socket.socket:
        """The first that answers: a machine with two addresses can often be reached by one of them only."""
        for rest in range(len(addresses), 0, -1):
            if self._stopped.is_set():
                raise Stopped
            try:
                to = (addresses[-rest], self._port)
                self._line = socket.create_connection(to, timeout=_left(until) / rest)
                self._line.settimeout(self._within)
            except OSError:
                if rest == 1:
                    raise
            else:
                return self._line
        raise ReceiverAway("it has no address")

    def _hang_up(self) -> None:
        """Who reads from it wakes up. Closing would not wake anybody, and TLS would first say goodbye."""
        if (line := self._line) is not None:
            with suppress(OSError):
                socket.socket.shutdown(line, socket.SHUT_RDWR)

    def _resolve(self, until: float) -> list[str]:
        """Once, and what was checked is what is connected to. A resolver cannot be interrupted, so a slow one is left behind."""
        found, wrong = dict[str, None](), list[str]()

        def look() -> None:
            try:
                for told in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
                    found[str(told[4][0])] = None
            except OSError as error:
                wrong.append(f"{self._host} has no address: {error.strerror or error}")

        thread = Thread(target=look, name="penstock-resolve", daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < until and not self._stopped.is_set():
            thread.join(min(0.1, _left(until)))
        if self._stopped.is_set():
            raise Stopped
        if wrong:
            raise ReceiverAway(wrong[0])
        if thread.is_alive():
            raise ReceiverAway(f"the address of {self._host} was not found in time")
        # One address that must not be called spoils the name: an owner does not mix such addresses with others.
        for address in found:
            if why := refusal(address, private=self._private):
                raise ReceiverAway(f"{self._host} is not called: {why}" + ("" if self._private else _ALLOW))
        return list(found)

    def _judge(self, answer: HTTPResponse) -> None:
        if 200 <= answer.status < 300:
            return
        if 300 <= answer.status < 400:
            raise MessageRefused(
                f"answered {answer.status}, and redirects are not followed: give the address it leads to"
            )
        with suppress(OSError, HTTPException):
            words = answer.read(200).decode("utf-8", "replace").strip()
            raise MessageRefused(
                f"answered {answer.status} {answer.reason}" + (f": {words!r}" if words else "")
            )
        raise MessageRefused(f"answered {answer.status} {answer.reason}")


_ALLOW: Final = " (alerts.allow_private = true would allow the own network)"


class _Sips(io.RawIOBase):
    """A socket of which so many bytes are read and no more. The head must come whole: the library would take half of one for all."""

    def __init__(self, line: socket.socket, most: int) -> None:
        self._line, self._left = line, most
        self.in_head = True

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        got = self._line.recv_into(memoryview(buffer)[: self._left]) if self._left else 0
        self._left -= got
        if not got and self.in_head:
            raise ConnectionError("it is too long" if not self._left else "it broke off")
        return got


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def signatures(keys: list[bytes], name: str, at: int, body: bytes) -> Iterator[str]:
    """One for each key, so that a receiver that knows only the old one still believes us while the key is being changed."""
    for key in keys:
        mac = hmac.new(key, f"{name}.{at}.".encode() + body, hashlib.sha256)
        yield "v1," + base64.b64encode(mac.digest()).decode()


def secrets_in(file: Path) -> list[bytes]:
    """One a line, the newest first. Made if the file is not there; Unsafe if others can read it, or guess it."""
    if not file.exists():
        replace_file(file, f"{_PREFIX}{base64.b64encode(secrets.token_bytes(32)).decode()}\n".encode())
    try:
        keys = [_key(line) for line in private_file(file).read_text("ascii").split()]
    except ValueError as error:  # without the words of the error: it would quote the secret
        raise Unsafe(f"{file} has a line that is not a secret: remove it to have one made") from error
    if min(map(len, keys), default=0) < _SHORTEST:
        raise Unsafe(f"{file} needs a secret of {_SHORTEST} bytes or more: remove it to have one made")
    return keys


def _key(line: str) -> bytes:
    return (
        base64.b64decode(line.removeprefix(_PREFIX), validate=True)
        if line.startswith(_PREFIX)
        else line.encode()
    )
