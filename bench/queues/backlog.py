"""A file that is not empty when a turn begins: jobs of an addon that is paused, so they stand in line and nobody may start them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import AddonId
from penstock.scheduler.driver import SteadyClock
from penstock.stores.api import Depth, SetAddon, Submit, committed
from penstock.stores.sqlite.store import SqliteStore

__all__ = ["lay", "make"]

_FILE = "BENCH_BACKLOG"


def make(file: Path, queued: int) -> None:
    """Once for many turns: to submit a million takes longer than all that is measured behind them."""
    store = SqliteStore(file, SteadyClock())
    addon = AddonId("paused")
    committed(store, SetAddon(addon, paused=True))
    for first in range(0, queued, 1_000):
        committed(
            store,
            Submit(
                [Intent(addon_id=addon, job_type="waits", cost_units=1)] * min(1_000, queued - first), Depth()
            ),
        )
    store.close()
    os.environ[_FILE] = str(file)


def lay(file: Path) -> None:
    """There, if this turn shall have one."""
    made = os.environ.get(_FILE)
    if made:
        shutil.copy(made, file)
