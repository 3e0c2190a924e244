"""
How busy the machine is in each hour of the week, and the quietest hour for a schedule.

The average of an hour is recorded when the hour is over. The newest week counts three tenths, so the record
follows a change of habits within a month, and one unusual night changes it little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from penstock.core.errors import BadIntent
from penstock.core.jobs.moments import local_moment, wall_time, zone_problem
from penstock.core.jobs.types import HOUR, Moment

#: The weight of the newest week.
NEWEST: Final = 0.3
_HOURS: Final = 168
#: 1970-01-01 was a Thursday.
_THURSDAY: Final = 72
#: How many hours before the given time are considered.
_CONSIDERED: Final = 12
_DAYS: Final = 7
_HOUR_OF_DAY: Final = re.compile(r"([01]?[0-9]|2[0-3]):[0-5][0-9]")


def hour_of_week(moment: Moment) -> int:
    """The number of the hour in its week; 0 is Monday 00:00 UTC."""
    return (moment // HOUR + _THURSDAY) % _HOURS


def blended(average: float | None, busy: float) -> float:
    return busy if average is None else average + NEWEST * (busy - average)


class HourAverage:
    """The average of the samples of the current hour."""

    def __init__(self) -> None:
        self._hour, self._total, self._samples = -1, 0.0, 0

    def add(self, moment: Moment, busy: float) -> tuple[int, float] | None:
        """Add a sample. If it begins a new hour, return the number and the average of the hour before."""
        hour, over = moment // HOUR, None
        if hour != self._hour:
            if self._samples:
                over = hour_of_week(self._hour * HOUR), self._total / self._samples
            self._hour, self._total, self._samples = hour, 0.0, 0
        self._total += busy
        self._samples += 1
        return over


def quietest_line(recorded: Mapping[int, float], before: str, zone: str, now: Moment) -> str:
    """
    A daily cron line that starts in the quietest of the twelve hours before "06:00" on the clocks of a zone.
    Each hour is judged by its average over the days of the week. Of equal hours the latest is taken.
    """
    problem = zone_problem(zone)
    if problem is not None:
        raise BadIntent.of(("zone", problem))
    if not isinstance(before, str) or _HOUR_OF_DAY.fullmatch(before) is None:
        raise BadIntent.of(("quietest_hour_before", f"must be a time like 06:00, not {before!r:.40}"))
    hour, minute = map(int, before.split(":"))
    today = wall_time(now, zone)
    best: tuple[float, int] | None = None
    for back in range(1, _CONSIDERED + 1):
        start = (hour - back) % 24
        text = f"{today:%Y-%m-%d} {start:02}:{minute:02}"
        first = local_moment(text, zone)
        hours = [hour_of_week(first + day * 24 * HOUR) for day in range(_DAYS)]
        scores = [recorded[each] for each in hours if each in recorded]
        if scores and (best is None or sum(scores) / len(scores) < best[0]):
            best = sum(scores) / len(scores), start
    if best is None:
        raise BadIntent.of(
            (
                "quietest_hour_before",
                "has no recorded load to go by yet: each hour is recorded when it is over",
            )
        )
    return f"{minute} {best[1]} * * *"
