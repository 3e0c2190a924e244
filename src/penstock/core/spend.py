"""
What work may cost: a limit per job, and per addon by day and by month (UTC).

Spending is told after the fact, so a limit can be overshot; it is then recorded by how much, and nothing starts until the window is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final, NamedTuple

from penstock.core.words import SECOND, Moment, Money

__all__ = ["WARN_AT", "Budget", "Mark", "Window", "judge", "window_names", "windows"]

WARN_AT: Final = 0.80


class Mark(StrEnum):
    """What one more amount did to a limit. Each is reached once, however the spending was cut into pieces."""

    WARNED = "warned"
    REACHED = "reached"


def judge(before: Money, added: Money, limit: Money | None) -> Mark | None:
    """The mark that this amount crossed, the worse one if it crossed both."""
    if limit is None:
        return None
    after = before + added
    if before < limit <= after:
        return Mark.REACHED
    if before < limit * WARN_AT <= after < limit:
        return Mark.WARNED
    return None


class Window(NamedTuple):
    kind: str  # day or month
    name: str  # 2026-11-16, 2026-11
    ends_at: Moment


def windows(now: Moment) -> tuple[Window, Window]:
    at = datetime.fromtimestamp(now // SECOND, UTC)
    midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
    next_month = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
    return (
        Window("day", f"{at:%Y-%m-%d}", _moment(midnight + timedelta(days=1))),
        Window("month", f"{at:%Y-%m}", _moment(next_month)),
    )


def window_names(now: Moment) -> dict[str, str]:
    return {window.name: window.kind for window in windows(now)}


@dataclass(frozen=True, slots=True)
class Budget:
    day: Money | None = None
    month: Money | None = None

    def windows(self, now: Moment) -> Iterator[tuple[str, Money, Moment]]:
        for window, limit in zip(windows(now), (self.day, self.month), strict=True):
            if limit is not None:
                yield window.kind, limit, window.ends_at


def _moment(at: datetime) -> Moment:
    return int(at.timestamp()) * SECOND
