"""Files and directories that no other user of this machine may read."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from penstock.core.errors import PenstockError


class Unsafe(PenstockError):
    """A setting, a file or a directory that would let others in; the message says how to mend it."""

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
    """The key of a certificate. Its group may read it: that is how systems hand keys to their services."""
    if stat.S_IMODE(path.stat().st_mode) & 0o037:
        raise Unsafe(
            f"others on this machine can reach the key {path}: run `chmod 600 {path}`", path=str(path)
        )
    return path


def _refuse_shared(path: Path, mode: str) -> None:
    found = path.stat()
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise Unsafe(f"others on this machine can reach {path}: run `chmod {mode} {path}`", path=str(path))
    if found.st_uid != os.geteuid():
        raise Unsafe(f"{path} belongs to another user: choose a place of your own", path=str(path))


def replace_file(path: Path, content: bytes) -> None:
    """0600 from its first byte on, and whole or not at all. An OSError names `path`, not the file that takes its place."""
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
    except BaseException:  # whatever it was, Ctrl-C included: no half-written secret stays behind
        Path(name).unlink(missing_ok=True)
        raise
