"""The live stats without open pages: while nothing is committed, they read nothing from the store."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import SECOND
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.server.event_hub import StatsStream
from penstock.stores.memory.store import MemoryStore

SUBMIT = [Intent(addon_id="a", job_type="t")]


class StatsHarness:
    """Live stats on a clock that the test moves. `read` has the names of the calls that went to the thread pool."""

    def __init__(self):
        self.now, self.read = 1_900_000_000 * SECOND, []
        self.service = SchedulerService(
            MemoryStore(lambda: self.now), SchedulerRules(capacity=Capacity(fixed=90))
        )
        self.loop = asyncio.new_event_loop()
        self.stream = StatsStream(self.service, self.run, self.loop)
        self.advance()

    async def run(self, work, *arguments):
        self.read.append(work.__name__)
        return work(*arguments)

    def advance(self, times=1):
        del self.read[:]
        for _ in range(times):
            self.now += SECOND
            self.loop.run_until_complete(self.stream.measure_second())


@pytest.fixture
def harness():
    harness = StatsHarness()
    yield harness
    harness.loop.close()


def test_while_nothing_is_committed_and_nobody_watches_the_store_is_left_alone(harness):
    harness.advance(5)

    assert harness.read == []
    assert len(harness.stream.live.history()) == 6


def test_what_was_committed_is_counted_in_the_next_beat(harness):
    harness.advance(5)
    harness.service.job_service.submit(SUBMIT)
    harness.advance()

    assert harness.read == ["_count"]
    assert harness.stream.live.history()[-1].counts == {"submitted": 1}


def test_a_commit_without_a_notice_is_counted_before_long(harness):
    harness.service.job_service.submit(SUBMIT)
    harness.stream.changed = False
    harness.advance(10)
    assert harness.read == []
    harness.advance()

    assert harness.stream.live.history()[-1].queued == 1


def test_who_watches_gets_every_second_from_the_store(harness):
    harness.stream.watchers = 1
    harness.advance(3)

    assert harness.read == ["_step"] * 3
    assert b'"queued":0' in harness.stream.line


def test_a_clock_that_may_have_to_be_asked_for_is_not_asked_on_the_loop(harness):
    harness.service.store.shared = True
    harness.advance(3)

    assert harness.read == ["_skip_second"] * 3
