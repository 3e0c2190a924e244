"""
The two kinds of receivers: a program, and a web address that gets signed POST requests.

The program gets each alert as JSON on its standard input, and the main fields as environment variables for
one-liners. It is never started through a shell, because an alert contains texts of jobs. It has a session and
process group of its own. The whole group is killed when its time is over, when the scheduler stops, and when
the program ends and leaves processes behind.

A webhook is called without redirects or a proxy, within one time limit. The name is resolved once; each
address is checked against the outbound rules, and the connection goes to one of the checked addresses, so
changing the name's address afterwards has no effect. The signature follows the Standard Webhooks convention
(HMAC-SHA256 over id, time and body), for which most languages have a library. A message cannot be forged,
altered or replayed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import os
import secrets
import select
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from threading import Event, Lock, Thread, Timer
from typing import Any, Final
from urllib.parse import urlsplit

from penstock.alerts.delivery import Message, MessageRefused, ReceiverAway, Stopped
from penstock.core.jobs.alerts import refusal
from penstock.core.jobs.types import SECOND, Moment
from penstock.scheduler.permissions import Unsafe, private_file, replace_file

_COMMAND_SEC: Final = 30.0
_KEPT: Final = 1_000  # characters of its output, for the log
_VARIABLE: Final = 4_000


class CommandReceiver:
    def __init__(self, argv: Sequence[str], *, within: float = _COMMAND_SEC) -> None:
        self._argv, self._within = tuple(argv), within
        self.name = f"command {argv[0]}"
        self._running: subprocess.Popen[bytes] | None = None
        self._stopped, self._lock = False, Lock()

    def deliver(self, message: Message, now: Moment) -> None:  # noqa: ARG002  # a webhook signs with the time
        # A file, not a pipe: a program that does not read its input must not block this thread.
        with tempfile.TemporaryFile() as body:
            body.write(message.body)
            body.seek(0)
            try:
                process = self._start(body.fileno(), message.content)
            except OSError as error:
                raise ReceiverAway(f"it cannot be started: {error.strerror}") from error
        with process:
            output, in_time = _read_output(process, time.monotonic() + self._within)
            self._end(process)
        if self._stopped:
            raise Stopped
        words = output.decode("utf-8", "replace").strip()
        if not in_time:
            raise MessageRefused(f"it had not ended after {self._within:g} s and was killed")
        if process.returncode:
            raise MessageRefused(f"it ended with {process.returncode}" + (f": {words!r}" if words else ""))

    def abort(self) -> None:
        with self._lock:
            self._stopped = True
            if self._running is not None:
                _kill(self._running)

    def _start(self, stdin: int, content: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise Stopped
            self._running = subprocess.Popen(  # noqa: S603  # the owner's own command, from the settings
                self._argv,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(content),
            )
            return self._running

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the group, then reap the process: until then no other process can get its id."""
        with self._lock:
            self._running = None
            _kill(process)
            process.wait()


def _environment(content: Mapping[str, Any]) -> dict[str, str]:
    """
    The daemon's environment without its PENSTOCK_ variables, which may contain tokens, and with the fields of
    the alert. Long values are cut, because exec refuses them.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    plain = {name: str(value) for name, value in content.items() if isinstance(value, (str, int))}
    return inherited | {
        f"PENSTOCK_ALERT_{name.upper()}": value[:_VARIABLE].replace("\0", "\\0")
        for name, value in plain.items()
    }


def _read_output(process: subprocess.Popen[bytes], until: float) -> tuple[bytes, bool]:
    """
    The beginning of the program's output, and whether it ended in time. The process is not reaped, so that
    its id is not reused.
    """
    assert process.stdout is not None
    ended, out, output = os.pidfd_open(process.pid), process.stdout.fileno(), b""
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(out, select.POLLIN)
        while (rest := until - time.monotonic()) > 0:
            ready = dict(poll.poll(rest * 1_000))
            if out in ready:
                piece = os.read(out, 65_536)
                output = (output + piece)[:_KEPT]
                if not piece:
                    poll.unregister(out)
            if ended in ready:  # do not wait for the output, which another process may still have open
                return output, True
        return output, False
    finally:
        os.close(ended)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


_WEBHOOK_SEC: Final = 5.0
_ANSWER: Final = 64 * 1024
_PREFIX: Final = "whsec_"
_SHORTEST: Final = 16
_ALLOW: Final = " (alerts.allow_private = true allows the own network)"


class Webhook:
    """
    Sends signed POST requests to an address. `private`: allow addresses of this machine and network. The
    secret is read at each delivery, so that it can be changed.
    """

    def __init__(
        self, url: str, secret_file: Path, *, private: bool = False, within: float = _WEBHOOK_SEC
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._netloc, self.name = parts.netloc, f"{parts.scheme}://{parts.netloc}"
        self._secret_file, self._private, self._within = secret_file, private, within
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._socket: socket.socket | None = None
        self._stopped = Event()

    def deliver(self, message: Message, now: Moment) -> None:
        headers = self._headers(message, now)
        try:
            with self._connected() as connection:
                connection.request("POST", self._path, message.body, headers)
                self._judge(connection.getresponse())
        except (OSError, HTTPException) as error:
            if self._stopped.is_set():
                raise Stopped from None
            raise ReceiverAway(f"no answer: {str(error) or type(error).__name__}") from error

    def abort(self) -> None:
        self._stopped.set()
        self._hang_up()

    def _headers(self, message: Message, now: Moment) -> dict[str, str]:
        at, message_id = now // SECOND, str(message.content["id"])
        try:
            keys = secrets_in(self._secret_file)
        except (OSError, Unsafe) as error:
            raise MessageRefused(f"it cannot be signed: {error}") from error
        return {
            "Host": self._netloc,
            "User-Agent": "penstock",
            "Content-Type": "application/json",
            "Connection": "close",
            "Webhook-Id": message_id,
            "Webhook-Timestamp": str(at),
            "Webhook-Signature": " ".join(signatures(keys, message_id, at, message.body)),
        }

    @contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        """
        A connection with a time limit for the whole delivery: sending one byte a second does not extend it.
        """
        until = time.monotonic() + self._within
        stream = self._connect(self._resolve(until), until)
        timer = Timer(_left(until), self._hang_up)
        timer.daemon = True
        timer.start()
        try:
            if self._tls is not None:
                stream = self._tls.wrap_socket(
                    stream, server_hostname=self._host, do_handshake_on_connect=False
                )
                self._socket = stream
                stream.do_handshake()
            if self._stopped.is_set():
                raise Stopped
            connection = HTTPConnection(self._host, self._port)
            connection.response_class = _LimitedResponse
            connection.sock = stream
            yield connection
        finally:
            timer.cancel()
            self._socket = None
            stream.close()

    def _connect(self, addresses: list[str], until: float) -> socket.socket:
        """Connect to the first address that answers: often only one address of a machine can be reached."""
        for rest in range(len(addresses), 0, -1):
            if self._stopped.is_set():
                raise Stopped
            try:
                to = (addresses[-rest], self._port)
                self._socket = socket.create_connection(to, timeout=_left(until) / rest)
                self._socket.settimeout(self._within)
            except OSError:
                if rest == 1:
                    raise
            else:
                return self._socket
        raise ReceiverAway("it has no address")

    def _hang_up(self) -> None:
        """
        Wake the thread that reads from the socket. `close` would not wake it, and with TLS it would first
        send a close message.
        """
        if (stream := self._socket) is not None:
            with suppress(OSError):
                socket.socket.shutdown(stream, socket.SHUT_RDWR)

    def _resolve(self, until: float) -> list[str]:
        """
        All addresses of the name, if all are allowed. A resolver cannot be interrupted: a slow one is
        abandoned.
        """
        addresses, failures = dict[str, None](), list[str]()

        def look() -> None:
            try:
                for entry in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
                    addresses[str(entry[4][0])] = None
            except OSError as error:
                failures.append(f"{self._host} has no address: {error.strerror or error}")

        thread = Thread(target=look, name="penstock-resolve", daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < until and not self._stopped.is_set():
            thread.join(min(0.1, _left(until)))
        if self._stopped.is_set():
            raise Stopped
        if failures:
            raise ReceiverAway(failures[0])
        if thread.is_alive():
            raise ReceiverAway(f"the address of {self._host} was not found in time")
        # One forbidden address is enough to refuse the name: an owner does not mix them with others.
        for address in addresses:
            if why := refusal(address, private=self._private):
                raise ReceiverAway(f"{self._host} is not called: {why}" + ("" if self._private else _ALLOW))
        return list(addresses)

    def _judge(self, answer: HTTPResponse) -> None:
        if 200 <= answer.status < 300:
            return
        if 300 <= answer.status < 400:
            raise MessageRefused(
                f"answered {answer.status}, and redirects are not followed: give the address it leads to"
            )
        words = ""
        with suppress(OSError, HTTPException):
            words = answer.read(200).decode("utf-8", "replace").strip()
        raise MessageRefused(f"answered {answer.status} {answer.reason}" + (f": {words!r}" if words else ""))


class _LimitedResponse(HTTPResponse):
    """
    A response of at most `_ANSWER` bytes. It refuses half a head, which the standard library would accept as
    whole.
    """

    def __init__(self, sock: socket.socket, **options: Any) -> None:
        super().__init__(sock, **options)
        self._reader = _LimitedReader(self.fp.detach())
        self.fp = io.BufferedReader(self._reader)

    def begin(self) -> None:
        super().begin()
        self._reader.in_head = False


class _LimitedReader(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw, self._rest = raw, _ANSWER
        self.in_head = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = (self._raw.readinto(memoryview(buffer)[: self._rest]) or 0) if self._rest else 0
        self._rest -= count
        if not count and self.in_head:
            raise ConnectionError("the answer is too long" if not self._rest else "the answer is incomplete")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def signatures(keys: list[bytes], name: str, at: int, body: bytes) -> Iterator[str]:
    """
    One signature for each key: while the key is being changed, a receiver with the old key can still check
    it.
    """
    for key in keys:
        mac = hmac.new(key, f"{name}.{at}.".encode() + body, hashlib.sha256)
        yield "v1," + base64.b64encode(mac.digest()).decode()


def secrets_in(file: Path) -> list[bytes]:
    """
    The keys in a file, one a line, newest first. Makes the file if it does not exist. Raises Unsafe if other
    users can read it or a key is too short.
    """
    if not file.exists():
        replace_file(file, f"{_PREFIX}{base64.b64encode(secrets.token_bytes(32)).decode()}\n".encode())
    try:
        keys = [_key(line) for line in private_file(file).read_text("ascii").split()]
    except ValueError as error:  # the error's own text would quote the secret
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
