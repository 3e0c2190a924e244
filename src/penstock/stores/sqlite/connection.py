"""
The SQLite file: how it is checked, opened, locked, and brought to the present schema.

Three locks lie beside the file. A process holds `-dispatch` while it dispatches; the lock names the process,
which also holds a lock on the file itself (`open_files.py`).
A writer holds `-write` for one commit (`transaction.py`). Every process that has the file open holds `-open`.

SQLite does not notice every loss of acknowledged work. This module refuses two causes: a file system whose
locks do not hold between hosts, and a damaged page. `guard.py` refuses files that were removed, replaced or
cut.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any, Final

import apsw

from penstock.core.errors import DispatcherHeld, SchemaNewer, StoreFailed
from penstock.stores.common.rows import migrations, statements
from penstock.stores.sqlite.open_files import MainFile

#: "PEN1": a database of another program is refused, and not migrated.
APPLICATION_ID: Final = 0x50454E31
#: Before this version, two connections that write and checkpoint can corrupt a database in WAL mode.
SAFE_WAL: Final = (3, 51, 3)
#: The statements of this store, by name.
SQL: Final = statements("sqlite")
#: Enough for all statements of the store: to compile one takes longer than to run most of them.
STATEMENTS: Final = 400


def connect(path: Path, *, readonly: bool = False) -> apsw.Connection:
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < SAFE_WAL:
        raise StoreFailed(
            f"SQLite {apsw.sqlite_lib_version()} can corrupt a database in WAL mode; apsw with SQLite 3.51.3 or newer is needed"
        )
    if not readonly:
        _make_private(path)
    flags = apsw.SQLITE_OPEN_READONLY if readonly else apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    with failures(path):
        con = apsw.Connection(os.fspath(path), flags=flags, statementcachesize=STATEMENTS)
        con.set_busy_timeout(10_000)
        if not readonly:
            # Half of the usual size, in a new file. A move writes a few bytes in each of a dozen pages, and
            # SQLite writes whole pages to the log.
            con.pragma("page_size", 2_048)
            con.pragma("journal_mode", "wal")
            # FULL: an acknowledged commit survives a power cut. NORMAL may lose the newest commits.
            con.pragma("synchronous", "FULL")
            con.pragma("journal_size_limit", 64 * 1024 * 1024)
            # Checkpoint seldom: a page that many commits write then goes into the file once.
            con.pragma("wal_autocheckpoint", 8_000)
            con.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
        # Plans must not depend on bound values: else SQLite compiles a statement with a bound limit at every
        # call.
        con.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        con.pragma("cache_size", -32_000)
        con.pragma("temp_store", "memory")
    return con


class failures:  # noqa: N801 - used in a `with` at every commit, where a generator would cost as much as a statement
    """
    Turns SQLite's errors about the disk or the file into StoreFailed. A broken constraint is a bug and stays
    as it is.
    """

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, _OF_THE_FILE):
            kind = type(error).__name__.removesuffix("Error").lower()
            raise StoreFailed(f"{self._path} {_ADVICE[kind]} ({error})", kind=kind) from error
        if isinstance(error, OSError):
            raise StoreFailed(f"{self._path} {_ADVICE['cantopen']} ({error})", kind="cantopen") from error


_OF_THE_FILE: Final = (
    apsw.BusyError,
    apsw.LockedError,
    apsw.FullError,
    apsw.IOError,
    apsw.ReadOnlyError,
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.CantOpenError,
    apsw.PermissionsError,
)


_ADVICE: Final = {
    "busy": "is kept locked by another program: end what holds a transaction open on it",
    "locked": "is kept locked by another program: end what holds a transaction open on it",
    "full": "cannot grow, its disk is full: free some space. Nothing was lost, and the next call goes on",
    "io": "could not be read or written: look at the disk, its free space and the system's log",
    "readonly": "may not be written: give this user the right to write the file, its folder, and the -wal and -shm beside it",
    "corrupt": "is damaged: restore a backup, or save what can be read by `sqlite3 FILE .recover`",
    "notadb": "is not a database of Penstock and was left alone: choose another file",
    "cantopen": "cannot be opened: its folder must exist, and this user must be allowed to write in it",
    "permissions": "may not be used by this user: change its owner or its mode",
}


def migrate(con: apsw.Connection, path: Path, lock: AbstractContextManager[None]) -> None:
    """
    Bring the schema up to date: forward only, one transaction per step, after a backup. Of processes that
    open the file at once, the one with the write `lock` migrates, and the others wait for it.
    """
    steps = migrations("sqlite")
    with failures(path):
        if schema_version(con, path) == len(steps):
            return
        with lock:
            _climb(con, path, steps)


def _climb(con: apsw.Connection, path: Path, steps: Sequence[str]) -> None:
    version = schema_version(con, path)
    if 0 < version < len(steps):
        write_copy(con, path.with_name(f"{path.name}.v{version}.backup"))
    for number, script in enumerate(steps[version:], start=version + 1):
        con.execute("BEGIN EXCLUSIVE")
        try:
            con.execute(script)
            con.execute(f"PRAGMA user_version = {number}; PRAGMA application_id = {APPLICATION_ID}")
            con.execute("COMMIT")
        except BaseException:  # Ctrl-C included: an interrupted step must leave the file as it was
            if con.in_transaction:  # else it came after the commit
                con.execute("ROLLBACK")
            raise


def integrity(path: Path, *, quick: bool = False) -> list[str]:
    """
    The problems that SQLite finds in its pages. `quick` skips the slow part: indexes against their tables.
    """
    with failures(path), closing(connect(path, readonly=True)) as con:
        lines = con.execute("PRAGMA quick_check(20)" if quick else "PRAGMA integrity_check(100)").fetchall()
    return [str(line) for (line,) in lines if line != "ok"]


def _make_private(path: Path) -> None:
    """
    Make a new file readable by its owner only, from its first byte on; SQLite gives the -wal and -shm the
    same mode.
    """
    with suppress(OSError):  # the file exists and keeps its mode, or SQLite reports a problem of the folder
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def copy(path: Path, target: Path) -> None:
    """Copy the database to `target`, also while others write."""
    with failures(path), closing(connect(path, readonly=True)) as con:
        write_copy(con, target)


def schema_version(con: apsw.Connection, path: Path) -> int:
    """The schema version of the file; 0 if it is empty. Refuses another program's file and a newer schema."""
    version = int(con.pragma("user_version"))
    tables = con.execute("SELECT count(*) FROM sqlite_schema").get
    if con.pragma("application_id") != APPLICATION_ID and (version or tables):
        raise StoreFailed(f"{path.name} is a database of another program; choose another file")
    if version > len(migrations("sqlite")):
        raise SchemaNewer(
            f"{path.name} has schema {version}, this Penstock knows {len(migrations('sqlite'))}: upgrade Penstock, or restore a backup",
            schema=version,
            known=len(migrations("sqlite")),
        )
    return version


def write_copy(con: apsw.Connection, target: Path) -> None:
    """Copy the database to `target`, first under another name: a partial copy must not look like a backup."""
    partial = target.with_name(target.name + ".part")
    partial.unlink(missing_ok=True)
    _make_private(partial)
    with failures(target):
        copy = apsw.Connection(os.fspath(partial))
    try:
        with closing(copy), copy.backup("main", con, "main") as backup:
            backup.step(-1)
        partial.replace(target)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, apsw.FullError):  # only the copy is written
            with failures(target):
                raise
        raise


def newest_numbers(con: apsw.Connection) -> tuple[int, int]:
    """The numbers of the newest job and of the newest event; 0 if there is none."""
    row: Any = con.execute(SQL["newest_numbers"]).fetchone()
    return row or (0, 0)


def newest_event(con: apsw.Connection) -> int:
    try:
        return newest_numbers(con)[1]
    except apsw.SQLError:
        return 0  # a file without a trail


class DispatchLock:
    """
    The right to dispatch from one file. The kernel frees the lock when its process dies, so there is no stale
    lock to clean up. The lock file names the holder; the lock on the database file itself holds although
    somebody removes the lock file.
    """

    def __init__(self, path: Path, holder: str, main_file: MainFile) -> None:
        name = path.with_name(path.name + "-dispatch")
        self._main_file = main_file
        self._fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            main_file.lock()
        except BlockingIOError:
            other = _read_holder(self._fd)
            os.close(self._fd)
            raise DispatcherHeld(
                f"{path.name} is dispatched by {other['holder']} (pid {other['pid']}); only one process may dispatch, others submit",
                **other,
            ) from None
        except OSError:
            os.close(self._fd)
            raise
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps({"holder": holder, "pid": os.getpid()}).encode(), 0)

    def close(self) -> None:
        self._main_file.unlock()
        os.close(self._fd)

    def leave_to_parent(self) -> None:
        """In a forked process: close its descriptor, and keep the lock, which both share."""
        os.close(self._fd)


def _read_holder(fd: int) -> dict[str, object]:
    try:
        holder: dict[str, object] = json.loads(os.pread(fd, 4_096, 0))
    except ValueError:  # the other process has not written its name yet
        holder = {"holder": "another process", "pid": "unknown"}
    return holder


#: How long a start examines a file that was not closed properly. A crash alone damages nothing, but damage to
#: the disk may have come with it.
EXAMINE_SEC: Final = 2.0
#: Examined last, so that the time is enough for all small tables.
LARGE_TABLES: Final = ("ended_dispatch", "job", "intent", "mention", "trail")
#: The kernel's names, with or without `fuse.` before them, of file systems whose locks or shared memory do
#: not hold between hosts.
NETWORK_FILE_SYSTEMS: Final = frozenset(
    [
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
        "rclone",
        "s3fs",
        "smb3",
        "smbfs",
        "sshfs",
    ]
)


def refuse_network_file_system(path: Path) -> None:
    device = path.parent.stat().st_dev
    for line in _mounts():
        words = line.split()
        if words[2] == f"{os.major(device)}:{os.minor(device)}":
            kind = words[words.index("-") + 1]
            if kind.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS:
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
        return []  # not on Linux, or not readable: refuse no file


def free_bytes(path: Path) -> int:
    """How many bytes this user can still write beside the file."""
    disk = os.statvfs(path.parent)
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)


class Presence:
    """
    The lock that every process holds which has the file open. If the first process finds a `-wal` that is not
    empty, the last process did not close the file properly: the first one examines the file while later ones
    wait.
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
    """The first problem that SQLite finds in the tables of this file within `EXAMINE_SEC`."""
    last = time.monotonic() + EXAMINE_SEC
    con.set_progress_handler(lambda: time.monotonic() > last, 100_000)
    tables = [str(name) for (name,) in con.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    try:
        for table in sorted(tables, key=lambda name: name in LARGE_TABLES):
            for (line,) in con.execute(f"PRAGMA quick_check({table})"):
                if line != "ok":  # several lines, with a heading
                    return str(line).removeprefix("*** in database main ***\n").splitlines()[0]
    except apsw.InterruptError:
        pass  # a large file: no problem was found in the time
    finally:
        con.set_progress_handler(None)
    return None
