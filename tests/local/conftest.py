"""Nothing a test starts may outlive it: no process, no thread, no descriptor."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest


def children(pid=None):
    pid = pid or os.getpid()
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except FileNotFoundError:
            continue
    return found


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_until(condition, seconds=20):
    """For what another process does: the one place where tests look again and again."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = descriptors()
    threads = set(threading.enumerate())
    yield
    gc.collect()
    wait_until(lambda: not children(), 10)

    def extra():
        return [
            t
            for t in threading.enumerate()
            if t not in threads and t.name != "penstock-timer" and t.is_alive()
        ]

    wait_until(lambda: not [t for t in extra() if t.name.startswith("penstock")], 10)
    gc.collect()
    wait_until(lambda: descriptors() <= before + 1, 5)
