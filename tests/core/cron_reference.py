"""
A second opinion on the moments of a cron line, made without cronsim and without a search: it looks at every
minute of UTC, asks the zone what the clocks show then, and reads off the rule of docs/schedules.md.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
_BOUNDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def values(field: str, lowest: int, highest: int) -> frozenset[int]:
    numbers: set[int] = set()
    for term in field.split(","):
        span, _, step = term.partition("/")
        first, _, last = span.partition("-")
        low, high = (lowest, highest) if first == "*" else (int(first), int(last or first))
        if step and not last and first != "*":
            high = highest
        numbers |= set(range(low, high + 1, int(step or 1)))
    return frozenset(numbers)


class Line:
    def __init__(self, cron: str) -> None:
        self.fields = cron.split()
        self.minutes, self.hours, self.days, self.months, self.weekdays = (
            values(field, *bounds) for field, bounds in zip(self.fields, _BOUNDS, strict=True)
        )

    def names(self, wall: datetime) -> bool:
        of_day = wall.day in self.days
        of_week = not self.weekdays.isdisjoint({wall.isoweekday(), wall.isoweekday() % 7})
        either = not (self.fields[2].startswith("*") or self.fields[4].startswith("*"))
        day = (of_day or of_week) if either else (of_day and of_week)
        return wall.minute in self.minutes and wall.hour in self.hours and day and wall.month in self.months


def clock(zone: str, start: datetime, end: datetime) -> tuple[list[datetime], list[datetime]]:
    """Every minute of UTC in [start, end), and what the clocks of the zone show then."""
    minutes = [start + i * MINUTE for i in range(int((end - start) / MINUTE))]
    of_zone = ZoneInfo(zone)
    return minutes, [minute.astimezone(of_zone).replace(tzinfo=None, fold=0) for minute in minutes]


def moments(cron: str, minutes: list[datetime], walls: list[datetime]) -> list[datetime]:
    """All of them, in UTC. The first and last minutes must be far from a change of the clocks."""
    line = Line(cron)
    if line.fields[1] == "*":
        return [minute for minute, wall in zip(minutes, walls, strict=True) if line.names(wall)]
    fired: set[datetime] = set()
    shown: set[datetime] = set()
    for at, (minute, wall) in enumerate(zip(minutes, walls, strict=True)):
        if at and wall - walls[at - 1] > MINUTE:  # the clocks went forward: which times were never shown?
            missing = walls[at - 1] + MINUTE
            while missing < wall:
                if line.names(missing) and missing not in shown:
                    fired.add(minute)
                shown.add(missing)
                missing += MINUTE
        if line.names(wall) and wall not in shown:
            fired.add(minute)
        shown.add(wall)
    return sorted(fired)


def changes(zone: str, first_year: int, last_year: int) -> list[datetime]:
    """Every minute of UTC at which the offset of a zone changes, found in steps of six hours, then minute by minute."""
    of_zone, found = ZoneInfo(zone), []
    hour, end = datetime(first_year, 1, 1, tzinfo=UTC), datetime(last_year + 1, 1, 1, tzinfo=UTC)
    before = hour.astimezone(of_zone).utcoffset()
    while hour < end:
        hour += timedelta(hours=6)
        offset = hour.astimezone(of_zone).utcoffset()
        if offset != before:
            minute = hour - timedelta(hours=6)
            while minute.astimezone(of_zone).utcoffset() == before:
                minute += MINUTE
            found.append(minute)
            before = offset
    return found
