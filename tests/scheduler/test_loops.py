"""Dispatcher and keeper on a clock that jumps: hours of waiting in milliseconds."""

from __future__ import annotations

from itertools import count
from threading import Event

import pytest

from penstock.core.jobs.load import Capacity, QuietState, Reading
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import HOUR, MINUTE, SECOND, EndReason
from penstock.stores.api import Query


def end_all(kit, how=EndReason.COMPLETED):
    for dispatch in kit.store.live():
        kit.job_service.end(dispatch.dispatch_id, how)


def lease_all(kit):
    for dispatch in kit.job_service.dispatchable():
        kit.job_service.lease(dispatch.job_id)


def test_a_reservation_nobody_takes_up_goes_back_and_lets_others_in_before_it_tries_again(kit):
    [absent] = kit.submit(cost_units=90)
    [other] = kit.submit(addon_id="b", cost_units=90)
    kit.step()
    kit.later(30)
    kit.step()

    assert [kit.state(absent), kit.state(other)] == ["QUEUED", "DISPATCHING"]
    assert kit.store.events(0, 100, absent)[-1].reason == "start_timeout"


def test_an_expired_lease_puts_its_job_back_as_a_crash(kit):
    [job_id] = kit.submit()
    kit.step()
    lease_all(kit)
    kit.later(30)
    kit.step()
    job = kit.store.job(job_id)

    assert (job.state, job.counters.crash, job.not_before) == (JobState.QUEUED, 1, kit.now + MINUTE)


def test_a_run_past_its_limit_is_told_then_given_up(kit):
    [job_id] = kit.submit(max_runtime_sec=20)
    kit.step()
    lease_all(kit)
    kit.later(20)
    kit.step()
    [ending] = kit.store.live()
    assert ending.reason is EndReason.MAX_RUNTIME_EXCEEDED

    kit.later(15)
    kit.step()
    assert kit.state(job_id) == "QUEUED"
    assert "TIMEOUT" in kit.kinds(job_id)


def test_the_keeper_asks_to_be_called_when_the_next_thing_is_due(kit):
    kit.submit()
    kit.step()

    assert kit.maintenance.step(kit.now) == kit.now + 30 * SECOND


def test_old_jobs_are_forgotten_in_small_steps(kit):
    kit.submit(n=5, cost_units=1)
    kit.step()
    lease_all(kit)
    end_all(kit)
    kit.later(31 * 24 * 3_600)
    kit.step()

    assert kit.store.find(Query()) == []


def test_a_week_of_crashes_takes_milliseconds(kit):
    [job_id] = kit.submit()
    began = kit.now
    while kit.state(job_id) != "FAILED":
        kit.step()
        lease_all(kit)
        kit.clock.now = kit.maintenance.step(kit.now)

    assert kit.now - began > 80 * MINUTE
    assert len(kit.store.attempts(job_id)) == 6


def test_a_denial_says_how_often_the_reason_before_it_had_held(kit):
    kit.submit(cost_units=90)
    kit.step()
    [job_id] = kit.submit(cost_units=10)
    for _ in range(5):
        kit.step()
    kit.machine.draining = True
    kit.step()
    denials = [e for e in kit.store.events(0, 100, job_id) if e.kind == "DENIED"]

    assert [(e.reason, e.data.get("after")) for e in denials] == [("no_room", None), ("draining", 5)]


@pytest.fixture
def measured(kit):
    from msgspec.structs import replace

    rules = replace(kit.rules, capacity=Capacity())
    return type(kit)(kit.store, kit.clock, rules)


def report(kit, cpu):
    for name, value in (("cpu", cpu), ("memory", 0.1)):
        kit.machine.report(Reading(name, value, kit.now))


def test_without_fresh_signals_nothing_starts(measured):
    [job_id] = measured.submit()
    measured.step()
    assert measured.state(job_id) == "QUEUED"

    report(measured, cpu=0.1)
    measured.step()
    assert measured.state(job_id) == "DISPATCHING"


def test_an_overnight_job_waits_for_the_streak_of_quiet_it_asked_for(measured):
    [job_id] = measured.submit(run_when="quiet", quiet_for_sec=600)
    started = None
    for second in range(0, 1_800, 10):
        report(measured, cpu=0.6 if second < 300 else 0.05)
        measured.step()
        if started is None and measured.state(job_id) == "DISPATCHING":
            started = second
        measured.later(10)

    assert started == 900
    assert measured.machine.conditions(measured.now).quiet is QuietState.QUIET


def test_the_trail_is_read_to_its_end_and_on_from_there(kit):
    from penstock.scheduler.job_service import feed

    kit.submit(n=7)
    first = list(feed(kit.store, page=3))
    kit.submit()

    assert len(first) == 7
    assert [event.seq for event in feed(kit.store, after=first[-1].seq)] == [8]


def test_a_wall_clock_that_was_set_moves_no_lease(kit):
    from penstock.scheduler.driver import SteadyClock
    from penstock.scheduler.maintenance import Maintenance

    wall, steady = [kit.now], [0]
    clock = SteadyClock(lambda: wall[0], lambda: steady[0])
    maintenance = Maintenance(kit.store, kit.rules, clock)
    kit.submit()
    kit.step()
    lease_all(kit)
    wall[0] += HOUR
    assert clock() == kit.now
    maintenance.step(clock())
    kit.clock.now = clock()

    assert clock() == wall[0]
    assert kit.store.live()[0].expires_at == kit.now + 30 * SECOND
    assert kit.store.overdue(10) == []


def test_a_small_drift_of_the_clock_is_left_alone():
    from penstock.scheduler.driver import SteadyClock

    wall = [1_000 * SECOND]
    clock = SteadyClock(lambda: wall[0], lambda: 0)
    wall[0] += SECOND

    assert clock.jump() == 0


def test_the_driver_steps_at_once_when_it_is_woken_and_survives_a_part_that_fails():
    from penstock.scheduler.driver import Driver

    first, second = Event(), Event()

    class Part:
        def step(self, now):
            if not first.is_set():
                first.set()
                raise RuntimeError("once")
            second.set()
            return now + HOUR

    driver = Driver(lambda: 0, [Part()], after_failure=HOUR)
    driver.start()
    assert first.wait(30)
    driver.wake()

    assert second.wait(30)
    driver.stop()


def test_all_parts_of_a_round_are_told_the_same_moment():
    """So that parts that ask for the same pause are due together, and one wake-up serves them all."""
    from penstock.scheduler.driver import Driver, TimedPart

    clock, told = count(), []

    class Part:
        def step(self, now):
            told.append(now)
            return now + HOUR

    wish = Driver(lambda: next(clock), [Part(), Part()], [TimedPart(Part())]).step()

    assert len(set(told)) == 1
    assert wish == told[0] + HOUR


class Timetable:
    """Upkeep that wants to be called once a minute, and records when it was."""

    def __init__(self):
        self.calls = []

    def step(self, now):
        self.calls.append(now)
        return now + MINUTE


@pytest.mark.parametrize(("pause", "calls"), [(None, [0, MINUTE]), (SECOND, [0, SECOND, 2 * SECOND])])
def test_a_wake_up_brings_upkeep_forward_only_where_it_concerns_it(pause, calls):
    from penstock.scheduler.driver import Driver, TimedPart

    clock, timetable = [0], Timetable()
    driver = Driver(lambda: clock[0], [], [TimedPart(timetable, pause)])
    driver.step()
    due = driver.step(woken=True)
    for now in (due, due + SECOND):
        clock[0] = now
        driver.step(woken=True)

    assert timetable.calls == calls


def test_upkeep_goes_on_when_the_clock_is_set_back():
    from penstock.scheduler.driver import Driver, TimedPart

    clock, timetable = [HOUR], Timetable()
    driver = Driver(lambda: clock[0], [], [TimedPart(timetable)])
    driver.step()
    clock[0] = SECOND

    assert driver.step() == SECOND + MINUTE
    assert timetable.calls == [HOUR, SECOND]
