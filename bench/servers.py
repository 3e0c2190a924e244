"""
Redis and PostgreSQL for the peers that need one: Debian's, on loopback, in a directory of their own, gone afterwards.

Both run with what their documentation gives a new installation, but for the room that a bench needs. PostgreSQL syncs every
commit, so it is measured against durable answers; Redis does so only when asked, and is run both ways.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

__all__ = ["postgres", "redis"]

_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))


@contextmanager
def redis(*, synced: bool = False) -> Iterator[str]:
    """`synced`: the append-only file is on disk before a write is answered, as a job that was accepted should be."""
    port = _free_port()
    with _directory() as where, _running(
        [
            _binary("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--dir", where, "--save", "",
            "--appendonly", "yes" if synced else "no", "--appendfsync", "always", "--daemonize", "no",
        ],
        port,
    ):  # fmt: skip
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def postgres() -> Iterator[str]:
    if not _BINARIES:
        raise FileNotFoundError("no PostgreSQL here: apt-get install postgresql")
    binaries, port = _BINARIES[-1], _free_port()
    with _directory(owner="postgres") as where:
        data = f"{where}/data"
        _call([f"{binaries}/initdb", "-D", data, "-A", "trust", "-U", "bench", "--no-sync"])
        with _running(
            [
                f"{binaries}/postgres", "-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1",
                "-c", f"unix_socket_directories={where}", "-c", "shared_buffers=256MB", "-c", "max_connections=60",
                "-c", "max_wal_size=4GB",
            ],
            port,
            user="postgres",
        ):  # fmt: skip
            _call(
                [f"{binaries}/pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port), "-t", "20"],
                until_it_works=20,
            )
            yield f"postgresql://bench@127.0.0.1:{port}/postgres"


@contextmanager
def _running(command: Sequence[str], port: int, user: str = "") -> Iterator[None]:
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(_as(user, command), stdout=log, stderr=log)
        try:
            _wait_for(port, server)
            yield
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes], seconds: float = 20) -> None:
    until = monotonic() + seconds
    while monotonic() < until and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            sleep(0.05)
        else:
            return
    raise RuntimeError(f"{server.args!r} did not come up")


@contextmanager
def _directory(owner: str = "") -> Iterator[str]:
    where = tempfile.mkdtemp(prefix="penstock-bench-")
    if owner and os.geteuid() == 0:
        shutil.chown(where, owner, owner)
    try:
        yield where
    finally:
        shutil.rmtree(where, ignore_errors=True)


def _call(command: Sequence[str], until_it_works: float = 0) -> None:
    """`until_it_works`: for so many seconds. A server listens before it lets anybody in."""
    until = monotonic() + until_it_works
    while subprocess.run(_as("postgres", command), check=False, stdout=subprocess.DEVNULL).returncode:
        if monotonic() > until:
            raise RuntimeError(f"{command!r} failed")
        sleep(0.1)


def _as(user: str, command: Sequence[str]) -> list[str]:
    """PostgreSQL refuses to run as root."""
    if user and os.geteuid() == 0:
        return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--", *command]
    return list(command)


def _binary(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"no {name} here: apt-get install {name}")
    return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
