"""
Messages between the runner and its processes: frames on sockets, the loop that waits for them, and one shared
page.

A frame is a JSON object after its length. It is never a pickle, because the other end may run foreign code. A
frame that is too long or no JSON object closes the channel. The launcher imports this module in a Python that
has only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from struct import Struct
from termios import FIONREAD
from threading import Lock
from time import monotonic
from typing import Any, Final, Protocol, TypeAlias

Frame: TypeAlias = dict[str, Any]
#: Bytes of one frame: a payload of 1,000,000 characters of any kind, and the other fields.
_MAX_FRAME: Final = 8_000_000
#: Bytes of a ticket, which is the number of a call that its worker may begin.
TICKET: Final = 8
_LENGTH: Final = Struct("<I")


class BadFrame(Exception):
    pass


def pack(message: Frame) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > _MAX_FRAME:
        raise BadFrame(f"a frame of {len(body)} bytes; at most {_MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream into frames. Keeps the beginning of a frame until its rest arrives."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        self._rest += data
        frames: list[Frame] = []
        at = 0
        while len(self._rest) - at >= _LENGTH.size:
            length = _LENGTH.unpack_from(self._rest, at)[0]
            if length > _MAX_FRAME:
                raise BadFrame(f"the other end announces a frame of {length} bytes; at most {_MAX_FRAME}")
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
        raise BadFrame(f"a frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadFrame("a frame is not an object")
    return message


class Channel:
    """
    One end of a socket that carries frames; it never blocks. It keeps bytes that do not fit into the socket:
    `loop` sends them later, or without a loop the next `push`.
    """

    def __init__(self, sock: socket.socket, loop: IoLoop | None = None) -> None:
        sock.setblocking(False)
        self._sock, self._loop = sock, loop
        self._reader, self._unsent = FrameReader(), bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, *messages: Frame) -> None:
        for message in messages:
            self._unsent += pack(message)
        if not self.push() and self._loop is not None:
            self._loop.push_later(self)

    def push(self) -> bool:
        """Send the bytes that are kept. Returns whether none is left."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.clear()  # the other end is gone, as the next `receive` will show
                return True
            del self._unsent[:sent]
        return True

    def receive(self) -> list[Frame] | None:
        """The frames that have arrived. None: the other end is gone, or sent a bad frame."""
        try:
            data = self._sock.recv(262_144)
            return self._reader.feed(data) if data else None
        except BlockingIOError:
            return []
        except (OSError, BadFrame):
            return None

    def close(self) -> None:
        self._sock.close()


class Readable(Protocol):
    def fileno(self) -> int: ...


class IoLoop:
    """The sockets that the runner's one thread waits for, and the function to call for each."""

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector
        self._reader = self._writer = -1
        self._unsent: set[Channel] = set()
        self._paused: dict[Readable, tuple[float, Callable[[], None]]] = {}
        self._lock = Lock()

    def open(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._reader, selectors.EVENT_READ, self._drain_wakeups)

    def add(self, readable: Readable, on_readable: Callable[[], None]) -> None:
        self._selector.register(readable, selectors.EVENT_READ, on_readable)

    def drop(self, readable: Readable) -> None:
        if self._paused.pop(readable, None) is None:
            self._selector.unregister(readable)

    def pause(self, readable: Readable, seconds: float) -> None:
        """Do not read it for this long: its data cannot be processed now."""
        on_readable = self._selector.get_key(readable).data
        self._selector.unregister(readable)
        self._paused[readable] = monotonic() + seconds, on_readable

    def push_later(self, channel: Channel) -> None:
        self._unsent.add(channel)

    def wait(self, at_most_sec: float) -> None:
        """Wait until a socket is readable, then call the functions of all that are."""
        if self._unsent:
            at_most_sec = min(at_most_sec, 0.01)
        for readable, (until, on_readable) in list(self._paused.items()):
            rest = until - monotonic()
            at_most_sec = min(at_most_sec, rest)
            if rest <= 0:
                del self._paused[readable]
                self.add(readable, on_readable)
        for key, _ in self._selector.select(max(0.0, at_most_sec)):
            if key.fd in self._selector.get_map():  # a function called before may have dropped it
                key.data()
        self._unsent = {channel for channel in self._unsent if not channel.push()}

    def wake(self) -> None:
        """Wake `wait`, from any thread."""
        with self._lock, contextlib.suppress(BlockingIOError):  # a full pipe: the loop is awake
            if self._writer >= 0:
                os.write(self._writer, b"1")

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4_096)

    def close(self) -> None:
        with self._lock:  # a late `wake` must not write to a new file with this number
            os.close(self._writer)
            self._writer = -1
        self._selector.close()
        os.close(self._reader)


_PAGE_SIZE: Final = mmap.PAGESIZE
_COUNT: Final = Struct("i")


def make_page() -> int:
    """The descriptor of a new page, shared by the `CallMarker`s of a worker and its warden."""
    fd = os.memfd_create("penstock-page", os.MFD_CLOEXEC)
    os.ftruncate(fd, _PAGE_SIZE)
    return fd


class CallMarker:
    """
    Two numbers that a warm worker and its warden share, so that the warden knows which call printed an
    output.

    The worker writes the number of the call that it runs. The warden counts each beginning and each end of a
    read, so an odd number means that it reads now. A worker begins its next call only when its pipes are
    empty and the warden does not read. So everything in a pipe was printed by the call that the page names.

    `fd`: the page. A warden without a worker has none.
    """

    def __init__(self, fd: int = -1) -> None:
        self._numbers = memoryview(mmap.mmap(fd, _PAGE_SIZE)).cast("Q")

    @property
    def running(self) -> int:
        """The call that runs or ran last. 0: there was none yet."""
        return self._numbers[0]

    @running.setter
    def running(self, call: int) -> None:
        self._numbers[0] = call

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._numbers[1] += 1
        try:
            yield
        finally:
            self._numbers[1] += 1

    def all_read(self, pipes: tuple[int, ...]) -> bool:
        """
        Whether the warden has read and stored all output. The count is read twice, because bytes of a read in
        between may not be on disk yet.
        """
        reads = self._numbers[1]
        return reads % 2 == 0 and not any(map(_bytes_in, pipes)) and self._numbers[1] == reads


def _bytes_in(pipe: int) -> int:
    """How many bytes are in a pipe; both ends can call this."""
    return int(_COUNT.unpack(ioctl(pipe, FIONREAD, bytes(_COUNT.size)))[0])
