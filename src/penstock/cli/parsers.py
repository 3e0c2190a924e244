"""
Types of arguments and options: durations, times and priorities, and completion for jobs, addons, hosts and
schedules.

Completion offers existing names. It fails silently and quickly: an error is of no use after a TAB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from penstock.core.jobs.types import Priority

if TYPE_CHECKING:
    from penstock.client.client import Client


T = TypeVar("T")
_UNITS: Final = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_PRIORITIES: Final = tuple(name.lower() for name in Priority.NAMES)
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


def _seconds(value: str) -> float:
    text = value.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        text += "s"
    parts = _PART.findall(text)
    written = "".join(number + unit for number, unit in parts) == text.replace(" ", "")
    seconds = sum(float(number) * _UNITS.get(unit, inf) for number, unit in parts)
    if not parts or not written or not isfinite(seconds):
        raise click.BadParameter(f"{value!r:.60} is not a duration: write 90s, 15m, 2h or 1h30m")
    return float(seconds)


def _moment(value: str) -> datetime:
    """
    Read `in 10m`, `+10m`, `22:30` (the next one), `2026-12-24 18:00` or RFC 3339. The default zone is this
    machine's.
    """
    text = value.strip()
    clock = re.fullmatch(r"(\d{1,2}):(\d{2})", text)
    try:
        if text.startswith(("+", "in ")):
            return datetime.now(UTC) + timedelta(seconds=_seconds(text.removeprefix("in ").lstrip("+ ")))
        if clock:
            now = datetime.now().astimezone()
            at = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
            return at if at > now else at + timedelta(days=1)
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{value!r} is not a time: write +10m, 22:30, or 2026-12-24 18:00") from None


class Whole(click.IntRange):
    """A whole number within a range. Help shows it as N, not as INTEGER RANGE."""

    name = "N"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            return super().convert(value, parameter, context)
        except click.BadParameter:
            raise _outside(value, "a whole number", self) from None


class Amount(click.FloatRange):
    """A number within a range. Help shows it as N, not as FLOAT RANGE."""

    name = "N"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            return super().convert(value, parameter, context)
        except click.BadParameter:
            raise _outside(value, "a number", self) from None


def _outside(value: Any, kind: str, bounds: Whole | Amount) -> click.BadParameter:
    """An error with the range and an example. click adds the name of the option."""
    least, most = bounds.min, bounds.max
    if most is not None:
        kind += f" from {least:,} to {most:,}"
    elif least is not None:
        kind += f" above {least:,}" if bounds.min_open else f" of {least:,} or more"
    example = min(max(10, least or 0), 10 if most is None else most)
    return click.BadParameter(f"{value!r} is not {kind}, for example {example:,}")


def _priority(value: str) -> int | str:
    text = value.strip().lower()
    if text in _PRIORITIES:
        return text
    if not (text.isdecimal() and Priority.LEAST <= int(text) <= Priority.MOST):
        raise click.BadParameter(f"{value!r} is not a priority: write 1..100, or {', '.join(_PRIORITIES)}")
    return int(text)


class _Parsed(click.ParamType[T]):
    """A type whose text a function parses. `words` are offered for completion."""

    def __init__(self, name: str, read: Callable[[str], T], words: Sequence[str] = ()) -> None:
        self.name, self._read, self._words = name, read, words

    def convert(self, value: Any, _: click.Parameter | None, __: click.Context | None) -> T:
        return self._read(str(value))

    def shell_complete(self, _: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self._words if word.startswith(incomplete)]


PRIORITY: Final = _Parsed("PRIORITY", _priority, _PRIORITIES)
DURATION: Final = _Parsed("DURATION", _seconds)
#: Durations in whole seconds, rounded up.
WHOLE_SECONDS: Final = _Parsed("DURATION", lambda value: ceil(_seconds(value)))
WHEN: Final = _Parsed("WHEN", _moment)


def short(job_id: str) -> str:
    """The last characters of an id: ids that were made at the same time begin alike."""
    return job_id[-8:]


def span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if not seconds:
        return "0 s"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    for limit, size, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if seconds < limit:
            value = seconds / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def age(moment: datetime | None, now: datetime | None = None) -> str:
    if moment is None:
        return "-"
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    return f"in {span(-seconds)}" if seconds < -0.5 else span(max(0.0, seconds))


_PATIENCE: Final = 2.0  # seconds


class _Name(click.ParamType[str]):
    def __init__(self, name: str, known: Callable[[Client], Iterator[CompletionItem]]) -> None:
        self.name, self._known = name, known

    def shell_complete(
        self, context: click.Context, _: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from penstock.client.client import Client
        from penstock.core.errors import PenstockError

        try:
            with Client(context.find_root().params.get("url"), timeout=_PATIENCE, retry_for=0.0) as client:
                return [item for item in self._known(client) if item.value.startswith(incomplete)]
        except (PenstockError, ValueError, OSError):
            return []


def _jobs(client: Client) -> Iterator[CompletionItem]:
    """Complete jobs by their short ids, newest first."""
    yield CompletionItem("last", help="the newest")
    for job in client.jobs(limit=50, newest_first=True).jobs:
        yield CompletionItem(job.job_id[-8:], help=f"{job.state} {job.job_type} of {job.addon_id}")


def _addons(client: Client) -> Iterator[CompletionItem]:
    for addon in client.addons().addons:
        yield CompletionItem(addon.addon_id)


def _hosts(client: Client) -> Iterator[CompletionItem]:
    for host in client.hosts().hosts:
        yield CompletionItem(host.host, help=host.state)


def _schedules(client: Client) -> Iterator[CompletionItem]:
    for info in client.schedules():
        yield CompletionItem(info.name, help=info.title)


SCHEDULE: Final = _Name("SCHEDULE", _schedules)
JOB: Final = _Name("JOB", _jobs)
ADDON: Final = _Name("ADDON", _addons)
HOST: Final = _Name("HOST", _hosts)
