"""
The high-water mark of a SQLite file: how far its trail had come, in a small file beside it (`jobs.db-high-water`).

SQLite recovers silently to whatever is left of a database whose `-wal` was cut or lost. The mark outlives that: a file whose
newest event is older than the mark has lost acknowledged work, and the store refuses to open it.

Writers raise the mark after each commit, under the write lock, so it is never ahead of the file. The write goes to the page cache, which survives
a kill; it is forced to disk once a second, so a power cut may set the mark back by a second. It also holds the size and the time
of the last change of the main file, which only a checkpoint changes: if they differ, another program has written to the file.

A restore sets the file back on purpose and calls `reset`; the next process to open the file makes a new mark.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

log = logging.getLogger("penstock.stores")

_MAGIC: Final = b"PENMARK1"
_LAYOUT: Final = struct.Struct("<8sQQQ")
_SYNC_SEC: Final = 1.0


class HighWater(NamedTuple):
    """`event`: the newest of the trail. `changed_ns` and `size`: of the main file, after the last commit."""

    event: int
    changed_ns: int = 0
    size: int = 0

    @property
    def main_file(self) -> tuple[int, int]:
        return self.changed_ns, self.size


def mark_file(path: Path) -> Path:
    return path.with_name(path.name + "-high-water")


def read(path: Path) -> HighWater | None:
    """Of the database at `path`; None if there is no mark that can be read."""
    try:
        content = mark_file(path).read_bytes()
    except FileNotFoundError:
        return None
    return _decoded(content, path)


def reset(path: Path) -> None:
    """Forget how far the database at `path` had come. For a restore, while no process has the file open."""
    mark_file(path).unlink(missing_ok=True)


def _decoded(content: bytes, path: Path) -> HighWater | None:
    if len(content) == _LAYOUT.size:
        magic, *numbers = _LAYOUT.unpack(content)
        if magic == _MAGIC:
            return HighWater(*numbers)
    if content:  # an empty one was made by a process that was killed before it wrote
        log.warning("%s is damaged: it is made anew", mark_file(path))
    return None


class HighWaterMark:
    """The mark, open for writing. The caller holds the write lock of the database in every call but `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open()
        self._synced_at = time.monotonic()
        #: As this process wrote it last. Another process may have raised it since: `current` reads the file.
        self._written: HighWater | None = None

    def _open(self) -> int:
        return os.open(mark_file(self._path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def current(self) -> HighWater | None:
        return _decoded(os.pread(self._fd, _LAYOUT.size, 0), self._path)

    def set(self, mark: HighWater) -> None:
        """After a commit. Costs a write of 32 bytes to the page cache, and nothing if the mark is the same as before."""
        if mark == self._written:
            return
        self._written = mark
        now = time.monotonic()
        with suppress(OSError):  # the commit stands; the next one raises the mark as well
            os.pwrite(self._fd, _LAYOUT.pack(_MAGIC, *mark), 0)
            if now - self._synced_at > _SYNC_SEC:
                self._synced_at = now
                self.secure(mark)

    def secure(self, mark: HighWater) -> None:
        """Force `mark` to disk under its name, which another program may have removed meanwhile."""
        fd = self._open()
        os.close(self._fd)
        self._fd = fd
        os.pwrite(fd, _LAYOUT.pack(_MAGIC, *mark), 0)
        os.fdatasync(fd)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
