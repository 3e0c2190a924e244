"""Nothing a test starts may outlive it: no process, no thread, no descriptor."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from tests.waiting import until

#: Started before the test, by others: a PostgreSQL server or a browser of the session.
elders = set()


def children():
    children = []
    for task in Path("/proc/self/task").iterdir():
        try:
            children += [int(child) for child in (task / "children").read_text().split()]
        except FileNotFoundError:
            continue
    return [child for child in children if child not in elders]


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    elders.clear()
    elders.update(children())
    before = descriptors()
    threads = set(threading.enumerate())
    yield
    gc.collect()
    until(lambda: not children())

    def extra():
        return [
            t
            for t in threading.enumerate()
            if t not in threads and t.name != "penstock-timer" and t.is_alive()
        ]

    until(lambda: not [t for t in extra() if t.name.startswith("penstock")])
    gc.collect()
    until(lambda: descriptors() <= before + 1)
