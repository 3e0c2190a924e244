"""The output of jobs on disk: bounded, with its beginning and end kept, readable while it grows.

The output of an attempt is one stream of records (which pipe, when, the bytes), cut into files whose names
are their offsets. The first file keeps the head. When it is full, two further files take turns: the older is
deleted when the newer is full, so the tail is always there. A reader keeps an offset into the stream and
learns how many bytes are no longer there.

The launcher imports this module in a Python that has only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

#: By the number in the record. `log`: lines that the job reported, not what it printed.
STREAMS: Final = ("stdout", "stderr", "log")
_HEADER: Final = Struct("<BxxxIq")
_NAME: Final = re.compile(r"\d{16}")
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Bytes on disk for one attempt."""

    head: int = 1_048_576
    tail: int = 1_048_576


def open_folder(root: str, *parts: str) -> int:
    """
    The descriptor of a folder below `root`, made if it is missing. No part of its path may be a link. `root`
    itself is made anew if somebody removed it with the old outputs.
    """
    with contextlib.suppress(FileExistsError):
        Path(root).mkdir(0o700)
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        if not _PART.fullmatch(part):
            os.close(handle)
            raise ValueError(f"not a name for a folder: {part!r}")
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=handle)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(part, flags, dir_fd=handle)
        finally:
            os.close(handle)
        handle = inner
    return handle


def fresh_folder(root: str, *parts: str) -> int:
    """
    The descriptor of a new, empty folder. An existing one is renamed: it belongs to an attempt that the
    database no longer has, because a restored backup begins again with the fences of its time.
    """
    *above, last = parts
    parent = open_folder(root, *above)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.rename(last, f"{last}.{time.time_ns()}", src_dir_fd=parent, dst_dir_fd=parent)
    finally:
        os.close(parent)
    return open_folder(root, *parts)


class OutputRecorder:
    """Writes the output of one attempt. On a full disk the output is lost, and the job continues."""

    def __init__(self, folder: int, output_limits: OutputLimits) -> None:
        self._folder, self._output_limits = folder, output_limits
        self._starts: list[int] = []
        self._offset = self._left = 0
        self._file = -1
        self._open_file(output_limits.head)

    def write(self, stream: int, data: bytes) -> None:
        record = _HEADER.pack(stream, len(data), time.time_ns() // 1_000) + data
        try:
            if len(record) > self._left:
                self._open_file(max(self._output_limits.tail // 2, len(record)))
            self._append(record)
        except OSError:
            return  # the disk is full

    def _append(self, record: bytes) -> None:
        written = os.write(self._file, record)
        if written < len(record):
            # A reader could read nothing after half a record.
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError("no room for a whole record")
        self._offset += written
        self._left -= written

    def _open_file(self, size: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
        file = os.open(_name(self._offset), flags, 0o600, dir_fd=self._folder)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._left = file, size
        self._starts.append(self._offset)
        if len(self._starts) > 3:
            os.unlink(_name(self._starts.pop(1)), dir_fd=self._folder)

    def close(self) -> None:
        os.close(self._file)
        os.close(self._folder)


def _name(offset: int) -> str:
    return f"{offset:016d}"


class Piece(NamedTuple):
    """
    A piece of output. `end`: the offset to continue from. `skipped`: bytes before it that are no longer
    there.
    """

    stream: str
    at: int
    data: bytes
    end: int
    skipped: int = 0


class Output:
    """Reads the recorded output of one attempt, from any process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, offset: int = 0, most: int = 1_048_576) -> Iterator[Piece]:
        """The output from `offset` on, as far as it exists now: about `most` bytes."""
        until = offset + most
        starts = self._starts()
        for place, start in enumerate(starts):
            following = starts[place + 1] if place + 1 < len(starts) else None
            if following is not None and following <= offset:
                continue
            skipped, offset = max(0, start - offset), max(offset, start)
            for piece in self._pieces(start, offset):
                yield piece._replace(skipped=skipped)
                skipped, offset = 0, piece.end
                if offset >= until:
                    return

    def _starts(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self._folder) if _NAME.fullmatch(name))  # noqa: PTH208  # names alone
        except FileNotFoundError:
            return []

    def _pieces(self, start: int, offset: int) -> Iterator[Piece]:
        try:
            with (self._folder / _name(start)).open("rb") as file:
                file.seek(offset - start)
                while len(header := file.read(_HEADER.size)) == _HEADER.size:
                    stream, length, at = _HEADER.unpack(header)
                    data = file.read(length)
                    if len(data) < length or stream >= len(STREAMS):
                        return  # the record is being written
                    offset += _HEADER.size + length
                    yield Piece(STREAMS[stream], at, data, offset)
        except FileNotFoundError:
            return  # the file was deleted meanwhile: the next read reports the skipped bytes
