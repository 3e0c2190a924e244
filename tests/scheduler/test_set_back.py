"""A wall clock that is set back by an hour must not put anybody to sleep for an hour."""

from __future__ import annotations

import pytest

from penstock.core.jobs.types import SECOND, EndReason

T0 = 1_900_000_000 * SECOND


class Times:
    """A wall that can be set, and the clock that goes on beside it."""

    def __init__(self):
        self.wall, self.steady = T0, 0

    def later(self, seconds):
        self.wall, self.steady = self.wall + seconds * SECOND, self.steady + seconds * SECOND


@pytest.fixture
def times():
    return Times()


@pytest.mark.parametrize("by", [-3600, 3600])
def test_the_keeper_goes_on_when_the_clock_is_set(times, by):
    from penstock.scheduler.driver import SteadyClock
    from penstock.scheduler.maintenance import Maintenance
    from penstock.scheduler.rules import SchedulerRules
    from penstock.stores.memory.store import MemoryStore

    clock = SteadyClock(lambda: times.wall, lambda: times.steady)
    store, rules = MemoryStore(clock), SchedulerRules()
    looks = []
    overdue, store.overdue = store.overdue, lambda most: looks.append(clock()) or overdue(most)
    maintenance = Maintenance(store, rules, clock)
    maintenance.step(clock())
    times.later(1)
    times.wall += by * SECOND
    maintenance.step(clock())
    times.later(1)

    wish = maintenance.step(clock())
    assert len(looks) == 3
    assert wish <= clock() + rules.prune_every


@pytest.mark.parametrize(
    ("ahead", "later"),
    [(-1, False), (0, False), (1, True), (10, True), (11, False), (3600, False)],
)
def test_a_moment_that_is_too_far_away_is_from_before_the_clock_was_set_back(ahead, later):
    from penstock.scheduler.driver import comes_later

    assert comes_later(T0 + ahead, T0, 10) is later


def test_a_pulse_goes_on_when_the_clock_is_set_back(kit):
    from penstock.scheduler.stats import LiveStats

    pulse = LiveStats(kit.store, kit.machine, kit.rules.host)
    pulse.measure(kit.now)
    kit.later(-3600)
    pulse.measure(kit.now)

    assert [second.at for second in pulse.history()][-1] == kit.now


def failing(kit):
    """A job whose next attempt is due in 6 s."""
    [job_id] = kit.submit(retry_delays_sec=(6,))
    kit.step()
    kit.job_service.end(kit.job_service.lease(job_id).dispatch_id, EndReason.JOB_ERROR, error="no")
    return job_id


@pytest.mark.parametrize("by", [-3 * 3600, 3 * 3600])
def test_a_retry_is_due_when_it_was_if_the_clock_is_set_while_the_scheduler_runs(kit, times, by):
    from penstock.scheduler.driver import SteadyClock
    from penstock.scheduler.maintenance import Maintenance

    job_id = failing(kit)
    clock = SteadyClock(lambda: times.wall, lambda: times.steady)
    maintenance = Maintenance(kit.store, kit.rules, clock)
    times.wall += by * SECOND
    kit.later(by)
    maintenance.step(clock())

    assert kit.store.job(job_id).not_before == kit.now + 6 * SECOND
    assert [event.data for event in kit.store.events(0, 100) if event.kind == "CLOCK_SHIFTED"] == [
        {"by": by * SECOND}
    ]


def test_a_retry_is_due_when_it_was_if_the_clock_is_set_back_while_no_scheduler_runs(kit):
    from penstock.scheduler.maintenance import recover

    job_id = failing(kit)
    kit.later(-3 * 3600)
    recover(kit.store, kit.rules)

    assert kit.store.job(job_id).not_before == kit.now + 6 * SECOND
    assert "CLOCK_SHIFTED" in [event.kind for event in kit.store.events(0, 100)]
    kit.later(6)
    kit.step()
    assert kit.state(job_id) == "DISPATCHING"


def test_a_start_after_a_pause_shifts_nothing(kit):
    from penstock.scheduler.maintenance import recover

    job_id = failing(kit)
    due = kit.store.job(job_id).not_before
    kit.later(3)
    recover(kit.store, kit.rules)

    assert kit.store.job(job_id).not_before == due
    assert "CLOCK_SHIFTED" not in [event.kind for event in kit.store.events(0, 100)]


def test_a_victim_of_preemption_has_its_time_again_when_the_clock_is_set_back():
    from penstock.core.jobs.preemption import Act, Preemption, advance, begin

    rules = Preemption(patience=60 * SECOND)
    cycle = begin("victim.1", "wanted", T0, rules)
    now = T0 - 3_600 * SECOND
    cycle, act = advance(cycle, victim_runs=True, still_wanted=True, now=now, preemption=rules)

    assert (act, cycle.due) == (None, now + 60 * SECOND)
    assert advance(cycle, victim_runs=True, still_wanted=True, now=cycle.due, preemption=rules)[1] is Act.ASK
