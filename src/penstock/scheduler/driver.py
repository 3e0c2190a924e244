"""
The driver: the thread that calls a scheduler's parts when they are due, and the clock that it uses.

A wake-up only sets an event, so a thousand wake-ups during a step cost one more step. The driver calls the
parts that start jobs with each wake-up, and when they are due. It calls upkeep when the clock says so; a
wake-up brings upkeep forward only if its `TimedPart` has a `pause`, and by no more than that allows.

If a part raises, the driver logs the error and calls the part again later: the store has rolled back, and the
next step decides on what is true then.
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

#: Upkeep may be called this much earlier, together with other upkeep.
_EARLY: Final[Span] = 1 * SECOND
#: A smaller difference between two clocks does not mean that one was set.
TOLERANCE: Final[Span] = 2 * SECOND


class Part(Protocol):
    """A part of a scheduler, which the driver calls."""

    def step(self, now: Moment) -> Moment:
        """Do what is due; return the moment of the next call."""
        ...


@dataclass(slots=True)
class TimedPart:
    """
    Upkeep and the moment at which it is due. `pause`: a wake-up makes it due too, but it is called at most
    once in that span; None: wake-ups do not affect it.
    """

    part: Part
    pause: Span | None = None
    due: Moment = 0
    called_at: Moment = 0


class Driver:
    """
    Calls the parts and the upkeep of a scheduler in one thread. `after_failure`: when a part that raised is
    called again.
    """

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
        """Call the parts now, because something changed. From any thread; never blocks."""
        self._wakeup.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wakeup.set()
        if self._thread.is_alive():  # a Ctrl-C may have come before the thread's start
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
        first, so that a machine that has become quiet admits jobs in the same pass. Upkeep that is nearly due
        is called together with upkeep that is due, so an idle scheduler wakes once a tick for all of it. If
        the clock was set back, all upkeep is due: else it would sleep for as long as the clock went back.
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
        except Exception:  # an error in one part must not stop the other parts
            log.exception("%s failed; it is called again later", type(part).__name__)
        return now + self._after_failure


def comes_later(moment: Moment, now: Moment, pause: Span) -> bool:
    """
    Whether `moment`, which was once set to now + `pause`, is still to come. If it lies further ahead than
    `pause`, the clock was set back since, and the moment counts as due.
    """
    return now < moment <= now + pause


def _wall() -> Moment:
    return time.time_ns() // 1_000


def _steady() -> Span:
    # CLOCK_BOOTTIME counts while the machine is suspended: leases expire during that time too, as on other
    # hosts.
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000


class SteadyClock:
    """
    A clock that does not jump: it starts at the wall clock's time and goes on with the monotonic clock. If
    the wall clock was set since, `jump` returns by how much, and `accept` sets this clock too. Maintenance
    then moves every lease and every delay by the same amount, so none gets longer or shorter.
    """

    def __init__(self, wall: Callable[[], Moment] = _wall, steady: Callable[[], Span] = _steady) -> None:
        self._wall, self._steady = wall, steady
        self._base = wall() - steady()

    def __call__(self) -> Moment:
        return self._base + self._steady()

    def jump(self) -> Span:
        """How far the wall clock was set away from this one; 0 for a difference within `TOLERANCE`."""
        by = self._wall() - self()
        return by if abs(by) > TOLERANCE else 0

    def accept(self, by: Span) -> None:
        self._base += by
