"""Who gets the machine, hour after hour: the real scheduler under loads that never end, on a clock that jumps."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from penstock.core.jobs.types import HOUR, MINUTE, SECOND
from penstock.stores.api import SetAddon, committed


class Load:
    """Keeps a scheduler busy: jobs come, run for as long as they said, and end."""

    def __init__(self, kit):
        self.kit, self.ends = kit.under(lease_for=HOUR), {}
        self.served = Counter()

    def step(self, seconds=1):
        """Time goes by: what is over ends, what may start starts."""
        kit = self.kit
        kit.later(seconds)
        for dispatch in kit.store.live():
            self.served[dispatch.addon_id] += dispatch.admission_class.cost_units * seconds
            if self.ends[dispatch.dispatch_id] <= kit.now:
                kit.job_service.end(dispatch.dispatch_id)
        self.start()

    def start(self):
        self.kit.step()
        for dispatch in self.kit.job_service.dispatchable():
            self.kit.job_service.lease(dispatch.job_id)
            self.ends[dispatch.dispatch_id] = dispatch.ends_at

    def longest_left(self):
        return max(self.ends[dispatch.dispatch_id] - self.kit.now for dispatch in self.kit.store.live())


@pytest.fixture
def load(kit):
    return Load(kit)


@pytest.fixture
def long_load(works_in_memory):
    """What it shows is the order's, and the stores agree about that elsewhere."""
    return Load(works_in_memory)


@pytest.mark.parametrize("together", [1, 9])
def test_one_job_behind_ten_thousand_of_another_addon_is_among_the_next_two(load, together):
    kit = load.kit
    kit.submit(n=10_000, cost_units=90 // together, expected_duration_sec=60)
    load.start()
    load.step(60)
    [lonely] = kit.submit(addon_id="b", cost_units=90 // together, expected_duration_sec=60)
    seen = kit.store.events(0, 100_000)[-1].seq
    load.step(60)
    load.step(60)
    started = [e.job_id for e in kit.store.events(seen, 1_000) if e.kind == "DISPATCHING"]

    assert lonely in started[:2]


def waits_under_urgent_load(load, others, length):
    kit = load.kit
    [lowest] = kit.submit(addon_id="patient", priority=1, cost_units=90)
    began = kit.now
    while kit.state(lowest) == "QUEUED":
        for n in range(others):
            kit.submit(addon_id=f"pushy-{n}", priority=100, cost_units=90, expected_duration_sec=length)
        load.step(length)
    return kit.now - began


def test_the_lowest_job_starts_within_ninety_minutes_under_endless_urgent_load(load):
    assert 60 * MINUTE < waits_under_urgent_load(load, others=1, length=60) <= 91 * MINUTE


def test_nor_do_many_who_push_hold_it_longer(long_load):
    assert waits_under_urgent_load(long_load, others=4, length=20) <= 90 * MINUTE + 20 * SECOND


@pytest.mark.parametrize("seed", range(4))
def test_a_large_job_behind_an_endless_stream_of_small_ones_gets_its_room(long_load, seed):
    load = long_load
    kit, rng = load.kit, Random(seed)

    def stream():
        for _ in range(2):
            kit.submit(addon_id="stream", cost_units=10, expected_duration_sec=rng.randrange(5, 60))

    for _ in range(60):
        stream()
        load.step()
    [large] = kit.submit(addon_id="large", cost_units=90)
    began, left = kit.now, 0
    while kit.state(large) == "QUEUED":
        stream()
        load.step()
        if kit.now <= began + 30 * SECOND:
            left = load.longest_left()

    assert kit.now - began <= 30 * SECOND + left + 2 * SECOND


def test_small_jobs_use_the_room_that_is_kept_for_as_long_as_they_end_in_time(load):
    kit = load.kit
    kit.submit(addon_id="long", cost_units=80, expected_duration_sec=120)
    load.start()
    kit.submit(addon_id="large", cost_units=90)
    kit.submit(addon_id="small", cost_units=5, expected_duration_sec=5)
    for _ in range(40):
        load.step()
    [slips, stays] = (
        kit.submit(addon_id="small", cost_units=5, expected_duration_sec=s)[0] for s in (20, 200)
    )
    load.step()

    assert [kit.state(slips), kit.state(stays)] == ["RUNNING", "QUEUED"]


def test_addons_get_the_machine_by_their_weight(long_load):
    load = long_load
    kit = load.kit
    committed(kit.store, SetAddon("heavy", weight=300))
    for addon_id in ("heavy", "light"):
        kit.submit(n=700, addon_id=addon_id, cost_units=15, expected_duration_sec=7)
    load.start()
    for _ in range(10 * 60):
        load.step()

    assert load.served["heavy"] / load.served["light"] == pytest.approx(3, rel=0.15)
