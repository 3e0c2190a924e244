"""Our daemon for one turn: in a directory of the turn, on its Unix socket alone. It belongs to the turn's own process; others find it by its directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from bench.queues import backlog
from bench.queues.tick import server

__all__ = ["start"]

_HOME = Path(server()).parent / "daemon"
os.environ["PENSTOCK_DATA_DIR"] = str(_HOME)


def start(*flags: str) -> None:
    """If there is none yet."""
    if (_HOME / "daemon.json").exists():
        return
    _HOME.mkdir(mode=0o700, exist_ok=True)
    backlog.lay(_HOME / "jobs.db")
    usual = [f"data_dir={_HOME}", "server.listen=none", "capacity.units=100", "log.level=error"]
    daemon = subprocess.Popen(
        [sys.executable, "-m", "penstock.daemon", *(f"--set={flag}" for flag in (*usual, *flags))]
    )
    until = time.monotonic() + 20
    while not (_HOME / "daemon.json").exists():
        if daemon.poll() is not None or time.monotonic() > until:
            raise RuntimeError("the daemon did not start")
        time.sleep(0.01)
