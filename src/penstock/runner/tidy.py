"""
Outputs and working folders go when their jobs are forgotten by the store.

In a thread of its own, for a job may have left a million files behind and the runner's thread has heartbeats to send.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Final

from penstock.core.words import JobId
from penstock.stores.protocol import Store

__all__ = ["Tidy", "tidy"]

log = logging.getLogger("penstock.runner")

_EVERY_SEC: Final = 3_600.0
_BATCH: Final = 500


class Tidy:
    def __init__(self, store: Store, runs: Path, every_sec: float = _EVERY_SEC) -> None:
        self._store, self._runs, self._every = store, runs, every_sec
        self._over = Event()
        self._thread = Thread(target=self._loop, name="penstock-tidy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It may be at a large folder: what it leaves is for the next one."""
        self._over.set()
        self._thread.join(0.1)

    def _loop(self) -> None:
        while not self._over.wait(self._every):
            try:
                tidy(self._store, self._runs)
            except Exception:  # a folder that cannot be removed must not stop the removing of all the others
                log.exception("old outputs could not be removed; it is tried again")


def tidy(store: Store, runs: Path) -> int:
    """How many folders went."""
    names = [name for name in os.listdir(runs) if not name.startswith(".")]  # noqa: PTH208  # names alone, perhaps very many
    return sum(_forget(store, runs, names[at : at + _BATCH]) for at in range(0, len(names), _BATCH))


def _forget(store: Store, runs: Path, names: Sequence[str]) -> int:
    known = {job.job_id for job in store.jobs([JobId(name) for name in names])}
    old = [name for name in names if name not in known]
    for name in old:
        shutil.rmtree(runs / name, ignore_errors=True)
    return len(old)
