"""How people write times and durations, and how they are shown."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from penstock.core.words import Priority

__all__ = ["DURATION", "PRIORITY", "WHEN", "age", "short", "span"]

_UNITS: Final = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_PRIORITIES: Final = tuple(name.lower() for name in Priority.NAMES)
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


class _Duration(click.ParamType[float]):
    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        text = value.strip().lower()
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return float(text)
        parts = _PART.findall(text)
        if (
            not parts
            or "".join(a + b for a, b in parts) != text.replace(" ", "")
            or any(b not in _UNITS for _, b in parts)
        ):
            self.fail(f"{value!r} is no duration: write 90s, 15m, 2h or 1h30m", param, context)
        return float(sum(float(number) * _UNITS[unit] for number, unit in parts))


class _When(click.ParamType[datetime]):
    """A moment: `in 10m`, `+10m`, `22:30` (the next one), `2026-12-24 18:00`, or RFC 3339. Without a zone: this machine's."""

    name = "WHEN"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        text = value.strip()
        if text.startswith(("+", "in ")):
            seconds = DURATION.convert(text.removeprefix("in ").lstrip("+ "), param, context)
            return datetime.now(UTC) + timedelta(seconds=seconds)
        clock = re.fullmatch(r"(\d{1,2}):(\d{2})", text)
        try:
            if clock:
                now = datetime.now().astimezone()
                at = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
                return at if at > now else at + timedelta(days=1)
            return datetime.fromisoformat(text).astimezone()
        except ValueError:
            self.fail(f"{value!r} is no moment: write +10m, 22:30, or 2026-12-24 18:00", param, context)


class _Priority(click.ParamType["int | str"]):
    name = "PRIORITY"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int | str:
        text = str(value).strip().lower()
        if text in _PRIORITIES:
            return text
        if not (text.isdecimal() and Priority.LEAST <= int(text) <= Priority.MOST):
            self.fail(f"{value!r} is no priority: write 1..100, or {', '.join(_PRIORITIES)}", param, context)
        return int(text)

    def shell_complete(self, _: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in _PRIORITIES if name.startswith(incomplete)]


PRIORITY: Final = _Priority()
DURATION: Final = _Duration()
WHEN: Final = _When()


def short(job_id: str) -> str:
    """The end of an id: the beginnings of those that were made together look alike."""
    return job_id[-8:]


def span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
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
