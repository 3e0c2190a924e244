"""
The only file that waits. It calls each part when the part asked for it, and all of them at once when somebody rings.

A ring only sets an event, so a thousand of them while a step runs cost one more step. A part that raises is logged and asked again
later: the store has rolled back, and the next step decides on what is true.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Event, Thread
from typing import Protocol

from penstock.core.refusals import Unavailable
from penstock.core.words import SECOND, Moment, Span, seconds
from penstock.stores.protocol import Clock

__all__ = ["Driver", "Part"]

log = logging.getLogger("penstock.driver")


class Part(Protocol):
    def step(self, now: Moment) -> Moment:
        """Do what is due; answer when to be asked again."""
        ...


class Driver:
    def __init__(
        self,
        clock: Clock,
        parts: Sequence[Part],
        *,
        after_failure: Span = 5 * SECOND,
        name: str = "penstock-driver",
    ) -> None:
        self._clock, self._parts, self._after_failure = clock, parts, after_failure
        self._wakeup, self._stopping = Event(), Event()
        self._thread = Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ring(self) -> None:
        """Something changed. From any thread; never blocks."""
        self._wakeup.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wakeup.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._wakeup.clear()  # before the steps: a ring during them must bring another round
            wait = self.round() - self._clock()
            if wait > 0:
                self._wakeup.wait(seconds(wait))

    def round(self) -> Moment:
        """
        Every part once; when the first of them wants to be asked again. All are told the same moment: those who asked for the same pause
        then come due together, and an idle scheduler is woken once for all of them.
        """
        now = self._clock()
        return min(self._step(part, now) for part in self._parts)

    def _step(self, part: Part, now: Moment) -> Moment:
        try:
            return part.step(now)
        except (Unavailable, OSError) as error:  # a full disk, a database that is away: said in one line
            log.error(  # noqa: TRY400  # as above
                "%s failed: %s; it is asked again in %s s",
                type(part).__name__,
                error,
                seconds(self._after_failure),
            )
            return now + self._after_failure
        except Exception:  # one part's mistake must not stop the other parts
            log.exception(
                "%s failed; it is asked again in %s s", type(part).__name__, seconds(self._after_failure)
            )
            return now + self._after_failure
