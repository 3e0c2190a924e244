"""One scheduler as a whole: what it remembers from the last start, and the verbs of whoever minds it."""

from __future__ import annotations

from threading import Event

import pytest
from msgspec.structs import replace
from tests.scheduler.conftest import ManualClock

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.ordering import Aging, Ordering
from penstock.core.jobs.types import MINUTE, SECOND
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import DrainHost, committed
from penstock.stores.memory.store import MemoryStore
from penstock.stores.sqlite.store import SqliteStore

RULES = SchedulerRules(capacity=Capacity(fixed=90))


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
    job_service = SchedulerService(reopened(), RULES).job_service
    job_service.pause()
    [job_id] = [receipt.job_id for receipt in job_service.submit([job()])]
    service = SchedulerService(reopened(), RULES)
    service.dispatcher.step(service.store.now())
    assert service.job_service.explain(job_id).reason == "paused"

    service.job_service.resume()
    service.dispatcher.step(service.store.now())
    assert str(service.store.job(job_id).state) == "DISPATCHING"


def test_an_addon_paused_by_its_name_stays_so_when_everything_is_resumed(reopened):
    service = SchedulerService(reopened(), RULES)
    service.job_service.pause("a")
    service.job_service.pause()
    service.job_service.resume()
    mine, others = [r.job_id for r in service.job_service.submit([job(), job(addon_id="b")])]
    service.dispatcher.step(service.store.now())

    assert str(service.store.job(mine).state) == "QUEUED"
    assert str(service.store.job(others).state) == "DISPATCHING"


def test_a_changed_aging_setting_holds_for_those_who_wait_already(reopened):
    now = [1_900_000_000 * SECOND]
    clock = lambda: now[0]  # noqa: E731 - a clock that stands
    first = SchedulerService(reopened(clock), RULES)
    [old] = [r.job_id for r in first.job_service.submit([job(priority=50, cost_units=90)])]
    now[0] += MINUTE
    [new] = [r.job_id for r in first.job_service.submit([job(priority=55, cost_units=90)])]
    rules = replace(RULES, ordering=Ordering(aging=Aging(1 * SECOND)))
    service = SchedulerService(reopened(clock), rules).start()
    service.stop()
    service.dispatcher.step(now[0])

    assert [str(service.store.job(i).state) for i in (old, new)] == ["DISPATCHING", "QUEUED"]


class Ticks:
    def __init__(self):
        self.heard = Event()

    def step(self, now):
        self.heard.set()
        return now + 3_600 * SECOND


def test_a_wake_up_brings_a_round_at_once():
    ticks = Ticks()
    service = SchedulerService(
        MemoryStore(SteadyClock()), replace(RULES, tick=3_600 * SECOND), more=[ticks]
    ).start()
    assert ticks.heard.wait(60)
    ticks.heard.clear()
    service.wake()
    came = ticks.heard.wait(60)
    service.stop()

    assert came


def test_a_host_that_drains_takes_nothing_until_it_is_told_to():
    service = SchedulerService(MemoryStore(SteadyClock()), RULES)
    service.drain()
    [receipt] = service.job_service.submit([job()])
    service.dispatcher.step(service.store.now())
    assert service.job_service.explain(receipt.job_id).reason == "draining"

    service.drain(on=False)
    service.dispatcher.step(service.store.now())
    assert str(service.store.job(receipt.job_id).state) == "DISPATCHING"


def test_a_start_that_fails_leaves_the_right_to_dispatch_to_others(reopened):
    def broken(_):
        raise RuntimeError("what runs here cannot be told")

    service = SchedulerService(reopened(), RULES)
    service.job_service.submit([job()])
    service.dispatcher.step(service.store.now())
    with pytest.raises(RuntimeError, match="cannot be told"):
        SchedulerService(service.store, RULES, survivors=broken).start()

    SchedulerService(service.store, RULES).start().stop()


def rounds(service, clock, seconds):
    """How often its driver wakes in that time, if no commit wakes it."""
    until, count = clock.now + seconds * SECOND, 0
    while (wish := service.driver.step()) < until:
        clock.now, count = wish, count + 1
    return count


@pytest.fixture
def idle():
    """A scheduler that measures its machine, with one job that nobody comes for, on a clock that the test moves."""
    clock = ManualClock()
    service = SchedulerService(MemoryStore(clock), SchedulerRules(), preempts=True)
    service.registration.join()
    service.job_service.submit([job(run_when="quiet", quiet_for_sec=3_600)])
    return service, clock


def test_an_idle_scheduler_is_woken_once_a_tick(idle):
    assert rounds(*idle, 60) <= 33  # with the first measurement, and what is done once a minute


def test_rings_at_odd_moments_leave_no_more_wakes_behind(idle):
    service, clock = idle
    for part_of_second in (0.3, 0.7, 0.45):
        clock.now += int(part_of_second * SECOND)
        service.driver.step(woken=True)
    rounds(service, clock, 4)

    assert rounds(service, clock, 60) <= 32


def test_a_drain_is_heard_within_a_second_though_it_was_looked_for_just_before(idle):
    service, clock = idle
    service.driver.step()
    clock.now += SECOND // 10
    committed(service.store, DrainHost(service.rules.host, draining=True))
    service.driver.step(woken=True)
    rounds(service, clock, 1.2)

    assert service.machine.drained


def test_where_nothing_runs_the_lines_are_not_gone_through_for_who_should_make_room(idle, monkeypatch):
    service, clock = idle
    looks = []
    monkeypatch.setattr(service.store, "read_view", lambda *_: looks.append(1))
    rounds(service, clock, 10)

    assert looks == []
