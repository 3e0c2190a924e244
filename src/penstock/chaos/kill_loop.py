"""
The kill loop: submits jobs to a daemon of its own, and kills the daemon or a job with SIGKILL at random
moments.

Everything is in a new folder: no other scheduler is touched.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from penstock.chaos import markers
from penstock.client.client import Client
from penstock.core.errors import PenstockError, Unavailable

__all__ = ["COST", "UNITS", "Aftermath", "KillLoop"]

UNITS: Final = 40
COST: Final = 10
_OPEN: Final = ("QUEUED", "DISPATCHING", "RUNNING")
#: A job that is killed often is retried as often: the check is that no job is lost, not that some are given
#: up.
_RETRIES: Final = json.dumps(["0.2s"] * 1_000)
_PATIENCE: Final = 120.0  # seconds without the end of a single job


class Aftermath(NamedTuple):
    """
    `acknowledged`: the ids of submitted jobs. `killed`: how often the scheduler and jobs. `settled`: all jobs
    ended.
    """

    folder: Path
    acknowledged: list[str]
    killed: Counter[str]
    settled: bool


class KillLoop:
    def __init__(self, folder: Path, *, jobs: int, kills: int, seed: int) -> None:
        self._folder, self._jobs, self._kills = folder, jobs, kills
        self._dice = Random(seed)  # noqa: S311  # no secret: the same seed kills at about the same moments
        self._daemon: subprocess.Popen[bytes] | None = None

    def run(self, report: Callable[[str], object]) -> Aftermath:
        killed: Counter[str] = Counter()
        acknowledged: list[str] = []
        with self._up() as client:
            for number in range(1, self._kills + 1):
                while len(acknowledged) < self._jobs * number // self._kills:
                    acknowledged.append(self._submit(client, len(acknowledged)))
                time.sleep(self._dice.uniform(0.05, 0.8))
                target = self._kill()
                killed[target] += 1
                report(f"{number} of {self._kills}: killed {target}")
            settled = self._settle(client, report)
        return Aftermath(self._folder, acknowledged, killed, settled)

    @contextmanager
    def _up(self) -> Iterator[Client]:
        self._start()
        try:
            with Client(
                f"unix://{self._folder}/penstock.sock", token=self._token(), retry_for=_PATIENCE
            ) as client:
                yield client
        finally:
            if self._daemon is not None:
                self._daemon.terminate()
                self._daemon.wait()

    def _start(self) -> None:
        settings = (
            f"data_dir={self._folder}",
            "server.listen=none",
            f"capacity.units={UNITS}",
            f"retry.crash={_RETRIES}",
            "log.format=json",
        )
        with (self._folder / "daemon.log").open("ab") as log:
            # In a session of its own: Ctrl-C goes to this process, which then stops the daemon.
            self._daemon = subprocess.Popen(  # noqa: S603  # the package's own module
                [sys.executable, "-m", "penstock.daemon", *(f"--set={one}" for one in settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while self._daemon.poll() is None and not self._listens(self._daemon.pid):
            time.sleep(0.02)
        if self._daemon.poll() is not None:
            raise Unavailable(f"the daemon did not start: {self._folder / 'daemon.log'} says why")

    def _listens(self, pid: int) -> bool:
        with suppress(OSError, ValueError):
            return bool(json.loads((self._folder / "daemon.json").read_text())["pid"] == pid)
        return False

    def _token(self) -> str:
        return (self._folder / "token").read_text("ascii").strip()

    def _submit(self, client: Client, number: int) -> str:
        """With a key: a submit whose answer was lost is repeated, and makes no second job."""
        seconds = f"{self._dice.uniform(0.05, 1.0):.2f}"
        argv = [sys.executable, markers.__file__, str(self._folder), seconds]
        return client.submit(
            "chaos", "penstock.command", {"argv": argv}, cost_units=COST, idempotency_key=str(number)
        ).job_id

    def _kill(self) -> str:
        victims = self._alive()
        if victims and self._dice.random() < 0.5:
            with suppress(ProcessLookupError):
                os.kill(self._dice.choice(victims), signal.SIGKILL)
            return "a job"
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait()
        self._start()
        return "the scheduler"

    def _alive(self) -> list[int]:
        """
        Processes of jobs that began and have not ended. A number may be reused by now, so its command line is
        checked.
        """
        marks = markers.marks(self._folder)
        began, ended = ({mark.pid for mark in marks if mark.what == what} for what in ("began", "ended"))
        return sorted(pid for pid in began - ended if _is_marker(pid, self._folder))

    def _settle(self, client: Client, report: Callable[[str], object]) -> bool:
        """No more kills: every job must end."""
        open_jobs, since = -1, time.monotonic()
        while time.monotonic() < since + _PATIENCE:
            with suppress(PenstockError):
                jobs = client.stats().jobs
                still_open = sum(jobs.get(state, 0) for state in _OPEN)
                if still_open == 0:
                    return True
                if still_open != open_jobs:
                    open_jobs, since = still_open, time.monotonic()
                    report(f"no more kills; {open_jobs} jobs to go")
            time.sleep(0.1)
        return False


def _is_marker(pid: int, folder: Path) -> bool:
    with suppress(OSError):
        return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
