"""
The driver: the one thread of a scheduler that waits, and the clock that it goes by.

A wake-up only sets an event, so a thousand wake-ups during a step cost one more step. A wake-up concerns the
parts that start jobs: the driver calls them with each one, and when they are due. Upkeep is called when it is
due by the clock; a wake-up brings that forward only for upkeep that says so, and by no more than it says.

A part that raises is logged and called again later: the store has rolled back, and the next step decides on
what is true then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Final, Protocol

from penstock.core.errors import Unavailable
from penstock.core.jobs.types import SECOND, Moment, Span, seconds
from penstock.stores.api import Clock

log = logging.getLogger("penstock.driver")

#: So much earlier upkeep may be called, along with other upkeep.
_EARLY: Final[Span] = 1 * SECOND
#: What clocks differ by without having been set.
TOLERANCE: Final[Span] = 2 * SECOND


class Part(Protocol):
    def step(self, now: Moment) -> Moment:
        """Do what is due; return when to be called again."""
        ...


@dataclass(slots=True)
class TimedPart:
    """
    A part with a timetable of its own. `pause`: a wake-up concerns it too, but it is called at most once in
    that span; None: only its own moment counts.
    """

    part: Part
    pause: Span | None = None
    due: Moment = 0
    called_at: Moment = 0


class Driver:
    def __init__(
        self,
        clock: Clock,
        parts: Sequence[Part],
        upkeep: Sequence[TimedPart] = (),
        *,
        after_failure: Span = 5 * SECOND,
        name: str = "penstock-driver",
    ) -> None:
        self._clock, self._parts, self._upkeep, self._after_failure = clock, parts, upkeep, after_failure
        self._now: Moment = 0
        self._wakeup, self._stopping = Event(), Event()
        self._thread = Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Something changed. From any thread; never blocks."""
        self._wakeup.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wakeup.set()
        if self._thread.is_alive():  # a Ctrl-C may have come before its start
            self._thread.join()

    def _loop(self) -> None:
        woken = False
        while not self._stopping.is_set():
            self._wakeup.clear()  # before the steps: a wake-up during them must bring another pass
            wait = self.step(woken=woken) - self._clock()
            woken = self._wakeup.wait(seconds(max(0, wait)))

    def step(self, *, woken: bool = False) -> Moment:
        """
        Call the upkeep that is due, then every part; return when the first of them is due again. Upkeep goes
        first: a machine that grew quiet admits jobs in the same pass. All get the same moment, and upkeep
        that is nearly due comes along with upkeep that is due: so an idle scheduler wakes once a tick for all
        of them. When the clock was set back, all upkeep is due: no part sleeps for as long as the clock went
        back.
        """
        now = self._clock()
        clock_went_back, self._now = now < self._now, now
        for timed in self._upkeep:
            if clock_went_back:
                timed.due = now
            elif woken and timed.pause is not None:
                timed.due = min(timed.due, timed.called_at + timed.pause)
        soon = now + _EARLY if any(t.due <= now for t in self._upkeep if t.pause is None) else now
        for timed in self._upkeep:
            if timed.due <= (soon if timed.pause is None else now):
                due = self._call(timed.part, now)
                timed.called_at, timed.due = now, max(due, now + (timed.pause or 0))
        return min([*(timed.due for timed in self._upkeep), *(self._call(part, now) for part in self._parts)])

    def _call(self, part: Part, now: Moment) -> Moment:
        try:
            return part.step(now)
        except (Unavailable, OSError) as error:  # a full disk, a database that is away: one line is enough
            log.error("%s failed: %s; it is called again later", type(part).__name__, error)  # noqa: TRY400  # as above
        except Exception:  # one part's mistake must not stop the other parts
            log.exception("%s failed; it is called again later", type(part).__name__)
        return now + self._after_failure


def comes_later(moment: Moment, now: Moment, pause: Span) -> bool:
    """
    Whether a moment is not due yet. A moment further away than the pause that it was made of is older than a
    clock that was set back, and counts as due.
    """
    return now < moment <= now + pause


def _wall() -> Moment:
    return time.time_ns() // 1_000


def _steady() -> Span:
    # Counts through a suspended machine, on which a lease goes on expiring as it does for every other host.
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000


class SteadyClock:
    """
    A clock that moves no lease: the wall clock of the moment it was made, carried on by the monotonic clock.
    When the wall clock has been set since, `jump` says by how much, and `accept` takes it over: maintenance
    then moves every lease and every delay by the same amount, so none grows or shrinks.
    """

    def __init__(self, wall: Callable[[], Moment] = _wall, steady: Callable[[], Span] = _steady) -> None:
        self._wall, self._steady = wall, steady
        self._base = wall() - steady()

    def __call__(self) -> Moment:
        return self._base + self._steady()

    def jump(self) -> Span:
        """How far the wall clock has been set away from this one; 0 for the drift that every clock has."""
        by = self._wall() - self()
        return by if abs(by) > TOLERANCE else 0

    def accept(self, by: Span) -> None:
        self._base += by
