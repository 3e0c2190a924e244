"""The load by the hour of the week, and the quietest hour before a time."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.core.errors import BadIntent
from penstock.core.jobs.load_hours import HourAverage, blended, hour_of_week, quietest_line
from penstock.core.jobs.types import HOUR, MINUTE, moment_of

MONDAY = moment_of(datetime(2026, 11, 16, tzinfo=UTC))


def test_the_week_begins_on_monday():
    assert 0 == hour_of_week(MONDAY)
    assert 167 == hour_of_week(MONDAY - 1)
    assert 25 == hour_of_week(MONDAY + 25 * HOUR + 5)


def test_an_hour_is_recorded_when_it_is_over():
    average = HourAverage()

    assert [None] * 3 == [average.add(MONDAY + n * MINUTE, busy) for n, busy in enumerate([2, 4, 6])]
    assert (0, 4) == average.add(MONDAY + HOUR, 9)
    assert (1, 9) == average.add(MONDAY + 5 * HOUR, 1)


def test_the_newest_week_counts_three_tenths():
    assert 5 == blended(None, 5)
    assert 5.3 == pytest.approx(blended(5, 6))


def test_the_quietest_of_the_twelve_hours_before_wins():
    recorded = dict.fromkeys(range(168), 5.0)
    for day in range(7):
        recorded[day * 24 + 2] = 1.0  # 03:00 in Berlin, in winter
        recorded[day * 24 + 12] = 0.0  # 13:00 in Berlin: not in the night

    assert "0 3 * * *" == quietest_line(recorded, "06:00", "Europe/Berlin", MONDAY)
    assert "30 2 * * *" == quietest_line(recorded, "06:30", "UTC", MONDAY)
    assert "0 12 * * *" == quietest_line(recorded, "13:00", "UTC", MONDAY)


def test_without_a_record_it_is_refused_by_name():
    with pytest.raises(BadIntent, match="quietest_hour_before has no recorded load"):
        quietest_line({12: 1.0}, "06:00", "UTC", MONDAY)
    with pytest.raises(BadIntent, match="zone"):
        quietest_line({12: 1.0}, "06:00", "Nowhere", MONDAY)


@pytest.mark.parametrize("before", ["", "6", "24:00", "06:60", "06:00:00", "six", 6, None])
def test_what_is_no_time_of_day_is_refused_by_name(before):
    with pytest.raises(BadIntent, match="quietest_hour_before must be a time like 06:00"):
        quietest_line({12: 1.0}, before, "UTC", MONDAY)
