"""
A clock that no lease can be moved by.

It is the wall clock of the moment it was made, carried on by the monotonic clock. When the wall clock has been set since, `jump`
says by how much, and `accept` takes it over: the maintenance then moves every lease and every delay by the same amount, so none grows or shrinks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from penstock.core.jobs.types import SECOND, Moment, Span

#: What clocks differ by without having been set.
TOLERANCE: Final[Span] = 2 * SECOND


def comes_later(moment: Moment, now: Moment, pause: Span) -> bool:
    """Whether it is not due yet. One that is further away than the pause it was made of is from before the clock was set back, and counts for nothing."""
    return now < moment <= now + pause


def _wall() -> Moment:
    return time.time_ns() // 1_000


def _steady() -> Span:
    # Counts through a suspended machine, on which a lease goes on expiring as it does for everybody else.
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000


class SteadyClock:
    def __init__(
        self,
        wall: Callable[[], Moment] = _wall,
        steady: Callable[[], Span] = _steady,
        *,
        tolerance: Span = TOLERANCE,
    ) -> None:
        self._wall, self._steady, self._tolerance = wall, steady, tolerance
        self._base = wall() - steady()

    def __call__(self) -> Moment:
        return self._base + self._steady()

    def jump(self) -> Span:
        """How far the wall clock has been set away from us; 0 for the drift that every clock has."""
        by = self._wall() - self()
        return by if abs(by) > self._tolerance else 0

    def accept(self, by: Span) -> None:
        self._base += by
