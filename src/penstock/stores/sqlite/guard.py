"""
Detects that the files of a SQLite database were removed, replaced or cut: while they are in use, and at a
start.

A process can still write to a removed file that it has open, but the file is gone when the process ends. So
each write transaction first compares the files under their names with those that this process opened. If they
differ, the store refuses every write, and saves what it still has open: from the `-wal` into the database, or
as a copy beside it (`jobs.db.rescued`).

If the `-wal` was cut or lost, SQLite recovers the rest of the database and reports nothing. So a small file
beside it (`jobs.db-high-water`) records the newest event of the trail. If the newest event of the database is
older than that mark, acknowledged work is missing, and the store refuses to open the file. Writers raise the
mark after each commit, under the write lock, so it is never ahead of the file. The write goes to the page
cache, which survives a kill; it is forced to disk once a second, so a power cut may set the mark back by a
second. The mark also holds the size and the time of the last change of the main file, which only a checkpoint
changes: if they differ, the writer examines the file.

A restore sets the file back on purpose and removes the mark; the next process that opens the file makes a new
one.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import apsw

from penstock.core.errors import PenstockError, StoreFailed
from penstock.stores.sqlite.connection import connect, first_problem, newest_event, write_copy

log = logging.getLogger("penstock.stores")

# the high-water mark

_MAGIC: Final = b"PENMARK1"
_LAYOUT: Final = struct.Struct("<8sQQQ")
_SYNC_SEC: Final = 1.0
#: The size in the mark of a file that another program overwrote while it was in use.
_OVERWRITTEN: Final = 2**64 - 1


class HighWater(NamedTuple):
    """
    What the mark holds. `event`: the number of the newest event. `changed_ns` and `size`: of the main file
    after the last commit.
    """

    event: int
    changed_ns: int = 0
    size: int = 0

    @property
    def main_file(self) -> tuple[int, int]:
        return self.changed_ns, self.size


def mark_file(path: Path) -> Path:
    return path.with_name(path.name + "-high-water")


def read_mark(path: Path) -> HighWater | None:
    """The mark of the database at `path`; None: there is no valid one."""
    try:
        content = mark_file(path).read_bytes()
    except FileNotFoundError:
        return None
    return _decoded(content, path)


def reset_mark(path: Path) -> None:
    """Remove the mark of the database at `path`: for a restore, while no process has the file open."""
    mark_file(path).unlink(missing_ok=True)


def _decoded(content: bytes, path: Path) -> HighWater | None:
    if len(content) == _LAYOUT.size:
        magic, *numbers = _LAYOUT.unpack(content)
        if magic == _MAGIC:
            return HighWater(*numbers)
    if content:  # an empty one is from a process that was killed before it wrote
        log.warning("%s is damaged: it is made anew", mark_file(path))
    return None


class HighWaterMark:
    """
    The mark, open for writing. The caller holds the write lock of the database in every call but `close`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open()
        self._synced_at = time.monotonic()
        #: The mark that this process wrote last. Another process may have raised it since: `current` reads
        #: the file.
        self._written: HighWater | None = None

    def _open(self) -> int:
        return os.open(mark_file(self._path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def current(self) -> HighWater | None:
        return _decoded(os.pread(self._fd, _LAYOUT.size, 0), self._path)

    def set(self, mark: HighWater) -> None:
        """
        Raise the mark after a commit: a write of 32 bytes to the page cache, or none if the mark stays the
        same.
        """
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

#: Bounds for how much the guard lengthens a `-wal` that has grown; between them it doubles the file.
LEAST_AHEAD: Final = 1 << 20
MOST_AHEAD: Final = 4 << 20
#: The sizes of the headers of the `-wal` and of each page in it, in bytes.
_WAL_HEADER: Final = 32
_FRAME_HEADER: Final = 24
#: Device and inode.
Identity: TypeAlias = tuple[int, int]


class FileLost(Exception):
    """
    A file is not the one that this process opened. Raised inside a transaction; after the rollback
    `FileGuard.save` turns it into an error for the caller.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


class FileGuard:
    """
    Compares the files of a database with those that this process opened. `alone`: no other process had the
    file open at that moment, so the file itself is the reference, and not its mark. The guard also keeps the
    `-wal` longer than its content: a sync of existing blocks takes half as long as a sync of a new length.
    """

    def __init__(self, path: Path, con: apsw.Connection, *, alone: bool) -> None:
        self._path, self._con, self._mark = path, con, HighWaterMark(path)
        self._name, self._wal_name = os.fspath(path), f"{os.fspath(path)}-wal"
        stat = path.stat()
        self._main: Identity = (stat.st_dev, stat.st_ino)
        self._wal: Identity | None = None
        self._wal_size: int | None = None
        #: Time of the last change and size of the main file. Only checkpoints change them, under the write
        #: lock.
        self._content: tuple[int, int] | None = None
        known = self._mark.current()
        if alone or known is None:
            self.committed(newest_event(con))
        else:
            self._content = known.main_file

    # before and after each transaction

    def look(self) -> None:
        """
        Check the files, inside a write transaction and before anything is written. FileLost: they differ.
        """
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
        if self._wal_size is None or size < self._wal_size:
            self._check_length(size)
        elif size > self._wal_size:
            size = self._lengthen(size)
        self._wal_size = size

    def check_main(self) -> tuple[int, int]:
        """
        Time of the last change and size of the main file. FileLost: it is not the one that this process
        opened.
        """
        try:
            main = os.stat(self._name)  # noqa: PTH116 - as above
        except FileNotFoundError:
            raise FileLost("file_deleted", f"{self._path} was deleted while it was in use") from None
        if (main.st_dev, main.st_ino) != self._main:
            raise FileLost("file_replaced", f"{self._path} was replaced by another file while it was in use")
        return main.st_mtime_ns, main.st_size

    def _examine(self, content: tuple[int, int]) -> None:
        """
        Examine a main file that this process did not change last: a checkpoint, or another program, changed
        it.
        """
        mark = self._mark.current()
        if mark is None or mark.main_file != content:
            problem = self._problem(0 if mark is None else mark.event)
            if problem is not None:
                raise FileLost(
                    "file_overwritten", f"{self._path} was overwritten while it was in use ({problem})"
                )
        self._content = content

    def _problem(self, event: int) -> str | None:
        """What is wrong with the file, on a new connection: the writer's own has pages in memory."""
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

    def _check_length(self, size: int) -> None:
        """
        Compare the size of the `-wal` with the number of its pages that SQLite knows. SQLite tells it outside
        of a transaction only; the write lock keeps other writers away. To read it from the `-shm` would end
        all locks of this process on that file: POSIX locks go with the first descriptor that is closed.
        """
        self._con.execute("ROLLBACK")
        states: Any = self._con.execute("PRAGMA wal_checkpoint(NOOP)").fetchall()
        page_size: Any = self._con.pragma("page_size")
        self._con.execute("BEGIN IMMEDIATE")
        [(_, pages, _)] = states
        if pages > 0 and size < _WAL_HEADER + pages * (_FRAME_HEADER + page_size):
            raise FileLost("wal_cut", f"{self._wal_name} was cut while it was in use")

    def _lengthen(self, size: int) -> int:
        """
        Append zeros to the `-wal`, and return its new size. Zeros are no valid frame: SQLite reads up to the
        first invalid frame, and only the holder of the write lock writes after it. On a full disk the file
        stays as it is.
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
        """Raise the mark, after a commit and before its callers are answered. `event`: the newest event."""
        try:
            main = os.stat(self._name)  # noqa: PTH116 - as above
        except FileNotFoundError:
            return  # the next `look` reports it, and this commit is saved with all others
        self._content = (main.st_mtime_ns, main.st_size)
        self._mark.set(HighWater(event, *self._content))

    def close(self) -> None:
        self._mark.close()

    # when a file is lost

    def save(self, lost: FileLost) -> StoreFailed:
        """
        Save what this process still has open; the error says where. Called under the write lock, without a
        transaction.
        """
        if lost.kind == "wal_removed" and self._checkpoint():
            saved = f"What was acknowledged before has been saved into {self._path}"
            return _lost(lost, f"{saved}: end every process that uses it and start again")
        if (
            lost.kind == "wal_cut"
        ):  # the checkpoint of a close would write what is missing as zeros into the database
            self._con.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            return _lost(lost, f"End every process that uses {self._path} and restore a backup")
        if lost.kind == "file_overwritten":
            known = self._mark.current()
            with suppress(OSError):  # else the next start would take what is there for the database
                self._mark.secure(HighWater(0 if known is None else known.event, size=_OVERWRITTEN))
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
        """Copy the database beside its name, unless another process has made the same copy before."""
        event = newest_event(self._con)
        self._mark.secure(HighWater(event))  # the mark may have been removed too, and the next start needs it
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
    """
    Acknowledged events that a file has lost. `known`: the newest event of its mark. `found`: of the file.
    """

    known: int
    found: int


def refuse_missing(path: Path, known: HighWater | None, *, accept_loss: bool) -> Loss | None:
    """
    Refuse a missing or empty file that had data, before it is opened: SQLite would make a new one, and remove
    the `-wal` that may have all the data. With `accept_loss` that `-wal` is set aside.
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


def refuse_overwritten(path: Path, known: HighWater | None, *, accept_loss: bool) -> Loss | None:
    """Before the file is opened: an earlier process saw that another program wrote into it."""
    if known is None or known.size != _OVERWRITTEN:
        return None
    if not accept_loss:
        raise StoreFailed(
            f"{path} was overwritten while it was in use. Nothing was changed. Restore a backup. {_GO_ON}",
            kind="file_overwritten",
        )
    return Loss(known.event, known.event)


def refuse_lost(path: Path) -> None:
    """Refuse a file that has lost acknowledged work, as the start of a scheduler does; change nothing."""
    known = read_mark(path)
    refuse_missing(path, known, accept_loss=False)
    refuse_overwritten(path, known, accept_loss=False)
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
    """Refuse a file whose newest event is older than its mark: it has lost acknowledged work."""
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
