"""
What a runner that was killed left running, found and ended before anybody runs anything again (SPEC TR-11).

Every process below a runner carries in its environment whose it is: a mark made from the folder of the runs, which one runner at a time may
use. So with the lock on that folder in hand, whatever carries the mark is left over, and nothing else on the machine is touched.
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
from penstock.runner.process_tree import DISPATCH_MARK, RUNNER_MARK, marked, send
from penstock.scheduler.maintenance import Survivors
from penstock.stores.api import Store

log = logging.getLogger("penstock.runner")

#: What runs under this name was run by us.
WORKER: Final = "runner"
_TIME_FOR_WARDENS: Final = 2.0
_PATIENCE: Final = 10.0


class Leftovers:
    """Where outputs and working folders of all runs lie, and who owns the processes that belong to them."""

    def __init__(self, data: Path | str) -> None:
        self.path = Path(data).resolve() / "runs"
        self.mark = blake2b(str(self.path).encode(), digest_size=12).hexdigest()
        self._lock = -1

    def take(self) -> None:
        """Refused while another runner works here."""
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

    def give_back(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def output(self, dispatch_id: DispatchId) -> Output:
        """What one attempt has printed, while it runs and after."""
        job, _, fence = dispatch_id.rpartition(".")
        if "/" in job or not fence.isdigit():
            raise NotFound(f"there is no dispatch {dispatch_id}", dispatch_id=dispatch_id)
        return Output(self.path / job / fence)

    def survivors(self) -> Survivors:
        """For the house: ends what is left of our dispatches and says which are gone for certain."""

        def gone(dispatches: Sequence[Dispatch]) -> Collection[DispatchId]:
            self.take()
            left = self.end_leftovers()
            return [d.dispatch_id for d in dispatches if d.worker == WORKER and d.dispatch_id not in left]

        return gone

    def end_leftovers(self) -> set[str]:
        """
        The marks of what would not die. Jobs are ended at once; launchers and wardens, which know better what is below them, are given time to do
        that themselves, as they do when their runner is gone.
        """
        began = time.monotonic()
        while found := list(marked(RUNNER_MARK, {self.mark})):
            took = time.monotonic() - began
            jobs = {process.pid: mark for process, mark in marked(DISPATCH_MARK, lambda _: True)}
            if took > _PATIENCE:
                pids = [process.pid for process, _ in found]
                log.error("what an earlier runner left survives SIGKILL: processes %s", pids)
                return {jobs[pid] for pid in pids if pid in jobs}
            for process, _ in found:
                if process.pid in jobs or took > _TIME_FOR_WARDENS:
                    send(process, signal.SIGKILL)
            time.sleep(0.02)
        return set()


#: From the start to the first step, and between two steps of a pass at least.
_PAUSE_SEC: Final = 1.0
#: A pause is so many times as long as the step before it.
_PAUSE_SHARE: Final = 30
#: How often the trail is asked whether jobs were pruned.
_LOOK_SEC: Final = 30.0
_BATCH: Final = 500


class OutputCleaner:
    def __init__(self, store: Store, runs: Path, batch: int = _BATCH) -> None:
        self._store, self._runs, self._batch = store, runs, batch
        #: Folders that this pass has not looked at, the oldest last: a job's id begins with the moment when it was submitted.
        self._names: list[str] = []
        #: The newest event when the last pass began; None: a pass is due.
        self._passed_at: int | None = None
        self._over = Event()
        self._thread = Thread(target=self._loop, name="penstock-tidy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It may be at a large folder: the next start removes what is left."""
        self._over.set()
        self._thread.join(0.1)

    def step(self) -> float:
        """Look at the next folders, if a pass is under way or due. Returns the seconds until the next step."""
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
        known = {job.job_id for job in self._store.jobs([JobId(name) for name in names])}
        for name in names:
            if name not in known and not self._over.is_set():
                shutil.rmtree(self._runs / name, ignore_errors=True)

    def _loop(self) -> None:
        pause = _PAUSE_SEC
        while not self._over.wait(pause):
            try:
                pause = self.step()
            except Exception:  # the store is away for a while: another pass comes
                log.exception("old outputs could not be removed; it is tried again")
                self._passed_at, pause = None, _LOOK_SEC
