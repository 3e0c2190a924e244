"""
Two numbers that a warm worker and its warden share, so that nobody has to be asked which call printed what.

The worker writes which call it runs; the warden writes how often it has begun and ended reading, so an odd number means that it reads now. A worker
goes on to the next call only when its pipes are empty and nobody reads: whatever is in a pipe was printed by the call that the page names.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from struct import Struct
from termios import FIONREAD
from typing import Final

__all__ = ["CallMarker", "page_file"]

_SIZE: Final = mmap.PAGESIZE
_COUNT: Final = Struct("i")


def page_file() -> int:
    """A descriptor to hand to both."""
    fd = os.memfd_create("penstock-page", os.MFD_CLOEXEC)
    os.ftruncate(fd, _SIZE)
    return fd


class CallMarker:
    """`fd`: of a page to share; without one it is shared with nobody, for what runs alone."""

    def __init__(self, fd: int = -1) -> None:
        self._numbers = memoryview(mmap.mmap(fd, _SIZE)).cast("Q")

    @property
    def running(self) -> int:
        """The call that runs or ran last; 0: there was none yet."""
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
        """Looked at twice: who read in between has taken something out that may not be written down yet."""
        reads = self._numbers[1]
        return reads % 2 == 0 and not any(map(_waiting, pipes)) and self._numbers[1] == reads


def _waiting(pipe: int) -> int:
    """Bytes in a pipe, which either end can tell."""
    return int(_COUNT.unpack(ioctl(pipe, FIONREAD, bytes(_COUNT.size)))[0])
