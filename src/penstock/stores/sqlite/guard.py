"""
Notices when the files of a SQLite database are removed, replaced or cut, while they are in use and at the next start.

A process that has a removed file open can still write to it, and everything it writes is gone when the process ends.
So each write transaction first compares the files under their names with the ones that this process opened. If they
differ, the store refuses every write, and saves what it still has open: from the `-wal` into the database, or as a copy
beside it (`jobs.db.rescued`).

SQLite recovers silently to whatever remains of a database whose `-wal` was cut or lost. So a small file beside it
(`jobs.db-high-water`) records how far the trail had come: a file whose newest event is older than that mark has lost
acknowledged work, and the store refuses to open it. Writers raise the mark after each commit, under the write lock, so it
is never ahead of the file. The write goes to the page cache, which survives a kill; it is forced to disk once a second, so
a power cut may set the mark back by a second. The mark also holds the size and the time of the last change of the main
file, which only a checkpoint changes: if they differ, another program has written to the file.

A restore sets the file back on purpose and removes the mark; the next process to open the file makes a new one.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import apsw

from penstock.core.errors import PenstockError, StoreFailed
from penstock.stores.sqlite.connection import connect, first_problem, newest_event, write_copy

log = logging.getLogger("penstock.stores")

# the high-water mark

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


def read_mark(path: Path) -> HighWater | None:
    """Of the database at `path`; None if there is no mark that can be read."""
    try:
        content = mark_file(path).read_bytes()
    except FileNotFoundError:
        return None
    return _decoded(content, path)


def reset_mark(path: Path) -> None:
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
        try:
            os.pwrite(self._fd, _LAYOUT.pack(_MAGIC, *mark), 0)
            if now - self._synced_at > _SYNC_SEC:
                self._synced_at = now
                self.secure(mark)
        except OSError:
            pass  # the commit stands; the next one raises the mark as well

    def secure(self, mark: HighWater) -> None:
        """Force `mark` to disk under its name, which another program may have removed meanwhile."""
        fd = self._open()
        os.close(self._fd)
        self._fd = fd
        os.pwrite(fd, _LAYOUT.pack(_MAGIC, *mark), 0)
        os.fdatasync(fd)

    def close(self) -> None:
        os.close(self._fd)


# the files in use

#: By this much the `-wal` is made longer when it has grown, until it is as long as it gets between two checkpoints.
LEAST_AHEAD: Final = 1 << 20
MOST_AHEAD: Final = 4 << 20
#: Device and inode.
Identity: TypeAlias = tuple[int, int]


class FileLost(Exception):
    """Raised inside a transaction. `FileGuard.save` turns it into an error for the caller, after the rollback."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


class FileGuard:
    """
    `alone`: no other process had the file open when this one opened it, so it is the reference as it is. The guard also keeps the
    `-wal` longer than its content: to sync blocks that are there takes half as long as to sync a new length.
    """

    def __init__(self, path: Path, con: apsw.Connection, *, alone: bool) -> None:
        self._path, self._con, self._mark = path, con, HighWaterMark(path)
        self._name, self._wal_name = os.fspath(path), f"{os.fspath(path)}-wal"
        stat = path.stat()
        self._main: Identity = (stat.st_dev, stat.st_ino)
        self._wal: Identity | None = None
        self._wal_size: int | None = None
        #: Time of the last change and size of the main file. Only checkpoints change them, and those happen under the write lock.
        self._content: tuple[int, int] | None = None
        known = self._mark.current()
        if alone or known is None:
            self.committed(newest_event(con))
        else:
            self._content = known.main_file

    # before and after each transaction

    def look(self) -> None:
        """Inside a write transaction, before anything is written."""
        main = self.check_main()
        if main != self._content:
            self._examine(main)
        try:
            wal = os.stat(self._wal_name)  # noqa: PTH116 - at every commit, and a Path takes three times as long
        except FileNotFoundError:
            self._check_wal(None)
            self._wal_size = 0
            return
        self._check_wal((wal.st_dev, wal.st_ino))
        size = wal.st_size
        if self._wal_size is not None and size > self._wal_size:
            size = self._lengthen(size)
        self._wal_size = size

    def check_main(self) -> tuple[int, int]:
        """Whether the main file is the one that this process opened. The answer: when it was last changed, and its size."""
        try:
            main = os.stat(self._name)  # noqa: PTH116 - as above
        except FileNotFoundError:
            raise FileLost("file_deleted", f"{self._path} was deleted while it was in use") from None
        if (main.st_dev, main.st_ino) != self._main:
            raise FileLost("file_replaced", f"{self._path} was replaced by another file while it was in use")
        return main.st_mtime_ns, main.st_size

    def _examine(self, content: tuple[int, int]) -> None:
        """This process did not write that: another one made a checkpoint, or another program overwrote the file."""
        mark = self._mark.current()
        if mark is None or mark.main_file != content:
            problem = self._problem(0 if mark is None else mark.event)
            if problem is not None:
                raise FileLost(
                    "file_overwritten", f"{self._path} was overwritten while it was in use ({problem})"
                )
        self._content = content

    def _problem(self, event: int) -> str | None:
        """As a new connection sees the file: this one has pages of its own in memory."""
        try:
            with closing(connect(self._path, readonly=True)) as con:
                newest = newest_event(con)
                return f"it ends at event {newest} of {event}" if newest < event else first_problem(con)
        except (PenstockError, apsw.Error) as error:
            return str(error)

    def _check_wal(self, found: Identity | None) -> None:
        if self._wal is None:
            self._wal = found
        elif found != self._wal:
            raise FileLost("wal_removed", f"{self._wal_name} was removed or replaced while it was in use")

    def _lengthen(self, size: int) -> int:
        """
        By zeros, which are no frame to SQLite: it reads to the first one that is not valid, and only the holder of the write lock writes behind
        that. On a full disk the file stays as it is.
        """
        more = min(max(size, LEAST_AHEAD), MOST_AHEAD)
        with suppress(OSError):
            file = os.open(self._wal_name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                size += os.pwrite(file, bytes(more), size)
            finally:
                os.close(file)
        return size

    def committed(self, event: int) -> None:
        """After a commit, and before its callers are answered. `event`: the newest of the trail now."""
        try:
            main = os.stat(self._name)  # noqa: PTH116 - as above
        except FileNotFoundError:
            return  # the next look says so, and saves this commit with all others
        self._content = (main.st_mtime_ns, main.st_size)
        self._mark.set(HighWater(event, *self._content))

    def close(self) -> None:
        self._mark.close()

    # when a file is lost

    def save(self, lost: FileLost) -> StoreFailed:
        """Outside of a transaction, under the write lock: save what this process still has open, and say where it is."""
        if lost.kind == "wal_removed" and self._checkpoint():
            saved = f"What was acknowledged before has been saved into {self._path}"
            return _lost(lost, f"{saved}: end every process that uses it and start again")
        if lost.kind == "file_overwritten":
            return _lost(lost, "End every process that uses it and restore a backup")
        try:
            copy = self._rescue()
        except (PenstockError, apsw.Error, OSError) as error:
            why = f"It could not be saved elsewhere ({error})"
            keep = (
                f"process {os.getpid()} has the last copy open: make room for it before you end that process"
            )
            return _lost(lost, f"{why}, and {keep}")
        saved = f"What was acknowledged before has been saved into {copy}"
        back = f"`penstock db restore {copy} --path {self._path}`"
        return _lost(lost, f"{saved}: end every process that uses {self._path}, run {back}, and start again")

    def _checkpoint(self) -> bool:
        try:
            ((busy, _, _),) = self._con.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except apsw.Error:
            return False
        return not busy

    def _rescue(self) -> Path:
        """Another process that has the same file open may have made the same copy before."""
        event = newest_event(self._con)
        self._mark.secure(HighWater(event))  # removed with the others, perhaps; the next start must know
        for number in count(1):
            target = self._path.with_name(f"{self._path.name}.rescued{'' if number == 1 else f'-{number}'}")
            if not target.exists():
                write_copy(self._con, target)
            if _event_of(target) == event:
                return target
        raise AssertionError("unreachable")


def _lost(lost: FileLost, advice: str) -> StoreFailed:
    return StoreFailed(f"{lost.what}. Nothing more is accepted. {advice}", kind=lost.kind)


def _event_of(path: Path) -> int:
    with closing(connect(path, readonly=True)) as con:
        return newest_event(con)


# at the start

_GO_ON: Final = (
    "To go on without what is missing, use `penstock up --accept-loss` or `penstock db check --accept-loss`"
)


class Loss(NamedTuple):
    """How far the file had come, and how far it goes now: numbers of events."""

    known: int
    found: int


def refuse_missing(path: Path, known: HighWater | None, *, accept_loss: bool) -> Loss | None:
    """
    Before the file is opened: SQLite makes a new one in place of a missing or empty one, and removes the `-wal` that has all the data. With
    `accept_loss` that `-wal` is put aside.
    """
    if path.exists() and path.stat().st_size:
        return None
    wal = path.with_name(path.name + "-wal")
    log_bytes = wal.stat().st_size if wal.exists() else 0
    event = 0 if known is None else known.event
    if not log_bytes and not event:
        return None
    if accept_loss:
        if log_bytes:
            wal.rename(_free_name(path.with_name(path.name + "-wal.lost")))
        return Loss(event, 0)
    state = "empty" if path.exists() else "missing"
    holds = [f"{wal} has {log_bytes} bytes of its data"] if log_bytes else []
    holds += [f"it had come to event {event}"] if event else []
    rescued = path.with_name(path.name + ".rescued")
    copy = ""
    if rescued.exists():
        copy = f" {rescued} is a copy that was saved when the file was lost: `penstock db restore {rescued} --path {path}`."
    raise StoreFailed(
        f"{path} is {state}, but {' and '.join(holds)}. Nothing was changed. Put the file back, or restore a backup.{copy} {_GO_ON}",
        kind="missing",
        known=event,
        found=0,
    )


def refuse_lost(path: Path) -> None:
    """As the start of a scheduler would refuse it, and nothing is changed."""
    known = read_mark(path)
    refuse_missing(path, known, accept_loss=False)
    if known is not None and path.exists():
        with closing(connect(path, readonly=True)) as con:
            refuse_behind(path, con, known, accept_loss=False)


def _free_name(path: Path) -> Path:
    return next(
        name
        for name in (path.with_name(path.name + ("" if n == 1 else f"-{n}")) for n in count(1))
        if not name.exists()
    )


def refuse_behind(
    path: Path, con: apsw.Connection, known: HighWater | None, *, accept_loss: bool
) -> Loss | None:
    """A file that ends before its high-water mark has lost acknowledged work."""
    event = 0 if known is None else known.event
    newest = newest_event(con) if event else 0
    if newest >= event:
        return None
    if not accept_loss:
        raise StoreFailed(
            f"{path} ends at event {newest}, but it had come to event {event}: acknowledged work is missing. Its -wal was cut or removed, or an older "
            f"copy was put in its place. Nothing was changed. Bring the newer files back, or restore a backup. {_GO_ON}",
            kind="behind",
            known=event,
            found=newest,
        )
    return Loss(event, newest)
