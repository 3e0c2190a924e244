"""
The pool's side of one worker process, and the packing of its calls.

A worker has a session of its own and two pipes that no other process has. It shares no lock or queue, so
killing it at any moment harms no other process. A page of shared memory, which outlives it, has the number of
its running call.

Pipes and not a socket pair, because a round trip takes half the time: reading from a Unix socket also wakes
the process at its other end, here the worker that waits for its next call.

Packing a call names its function, pickles its arguments, and copies buffers into shared memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from penstock.core.errors import NotPicklable
from penstock.core.text import safe_repr
from penstock.pools.child import protocol, shared_memory
from penstock.pools.child.main import PAGE_CANCELS, PAGE_RUNNING, PAGE_SIZE, resident_memory
from penstock.pools.child.protocol import PLAIN_TYPES, SHORT, SHORT_TYPES
from penstock.pools.child.shared_memory import FilledSegment, Ref, SegmentMapper
from penstock.pools.future import Call
from penstock.pools.workers.base import WorkerSlot

#: Bytes of one read. From 128 KB on, malloc would map and unmap pages for every read.
_RECEIVE = 65536
#: The size of a pipe in bytes, if the system allows it: more than the longest message.
_PIPE = 256 * 1024


class WorkerProcess(WorkerSlot):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.outbox: list[tuple[Any, ...]] = []
        self.unsent = 0  # calls in the outbox
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd: int | None = None
        self.inlet = self.outlet = -1  # the ends where we write and where we read
        self.page: memoryview

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    # Starting

    def open(self) -> None:
        """
        Make all resources but the process. Calls can be written from now on; the process reads them when it
        runs.
        """
        super().open()
        self.unsent = 0
        self.outbox = []
        self.functions_sent: set[PackedFunction] = set()  # functions that were sent to it
        self.main_sent = False
        self.lent: dict[int, FilledSegment] = {}
        self.mapper = SegmentMapper()
        self.frames = protocol.Frames()
        self.outbuf = b""
        self.their_inlet, self.inlet = _pipe()
        self.outlet, self.their_outlet = _pipe()
        os.set_blocking(self.inlet, False)
        os.set_blocking(self.outlet, False)
        self.page_fd = _page()
        self._map = mmap.mmap(self.page_fd, PAGE_SIZE)
        self.page = memoryview(self._map).cast("Q")
        self.their_lifeline, self.lifeline = os.pipe()

    def spawn(self) -> None:
        """
        Start the process by vfork and exec, never by fork: the pool's process has threads. The child gets its
        four descriptors and the path of this package; everything else comes as the first message.
        """
        fds = (self.their_inlet, self.their_outlet, self.page_fd, self.their_lifeline)
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120  # pathlib is slow to import
        code = (
            f"import sys; sys.path.insert(0, {root!r}); "
            f"from penstock.pools.child.main import main; main(*{fds}, {os.getpid()})"
        )
        try:
            self.process = subprocess.Popen(  # noqa: S603  # our own interpreter and our own code
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]  # noqa: SLF001  # as multiprocessing does
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )
        finally:
            for fd in fds:
                os.close(fd)
        if hasattr(os, "pidfd_open"):
            self.pidfd = os.pidfd_open(self.process.pid)

    # Writing and reading

    def flush(self) -> bool:
        """Write the outbox. False: it did not all fit; call `push` when the pipe has room again."""
        if self.mapper.done:
            self.outbox[:0] = [
                (protocol.FREE, self.mapper.done.popleft()) for _ in range(len(self.mapper.done))
            ]
        data = protocol.frame(self.outbox)
        self.outbox = []
        self.unsent = 0
        if self.outbuf:
            self.outbuf += data
            return False
        try:
            sent = os.write(self.inlet, data)
        except OSError:
            sent = 0  # `push` handles it
        if sent == len(data):
            return True
        self.outbuf = data[sent:]
        return self.push()

    def push(self) -> bool:
        """Write the rest of earlier messages. False: it still does not fit."""
        try:
            sent = os.write(self.inlet, self.outbuf)
        except BlockingIOError:
            return False
        except OSError:
            self.outbuf = b""  # it is dead, which the reader notices
            return True
        self.outbuf = self.outbuf[sent:]
        return not self.outbuf

    def receive(self) -> list[tuple[Any, ...]] | None:
        """The messages that the worker sent. None: there will be no more."""
        try:
            data = os.read(self.outlet, _RECEIVE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self.frames.feed(data) if data else None

    def can_reach(self, dispatch: int, ref: tuple[Any, ...]) -> bool:
        """
        Open the shared memory of a result. False: it is lost with the worker, and the call counts as running
        at its death.
        """
        try:
            self.mapper.reach(Ref(*ref))
        except (FileNotFoundError, ProcessLookupError):
            self.unread.add(dispatch)
            self._end()  # it may be alive, if the function closed descriptors of the worker
            return False
        except OSError:
            return True  # a problem on our side, such as too many open files: mapping it raises the error
        return True

    def load_shared(self, result: tuple[bytes | None, Any]) -> Any:
        return shared_memory.load(*result, self.mapper)

    def signal_cancel(self) -> None:
        self.page[PAGE_CANCELS] += 1

    @property
    def running(self) -> int:
        return self.page[PAGE_RUNNING]

    # Ending

    def kill(self, why: str) -> None:
        """
        Kill the whole process group, with the processes that the function started. Call it before the process
        is reaped.
        """
        super().kill(why)
        self._end()

    def _end(self) -> None:
        if self.process is not None and self.process.returncode is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def reap(self) -> str:
        code = self.process.wait() if self.process is not None else 0
        if self.failure is not None:
            return self.failure[0]
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = str(-code)
            return f"it was killed by {name}"
        return f"it exited with code {code}"

    def close(self) -> None:
        """Release the resources of `open` and `spawn`. `running` is valid until then."""
        super().close()
        self.page.release()
        self._map.close()
        for fd in (self.inlet, self.outlet, self.lifeline):
            os.close(fd)
        self.mapper.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.process = None
        self.lent.clear()

    def memory(self) -> int:
        return resident_memory(self.pid or 0)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # the system limits the number of large pipes per user
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE)
    return read, write


def _page() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("penstock-page", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, PAGE_SIZE)
    return fd


@dataclass(slots=True, eq=False)
class PackedFunction:
    """A function that is sent to a worker once and then named by its number."""

    number: int
    blob: bytes
    needs_main: bool


@dataclass(slots=True, eq=False)
class Packed:
    """Arguments that do not fit into a message as they are."""

    data: bytes | None
    filled: FilledSegment | None
    needs_main: bool


class Packer:
    def __init__(self) -> None:
        self._functions: dict[Any, PackedFunction] = {}
        self._numbers = count(1)
        self.arena = shared_memory.Arena()
        self._lock = threading.Lock()

    def pack_call(
        self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Prepare a call. Returns the function that makes its payload. None: the payload is made."""
        function: Any
        try:
            function = self._functions[fn]
        except (KeyError, TypeError):
            function = fn if type(fn) is str else self._function(fn)
        if function is not None and not kwargs:
            # `protocol.is_plain`, inlined: calling it takes as long as the rest.
            for value in args:
                kind = type(value)
                if kind not in PLAIN_TYPES and (kind not in SHORT_TYPES or len(value) > SHORT):
                    break
            else:
                call.function = function
                call.body = args
                return None
        call.function = 0 if function is None else function
        return lambda: self._pack(call, fn if function is None else None, args, kwargs)

    def _function(self, fn: Any) -> Any:
        """
        How to name the function to workers. None: send it with each call, because it cannot be imported.
        """
        if not protocol.by_reference(fn):
            return None
        blob = pickle.dumps(fn, 5)
        packed = self._functions[fn] = PackedFunction(next(self._numbers), blob, b"__main__" in blob)
        return packed

    def _pack(self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data, buffers = protocol.pack_arguments(fn, args, kwargs)
        needs_main = b"__main__" in data
        if needs_main and protocol.main_module() is None and protocol.cloudpickle() is None:
            raise NotPicklable(
                f"{safe_repr(call.fn, 200)} or its arguments live in a __main__ that no worker can import{protocol.advice()}"
            )
        if not shared_memory.AVAILABLE or not (buffers or len(data) >= protocol.LARGE):
            call.body = Packed(data, None, needs_main)
            return
        inline = len(data) < protocol.LARGE
        with self._lock:
            filled = self.arena.pack([*buffers] if inline else [data, *buffers])
        call.body = Packed(data if inline else None, filled, needs_main)

    def trim(self) -> list[int]:
        """
        Release unused memory. Returns the numbers of the segments, which the workers must close too.
        """
        with self._lock:
            return self.arena.trim()
