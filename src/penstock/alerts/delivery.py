"""
Delivery to one receiver: a spool of messages on the disk, and a messenger that empties it in a thread of its
own.

A message is a file, so that a kill at any moment loses none and a delivery costs one unlink. Its name is the
number of its event: a reader that was killed before it wrote its position overwrites the same messages.

A slow or absent receiver delays no other. A refused message is retried later while the others are sent. When
the receiver does not answer, all messages wait, because the next would fail too. The pauses grow, and a
message that is too old is given up and reported.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.core.jobs.alerts import LONGEST_PAUSE, pause
from penstock.core.jobs.types import HOUR, Moment, seconds
from penstock.scheduler.permissions import private_directory, replace_file

log = logging.getLogger("penstock.alerts")

_ENDING: Final = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """
    A message to a receiver. `tries`: how many have failed. The next try is at `due`; at `until` the message
    is given up.
    """

    number: int
    content: dict[str, Any]
    due: Moment
    until: Moment
    tries: int = 0

    @property
    def body(self) -> bytes:
        return json.dumps(self.content, ensure_ascii=False, separators=(",", ":")).encode()


class Spool:
    """
    The messages to one receiver, on disk and bounded. The reader's thread calls `put`, the messenger's thread
    the other methods. Files appear and vanish as a whole, so no lock is needed.
    """

    def __init__(self, folder: Path, most: int = 1_000) -> None:
        self.folder, self._most = private_directory(folder), most
        self._missed = 0
        for torn in folder.glob(f".*{_ENDING}.*"):  # a kill came before the rename
            torn.unlink(missing_ok=True)

    def __len__(self) -> int:
        return sum(1 for _ in self._numbers())

    def put(self, message: Message) -> bool:
        """
        Add a message. False: the spool is full; the next message that fits has the number of the others
        (`not_told`).
        """
        path = self._path(message.number)
        if not path.exists() and len(self) >= self._most:
            self._missed += 1
            if self._missed == 1:
                log.error(
                    "%s is full with %d messages: further messages are dropped", self.folder, self._most
                )
            return False
        if self._missed:
            message = replace(message, content=message.content | {"not_told": self._missed})
            self._missed = 0
        self.keep(message)
        return True

    def keep(self, message: Message) -> None:
        replace_file(self._path(message.number), json.dumps(asdict(message)).encode())

    def messages(self, after: int = 0) -> list[Message]:
        """
        The messages with a higher number, in order. A damaged file is renamed, so that it does not block the
        others.
        """
        return [read for number in sorted(self._numbers()) if number > after and (read := self._read(number))]

    def drop(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def _read(self, number: int) -> Message | None:
        path = self._path(number)
        try:
            return Message(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.error("%s is damaged (%s) and was renamed", path, error)  # noqa: TRY400  # for a person
            path.rename(path.with_suffix(".damaged"))
            return None

    def _numbers(self) -> Iterator[int]:
        for path in self.folder.iterdir():
            if path.suffix == _ENDING and path.stem.isdigit():
                yield int(path.stem)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}{_ENDING}"


_IDLE: Final = 24 * HOUR


class MessageRefused(Exception):
    """The receiver refuses this message."""


class ReceiverAway(Exception):
    """The receiver did not answer. The next message would fail too."""


class Stopped(Exception):
    """The daemon stops; whether the message arrived is unknown."""


class Target(Protocol):
    """How messages reach one receiver: a command or a webhook."""

    #: The name for the log, without the parts of an address that may be secret.
    name: str

    def deliver(self, message: Message, now: Moment) -> None:
        """
        Deliver a message, within a time limit. Raises MessageRefused, ReceiverAway or Stopped if it did not
        arrive.
        """
        ...

    def abort(self) -> None:
        """Abort the delivery under way, and deliver nothing more. Called from another thread."""
        ...


class Messenger:
    """
    Delivers messages, as one step of a driver. `gave_up` is called with each abandoned message and the
    reason.
    """

    def __init__(
        self, target: Target, spool: Spool, on_given_up: Callable[[Target, Message, str], None]
    ) -> None:
        self.target, self.spool, self._gave_up = target, spool, on_given_up
        self._messages: dict[int, Message] = {}
        self._newest = 0
        #: How many tries in a row had no answer, and when the next one is due.
        self._failures, self._closed_until = 0, 0
        self._stopped = False

    def step(self, now: Moment) -> Moment:
        for message in self.spool.messages(self._newest):
            self._messages[message.number] = message
            self._newest = message.number
        for message in sorted(self._messages.values(), key=lambda message: message.number):
            if self._failures and message.until <= now:
                self._give_up(message, "the receiver did not answer in time")
            elif not self._stopped and _is_due(message.due, now) and _is_due(self._closed_until, now):
                self._deliver(message, now)
                return now  # a delivery takes time: the driver reads the clock again
        return self._next(now)

    def _deliver(self, message: Message, now: Moment) -> None:
        try:
            self.target.deliver(message, now)
        except Stopped:
            self._stopped = True
        except MessageRefused as error:
            self._failures = 0
            self._retry_later(message, now, str(error))
        except ReceiverAway as error:
            self._failures += 1
            self._closed_until = now + pause(self._failures)
            self._retry_later(message, now, str(error))
        else:
            self._failures, self._closed_until = 0, 0
            self._done(message)

    def _retry_later(self, message: Message, now: Moment, why: str) -> None:
        tries = message.tries + 1
        due = now + pause(tries)
        if due >= message.until:
            self._give_up(message, why)
            return
        level = logging.WARNING if tries == 1 else logging.INFO
        log.log(level, "%s: %s; next try in %g s", self.target.name, why, seconds(due - now))
        self._messages[message.number] = later = replace(message, tries=tries, due=due)
        self.spool.keep(later)

    def _give_up(self, message: Message, why: str) -> None:
        log.error(
            "%s: gave up after %d tries: %s. The message: %s",
            self.target.name,
            message.tries,
            why,
            message.body.decode(),
        )
        self._gave_up(self.target, message, why)
        self._done(message)

    def _done(self, message: Message) -> None:
        self.spool.drop(message.number)
        del self._messages[message.number]

    def _next(self, now: Moment) -> Moment:
        """When the next step is due: a try, or the moment to give up a message."""
        if self._stopped or not self._messages:
            return now + _IDLE
        waits = [max(message.due, self._closed_until) for message in self._messages.values()]
        ends = [message.until for message in self._messages.values()] if self._failures else []
        return min(*waits, *ends, now + LONGEST_PAUSE)


def _is_due(due: Moment, now: Moment) -> bool:
    """
    Whether the moment has come. One further away than the longest pause counts as due: the clock was set
    back.
    """
    return not now < due <= now + LONGEST_PAUSE
