"""
The killing: jobs are submitted, a daemon and its jobs work, and one after the other something is ended with SIGKILL at a moment of chance.

Everything lies in a folder that nobody else uses: no scheduler but the one that is started here is touched.
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
#: A job that is killed often is tried as often: what is to be proved is that none is lost, not that some give up.
_RETRIES: Final = json.dumps(["0.2s"] * 1_000)
_PATIENCE: Final = 120.0  # seconds without the end of a single job


class Aftermath(NamedTuple):
    """`acknowledged`: what a submit was answered for. `killed`: the scheduler and jobs, how often. `settled`: nothing was left to do."""

    folder: Path
    acknowledged: list[str]
    killed: Counter[str]
    settled: bool


class KillLoop:
    def __init__(self, folder: Path, *, jobs: int, kills: int, seed: int) -> None:
        self._folder, self._jobs, self._kills = folder, jobs, kills
        self._dice = Random(seed)  # noqa: S311  # no secret: the same seed kills at about the same moments
        self._daemon: subprocess.Popen[bytes] | None = None

    def wreak(self, tell: Callable[[str], object]) -> Aftermath:
        killed: Counter[str] = Counter()
        acknowledged: list[str] = []
        with self._up() as client:
            for number in range(1, self._kills + 1):
                while len(acknowledged) < self._jobs * number // self._kills:
                    acknowledged.append(self._submit(client, len(acknowledged)))
                time.sleep(self._dice.uniform(0.05, 0.8))
                who = self._kill()
                killed[who] += 1
                tell(f"{number} of {self._kills}: killed {who}")
            settled = self._calm(client, tell)
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
            # In a session of its own: Ctrl-C is for us, and the daemon is stopped in good order after it.
            self._daemon = subprocess.Popen(  # noqa: S603  # our own module
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
        """With a key: an answer that was lost with the scheduler is asked for again, and no second job comes of it."""
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
        """Witnesses that began and have not ended. The number may be another's by now, so its command is looked at."""
        marks = markers.marks(self._folder)
        began, ended = ({mark.pid for mark in marks if mark.what == what} for what in ("began", "ended"))
        return sorted(pid for pid in began - ended if _is_marker(pid, self._folder))

    def _calm(self, client: Client, tell: Callable[[str], object]) -> bool:
        """Nobody kills any more: everything must get somewhere."""
        left, since = -1, time.monotonic()
        while time.monotonic() < since + _PATIENCE:
            with suppress(PenstockError):
                jobs = client.stats().jobs
                now_left = sum(jobs.get(state, 0) for state in _OPEN)
                if now_left == 0:
                    return True
                if now_left != left:
                    left, since = now_left, time.monotonic()
                    tell(f"calm; {left} jobs to go")
            time.sleep(0.1)
        return False


def _is_marker(pid: int, folder: Path) -> bool:
    with suppress(OSError):
        return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
