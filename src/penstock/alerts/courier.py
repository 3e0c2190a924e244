"""
One receiver's letters, in a thread of their own: whoever is slow or away delays nobody else.

A letter that was refused waits by itself, and the others go on; where nobody answers the door all wait, for the next would find
it as closed. Each waits longer from time to time, and a letter that is too old is given up and told of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from penstock.alerts.spool import Letter, Spool
from penstock.core.outbound import LONGEST_PAUSE, pause
from penstock.core.words import HOUR, Moment, seconds

__all__ = ["Away", "Courier", "Refused", "Stopped", "Way"]

log = logging.getLogger("penstock.alerts")

_LATER: Final = 24 * HOUR


class Refused(Exception):
    """The receiver has answered, and does not want this letter as it is."""


class Away(Exception):
    """There was no answer. The next letter would not get one either."""


class Stopped(Exception):
    """We are being stopped; nothing is known about the letter."""


class Way(Protocol):
    #: As it stands in the log: without what may be secret in an address.
    name: str

    def deliver(self, letter: Letter, now: Moment) -> None:
        """Refused, Away or Stopped if it did not arrive. It ends by itself, in time."""
        ...

    def cut(self) -> None:
        """From another thread: what is being delivered ends now, and nothing more is delivered."""
        ...


class Courier:
    """A part of a driver of its own. `gave_up` is told the letter and why."""

    def __init__(self, way: Way, spool: Spool, gave_up: Callable[[Way, Letter, str], None]) -> None:
        self.way, self.spool, self._gave_up = way, spool, gave_up
        self._letters: dict[int, Letter] = {}
        self._newest = 0
        self._fails, self._opens_at = (
            0,
            0,
        )  # how often in a row nobody answered, and when the door is tried again
        self._stopped = False

    def step(self, now: Moment) -> Moment:
        for letter in self.spool.letters(self._newest):
            self._letters[letter.number] = letter
            self._newest = letter.number
        for letter in sorted(self._letters.values(), key=lambda letter: letter.number):
            if self._fails and letter.until <= now:
                self._give_up(letter, "nobody answered in all the time it had")
            elif not self._stopped and _has_come(letter.due, now) and _has_come(self._opens_at, now):
                self._carry(letter, now)
                return now  # a delivery takes time: what time it is, is asked again
        return self._next(now)

    def _carry(self, letter: Letter, now: Moment) -> None:
        try:
            self.way.deliver(letter, now)
        except Stopped:
            self._stopped = True
        except Refused as error:
            self._fails = 0
            self._again(letter, now, str(error))
        except Away as error:
            self._fails += 1
            self._opens_at = now + pause(self._fails)
            self._again(letter, now, str(error))
        else:
            self._fails, self._opens_at = 0, 0
            self._done(letter)

    def _again(self, letter: Letter, now: Moment, why: str) -> None:
        tries = letter.tries + 1
        due = now + pause(tries)
        if due >= letter.until:
            self._give_up(letter, why)
            return
        level = logging.WARNING if tries == 1 else logging.INFO
        log.log(level, "%s: %s; tried again in %g s", self.way.name, why, seconds(due - now))
        self._letters[letter.number] = later = replace(letter, tries=tries, due=due)
        self.spool.keep(later)

    def _give_up(self, letter: Letter, why: str) -> None:
        log.error(
            "%s: given up after %d tries: %s. It was: %s",
            self.way.name,
            letter.tries,
            why,
            letter.body.decode(),
        )
        self._gave_up(self.way, letter, why)
        self._done(letter)

    def _done(self, letter: Letter) -> None:
        self.spool.drop(letter.number)
        del self._letters[letter.number]

    def _next(self, now: Moment) -> Moment:
        """A letter that waits at a closed door is also given up in time."""
        if self._stopped or not self._letters:
            return now + _LATER
        waits = [max(letter.due, self._opens_at) for letter in self._letters.values()]
        ends = [letter.until for letter in self._letters.values()] if self._fails else []
        return min(*waits, *ends, now + LONGEST_PAUSE)


def _has_come(due: Moment, now: Moment) -> bool:
    """Nothing is put off for longer than the longest pause: if it seems so, the clock was set back."""
    return not now < due <= now + LONGEST_PAUSE
