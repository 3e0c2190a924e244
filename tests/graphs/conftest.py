import threading

import pytest

from penstock.graphs.executor import GraphExecutor


@pytest.fixture
def executor():
    with GraphExecutor(compute=2, io=4, tasks=50, grace=0.2) as executor:
        yield executor


@pytest.fixture(autouse=True)
def no_thread_stays():
    """Except the one timer of the process, which all pools and graphs share, and what a test says it left behind."""
    before = set(threading.enumerate())
    left: set[str] = set()
    yield left
    for thread in set(threading.enumerate()) - before:
        if thread.name != "penstock-timer" and thread.name not in left:
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} leaked"
