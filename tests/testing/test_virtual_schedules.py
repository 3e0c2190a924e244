"""Schedules on a clock that the test moves: a year in a second."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

import penstock
from penstock.core.errors import BadIntent
from penstock.core.jobs.job import EventKind
from penstock.stores.api import RecordLoad, committed
from penstock.testing import VirtualScheduler


def trail(scheduler):
    kinds = [kind for kind in EventKind if kind.startswith("SCHEDULE_")]
    return Counter(f"{event.kind} {event.reason}" for event in scheduler.store.events_of(kinds, 0, 100_000))


def test_a_year_of_workdays_passes_in_one_call(scheduler, clock):
    mornings = []

    @scheduler.schedule("0 6 * * mon-fri", zone="Europe/Berlin")
    def report() -> None:
        mornings.append(clock.now())

    assert 261 == scheduler.drain(advance=timedelta(days=365))
    assert {4, 5} == {moment.hour for moment in mornings}  # summer and winter, in UTC
    assert 261 == len({moment.date() for moment in mornings})
    assert {0, 1, 2, 3, 4} == {moment.weekday() for moment in mornings}


def test_a_schedule_is_what_the_code_declares_with_its_arguments(scheduler):
    seen = []

    @scheduler.schedule(every=timedelta(hours=6), name="eu", args=("eu",))
    @scheduler.schedule(every=3_600, name="us", kwargs={"region": "us"})
    @scheduler.job(cost=7)
    def sync(region: str) -> None:
        seen.append(region)

    scheduler.drain(advance=timedelta(hours=12))

    assert Counter({"us": 12, "eu": 2}) == Counter(seen)
    scheduler.assert_scheduled("eu", every=21_600)
    scheduler.assert_scheduled(sync, "us", every=timedelta(hours=1), overlap="skip")
    assert {7} == {job.job.intent.cost_units for job in scheduler.find()}


def test_a_failing_assertion_lists_what_is_scheduled(scheduler):
    @scheduler.schedule("0 6 * * *", zone="Europe/Berlin")
    def report() -> None: ...

    @scheduler.job
    def other() -> None: ...

    with pytest.raises(
        AssertionError, match=r"other is not scheduled; scheduled are:\n  report: report '0 6"
    ):
        scheduler.assert_scheduled(other)
    with pytest.raises(AssertionError, match="report has zone 'Europe/Berlin', not 'UTC'"):
        scheduler.assert_scheduled(report, zone="UTC")


def test_once_runs_once(scheduler, clock):
    seen = []

    @scheduler.schedule(at="2030-02-01 06:00", zone="America/New_York")
    def migrate() -> None:
        seen.append(clock.now())

    scheduler.drain(advance=timedelta(days=100))

    assert [datetime(2030, 2, 1, 11, tzinfo=UTC)] == seen
    assert None is scheduler.get_schedule("migrate").next_moment


def test_a_job_that_takes_longer_than_its_hour_is_not_started_twice(scheduler, clock):
    starts = []

    @scheduler.schedule("0 * * * *")
    def slow() -> None:
        starts.append(clock.now().hour)
        clock.advance(timedelta(minutes=90))

    scheduler.drain(advance=timedelta(hours=8, minutes=1))

    assert [1, 3, 5, 7] == starts
    assert trail(scheduler)["SCHEDULE_SKIPPED overlap"] == 4


def test_moments_that_are_queued_run_one_after_the_other(scheduler, clock):
    starts = []

    @scheduler.schedule("0 1-4 1 1 *", overlap="queue")
    def slow() -> None:
        starts.append(f"{clock.now():%H:%M}")
        clock.advance(timedelta(minutes=90))

    scheduler.drain(advance=timedelta(hours=12))

    assert ["01:00", "02:30", "04:00", "05:30"] == starts


def test_cancel_running_stops_the_job_that_takes_too_long(scheduler, clock):
    starts, stops = [], []

    @scheduler.schedule("0 1-3 1 1 *", overlap="cancel-running")
    def slow(ctx: penstock.JobContext) -> None:
        starts.append(f"{clock.now():%H:%M}")
        for _ in range(20):
            clock.advance(timedelta(minutes=10))
            if ctx.canceled:
                stops.append(f"{clock.now():%H:%M}")
                ctx.check()

    scheduler.drain(advance=timedelta(hours=12))

    assert ["01:00", "02:00", "03:00"] == starts
    assert ["02:00", "03:00"] == stops
    assert Counter({"CANCELED": 2, "DONE": 1}) == Counter(str(job.state) for job in scheduler.find())


def test_the_job_can_read_its_moment_from_its_tags(scheduler):
    tags = []

    @scheduler.schedule("30 6 * * *", zone="Europe/Berlin")
    def report(ctx: penstock.JobContext) -> None:
        tags.append(ctx.tags)

    scheduler.drain(advance=timedelta(days=1))

    assert [("schedule:report", "moment:2030-01-01T05:30:00Z")] == [tuple(each) for each in tags]


def test_pause_resume_run_and_remove(scheduler):
    seen = []

    @scheduler.schedule(every=3_600)
    def note() -> None:
        seen.append(1)

    [handle] = scheduler.schedules()
    handle.pause()
    assert 0 == scheduler.drain(advance=timedelta(hours=5))
    assert handle.paused
    assert None is handle.next_moment
    job = handle.run()
    scheduler.drain()
    assert "DONE" == job.state
    handle.resume()
    assert 2 == scheduler.drain(advance=timedelta(hours=2))
    assert 3 == len(handle.jobs())
    handle.remove()
    assert 0 == scheduler.drain(advance=timedelta(hours=2))
    assert [] == scheduler.schedules()
    with pytest.raises(penstock.NotFound):
        handle.run()
    assert {
        "SCHEDULE_SET added": 1,
        "SCHEDULE_SET paused": 1,
        "SCHEDULE_SET resumed": 1,
        "SCHEDULE_SET removed": 1,
        "SCHEDULE_FIRED run": 1,
        "SCHEDULE_FIRED due": 2,
    } == trail(scheduler)


def test_a_program_that_starts_again_changes_nothing_and_edits_what_its_code_changed(scheduler):
    def declare(cron):
        @scheduler.schedule(cron, zone="Europe/Berlin")
        def report() -> None: ...

    declare("0 6 * * *")
    scheduler.get_schedule("report").pause()
    declare("0 6 * * *")
    assert {"SCHEDULE_SET added": 1, "SCHEDULE_SET paused": 1} == trail(scheduler)
    declare("0 7 * * *")

    assert 1 == trail(scheduler)["SCHEDULE_SET edited"]
    assert scheduler.get_schedule("report").paused
    scheduler.assert_scheduled("report", cron="0 7 * * *", paused=True)


def test_the_schedules_of_a_program_are_played_over_its_own_scheduler(tmp_path):
    own = penstock.Scheduler(tmp_path / "jobs.db")
    seen = []

    @own.schedule("@daily")
    def tidy() -> None:
        seen.append(1)

    with VirtualScheduler.over(own) as virtual:
        virtual.drain(advance=timedelta(days=30))
        own.get_schedule("tidy").pause()
        virtual.drain(advance=timedelta(days=30))

    assert 30 == len(seen)
    assert [] == own.schedules()
    own.close()


@pytest.mark.parametrize(
    ("cron", "options", "words"),
    [
        ("0 0 31 2 *", {}, "never comes"),
        ("0 6 * * *", {"zone": "Mars/Base"}, "time zone"),
        ("0 6 * * *", {"zone": 7}, "zone is 7"),
        ("0 6 * * *", {"every": 5}, "exactly one"),
        (None, {}, "exactly one"),
        (None, {"every": 0.5}, "whole seconds"),
        (None, {"every": 0}, "every_sec"),
        (None, {"every": "5"}, "every is '5'"),
        (None, {"at": "tomorrow"}, "at is 'tomorrow'"),
        (None, {"at": 5}, "at is 5"),
        (None, {"at": "2030-02-01 06:00", "zone": "Mars/Base"}, "time zone"),
        ("@daily", {"overlap": "maybe"}, "cancel-running"),
        ("@daily", {"missed": "maybe"}, "latest"),
        ("@daily", {"missed_limit": 0}, "missed_limit"),
        ("@daily", {"missed_limit": "many"}, "missed_limit"),
        ("@daily", {"args": (1, 2)}, "too many positional"),
        ("@daily", {"colour": "red"}, "'colour' is not an option"),
        ("@daily", {"name": "a b"}, "name must be"),
        (5, {}, "cron is 5"),
    ],
)
def test_what_is_no_schedule_is_refused_where_it_is_declared(scheduler, cron, options, words):
    with pytest.raises((ValueError, TypeError, penstock.BadArgument), match=words):

        @scheduler.schedule(cron, **options)
        def report(day: int = 0) -> None: ...

    assert [] == scheduler.schedules()


def test_a_schedule_from_data_is_refused_by_the_name_of_what_is_wrong(scheduler):
    report = scheduler.job(name="report")(lambda: None)
    for arguments, options, words in (
        ((5, report, "@daily"), {}, "name is 5"),
        (("report", len, "@daily"), {}, "is not a job function"),
        (("report", report, "@daily"), {"zone": None}, "zone is None"),
    ):
        with pytest.raises(TypeError, match=words):
            scheduler.set_schedule(*arguments, **options)

    assert [] == scheduler.schedules()


def test_a_job_with_a_deadline_cannot_be_scheduled(scheduler):
    job = scheduler.job(name="late", deadline=timedelta(hours=1))(lambda: None)

    with pytest.raises(ValueError, match="deadline"):
        scheduler.schedule("@daily")(job)


def test_two_functions_cannot_share_the_name_of_a_schedule(scheduler):
    scheduler.schedule("@daily", name="x")(scheduler.job(name="a")(lambda: None))

    with pytest.raises(ValueError, match="already"):
        scheduler.schedule("@daily", name="x")(scheduler.job(name="b")(lambda: None))


def test_a_program_asks_for_the_quietest_hour_before_a_time(scheduler):
    note = scheduler.job(name="note")(lambda: None)
    with pytest.raises(BadIntent, match="no recorded load"):
        scheduler.quietest_hour_before("06:00")
    for hour in range(168):
        committed(scheduler.store, RecordLoad("here", hour, 1.0 if hour % 24 == 3 else 5.0))

    line = scheduler.quietest_hour_before("06:00", zone="Europe/Berlin")

    assert scheduler.set_schedule("note", note, line, zone="Europe/Berlin").schedule.cron == line
    assert line in ("0 4 * * *", "0 5 * * *")  # 03:00 in UTC


@pytest.mark.parametrize(("missed", "runs"), [("skip", 0), ("latest", 1), ("all", 3)])
def test_moments_at_which_the_program_did_not_run_follow_the_policy(scheduler, clock, missed, runs):
    note = scheduler.job(name="note")(lambda: None)
    scheduler.set_schedule("note", note, every=3_600, missed=missed, missed_limit=3)

    clock.advance(timedelta(hours=10, minutes=30))

    assert runs == scheduler.drain()
    assert clock.now() + timedelta(minutes=30) == scheduler.get_schedule("note").next_moment
