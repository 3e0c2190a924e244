"""
The processes of a trial: daemons and SDK workers, and killing and freezing of processes.

Each daemon has a data directory below the folder of the trial. On PostgreSQL several daemons share one
database, in a schema of their own. A process that is frozen with SIGSTOP continues after a time in any case:
the loop may be waiting for an answer of the frozen scheduler.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final, NamedTuple, Protocol, TypeVar

from penstock.chaos.checks import UNITS
from penstock.client.client import Client
from penstock.core.errors import Unavailable

#: The length of a lease in seconds: short, so that a freeze can outlast it.
LEASE_SEC: Final = 2
_LONGEST_FREEZE_SEC: Final = 15 * LEASE_SEC
#: Enough retries for a job that is killed often: the check is that no job is lost.
_RETRIES: Final = json.dumps(["0.2s"] * 1_000)
#: For how many seconds a request is repeated.
PATIENCE: Final = 120.0


class TrialPlace(NamedTuple):
    """The folder and the database of a trial. Without an address: a SQLite file in the folder."""

    folder: Path
    address: str | None = None
    schema: str = "penstock"

    @property
    def database(self) -> str:
        return self.address or str(self.folder / "jobs.db")


class TrialProcess(Protocol):
    """A process that can be killed or frozen."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """Kill it (SIGKILL), and start another if the trial needs it."""


P = TypeVar("P", bound=TrialProcess)


class Daemon:
    """One scheduler. It can be killed and started again on the same data directory."""

    def __init__(self, place: TrialPlace, name: str) -> None:
        self.name, self._folder = name, place.folder / name
        self._folder.mkdir(mode=0o700)
        self._settings = [
            f"data_dir={self._folder}",
            f"database={place.database}",
            f"host.name={name}",
            "server.listen=none",
            f"capacity.units={UNITS}",
            f"leases.ttl={LEASE_SEC}s",
            f"retry.crash={_RETRIES}",
            'retry.start=["0.2s"]',
            "log.format=json",
        ]
        if place.address is not None:
            self._settings.append(f"postgres.schema={place.schema}")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._folder}/penstock.sock"

    @property
    def token(self) -> str:
        return (self._folder / "token").read_text("ascii").strip()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> Client:
        return Client(self.url, token=self.token, retry_for=PATIENCE)

    def start(self) -> None:
        words = [f"--set={one}" for one in self._settings]
        self._process = spawn(["penstock.daemon", *words], self._folder / "daemon.log")
        while self._process.poll() is None and not self._listens(self._process.pid):
            time.sleep(0.02)
        if self._process.poll() is not None:
            raise Unavailable(f"the daemon did not start: {self._folder / 'daemon.log'} says why")

    def _listens(self, pid: int) -> bool:
        with suppress(OSError, ValueError):
            return bool(json.loads((self._folder / "daemon.json").read_text())["pid"] == pid)
        return False

    def kill(self) -> None:
        end(self._process, signal.SIGKILL)
        self.start()

    def stop(self) -> None:
        end(self._process, signal.SIGTERM)


class SdkWorker:
    """A program with an SDK worker. Every second one runs its functions in processes."""

    def __init__(self, daemon: Daemon, folder: Path, number: int) -> None:
        self.name = f"worker{number}"
        options = ["--processes"] if number % 2 else []
        self._words = ["penstock.chaos.sdk_worker", str(folder), daemon.url, self.name, *options]
        self._token, self._log = daemon.token, folder / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._process = spawn(self._words, self._log, PENSTOCK_TOKEN=self._token)

    def kill(self) -> None:
        end(self._process, signal.SIGKILL)
        self.start()

    def stop(self) -> None:
        end(self._process, signal.SIGTERM)


class Command(NamedTuple):
    """The process of a command that a scheduler runs."""

    pid: int

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def spawn(words: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """
    Start a process in a session of its own: Ctrl-C reaches only this process, which then stops the others.
    """
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603  # a module of the package
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **variables},
        )


def end(process: subprocess.Popen[bytes] | None, number: signal.Signals) -> None:
    if process is not None:
        process.send_signal(number)
        process.wait()


class Freezer:
    """Freezes processes for a time. It uses pidfds, which stay correct even if a process id is reused."""

    def __init__(self) -> None:
        self._frozen: dict[int, Thread] = {}

    def freeze(self, pid: int, seconds: float, until: Callable[[], bool]) -> None:
        """Freeze for these seconds, then until the condition holds or `_LONGEST_FREEZE_SEC` are over."""
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            thread = self._frozen[pid] = Thread(
                target=_continue_later, args=(process, seconds, until), daemon=True
            )
            thread.start()

    def unfrozen(self, processes: Sequence[P]) -> list[P]:
        """The processes that are not frozen. If all are, wait until one continues."""
        while processes and all(self._is_frozen(process.pid) for process in processes):
            time.sleep(0.02)
        return [process for process in processes if not self._is_frozen(process.pid)]

    def _is_frozen(self, pid: int) -> bool:
        return pid in self._frozen and self._frozen[pid].is_alive()

    def wait(self) -> None:
        """Wait until every process continues."""
        for thread in self._frozen.values():
            thread.join()


def _continue_later(process: int, seconds: float, until: Callable[[], bool]) -> None:
    latest = time.monotonic() + _LONGEST_FREEZE_SEC
    time.sleep(seconds)
    while not until() and time.monotonic() < latest:
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGCONT)
    os.close(process)
