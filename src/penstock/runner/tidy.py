"""
Outputs and working folders go when their jobs are forgotten by the store.

In a thread of its own, for a job may have left a million files behind and the runner's thread has heartbeats to send. It passes over all folders,
the oldest first: once soon after the start, then whenever the store has pruned jobs. A pass is cut into small steps with pauses between them, so that
a hundred thousand folders take a small share of one core, and a stop waits for none of it.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Final

from penstock.core.job import EventKind
from penstock.core.words import JobId
from penstock.stores.protocol import Store

__all__ = ["OutputCleaner"]

log = logging.getLogger("penstock.runner")

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
