"""What a job prints, on disk: bounded, the beginning and the end kept, readable while it grows.

The output of an attempt is one stream of records (which pipe, when, the bytes), cut into files that are named by where they begin. The first
file keeps the head. When it is full, two further ones take turns: the older is deleted when the newer is full, so the tail is
always there. A reader keeps an offset into the stream and learns how much of it is no longer there.

Outputs and working folders go when their jobs are forgotten by the store.

In a thread of its own, for a job may have left a million files behind and the runner's thread has heartbeats to send. It passes over all folders,
the oldest first: once soon after the start, then whenever the store has pruned jobs. A pass is cut into small steps with pauses between them, so that
a hundred thousand folders take a small share of one core, and a stop waits for none of it.
"""

#: By the number in the record. `log`: what the job told us to note, not what it printed.
from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from threading import Event, Thread
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.jobs.types import JobId

# The launcher imports this module in a Python that has the standard library alone.
if TYPE_CHECKING:
    from penstock.stores.api import Store


STREAMS: Final = ("stdout", "stderr", "log")
_HEADER: Final = Struct("<BxxxIq")
_NAME: Final = re.compile(r"\d{16}")
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,99}")


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Bytes on disk for one attempt."""

    head: int = 1_048_576
    tail: int = 1_048_576


def open_folder(root: str, *parts: str) -> int:
    """
    A folder below `root`, made if need be, as a descriptor: no part of the way is a link, whoever may have put one there.
    """
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
    The same, and empty. A folder of that name is kept under another: it is from an attempt that the database no longer knows, because a
    backup was restored, and fences begin again where the backup was taken.
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
    """Writes; the one process that does. A disk that is full costs the output and not the job."""

    def __init__(self, folder: int, output_limits: OutputLimits) -> None:
        self._folder, self._output_limits = folder, output_limits
        self._starts: list[int] = []
        self._offset = self._left = 0
        self._file = -1
        self.lost = 0  # bytes that could not be written
        self._registration(output_limits.head)

    def write(self, stream: int, data: bytes) -> None:
        record = _HEADER.pack(stream, len(data), time.time_ns() // 1_000) + data
        try:
            if len(record) > self._left:
                self._registration(max(self._output_limits.tail // 2, len(record)))
            self._append(record)
        except OSError:
            self.lost += len(data)

    def _append(self, record: bytes) -> None:
        written = os.write(self._file, record)
        if written < len(record):
            # Half a record would hide everything after it.
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError("no room for a whole record")
        self._offset += written
        self._left -= written

    def _registration(self, size: int) -> None:
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
    """`end`: the offset to go on from. `skipped`: so many bytes before it are no longer there."""

    stream: str
    at: int
    data: bytes
    end: int
    skipped: int = 0


class Output:
    """Reads what the recorder of one attempt writes, from any process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, offset: int = 0, most: int = 1_048_576) -> Iterator[Piece]:
        """What is there now, from `offset` on, about `most` bytes of it."""
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

    def follow(
        self, over: Callable[[], bool], offset: int = 0, *, wait: Callable[[float], object] = time.sleep
    ) -> Iterator[Piece]:
        """Until `over` says that nothing more will be written; asked before the last look, so nothing is missed."""
        pause = 0.01
        while True:
            last = over()
            seen = offset
            for piece in self.read(offset):
                offset = piece.end
                yield piece
            if offset > seen:
                pause = 0.01
            elif last:
                return
            else:
                wait(pause)
                pause = min(pause * 1.5, 0.25)

    def text(self, most: int = 65_536) -> str:
        """The last `most` bytes of what was printed, whichever pipe it came through."""
        printed = b"".join(piece.data for piece in self.read(most=1 << 62) if piece.stream != "log")
        return printed[-most:].decode(errors="replace")

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
                        return  # it is being written
                    offset += _HEADER.size + length
                    yield Piece(STREAMS[stream], at, data, offset)
        except FileNotFoundError:
            return  # deleted since we looked: the next look tells how much was skipped


log = logging.getLogger("penstock.runner")

#: From the start to the first step, and between two steps of a pass at least.
_PAUSE_SEC: Final = 1.0
#: A pause is so many times as long as the step before it.
_PAUSE_SHARE: Final = 30
#: How often the trail is asked whether jobs were pruned.
_LOOK_SEC: Final = 30.0
_BATCH: Final = 500


class OutputCleaner:
    def __init__(self, store: Store, runs: Path, batch: int = _BATCH) -> None:
        self._store, self._runs, self._batch = store, runs, batch
        #: Folders that this pass has not looked at, the oldest last: a job's id begins with the moment when it was submitted.
        self._names: list[str] = []
        #: The newest event when the last pass began; None: a pass is due.
        self._passed_at: int | None = None
        self._over = Event()
        self._thread = Thread(target=self._loop, name="penstock-tidy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It may be at a large folder: the next start removes what is left."""
        self._over.set()
        self._thread.join(0.1)

    def step(self) -> float:
        """Look at the next folders, if a pass is under way or due. Returns the seconds until the next step."""
        began = time.monotonic()
        if not self._names and not self._begin_pass():
            return _LOOK_SEC
        batch = self._names[-self._batch :]
        del self._names[-self._batch :]
        self._remove_unknown(batch)
        return max(_PAUSE_SEC, _PAUSE_SHARE * (time.monotonic() - began)) if self._names else _LOOK_SEC

    def _begin_pass(self) -> bool:
        from penstock.core.jobs.job import EventKind  # noqa: PLC0415  # the launcher could not import it

        newest = self._store.newest()
        if self._passed_at is not None and not self._store.events_of({EventKind.PRUNED}, self._passed_at, 1):
            return False
        names = [name for name in os.listdir(self._runs) if not name.startswith(".")]  # noqa: PTH208  # names alone, perhaps very many
        self._names, self._passed_at = sorted(names, reverse=True), newest
        return True

    def _remove_unknown(self, names: Sequence[str]) -> None:
        known = {job.job_id for job in self._store.jobs([JobId(name) for name in names])}
        for name in names:
            if name not in known and not self._over.is_set():
                shutil.rmtree(self._runs / name, ignore_errors=True)

    def _loop(self) -> None:
        pause = _PAUSE_SEC
        while not self._over.wait(pause):
            try:
                pause = self.step()
            except Exception:  # the store is away for a while: another pass comes
                log.exception("old outputs could not be removed; it is tried again")
                self._passed_at, pause = None, _LOOK_SEC
