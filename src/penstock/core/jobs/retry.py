"""
When to try again, as data.

A schedule is the list of its delays, and all of them are used: the failure after the last delay is the final one.
Counters are per category, so a machine that was away does not eat into what the job is allowed for crashes, and
a graceful stop counts nowhere.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.types import MINUTE, SECOND, Span

__all__ = ["DEFAULT", "NONE_YET", "Category", "Counters", "Schedules", "after_failure"]


class Category(StrEnum):
    CRASH = "crash"  # the worker, the lease or the time limit was lost: we do not know what the job did
    UNAVAILABLE = "unavailable"  # the job says that what it needs is away
    ERROR = "error"  # the job's own error
    START = "start"  # nobody came for it in time


class Counters(Struct, frozen=True, gc=False):
    crash: int = 0
    unavailable: int = 0
    error: int = 0
    start: int = 0


NONE_YET = Counters()


class Schedules(Struct, frozen=True):
    crash: tuple[Span, ...] = (1 * MINUTE, 5 * MINUTE, 15 * MINUTE, 30 * MINUTE, 30 * MINUTE)
    unavailable: tuple[Span, ...] = (2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 15 * MINUTE)
    #: The last one is repeated for ever: a job does not fail because its worker is away. But without a pause it would
    #: be the first to be reserved again, and hold the room of those who are present.
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
