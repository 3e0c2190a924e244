"""
What work may cost: a limit per job, and per addon by day and by month (UTC).

Spending is told after the fact, so a limit can be overshot; it is then recorded by how much, and nothing starts until the window is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from penstock.core.words import HOUR, SECOND, Moment, Money

__all__ = ["WARN_AT", "Budget", "Mark", "Window", "judge", "windows"]

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
    return _windows_of_day(now // (24 * HOUR))


@lru_cache(maxsize=8)
def _windows_of_day(day: int) -> tuple[Window, Window]:
    """Every tick asks, and the answer changes at midnight."""
    at = midnight = datetime.fromtimestamp(day * 86_400, UTC)
    next_month = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
    return (
        Window("day", f"{at:%Y-%m-%d}", _moment(midnight + timedelta(days=1))),
        Window("month", f"{at:%Y-%m}", _moment(next_month)),
    )


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
