"""
The moments of a schedule: a cron line in a time zone, every N seconds, or once.

cronsim computes the times of a cron line on wall-clock times without a zone. When the clocks change, these
rules apply (docs/schedules.md has them):

- A line that names hours ("30 2 * * *", "0 */6 * * *") means times of the wall clock. If times are in the
  missing hour, one moment comes right after the gap, however many they are. A time in the doubled hour comes
  once, in the first pass.
- A line whose hour is `*` means "in every hour", so it goes by elapsed time: nothing comes for the missing
  hour, and both passes of the doubled hour count. The moments of "30 * * * *" are one hour apart all year.
- "Every N" and "once" do not depend on the zone's clock changes.

Between two changes of the clocks the offset to UTC is constant. So the search goes from one such stretch to
the next, and cronsim finds the wall-clock times inside of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from penstock.core.errors import Unavailable
from penstock.core.jobs.types import SECOND, Moment, moment_of

MAX_CRON: Final = 200  # characters
#: How far the search goes: cronsim gives up after 50 years too.
_HORIZON_YEARS: Final = 51
_DAY: Final = 86_400
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001  # a time on a wall has no zone
_WORDS: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
CRON_WORDS: Final = tuple(_WORDS)
#: Files beside those of the zones: another zone on each host, and copies of zones, some with leap seconds.
_NO_NAME: Final = re.compile(r"localtime|posixrules|(posix|right)/.*", re.DOTALL)
#: The allowed values of each field of a line.
_ALLOWED: Final = {
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31 or L",
    "month": "1-12 or jan-dec",
    "day-of-week": "0-7 or sun-sat",
}


class Timing(NamedTuple):
    """When a schedule fires: one of `cron` (in `zone`), `every_sec` (counted from `anchor`) and `at`."""

    cron: str | None
    every_sec: int | None
    at: Moment | None
    zone: str
    anchor: Moment

    def after(self, moment: Moment) -> Moment | None:
        """
        The first moment after this one; None: there is none. Unavailable: this host cannot read the line or
        does not know the zone, although the host that accepted the schedule could.
        """
        if self.cron is not None:
            return cron_after(self.cron, self.zone, moment)
        if self.every_sec is not None:
            step = self.every_sec * SECOND
            return self.anchor + max(1, (moment - self.anchor) // step + 1) * step
        return self.at if self.at is not None and self.at > moment else None

    def moments(self, after: Moment) -> Iterator[Moment]:
        moment = self.after(after)
        while moment is not None:
            yield moment
            moment = self.after(moment)


def cron_problem(cron: str) -> str | None:
    """The problem of a cron line, as a sentence without its subject; None: the line is valid."""
    if len(cron) > MAX_CRON:
        return f"must be at most {MAX_CRON} characters"
    try:
        line = cron_line(cron)
    except ValueError as error:
        return str(error)
    if line.next(0) is None:
        return "never comes: no such date exists"
    return None


def zone_problem(zone: str) -> str | None:
    if _known_zone(zone) is None or _NO_NAME.fullmatch(zone):
        return 'must be a time zone like "Europe/Berlin" or "UTC"'
    return None


def zone_or_utc(zone: str) -> ZoneInfo:
    """The zone in which to show a moment: UTC if this host does not know the zone."""
    return _known_zone(zone) or ZoneInfo("UTC")


def _known_zone(zone: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: the name of a directory, or far too long
        return None


def local_moment(text: str, zone: str) -> Moment:
    """
    The moment at which the clocks of a zone show a time such as "2026-12-01 06:00"; an offset in the text
    wins over the zone. A time in the missing hour means the moment right after it; in the doubled hour, its
    first pass. ValueError: the text is no time.
    """
    local = datetime.fromisoformat(text.strip())
    if local.tzinfo is not None:
        return moment_of(local.astimezone(UTC))
    aware = local.replace(tzinfo=ZoneInfo(zone), fold=0)
    moment = moment_of(aware.astimezone(UTC))
    if wall_time(moment, zone) == local:
        return moment
    # The time is in a gap: with the offset from before the gap it is after the change, which is the last one
    # before it.
    changes = _changes(zone, aware.astimezone(UTC).year)
    return max(change.at for change in changes if change.at * SECOND <= moment) * SECOND


def wall_time(moment: Moment, zone: str) -> datetime:
    """The time that the clocks of a zone show, without the zone."""
    second, microseconds = divmod(moment, SECOND)
    local = datetime.fromtimestamp(second, ZoneInfo(zone)).replace(tzinfo=None, fold=0)
    return local + timedelta(microseconds=microseconds)


# cron lines


class CronLine:
    """
    The wall-clock times of a cron line, in seconds since 1970 on the wall clock. The last result is kept,
    because searches in a rare line mostly have the same one.
    """

    def __init__(self, fields: str) -> None:
        self.fields = fields
        #: Whether the line names hours. Otherwise it has times in every hour, and goes by elapsed time.
        self.names_hours = fields.split()[1] != "*"
        self._last_search: tuple[int, int | None] = (1, 0)  # covers nothing
        self._parsed = CronSim(fields, _EPOCH)

    def next(self, wall: int) -> int | None:
        """The first time at or after this one."""
        start, match = self._last_search
        if start <= wall and (match is None or wall <= match):
            return match
        match = self._search(wall)
        self._last_search = (wall, match)
        return match

    def _search(self, wall: int) -> int | None:
        search = copy(self._parsed)  # for several threads; parsing takes longer than the search
        search.dt = _EPOCH + timedelta(seconds=wall - 1)
        try:
            match = next(search)
        except (StopIteration, OverflowError):
            return None
        return int((match - _EPOCH).total_seconds())


def cron_line(cron: str) -> CronLine:
    """Parse a cron line. ValueError says what is wrong with it."""
    words = cron.split()
    if len(words) == 1 and words[0].startswith("@"):
        fields = _WORDS.get(words[0].lower())
        if fields is None:
            raise ValueError(f"must be five fields or one of {', '.join(_WORDS)}")
    elif len(words) == 5:
        fields = " ".join(words)
    else:
        raise ValueError("must be five fields: minute, hour, day of month, month, day of week")
    try:
        CronSim(fields, _EPOCH)
    except (CronSimError, AssertionError, ValueError, TypeError) as error:
        text = str(error)
        if text == "Bad day-of-month" and _never(fields):
            raise ValueError("never comes: no such date exists") from None
        field = text.removeprefix("Bad ") if text.startswith("Bad ") else "fields"
        if field not in _ALLOWED:
            raise ValueError("has fields that cannot be read") from None
        raise ValueError(
            f"has a wrong {field}: write {_ALLOWED[field]}, *, or lists, ranges and steps"
        ) from None
    return CronLine(fields)


def _never(fields: str) -> bool:
    """Whether the line is valid except that its months have no such day."""
    minute, hour, day, _, weekday = fields.split()
    try:
        CronSim(f"{minute} {hour} {day} * {weekday}", _EPOCH)
    except (CronSimError, AssertionError, ValueError, TypeError):
        return False
    return True


@lru_cache(maxsize=512)
def _line(cron: str) -> CronLine:
    try:
        return cron_line(cron)
    except ValueError as error:  # an older or newer cronsim accepted it
        raise Unavailable(f"this host cannot read the cron line {cron!r}: it {error}") from None


def cron_after(cron: str, zone: str, after: Moment) -> Moment | None:
    if _known_zone(zone) is None:
        raise Unavailable(f"this host does not know the time zone {zone!r}: update its package tzdata")
    line, second = _line(cron), after // SECOND
    for stretch in _stretches(zone, second):
        entered = second < stretch.start  # `after` lies in an earlier stretch
        lowest = max(second + 1, stretch.start) + stretch.offset
        if line.names_hours and stretch.offset_before > stretch.offset:
            lowest = max(lowest, stretch.wall_before)
        if line.names_hours and stretch.offset_before < stretch.offset and entered:
            in_gap = line.next(stretch.wall_before)
            if in_gap is not None and in_gap < stretch.start + stretch.offset:
                return stretch.start * SECOND
        wall = line.next(lowest)
        if wall is None:
            return None
        if wall < stretch.end + stretch.offset:
            return (wall - stretch.offset) * SECOND
    return None


# clock changes


class ClockChange(NamedTuple):
    """A change of the clocks: its second since 1970 in UTC, and the offsets to UTC in seconds."""

    at: int
    offset_before: int
    offset: int


class _Stretch(NamedTuple):
    """The time between two clock changes, in which the offset is constant."""

    start: int
    end: int
    offset_before: int
    offset: int

    @property
    def wall_before(self) -> int:
        """The time that the clocks would show at the start if they had not been changed."""
        return self.start + self.offset_before


def _stretches(zone: str, second: int) -> Iterator[_Stretch]:
    """The stretch that contains a second, then the later ones, up to the horizon."""
    first = datetime.fromtimestamp(second, UTC).year - 1
    last = min(first + _HORIZON_YEARS + 1, 9998)
    start = _year_start(first)
    offset_before = offset = _offset(zone, start)
    for year in range(first, last + 1):
        for change in _changes(zone, year):
            if change.at > second:
                yield _Stretch(start, change.at, offset_before, offset)
            start, offset_before, offset = change
    yield _Stretch(start, _year_start(last + 1), offset_before, offset)


@lru_cache(maxsize=4096)
def _changes(zone: str, year: int) -> tuple[ClockChange, ...]:
    """The clock changes of a year. The search assumes that there are never two within half a day."""
    changes: list[ClockChange] = []
    start, end = _year_start(year), _year_start(year + 1)
    before = _offset(zone, start)
    for second in range(start + _DAY // 2, end + 1, _DAY // 2):
        offset = _offset(zone, second)
        if offset != before:
            changes.append(ClockChange(_change_within(zone, second - _DAY // 2, second), before, offset))
            before = offset
    return tuple(changes)


def _change_within(zone: str, low: int, high: int) -> int:
    before = _offset(zone, low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _offset(zone, middle) == before else (low, middle)
    return high


def _offset(zone: str, second: int) -> int:
    shift = datetime.fromtimestamp(second, ZoneInfo(zone)).utcoffset()
    return 0 if shift is None else int(shift.total_seconds())


def _year_start(year: int) -> int:
    return int(datetime(year, 1, 1, tzinfo=UTC).timestamp())
