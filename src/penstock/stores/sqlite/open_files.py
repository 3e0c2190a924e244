"""
The database files that this process has open, and the lock on such a file itself.

SQLite's own locks are POSIX locks, which have two traps. A process that closes any descriptor of a file loses
all its locks on that file. So the descriptor of `MainFile` stays open until the last store of this process
that has the file open is closed. And a forked process inherits SQLite's record of its locks, but not the
locks: it would read and write without any. So a forked process refuses the files of its parent.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from pathlib import Path
from threading import Lock
from typing import Final, TypeAlias

from penstock.core.errors import StoreFailed

#: Device and inode.
Identity: TypeAlias = tuple[int, int]

_lock = Lock()
#: How many stores of this process have a file open.
_users: Final[Counter[Identity]] = Counter()
#: The descriptors of the locks, by file. They are closed with the last store.
_descriptors: Final[dict[Identity, list[int]]] = {}
_of_parent: Final[set[Identity]] = set()


def refuse_inherited(path: Path) -> None:
    """Refuse a file that the parent had open when it forked this process, before the file is opened."""
    try:
        state = path.stat()
    except OSError:
        return
    if (state.st_dev, state.st_ino) in _of_parent:
        raise StoreFailed(
            f"{path} was in use when this process was forked, and SQLite cannot be used on both sides of a fork: "
            "start this process by the method spawn or forkserver, or fork before the first use of the file",
            kind="forked",
        )


class MainFile:
    """
    The database file of one store. Its lock is on the file itself: it holds although the names of all lock
    files were removed.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, -1
        state = path.stat()
        self._identity = (state.st_dev, state.st_ino)
        with _lock:
            _users[self._identity] += 1

    def lock(self) -> None:
        """BlockingIOError: another process, or another store, has the lock."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            with _lock:
                _descriptors.setdefault(self._identity, []).append(self._fd)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Called after the connections of the store are closed."""
        with _lock:
            _users[self._identity] -= 1
            if not _users[self._identity]:
                del _users[self._identity]
                for fd in _descriptors.pop(self._identity, ()):
                    os.close(fd)


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - the thread that held it stayed in the parent
    _lock = Lock()
    _of_parent.update(_users)
    _users.clear()
    for fds in _descriptors.values():
        for fd in fds:  # without an unlock, which would end the lock of the parent
            os.close(fd)
    _descriptors.clear()


os.register_at_fork(after_in_child=_after_fork)
