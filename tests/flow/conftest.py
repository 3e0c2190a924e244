from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No thread outlives its flow, and asyncio has nothing to complain of (a lost task, an error that no code fetched)."""
    before = set(threading.enumerate())
    warnings = LoggedWarnings(logging.WARNING)
    logging.getLogger("asyncio").addHandler(warnings)

    yield

    gc.collect()
    logging.getLogger("asyncio").removeHandler(warnings)
    assert not set(threading.enumerate()) - before
    assert not warnings.messages


@pytest.fixture
async def no_task_is_left():
    """A few turns of the loop after a test, nothing runs that did not run before it."""
    before = asyncio.all_tasks()

    yield

    await turns()
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}


@pytest.fixture
def calls():
    return ControlledCalls()


@pytest.fixture
def alive():
    return Alive()


class LoggedWarnings(logging.Handler):
    def __init__(self, level):
        super().__init__(level)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


class ControlledCalls:
    """Calls that the test ends, with a record of their starts, cancels and most at once."""

    def __init__(self):
        self.gates = {}
        self.started = []
        self.running = []
        self.canceled = []
        self.most = 0

    async def call(self, item):
        gate = self.gates[item] = asyncio.get_running_loop().create_future()
        self.started.append(item)
        self.running.append(item)
        self.most = max(self.most, len(self.running))
        try:
            return await gate
        except asyncio.CancelledError:
            self.canceled.append(item)
            raise
        finally:
            self.running.remove(item)

    def end(self, *items):
        for item in items:
            self.gates[item].set_result(item)

    def fail(self, item, error):
        self.gates[item].set_exception(error)

    async def settle(self):
        """Let every task run until it waits."""
        await turns()

    def pulled_from(self, items):
        """The items, and in `self.pulled` those that have been asked for."""
        self.pulled = []
        for item in items:
            self.pulled.append(item)
            yield item

    async def apulled_from(self, items):
        self.closed = False
        self.pulled = []
        try:
            for item in items:
                await asyncio.sleep(0)
                self.pulled.append(item)
                yield item
        finally:
            self.closed = True


class Alive:
    """How many payloads there are, and how many there have been at once."""

    def __init__(self):
        self.now = 0
        self.most = 0
        self._lock = threading.Lock()

    def payload(self):
        payload = Payload()
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        weakref.finalize(payload, self._gone)
        return payload

    def _gone(self):
        with self._lock:
            self.now -= 1


class Payload:
    pass


async def turns(count=30):
    for _ in range(count):
        await asyncio.sleep(0)
