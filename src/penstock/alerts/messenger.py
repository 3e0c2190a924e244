"""
One receiver's messages, in a thread of their own: whoever is slow or away delays nobody else.

A message that was refused waits by itself, and the others go on; where nobody answers the door all wait, for the next would find
it as closed. Each waits longer from time to time, and a message that is too old is given up and told of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from penstock.alerts.reader import Message, Spool
from penstock.core.jobs.outbound import LONGEST_PAUSE, pause
from penstock.core.jobs.types import HOUR, Moment, seconds

__all__ = ["MessageRefused", "Messenger", "ReceiverAway", "Stopped", "Way"]

log = logging.getLogger("penstock.alerts")

_LATER: Final = 24 * HOUR


class MessageRefused(Exception):
    """The receiver has answered, and does not want this message as it is."""


class ReceiverAway(Exception):
    """There was no answer. The next message would not get one either."""


class Stopped(Exception):
    """We are being stopped; nothing is known about the message."""


class Way(Protocol):
    #: As it stands in the log: without what may be secret in an address.
    name: str

    def deliver(self, message: Message, now: Moment) -> None:
        """Refused, Away or Stopped if it did not arrive. It ends by itself, in time."""
        ...

    def cut(self) -> None:
        """From another thread: what is being delivered ends now, and nothing more is delivered."""
        ...


class Messenger:
    """A part of a driver of its own. `gave_up` is told the message and why."""

    def __init__(self, way: Way, spool: Spool, gave_up: Callable[[Way, Message, str], None]) -> None:
        self.way, self.spool, self._gave_up = way, spool, gave_up
        self._messages: dict[int, Message] = {}
        self._newest = 0
        self._fails, self._opens_at = (
            0,
            0,
        )  # how often in a row nobody answered, and when the door is tried again
        self._stopped = False

    def step(self, now: Moment) -> Moment:
        for message in self.spool.messages(self._newest):
            self._messages[message.number] = message
            self._newest = message.number
        for message in sorted(self._messages.values(), key=lambda message: message.number):
            if self._fails and message.until <= now:
                self._give_up(message, "nobody answered in all the time it had")
            elif not self._stopped and _has_come(message.due, now) and _has_come(self._opens_at, now):
                self._carry(message, now)
                return now  # a delivery takes time: what time it is, is asked again
        return self._next(now)

    def _carry(self, message: Message, now: Moment) -> None:
        try:
            self.way.deliver(message, now)
        except Stopped:
            self._stopped = True
        except MessageRefused as error:
            self._fails = 0
            self._again(message, now, str(error))
        except ReceiverAway as error:
            self._fails += 1
            self._opens_at = now + pause(self._fails)
            self._again(message, now, str(error))
        else:
            self._fails, self._opens_at = 0, 0
            self._done(message)

    def _again(self, message: Message, now: Moment, why: str) -> None:
        tries = message.tries + 1
        due = now + pause(tries)
        if due >= message.until:
            self._give_up(message, why)
            return
        level = logging.WARNING if tries == 1 else logging.INFO
        log.log(level, "%s: %s; tried again in %g s", self.way.name, why, seconds(due - now))
        self._messages[message.number] = later = replace(message, tries=tries, due=due)
        self.spool.keep(later)

    def _give_up(self, message: Message, why: str) -> None:
        log.error(
            "%s: given up after %d tries: %s. It was: %s",
            self.way.name,
            message.tries,
            why,
            message.body.decode(),
        )
        self._gave_up(self.way, message, why)
        self._done(message)

    def _done(self, message: Message) -> None:
        self.spool.drop(message.number)
        del self._messages[message.number]

    def _next(self, now: Moment) -> Moment:
        """A message that waits at a closed door is also given up in time."""
        if self._stopped or not self._messages:
            return now + _LATER
        waits = [max(message.due, self._opens_at) for message in self._messages.values()]
        ends = [message.until for message in self._messages.values()] if self._fails else []
        return min(*waits, *ends, now + LONGEST_PAUSE)


def _has_come(due: Moment, now: Moment) -> bool:
    """Nothing is put off for longer than the longest pause: if it seems so, the clock was set back."""
    return not now < due <= now + LONGEST_PAUSE
