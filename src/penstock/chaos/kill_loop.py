"""
The kill loop: submits jobs to a daemon of its own, kills the daemon or a job with SIGKILL at random moments,
and checks the promises.

The checks compare the audit trail with the marks that the jobs wrote outside of it. Everything is in a new
folder: no other scheduler is touched.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from penstock.chaos import markers
from penstock.chaos.markers import Marker, marks
from penstock.client.client import Client
from penstock.core.errors import PenstockError, Unavailable
from penstock.core.jobs.job import ENDS, Event, EventKind
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId
from penstock.scheduler.job_service import feed
from penstock.stores.api import Store

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


class PromiseCheck(NamedTuple):
    name: str
    promise: str
    #: The violations. Empty: the promise holds.
    broken: list[str]


def check_promises(aftermath: Aftermath, store: Store) -> list[PromiseCheck]:
    markers = marks(aftermath.folder)
    beside = [f"{mark.job_id} ran beside itself" for mark in markers if mark.what == "beside"]
    events = list(feed(store))
    return [
        PromiseCheck("RS-1", "a job accepted is never lost", [*_lost(aftermath, store)]),
        PromiseCheck("RS-1", "a DONE job ran to its end", [*_undone(aftermath.acknowledged, markers)]),
        PromiseCheck("RS-2", "never two live attempts of one job", beside),
        PromiseCheck("RS-2", "every attempt has a higher fence than the one before", [*_fences(events)]),
        PromiseCheck("RS-3", "every job ends in one state, and stays there", [*_moved_on(events)]),
        PromiseCheck("RS-4", "never more units in use than there are", [*_overfull(events)]),
        PromiseCheck("JB-3", "the trail has no gap and the ledger adds up", store.audit()),
    ]


def _lost(aftermath: Aftermath, store: Store) -> Iterator[str]:
    jobs = {job.job_id: job for job in store.jobs([JobId(job) for job in aftermath.acknowledged])}
    for job_id in aftermath.acknowledged:
        job = jobs.get(JobId(job_id))
        if job is None:
            yield f"{job_id} is gone"
        elif job.state is not JobState.DONE:
            yield f"{job_id} is {job.state}"


def _undone(acknowledged: Sequence[str], markers: Sequence[Marker]) -> Iterator[str]:
    ended = {mark.job_id for mark in markers if mark.what == "ended"}
    return (f"{job_id} did not" for job_id in acknowledged if job_id not in ended)


def _fences(events: Iterable[Event]) -> Iterator[str]:
    last: dict[str, int] = {}
    for event in events:
        if event.kind is EventKind.RUNNING and event.dispatch_id is not None:
            job_id, _, fence = event.dispatch_id.rpartition(".")
            if int(fence) <= last.get(job_id, 0):
                yield f"{event.dispatch_id} came after fence {last[job_id]}"
            last[job_id] = int(fence)


def _moved_on(events: Iterable[Event]) -> Iterator[str]:
    done: set[str] = set()
    for event in events:
        if event.job_id is None or event.state is None:
            continue
        if event.job_id in done:
            yield f"{event.job_id} moved on to {event.state}"
        elif event.state is JobState.DONE:
            done.add(event.job_id)


def _overfull(events: Iterable[Event]) -> Iterator[str]:
    """A dispatch uses its units from its first event to its last."""
    held: set[str] = set()
    for event in events:
        if event.dispatch_id is None:
            continue
        if event.kind in ENDS:
            held.discard(event.dispatch_id)
        elif event.kind in (EventKind.DISPATCHING, EventKind.RUNNING):
            held.add(event.dispatch_id)
            if len(held) * COST > UNITS:
                yield f"{len(held) * COST} units at event {event.seq}"
