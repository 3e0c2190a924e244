"""
Shared memory for large buffers.

The sender owns a segment (a memfd, so nothing is left behind and /dev/shm is not used) and copies buffers
into it through a mapping that it keeps: the page faults of a new mapping of 32 MB cost ten times the copy.
The receiver opens the segment through /proc/PID/fd and maps it privately, so that its writes never reach the
sender's copy, which a requeued call may still need. The segment is returned only when the last view of the
mapping is gone, so an array that a function keeps stays valid.

A release may happen anywhere, even in a garbage collection while a lock is held, so it only appends to a
deque.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from itertools import count
from typing import Any, Final, NamedTuple

AVAILABLE: Final = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")  # noqa: PTH112  # pathlib is slow to import

_ALIGN: Final = 64
_KEEP: Final = 256 * 1024 * 1024


class Ref(NamedTuple):
    """The address of buffers in a segment, as it is sent."""

    pid: int
    fd: int
    segment: int
    size: int
    spans: tuple[tuple[int, int], ...]


class Segment:
    __slots__ = ("fd", "map", "serial", "size")

    def __init__(self, serial: int, size: int) -> None:
        self.serial = serial
        self.size = size
        self.fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)

    def close(self) -> None:
        if self.fd >= 0:
            self.map.close()
            os.close(self.fd)
            self.fd = -1

    __del__ = close  # a deleted arena does not close its segments itself


class Arena:
    """The segments that one process owns. Each is free, or belongs to exactly one FilledSegment."""

    def __init__(self) -> None:
        self._serial = count(1)
        self._free: dict[int, list[Segment]] = {}
        self.kept = 0
        self.returned: deque[Segment] = deque()
        self._pid = os.getpid()

    def pack(self, buffers: list[bytes | memoryview]) -> FilledSegment:
        """Copy the buffers into a segment of their own."""
        spans, at = [], 0
        for buffer in buffers:
            size = len(buffer) if isinstance(buffer, bytes) else buffer.nbytes
            spans.append((at, size))
            at += (size + _ALIGN - 1) // _ALIGN * _ALIGN
        segment = self._take(at)
        for buffer, (start, size) in zip(buffers, spans, strict=True):
            segment.map[start : start + size] = buffer if isinstance(buffer, bytes) else buffer.cast("B")
        return FilledSegment(
            self, segment, Ref(self._pid, segment.fd, segment.serial, segment.size, tuple(spans))
        )

    def _take(self, size: int) -> Segment:
        self.sort_returned()
        size = 1 << max(size - 1, 4095).bit_length()
        free = self._free.get(size)
        if free:
            self.kept -= size
            return free.pop()
        return Segment(next(self._serial), size)

    def sort_returned(self) -> list[int]:
        """
        Keep returned segments for reuse, and close those above the limit. Returns the numbers of the closed
        ones.
        """
        closed = []
        while self.returned:
            segment = self.returned.popleft()
            if self.kept + segment.size > _KEEP:
                closed.append(segment.serial)
                segment.close()
            else:
                self.kept += segment.size
                self._free.setdefault(segment.size, []).append(segment)
        return closed

    def trim(self) -> list[int]:
        """Close all segments that are not in use."""
        closed = self.sort_returned()
        for segments in self._free.values():
            for segment in segments:
                closed.append(segment.serial)
                segment.close()
        self._free.clear()
        self.kept = 0
        return closed


class FilledSegment:
    """A segment with buffers in it. It returns to its arena when this object is deleted."""

    __slots__ = ("_arena", "_segment", "ref")

    def __init__(self, arena: Arena, segment: Segment, ref: Ref) -> None:
        self._arena = arena
        self._segment = segment
        self.ref = ref

    def __del__(self) -> None:
        self._arena.returned.append(self._segment)


class SegmentMapper:
    """
    Maps segments of another process. `done` lists those that are no longer mapped.
    """

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self.done: deque[int] = deque()

    def reach(self, ref: Ref) -> int:
        """
        This process's descriptor of the segment, which stays valid after the owner's death. Raises
        FileNotFoundError if the owner is gone already.
        """
        fd = self._fds.get(ref.segment)
        if fd is None:
            fd = self._fds[ref.segment] = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR | os.O_CLOEXEC)
        return fd

    def views(self, ref: Ref) -> list[memoryview]:
        fd = self.reach(ref)
        # Not with MAP_POPULATE, which would copy every page of a private mapping at once.
        flags = mmap.MAP_PRIVATE
        shared = mmap.mmap(
            fd, ref.spans[-1][0] + ref.spans[-1][1], flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        weakref.finalize(shared, self.done.append, ref.segment).atexit = False
        whole = memoryview(shared)
        return [whole[start : start + size] for start, size in ref.spans]

    def drop(self, segment: int) -> None:
        fd = self._fds.pop(segment, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for segment in list(self._fds):
            self.drop(segment)


def load(data: bytes | None, ref: Any, mapper: SegmentMapper) -> Any:
    """Unpickle a value. `data` None: the pickle itself is in shared memory."""
    import pickle  # noqa: PLC0415  # used only here

    views = mapper.views(Ref(*ref))
    return pickle.loads(views.pop(0) if data is None else data, buffers=views)
