from __future__ import annotations

from collections import Counter

import pytest

from penstock.core.jobs.load import Capacity, Reading
from penstock.core.jobs.types import SECOND
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.stats import LiveStats


@pytest.fixture
def pulse(kit):
    kit.submit(n=3)  # before anybody looked
    pulse = LiveStats(kit.store, kit.machine, kit.rules.host)
    pulse.measure(kit.now)
    return pulse


def beat(kit, pulse, seconds=1):
    kit.later(seconds)
    pulse.measure(kit.now)
    return pulse.frame()


def test_a_second_counts_what_happened_in_it_and_nothing_before(kit, pulse):
    before = pulse.frame()
    kit.submit(n=2)
    [claimed] = kit.job_service.claim(WorkerKinds(), 1)
    kit.later(2)
    kit.job_service.end(claimed.dispatch.dispatch_id)
    after = beat(kit, pulse)

    assert before.second.counts == {}
    assert before.jobs == {"QUEUED": 3}
    assert after.second.counts == {"submitted": 2, "started": 1, "done": 1}
    assert after.jobs == {"QUEUED": 4, "DONE": 1}


def test_attempt_times_are_those_of_the_last_minute(kit, pulse):
    [claimed] = kit.job_service.claim(WorkerKinds(), 1)
    kit.later(5)
    kit.job_service.end(claimed.dispatch.dispatch_id)
    soon = beat(kit, pulse)
    for _ in range(60):
        late = beat(kit, pulse)

    assert soon.attempt == (5 * SECOND, 5 * SECOND)
    assert late.attempt is None


def test_wait_times_run_from_when_a_job_was_ready(kit, pulse):
    kit.later(7)
    kit.submit(earliest_start_at=kit.now + 3 * SECOND)
    kit.later(4)
    kit.job_service.claim(WorkerKinds(), 4)
    frame = beat(kit, pulse)

    assert sorted(frame.second.waits) == [1 * SECOND, *[11 * SECOND] * 3]
    assert frame.wait == (11 * SECOND, 11 * SECOND)


def test_every_measure_makes_a_frame_however_soon_it_comes(kit, pulse):
    """A timer may fire early: the commits of that second must not wait for the next commit to be counted."""
    before = pulse.frame()
    kit.later(0.9)
    kit.submit()
    pulse.measure(kit.now)

    assert pulse.frame().number == before.number + 1
    assert pulse.frame().second.counts["submitted"] == 1


def test_use_and_capacity_stand_beside_each_other(kit, pulse):
    kit.job_service.claim(WorkerKinds(), 2)
    frame = beat(kit, pulse)

    assert (frame.second.in_use, frame.second.capacity, frame.second.queued) == (20, 90, 1)


def test_refusals_are_counted_by_reason(kit, pulse):
    kit.submit(n=1, cost_units=80)
    kit.submit(n=1, cost_units=90, priority=90)
    kit.step()
    frame = beat(kit, pulse)

    refused = [event.reason for event in kit.store.events(0, 100) if event.kind == "DENIED"]
    assert refused
    assert frame.denials == Counter(refused)


def test_a_quarter_of_an_hour_is_kept(kit, pulse):
    for _ in range(1_000):
        beat(kit, pulse)

    assert len(pulse.history()) == 900


def test_a_second_without_a_commit_is_like_the_one_before_it_and_reads_nothing(kit, pulse, monkeypatch):
    kit.submit(n=2)
    kit.job_service.claim(WorkerKinds(), 1)
    before = beat(kit, pulse)
    for verb in ("events", "addons", "ledger"):
        monkeypatch.setattr(kit.store, verb, None)
    kit.later(1)
    pulse.measure(kit.now, changed=False)
    after = pulse.frame()

    assert before.second.counts == {"submitted": 2, "started": 1}
    assert after.second == before.second._replace(at=kit.now, counts={}, waits=[], attempts=[])
    assert (after.jobs, after.events, after.number) == (before.jobs, [], before.number + 1)
    assert after.wait == before.wait  # of the last minute


def test_a_second_without_a_commit_still_tells_how_much_the_machine_can_take(kit):
    measured = kit.under(capacity=Capacity())  # by signals that nobody takes: it may start nothing
    pulse = LiveStats(kit.store, measured.machine, kit.rules.host)
    pulse.measure(kit.now)
    before = pulse.frame().second.capacity
    for name in ("cpu", "memory"):
        measured.machine.report(Reading(name, 0.0, kit.now))
    kit.later(1)
    pulse.measure(kit.now, changed=False)

    assert before == 0 < pulse.frame().second.capacity


def test_who_rests_before_the_first_second_looks(kit):
    kit.submit(n=3)
    pulse = LiveStats(kit.store, kit.machine, kit.rules.host)
    pulse.measure(kit.now, changed=False)

    assert pulse.frame().jobs == {"QUEUED": 3}
