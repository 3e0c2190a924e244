"""
Retry schedules: when a failed job runs again.

A schedule is a list of delays, and all of them are used: the failure after the last delay is final. Counters
are per category, so a machine that was unavailable does not use up the retries for crashes, and a graceful
stop counts nowhere.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.types import MINUTE, SECOND, Span

__all__ = ["DEFAULT", "NONE_YET", "Category", "Counters", "Schedules", "after_failure"]


class Category(StrEnum):
    CRASH = "crash"  # worker, lease or time limit was lost: what the job did is unknown
    UNAVAILABLE = "unavailable"  # the job reported that something it needs is unavailable
    ERROR = "error"  # the job's own error
    START = "start"  # no worker took the reservation in time


class Counters(Struct, frozen=True, gc=False):
    crash: int = 0
    unavailable: int = 0
    error: int = 0
    start: int = 0


NONE_YET = Counters()


class Schedules(Struct, frozen=True):
    crash: tuple[Span, ...] = (1 * MINUTE, 5 * MINUTE, 15 * MINUTE, 30 * MINUTE, 30 * MINUTE)
    unavailable: tuple[Span, ...] = (2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 15 * MINUTE)
    #: The last delay repeats for ever: a job does not fail because its worker is away. Without a delay it
    #: would be reserved again first, and hold the units of jobs whose workers are present.
    start: tuple[Span, ...] = (30 * SECOND, 1 * MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE)


DEFAULT = Schedules()


def after_failure(
    category: Category, counters: Counters, schedules: Schedules, own_delays_sec: tuple[int, ...]
) -> tuple[Counters, Span | None]:
    """The counters after this failure, and the delay until the next attempt; None: there is none left."""
    match category:
        case Category.CRASH:
            delays, failures = schedules.crash, counters.crash
            counters = replace(counters, crash=failures + 1)
        case Category.UNAVAILABLE:
            delays, failures = schedules.unavailable, counters.unavailable
            counters = replace(counters, unavailable=failures + 1)
        case Category.ERROR:
            delays, failures = tuple(d * SECOND for d in own_delays_sec), counters.error
            counters = replace(counters, error=failures + 1)
        case Category.START:
            failures = min(counters.start, len(schedules.start) - 1)
            delays, counters = schedules.start, replace(counters, start=counters.start + 1)
        case _:
            assert_never(category)
    return counters, delays[failures] if failures < len(delays) else None
