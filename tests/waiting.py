"""Waiting for what another thread or process does: the one place where tests look again and again."""

from __future__ import annotations

import time
from pathlib import Path

#: Nothing takes so long, on a machine that is ten times as busy: a test that waits for it has failed.
LONG = 60.0


def until(true, within=LONG, what="it"):
    """What was found."""
    ends = time.monotonic() + within
    while not (found := true()):
        assert time.monotonic() < ends, f"{what} did not come in time"
        time.sleep(0.005)
    return found


def alive(pid):
    """Not counting zombies, which only wait for somebody to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
