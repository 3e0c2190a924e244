"""One scheduler as a whole: what it remembers from the last start, and the verbs of whoever minds it."""

from __future__ import annotations

from dataclasses import replace
from threading import Event

import pytest
from tests.engine.conftest import Hands

from penstock.core.intent import Intent
from penstock.core.order import Aging, Ordering
from penstock.core.quiet import Capacity
from penstock.core.words import MINUTE, SECOND
from penstock.engine.clock import SteadyClock
from penstock.engine.house import House
from penstock.engine.rules import Rules
from penstock.stores.memory import MemoryStore
from penstock.stores.sqlite import SqliteStore

RULES = Rules(capacity=Capacity(fixed=90))


def job(**fields):
    return Intent(**{"addon_id": "a", "job_type": "t"} | fields)


@pytest.fixture
def reopened(tmp_path):
    """Opens the same file again and again, as programs do."""
    open_now = []

    def again(clock=None):
        if open_now:
            open_now.pop().close()
        open_now.append(SqliteStore(tmp_path / "jobs.db", clock or SteadyClock()))
        return open_now[0]

    yield again
    open_now.pop().close()


def test_what_was_paused_is_paused_after_a_restart(reopened):
    desk = House(reopened(), RULES).desk
    desk.pause()
    [job_id] = [receipt.job_id for receipt in desk.submit([job()])]
    house = House(reopened(), RULES)
    house.dispatcher.step(house.store.now())
    assert house.desk.explain(job_id).reason == "paused"

    house.desk.resume()
    house.dispatcher.step(house.store.now())
    assert str(house.store.job(job_id).state) == "DISPATCHING"


def test_an_addon_paused_by_its_name_stays_so_when_everything_is_resumed(reopened):
    house = House(reopened(), RULES)
    house.desk.pause("a")
    house.desk.pause()
    house.desk.resume()
    mine, others = [r.job_id for r in house.desk.submit([job(), job(addon_id="b")])]
    house.dispatcher.step(house.store.now())

    assert str(house.store.job(mine).state) == "QUEUED"
    assert str(house.store.job(others).state) == "DISPATCHING"


def test_a_changed_aging_setting_holds_for_those_who_wait_already(reopened):
    now = [1_900_000_000 * SECOND]
    clock = lambda: now[0]  # noqa: E731 - a clock that stands
    first = House(reopened(clock), RULES)
    [old] = [r.job_id for r in first.desk.submit([job(priority=50, cost_units=90)])]
    now[0] += MINUTE
    [new] = [r.job_id for r in first.desk.submit([job(priority=55, cost_units=90)])]
    rules = replace(RULES, ordering=Ordering(aging=Aging(1 * SECOND)))
    house = House(reopened(clock), rules).start()
    house.stop()
    house.dispatcher.step(now[0])

    assert [str(house.store.job(i).state) for i in (old, new)] == ["DISPATCHING", "QUEUED"]


class Ticks:
    def __init__(self):
        self.heard = Event()

    def step(self, now):
        self.heard.set()
        return now + 3_600 * SECOND


def test_a_kick_looks_at_once():
    ticks = Ticks()
    house = House(MemoryStore(SteadyClock()), replace(RULES, tick=3_600 * SECOND), more=[ticks]).start()
    assert ticks.heard.wait(10)
    ticks.heard.clear()
    house.kick()
    came = ticks.heard.wait(10)
    house.stop()

    assert came


def test_a_host_that_drains_takes_nothing_until_it_is_told_to():
    house = House(MemoryStore(SteadyClock()), RULES)
    house.drain()
    [receipt] = house.desk.submit([job()])
    house.dispatcher.step(house.store.now())
    assert house.desk.explain(receipt.job_id).reason == "draining"

    house.drain(on=False)
    house.dispatcher.step(house.store.now())
    assert str(house.store.job(receipt.job_id).state) == "DISPATCHING"


def test_a_start_that_fails_leaves_the_right_to_dispatch_to_others(reopened):
    def broken(_):
        raise RuntimeError("what runs here cannot be told")

    house = House(reopened(), RULES)
    house.desk.submit([job()])
    house.dispatcher.step(house.store.now())
    with pytest.raises(RuntimeError, match="cannot be told"):
        House(house.store, RULES, survivors=broken).start()

    House(house.store, RULES).start().stop()


def rounds(house, clock, seconds):
    """How often its driver is woken in that time, if nobody rings."""
    until, count = clock.now + seconds * SECOND, 0
    while (wish := house.driver.round()) < until:
        clock.now, count = wish, count + 1
    return count


@pytest.fixture
def idle():
    """A scheduler that measures its machine, with one job that nobody comes for, on a clock that the test moves."""
    clock = Hands()
    house = House(MemoryStore(clock), Rules(), preempts=True)
    house.roll.join()
    house.desk.submit([job(run_when="quiet", quiet_for_sec=3_600)])
    return house, clock


def test_an_idle_scheduler_is_woken_once_a_tick(idle):
    assert rounds(*idle, 60) <= 33  # with the first measurement, and what is done once a minute


def test_rings_at_odd_moments_leave_no_more_wakes_behind(idle):
    house, clock = idle
    for part_of_second in (0.3, 0.7, 0.45):
        clock.now += int(part_of_second * SECOND)
        house.driver.round()
    rounds(house, clock, 4)

    assert rounds(house, clock, 60) <= 32


def test_a_drain_is_heard_within_a_second_though_it_was_looked_for_just_before(idle):
    house, clock = idle
    house.driver.round()
    clock.now += SECOND // 10
    house.store.drain(house.rules.host, draining=True)
    rounds(house, clock, 1.2)

    assert house.machine.drained


def test_where_nothing_runs_the_lines_are_not_gone_through_for_who_should_make_room(idle, monkeypatch):
    house, clock = idle
    looks = []
    monkeypatch.setattr(house.store, "look", lambda *_: looks.append(1))
    rounds(house, clock, 10)

    assert looks == []
