"""
What is looked at before a file is trusted.

A SQLite file can lose acknowledged work in ways that SQLite itself does not notice. Two are refused here: a file system whose locks do not hold
between hosts, and a page that went bad. `sqlite_guard` refuses files that were removed, replaced or cut.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

import apsw

from penstock.core.errors import StoreFailed

__all__ = ["Presence", "first_problem", "free_bytes", "refuse_network_file_system"]

#: How long a file that was not closed properly is examined before work goes on. A crash alone damages nothing; this looks for what came with it.
EXAMINE_SEC: Final = 2.0
#: The small tables first: the time is for all of them.
TABLES: Final = (
    "totals",
    "budget",
    "host",
    "admission_class",
    "checkpoint",
    "active_dispatch",
    "queue",
    "ended_jobs",
    "ended_dispatch",
    "job",
    "intent",
    "mention",
    "trail",
)
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


def free_bytes(path: Path) -> int:
    """What this user can still write beside the file."""
    disk = os.statvfs(path.parent)
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)


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
            self.alone = True
        except BlockingIOError:
            self.alone = False
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        wal = path.with_name(path.name + "-wal")
        self._left_open = self.alone and wal.exists() and wal.stat().st_size > 0

    def examine(self, con: apsw.Connection) -> None:
        if self._left_open:
            problem = first_problem(con)
            if problem is not None:
                raise StoreFailed(
                    f"{self._path} is damaged ({problem}) and was left as it is: restore a backup, or save what can be read by "
                    f"`sqlite3 {self._path} .recover | sqlite3 recovered.db`",
                    kind="corrupt",
                )
        if self.alone:
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self._fd)


def first_problem(con: apsw.Connection) -> str | None:
    """What SQLite finds wrong with the tables of this file, in the time that a start may take."""
    last = time.monotonic() + EXAMINE_SEC
    con.set_progress_handler(lambda: time.monotonic() > last, 100_000)
    # A process that was killed at its very first start has made some of them, or none.
    there = {name for (name,) in con.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    try:
        for table in (table for table in TABLES if table in there):
            for (said,) in con.execute(f"PRAGMA quick_check({table})"):
                if said != "ok":
                    return str(said).splitlines()[0]
    except apsw.InterruptError:
        pass  # a large file: what could be examined in the time is sound
    finally:
        con.set_progress_handler(None)
    return None
