"""
Permissions of the operating system: the users that jobs run as (`runner.users`), and files that no other user
of this machine may read.

The daemon looks users up once, at its start. To run jobs as another user, a process needs capabilities. Root
has them. A service that is not root must have them as ambient capabilities: the launcher is started by exec,
which drops all others.
"""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from penstock.core.errors import PenstockError

#: By number, the capabilities that are needed to become another user, to signal its processes, and to find
#: the processes that a killed warden left behind.
NEEDED: Final[Mapping[int, str]] = {
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    19: "CAP_SYS_PTRACE",
}


class SystemUser(NamedTuple):
    """A user of this machine, under whose rights jobs run."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}


def account(name: str) -> SystemUser:
    """The user of this name. KeyError: this machine has no such user."""
    entry = pwd.getpwnam(name)
    groups = tuple(sorted(os.getgrouplist(name, entry.pw_gid)))
    home = entry.pw_dir if Path(entry.pw_dir).is_dir() else "/"
    return SystemUser(name, entry.pw_uid, entry.pw_gid, groups, home, entry.pw_shell or "/bin/sh")


def missing_capabilities() -> list[str]:
    """The capabilities that this process lacks to run jobs as other users."""
    field = "CapEff" if os.geteuid() == 0 else "CapAmb"
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
    )
    held = int(status.get(field, "0"), 16)
    return [name for number, name in NEEDED.items() if not held >> number & 1]


class Unsafe(PenstockError):
    """A setting, a file or a directory gives other users access; the message says how to fix it."""

    code = "unsafe"


def private_directory(path: Path) -> Path:
    """Make the directory if it is missing; refuse it if another user can enter it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_shared(path, "700")
    return path


def private_file(path: Path) -> Path:
    _refuse_shared(path, "600")
    return path


def secret_key(path: Path) -> Path:
    """
    Refuse a certificate's key that others can reach. Its group may read it, as systems give keys to services.
    """
    if stat.S_IMODE(path.stat().st_mode) & 0o037:
        raise Unsafe(
            f"others on this machine can reach the key {path}: run `chmod 600 {path}`", path=str(path)
        )
    return path


def _refuse_shared(path: Path, mode: str) -> None:
    status = path.stat()
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise Unsafe(f"others on this machine can reach {path}: run `chmod {mode} {path}`", path=str(path))
    if status.st_uid != os.geteuid():
        raise Unsafe(f"{path} belongs to another user: choose a place of your own", path=str(path))


def replace_file(path: Path, content: bytes) -> None:
    """Write the file with mode 0600, whole or not at all. An OSError names `path`, not the temporary file."""
    try:
        _replace(path, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(path: Path, content: bytes) -> None:
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:  # also Ctrl-C: no half-written secret must stay behind
        Path(name).unlink(missing_ok=True)
        raise
