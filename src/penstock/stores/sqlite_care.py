"""
What is looked at before a file is trusted, and while it is in use.

A SQLite file has three ways to lose what was answered that SQLite itself does not notice: a file system whose locks do not hold between hosts, a page
that went bad while nobody looked, and a `-wal` that somebody removes while it is open. Each is refused here, in words that say what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Final

import apsw

from penstock.core.refusals import StoreFailed

__all__ = ["Presence", "WalGuard", "refuse_network_file_system"]

#: How long a file that was not closed properly is examined before work goes on. A crash alone damages nothing; this looks for what came with it.
EXAMINE_SEC: Final = 2.0
#: The small tables first: the time is for all of them.
TABLES: Final = (
    "sums",
    "budget",
    "host",
    "demand",
    "checkpoint",
    "live",
    "queue",
    "done",
    "attempt",
    "job",
    "intent",
    "mention",
    "trail",
)
#: So much longer the `-wal` is made when it has grown, until it is as long as it gets between two checkpoints.
LEAST_AHEAD: Final = 1 << 20
MOST_AHEAD: Final = 4 << 20
#: As the kernel names them, with or without `fuse.` before it. Their locks, or their shared memory, do not hold between hosts.
FAR: Final = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gcsfuse",
        "glusterfs",
        "goofys",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
    }
    | {"rclone", "s3fs", "smb3", "smbfs", "sshfs"}
)


def refuse_network_file_system(path: Path) -> None:
    device = path.parent.stat().st_dev
    for line in _mounts():
        words = line.split()
        if words[2] == f"{os.major(device)}:{os.minor(device)}":
            kind = words[words.index("-") + 1]
            if kind.removeprefix("fuse.") in FAR:
                raise StoreFailed(
                    f"{path} lies on a network file system ({kind}, mounted at {words[4]}), where SQLite's locks do not hold: "
                    "put it on a local disk, or use PostgreSQL for several hosts",
                    kind="network",
                    file_system=kind,
                )
            return


def _mounts() -> list[str]:
    try:
        return Path("/proc/self/mountinfo").read_text("utf-8").splitlines()
    except OSError:
        return []  # not on Linux, or nothing may be seen: then nothing is known, and nothing refused


class Presence:
    """
    Held by every process that has the file open. Whoever comes first and finds a `-wal` with something in it knows that the last
    one did not close it, and examines the file while the others wait.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path.with_name(path.name + "-open"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._alone = True
        except BlockingIOError:
            self._alone = False
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        wal = path.with_name(path.name + "-wal")
        self._left_open = self._alone and wal.exists() and wal.stat().st_size > 0

    def examine(self, con: apsw.Connection) -> None:
        if self._left_open:
            problem = _first_problem(con)
            if problem is not None:
                raise StoreFailed(
                    f"{self._path} is damaged ({problem}) and was left as it is: restore a backup, or save what can be read by "
                    f"`sqlite3 {self._path} .recover | sqlite3 recovered.db`",
                    kind="corrupt",
                )
        if self._alone:
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self._fd)


def _first_problem(con: apsw.Connection) -> str | None:
    last = time.monotonic() + EXAMINE_SEC
    con.set_progress_handler(lambda: time.monotonic() > last, 100_000)
    try:
        for table in TABLES:
            for (said,) in con.execute(f"PRAGMA quick_check({table})"):
                if said != "ok":
                    return str(said).splitlines()[0]
    except apsw.InterruptError:
        pass  # a large file: what could be examined in the time is sound
    finally:
        con.set_progress_handler(None)
    return None


class WalGuard:
    """
    Sees to it that the `-wal` beside the file is the one we write to: a file that was removed can still be written, and all of it is gone
    with the last process that has it open. And that it is longer than what is in it: to sync what was written over takes half as long as to
    sync what made the file longer.
    """

    def __init__(self, path: Path, con: apsw.Connection) -> None:
        self._path, self._con = path, con
        self._name = os.fspath(path.with_name(path.name + "-wal"))
        self._file: tuple[int, int] | None = None
        self._size: int | None = None

    def look(self) -> None:
        """Inside a write transaction, before anything is written."""
        try:
            stat = os.stat(self._name)  # noqa: PTH116 - at every commit, and a Path takes three times as long
        except FileNotFoundError:
            found, size = None, 0
        else:
            found, size = (stat.st_dev, stat.st_ino), stat.st_size
        self._check(found)
        if self._size is not None and size > self._size:
            size = self._lengthen(size)
        self._size = size

    def _lengthen(self, size: int) -> int:
        """
        By zeros, which are no frame to SQLite: it reads to the first one that is not valid, and only who has the write lock writes behind that. On
        a full disk nothing is lost by leaving it.
        """
        more = min(max(size, LEAST_AHEAD), MOST_AHEAD)
        with contextlib.suppress(OSError):
            file = os.open(self._name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                size += os.pwrite(file, bytes(more), size)
            finally:
                os.close(file)
        return size

    def _check(self, found: tuple[int, int] | None) -> None:
        if self._file is None:
            self._file = found
        elif found != self._file:
            raise StoreFailed(
                f"{self._name} was removed or replaced while it was in use. What was answered before has been saved into {self._path}: "
                "end every process that uses it and start again",
                kind="wal_removed",
            )

    def save(self) -> None:
        """We still have the removed file open: what is in it goes into the database, where the next process finds it."""
        self._con.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
