"""
The runner's folder, and the removal of what is left over: processes of a runner that was killed (SPEC TR-11),
and outputs of jobs that the store has forgotten.

Every process below a runner has a mark in its environment, made from the path of the folder. One runner at a
time may lock the folder, so every process with the mark that runs before it starts any is left over. It ends
those first, and touches no other process of the machine.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import time
from collections.abc import Collection, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Event, Thread
from typing import Final

from penstock.core.errors import DispatcherHeld, NotFound
from penstock.core.jobs.job import Dispatch, EventKind
from penstock.core.jobs.types import DispatchId, JobId
from penstock.runner.output import Output
from penstock.runner.process_tree import DISPATCH_MARK, RUNNER_MARK, find_marked, send_signal
from penstock.scheduler.maintenance import Survivors
from penstock.stores.api import Store

log = logging.getLogger("penstock.runner")

#: The worker name of the runner's dispatches.
WORKER: Final = "runner"
_TIME_FOR_WARDENS: Final = 2.0
_PATIENCE: Final = 10.0


class RunnerFolder:
    """The folder with the outputs and working folders of all attempts, and the mark of their processes."""

    def __init__(self, data: Path | str) -> None:
        self.path = Path(data).resolve() / "runs"
        self.mark = blake2b(str(self.path).encode(), digest_size=12).hexdigest()
        self._lock = -1

    def lock(self) -> None:
        """Lock the folder. Raises DispatcherHeld while another runner works here."""
        if self._lock >= 0:
            return
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(self.path / ".lock", flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise DispatcherHeld(f"another runner works in {self.path}", holder=str(self.path)) from None
        self._lock = lock

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def output(self, dispatch_id: DispatchId) -> Output:
        """The output of one attempt, while it runs and after."""
        job, _, fence = dispatch_id.rpartition(".")
        if "/" in job or not fence.isdigit():
            raise NotFound(f"there is no dispatch {dispatch_id}", dispatch_id=dispatch_id)
        return Output(self.path / job / fence)

    def survivors(self) -> Survivors:
        """
        A function for the scheduler: it ends the processes of earlier dispatches, and returns the dispatches
        of which none is left.
        """

        def gone(dispatches: Sequence[Dispatch]) -> Collection[DispatchId]:
            self.lock()
            alive = self.end_leftovers()
            return [d.dispatch_id for d in dispatches if d.worker == WORKER and d.dispatch_id not in alive]

        return gone

    def end_leftovers(self) -> set[str]:
        """
        End all processes with the mark, and return the dispatches whose processes do not die. Jobs are killed
        at once; launchers and wardens get time to end the processes below them.
        """
        began = time.monotonic()
        while leftovers := list(find_marked(RUNNER_MARK, {self.mark})):
            took = time.monotonic() - began
            jobs = {process.pid: mark for process, mark in find_marked(DISPATCH_MARK, lambda _: True)}
            if took > _PATIENCE:
                pids = [process.pid for process, _ in leftovers]
                log.error("processes of an earlier runner survive SIGKILL: %s", pids)
                return {jobs[pid] for pid in pids if pid in jobs}
            for process, _ in leftovers:
                if process.pid in jobs or took > _TIME_FOR_WARDENS:
                    send_signal(process, signal.SIGKILL)
            time.sleep(0.02)
        return set()


#: The pause before the first step, and the shortest pause between two steps.
_PAUSE_SEC: Final = 1.0
#: A pause is this many times as long as the step before it.
_PAUSE_SHARE: Final = 30
#: Seconds between two checks whether jobs were pruned.
_LOOK_SEC: Final = 30.0
_BATCH: Final = 500


class OutputCleaner:
    """
    Removes the outputs and working folders of jobs that the store has forgotten.

    It has a thread of its own: a job may have left a million files, and the runner's thread must send
    heartbeats. It checks all folders, the oldest first: once soon after the start, then whenever the store
    has pruned jobs. A pass consists of small steps with pauses, so that a hundred thousand folders take a
    small share of one core, and a stop waits for no pass.
    """

    def __init__(self, store: Store, runs: Path, batch: int = _BATCH) -> None:
        self._store, self._runs, self._batch = store, runs, batch
        #: Folders that this pass has not checked, the oldest last: a job's id begins with its time of submit.
        self._names: list[str] = []
        #: The newest event when the last pass began. None: a pass is due.
        self._passed_at: int | None = None
        self._over = Event()
        self._thread = Thread(target=self._loop, name="penstock-tidy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop without waiting for the removal of a large folder: the next start continues it."""
        self._over.set()
        self._thread.join(0.1)

    def step(self) -> float:
        """Check the next folders, if a pass is under way or due. Returns the seconds until the next step."""
        began = time.monotonic()
        if not self._names and not self._begin_pass():
            return _LOOK_SEC
        batch = self._names[-self._batch :]
        del self._names[-self._batch :]
        self._remove_unknown(batch)
        return max(_PAUSE_SEC, _PAUSE_SHARE * (time.monotonic() - began)) if self._names else _LOOK_SEC

    def _begin_pass(self) -> bool:
        newest = self._store.newest()
        if self._passed_at is not None and not self._store.events_of({EventKind.PRUNED}, self._passed_at, 1):
            return False
        names = [name for name in os.listdir(self._runs) if not name.startswith(".")]  # noqa: PTH208  # names alone, perhaps very many
        self._names, self._passed_at = sorted(names, reverse=True), newest
        return True

    def _remove_unknown(self, names: Sequence[str]) -> None:
        job_ids = {job.job_id for job in self._store.jobs([JobId(name) for name in names])}
        for name in names:
            if name not in job_ids and not self._over.is_set():
                shutil.rmtree(self._runs / name, ignore_errors=True)

    def _loop(self) -> None:
        pause = _PAUSE_SEC
        while not self._over.wait(pause):
            try:
                pause = self.step()
            except Exception:  # the store is away: the next pass tries again
                log.exception("old outputs could not be removed; the next pass tries again")
                self._passed_at, pause = None, _LOOK_SEC
