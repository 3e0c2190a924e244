from __future__ import annotations

from collections import Counter

import pytest

from penstock.core.jobs.load import Capacity, Reading
from penstock.core.jobs.types import SECOND
from penstock.scheduler.dispatcher import WorkerKinds
from penstock.scheduler.stats import LiveStats


@pytest.fixture
def pulse(works):
    works.submit(n=3)  # before anybody looked
    pulse = LiveStats(works.store, works.machine, works.rules.host)
    pulse.step(works.now)
    return pulse


def beat(works, pulse, seconds=1):
    works.later(seconds)
    pulse.step(works.now)
    return pulse.frame()


def test_a_second_counts_what_happened_in_it_and_nothing_before(works, pulse):
    before = pulse.frame()
    works.submit(n=2)
    [claimed] = works.job_service.claim(WorkerKinds(), 1)
    works.later(2)
    works.job_service.complete(claimed.dispatch.dispatch_id)
    after = beat(works, pulse)

    assert before.second.counts == {}
    assert before.jobs == {"QUEUED": 3}
    assert after.second.counts == {"submitted": 2, "started": 1, "done": 1}
    assert after.jobs == {"QUEUED": 4, "DONE": 1}


def test_run_times_are_those_of_the_last_minute(works, pulse):
    [claimed] = works.job_service.claim(WorkerKinds(), 1)
    works.later(5)
    works.job_service.complete(claimed.dispatch.dispatch_id)
    soon = beat(works, pulse)
    for _ in range(60):
        late = beat(works, pulse)

    assert soon.run == (5 * SECOND, 5 * SECOND)
    assert late.run is None


def test_wait_times_run_from_when_a_job_was_ready(works, pulse):
    works.later(7)
    works.submit(earliest_start_at=works.now + 3 * SECOND)
    works.later(4)
    works.job_service.claim(WorkerKinds(), 4)
    frame = beat(works, pulse)

    assert sorted(frame.second.waits) == [1 * SECOND, *[11 * SECOND] * 3]
    assert frame.wait == (11 * SECOND, 11 * SECOND)


def test_a_ring_between_two_seconds_makes_no_second(works, pulse):
    works.later(0.2)
    works.submit()
    wish = pulse.step(works.now)

    assert wish == works.now + 0.8 * SECOND
    assert len(pulse.history()) == 1


def test_use_and_capacity_stand_beside_each_other(works, pulse):
    works.job_service.claim(WorkerKinds(), 2)
    frame = beat(works, pulse)

    assert (frame.second.in_use, frame.second.capacity, frame.second.queued) == (20, 90, 1)


def test_refusals_are_counted_by_reason(works, pulse):
    works.submit(n=1, cost_units=80)
    works.submit(n=1, cost_units=90, priority=90)
    works.step()
    frame = beat(works, pulse)

    refused = [event.reason for event in works.store.events(0, 100) if event.kind == "DENIED"]
    assert refused
    assert frame.denials == Counter(refused)


def test_a_quarter_of_an_hour_is_kept(works, pulse):
    for _ in range(1_000):
        beat(works, pulse)

    assert len(pulse.history()) == 900


def test_a_second_without_a_commit_is_like_the_one_before_it_and_reads_nothing(works, pulse, monkeypatch):
    works.submit(n=2)
    works.job_service.claim(WorkerKinds(), 1)
    before = beat(works, pulse)
    for verb in ("events", "addons", "ledger"):
        monkeypatch.setattr(works.store, verb, None)
    works.later(1)
    pulse.rest(works.now)
    after = pulse.frame()

    assert before.second.counts == {"submitted": 2, "started": 1}
    assert after.second == before.second._replace(at=works.now, counts={}, waits=(), runs=())
    assert (after.jobs, after.events, after.number) == (before.jobs, (), before.number + 1)
    assert after.wait == before.wait  # of the last minute


def test_a_second_without_a_commit_still_tells_how_much_the_machine_can_take(works):
    measured = works.under(capacity=Capacity())  # by signals that nobody takes: it may start nothing
    pulse = LiveStats(works.store, measured.machine, works.rules.host)
    pulse.step(works.now)
    before = pulse.frame().second.capacity
    for name in ("cpu", "memory"):
        measured.machine.report(Reading(name, 0.0, works.now))
    works.later(1)
    pulse.rest(works.now)

    assert before == 0 < pulse.frame().second.capacity


def test_who_rests_before_the_first_second_looks(works):
    works.submit(n=3)
    pulse = LiveStats(works.store, works.machine, works.rules.host)
    pulse.rest(works.now)

    assert pulse.frame().jobs == {"QUEUED": 3}
