"""Moments of schedules, at every change of the clocks in twenty zones over ten years, beside a reference that does not use cronsim."""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime, timedelta
from itertools import takewhile

import pytest
from tests.core import cron_reference

from penstock.core.jobs.moments import (
    Timing,
    cron_after,
    cron_problem,
    local_moment,
    wall_time,
    zone_problem,
)
from penstock.core.jobs.types import HOUR, SECOND, moment_of, when

#: Half hours, whole days, two changes for one month of the year, offsets for good: what zones have had since 2010.
ZONES = [
    *("Europe/Berlin", "Europe/London", "Europe/Dublin", "Europe/Istanbul", "Europe/Volgograd"),
    *("America/New_York", "America/Los_Angeles", "America/Sao_Paulo", "America/Caracas", "America/Havana"),
    *("Africa/Casablanca", "Africa/Cairo", "Asia/Tehran", "Asia/Gaza", "Asia/Pyongyang", "Asia/Kolkata"),
    *("Australia/Sydney", "Australia/Lord_Howe", "Pacific/Apia", "America/Asuncion"),
]
YEARS = range(2016, 2027)
LINES = [
    *("30 2 * * *", "*/20 1-3 * * *", "0 0 * * *", "15,45 0,2 * * 0", "0 */2 * * *"),
    *("30 * * * *", "*/7 * * * *", "0 3 * * 1-5", "59 23 * * 6,7", "10 2 25-31 3,10,11 0"),
]


def moments(cron, zone, start, end):
    timing = Timing(cron, None, None, zone, 0)
    until = moment_of(end)
    return [when(m) for m in takewhile(lambda m: m < until, timing.moments(moment_of(start) - 1))]


@pytest.mark.parametrize("zone", ZONES)
def test_the_moments_around_every_change_of_the_clocks_are_those_of_the_reference(zone):
    found = cron_reference.changes(zone, YEARS[0], YEARS[-1])
    soak = "PENSTOCK_SOAK" in os.environ
    lines, hours = (LINES, 50) if soak else (random.Random(zone).sample(LINES, 5), 7)

    for change in found:
        start, end = change - timedelta(hours=hours), change + timedelta(hours=hours)
        minutes, walls = cron_reference.clock(zone, start, end)
        for cron in lines:
            expected = cron_reference.moments(cron, minutes, walls)
            assert expected == moments(cron, zone, start, end), (cron, change)


def test_the_zones_are_twenty_and_have_changes_of_every_kind():
    assert 20 == len(set(ZONES))
    steps = {
        after.astimezone(zone).utcoffset() - (after - timedelta(minutes=1)).astimezone(zone).utcoffset()
        for name in ZONES
        for zone in [cron_reference.ZoneInfo(name)]
        for after in cron_reference.changes(name, 2010, YEARS[-1])
    }

    hours = {step / timedelta(hours=1) for step in steps}
    assert {1, -1, 0.5, -0.5, 24} <= hours  # 24: Samoa left out a day


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("30 2 * * *", ["28 02:30", "29 03:00", "30 02:30"]),  # the missing hour: right after it
        ("*/20 2 * * *", ["28 02:00", "28 02:20", "28 02:40", "29 03:00", "30 02:00"]),  # once
        (
            "30 1-3 * * *",
            ["28 01:30", "28 02:30", "28 03:30", "29 01:30", "29 03:00", "29 03:30", "30 01:30"],
        ),
        ("0 3 * * *", ["28 03:00", "29 03:00", "30 03:00"]),
    ],
)
def test_a_time_in_the_missing_hour_comes_right_after_it(cron, expected):
    start = moment_of(datetime(2026, 3, 27, 23, tzinfo=UTC))
    found = Timing(cron, None, None, "Europe/Berlin", 0).moments(start)

    walls = [f"{wall_time(next(found), 'Europe/Berlin'):%d %H:%M}" for _ in expected]
    assert expected == walls


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("30 2 * * *", ["25T00:30", "26T01:30"]),  # the doubled hour: its first pass
        ("0 */3 * * *", ["24T22:00", "25T02:00", "25T05:00"]),
        ("30 * * * *", ["24T22:30", "24T23:30", "25T00:30", "25T01:30", "25T02:30"]),  # by elapsed time
    ],
)
def test_a_time_in_the_doubled_hour_comes_once(cron, expected):
    start = moment_of(datetime(2026, 10, 24, 21, 45, tzinfo=UTC))
    found = Timing(cron, None, None, "Europe/Berlin", 0).moments(start)

    assert expected == [f"{when(next(found)):%dT%H:%M}" for _ in expected]


def test_the_day_that_samoa_left_out_comes_right_after_it():
    start = moment_of(datetime(2011, 12, 29, tzinfo=UTC))

    assert datetime(2011, 12, 30, 10, tzinfo=UTC) == when(cron_after("0 6 30 12 *", "Pacific/Apia", start))
    assert "2011-12-31 00:00:00" == str(
        wall_time(moment_of(datetime(2011, 12, 30, 10, tzinfo=UTC)), "Pacific/Apia")
    )


def test_every_n_counts_from_its_anchor_and_knows_no_clock_change():
    timing = Timing(None, 90, None, "Europe/Berlin", 7)

    assert 7 + 90 * SECOND == timing.after(0) == timing.after(7)
    assert 7 + 180 * SECOND == timing.after(7 + 90 * SECOND)
    assert 7 + 90 * SECOND == timing.after(6 + 90 * SECOND)


def test_once_comes_once():
    timing = Timing(None, None, 5 * HOUR, "UTC", 0)

    assert [5 * HOUR] == list(timing.moments(0))
    assert [] == list(timing.moments(5 * HOUR))


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("0 0 31 2 *", "never comes"),
        ("0 0 30 2 *", "never comes"),
        ("0 0 31 4,6,9,11 *", "never comes"),
        ("60 * * * *", "minute"),
        ("* 24 * * *", "hour"),
        ("* * 0 * *", "day-of-month"),
        ("* * * 13 *", "month"),
        ("* * * * 8", "day-of-week"),
        ("5-1 * * * *", "minute"),
        ("*/0 * * * *", "minute"),
        ("a b c d e", "minute"),
        ("\u0663 * * * *", "minute"),
        ("* * * *", "five fields"),
        ("* * * * * *", "five fields"),
        ("", "five fields"),
        ("@reboot", "@daily"),
        ("0" * 300, "at most 200"),
    ],
)
def test_a_line_that_cannot_come_is_refused_by_name(cron, words):
    assert words in (cron_problem(cron) or "")


@pytest.mark.parametrize(
    "cron", ["0 6 * * mon-fri", "@daily", "@Hourly", "0 0 29 2 *", "0 0 L * *", "0 9 * * mon#1"]
)
def test_a_line_that_cron_knows_is_taken(cron):
    assert None is cron_problem(cron)


@pytest.mark.parametrize(
    "zone",
    [
        *("Nowhere/Here", "", "..", "../../etc/passwd", "Europe", "x" * 500, "\0"),
        *("localtime", "right/UTC", "posixrules"),
    ],
)
def test_an_unknown_zone_is_refused(zone):
    assert "time zone" in (zone_problem(zone) or "")


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-12-01 06:00", "2026-12-01T05:00"),
        ("2026-12-01T06:00:30", "2026-12-01T05:00"),
        ("2026-03-29 02:30", "2026-03-29T01:00"),  # missing
        ("2026-10-25 02:30", "2026-10-25T00:30"),  # doubled
        ("2026-12-01 06:00Z", "2026-12-01T06:00"),
        ("2026-12-01 06:00-05:00", "2026-12-01T11:00"),
    ],
)
def test_a_local_time_is_one_moment(text, utc):
    assert utc == f"{when(local_moment(text, 'Europe/Berlin')):%Y-%m-%dT%H:%M}"
