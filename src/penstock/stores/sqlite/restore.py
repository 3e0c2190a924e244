"""
Replaces a SQLite file by a backup.

The restore holds the `-open` lock alone, so no process has the file open. It deletes nothing: the old file,
with its `-wal` and `-shm`, is set aside under another name. After a kill there is the old file, or only the
set-aside one, or the restored one; a second restore completes the first.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import apsw

from penstock.core.errors import StoreFailed
from penstock.stores.sqlite.connection import connect, copy, failures, schema_version, write_copy
from penstock.stores.sqlite.guard import reset_mark

#: In the order in which they are set aside. The main file goes first: a start refuses a `-wal` without it,
#: but would take a main file without its `-wal` for the whole database.
_PARTS: Final = ("", "-wal", "-shm")


def restore(backup: Path, path: Path) -> Path | None:
    """
    Make `backup` the database at `path`. Returns the name of the set-aside old file; None: there was none.
    StoreFailed, and nothing is changed: the backup is damaged, or a process uses the file at `path`.
    """
    with _alone(path):
        fresh = path.with_name(path.name + ".restoring")
        try:
            _copy(backup, fresh)
            _refuse_unless_whole(fresh, backup)
            fresh.chmod(0o600)
            _sync(fresh)
        except BaseException:  # Ctrl-C included
            fresh.unlink(missing_ok=True)
            raise
        set_aside = _set_aside(path)
        # Before the restored file has its name: by the old mark the next start would refuse it.
        reset_mark(path)
        fresh.replace(path)
        _sync(path.parent)
    return set_aside


def _copy(backup: Path, target: Path) -> None:
    """
    Copy a backup, also from a read-only folder. A `-wal` beside it, as in a copy of all files, is a part of
    it.
    """
    wal = backup.with_name(backup.name + "-wal")
    if wal.exists() and wal.stat().st_size:
        copy(backup, target)
        return
    with failures(backup):
        # Immutable: SQLite takes no locks and leaves no -wal and no -shm beside it.
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        with closing(apsw.Connection(f"{backup.as_uri()}?immutable=1", flags=flags)) as con:
            write_copy(con, target)


def _refuse_unless_whole(fresh: Path, backup: Path) -> None:
    with failures(backup), closing(connect(fresh)) as con:
        if schema_version(con, backup) == 0:
            raise StoreFailed(
                f"{backup} is empty: it is no backup of Penstock; nothing was changed", kind="notadb"
            )
        for (line,) in con.execute("PRAGMA integrity_check(1)"):
            if line != "ok":
                raise StoreFailed(f"{backup} is damaged ({line}); nothing was changed", kind="corrupt")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    fd = os.open(path.with_name(path.name + "-open"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise StoreFailed(
            f"{path} is in use: stop the scheduler (`penstock stop`) and every program that uses the file, then restore again",
            kind="in_use",
        ) from None
    finally:
        os.close(fd)


def _set_aside(path: Path) -> Path | None:
    _fold_in(path)
    parts = [part for part in _PARTS if path.with_name(path.name + part).exists()]
    if not parts:
        return None
    target = path.with_name(f"{path.name}.before-restore-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
    for part in parts:
        path.with_name(path.name + part).rename(target.with_name(target.name + part))
    return target


def _fold_in(path: Path) -> None:
    """
    Move the `-wal` into the main file, so that one rename sets it aside. A damaged file is set aside in its
    parts.
    """
    if path.exists() and path.stat().st_size:
        with suppress(StoreFailed), failures(path), closing(connect(path)) as con:
            con.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
