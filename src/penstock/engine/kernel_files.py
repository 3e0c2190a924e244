"""
Files in which the kernel tells how things are, opened once and read from their beginning again and again.

They are made anew at every read, so one that is open never grows old; to open and close it costs more than what it says, and an idle scheduler
does little else than read them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final

__all__ = ["KernelFiles", "text_once"]

_MOST: Final = 1 << 16
#: The kernel hands out long lists a page at a time, and ends a page where the next line does not fit. What is shorter is the last.
_LAST: Final = 3_000


class KernelFiles:
    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def text(self, path: str) -> str:
        """Nothing, where there is no such file or what it told of is gone."""
        fd = self._open.get(path)
        try:
            if fd is None:
                fd = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return _read(fd)
        except OSError:
            self._drop(path)
            return ""

    def close(self) -> None:
        for path in list(self._open):
            self._drop(path)

    def _drop(self, path: str) -> None:
        fd = self._open.pop(path, None)
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Who measures is let go of and not closed. Perhaps so late that this module's own names are gone.
        for fd in self._open.values():
            close(fd)


def text_once(path: str) -> str:
    """For what may be gone the next time."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return _read(fd)
    except OSError:  # it went while we looked
        return ""
    finally:
        os.close(fd)


def _read(fd: int) -> str:
    found = piece = os.pread(fd, _MOST, 0)
    while len(piece) >= _LAST:
        piece = os.pread(fd, _MOST, len(found))
        found += piece
    return found.decode("ascii", "replace")
