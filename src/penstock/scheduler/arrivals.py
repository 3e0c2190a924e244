"""
A load: jobs that arrive, and what each does when it runs. In columns, so that a million jobs take 50 MB.

An intent has twenty fields, of which a million jobs share nearly all: a load keeps each distinct intent once,
without its times, and a number for each job. What few jobs have (failed attempts, a cancel, spending) is kept
apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from math import isnan, nan
from typing import NamedTuple

from msgspec.structs import replace

from penstock.core.jobs.dependencies import ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import EndReason, Moment, Money, Span


class PlayedAttempt(NamedTuple):
    """How one attempt goes if nothing interferes."""

    runs_for: Span
    end: EndReason = EndReason.COMPLETED


class Arrival(NamedTuple):
    """
    A job that is submitted at a moment. `attempts`: how its attempts go; without any, each attempt runs for
    `runs_for` and completes. If there are more attempts than given, they go like the last one.
    """

    at: Moment
    intent: Intent
    runs_for: Span
    attempts: tuple[PlayedAttempt, ...] = ()
    #: When its owner cancels it, if it has not ended by then.
    canceled_at: Moment | None = None
    #: How much each attempt spends.
    spends: Money = 0
    #: How soon it makes room when it is asked to; None: not before it is stopped.
    yields_after: Span | None = None
    #: Its next attempt goes on where it was interrupted.
    resumes: bool = False
    #: The jobs that it waits for, by number.
    parents: tuple[tuple[int, ParentCondition], ...] = ()


class JobExtras(NamedTuple):
    """The fields of an arrival that few jobs have."""

    attempts: tuple[PlayedAttempt, ...] = ()
    canceled_at: Moment | None = None
    spends: Money = 0
    yields_after: Span | None = None
    resumes: bool = False
    parents: tuple[tuple[int, ParentCondition], ...] = ()


NO_EXTRAS = JobExtras()


class Load:
    """Arrivals in columns, by number."""

    def __init__(self, arrivals: Iterable[Arrival] = (), *, usual: JobExtras = NO_EXTRAS) -> None:
        #: What holds for every job that is not in `extras`.
        self.usual = usual
        self.at, self.runs_for = array("q"), array("q")
        #: The number of the intent in `intents`.
        self.intent = array("l")
        self.intents: list[Intent] = []
        self._numbers: dict[Intent, int] = {}
        #: The times of the intent: NaN and 0 stand for None.
        self.expected_sec, self.deadline_at, self.earliest_start_at = array("d"), array("q"), array("q")
        self.extras: dict[int, JobExtras] = {}
        for arrival in arrivals:
            self.append(arrival)

    def append(self, arrival: Arrival) -> int:
        """Returns the number of the job."""
        intent = arrival.intent
        plain = replace(intent, expected_duration_sec=None, deadline_at=None, earliest_start_at=None)
        number = self.add(
            arrival.at,
            self.number_of(plain),
            arrival.runs_for,
            expected_sec=nan if intent.expected_duration_sec is None else intent.expected_duration_sec,
            deadline_at=intent.deadline_at or 0,
            earliest_start_at=intent.earliest_start_at or 0,
        )
        extras = JobExtras(*arrival[3:])
        if extras != self.usual:
            self.extras[number] = extras
        return number

    def number_of(self, intent: Intent) -> int:
        """Of an intent without times."""
        number = self._numbers.get(intent)
        if number is None:
            number = self._numbers[intent] = len(self.intents)
            self.intents.append(intent)
        return number

    def add(
        self,
        at: Moment,
        intent: int,
        runs_for: Span,
        *,
        expected_sec: float = nan,
        deadline_at: Moment = 0,
        earliest_start_at: Moment = 0,
    ) -> int:
        self.at.append(at)
        self.intent.append(intent)
        self.runs_for.append(runs_for)
        self.expected_sec.append(expected_sec)
        self.deadline_at.append(deadline_at)
        self.earliest_start_at.append(earliest_start_at)
        return len(self.at) - 1

    def intent_of(self, job: int) -> Intent:
        expected = self.expected_sec[job]
        return replace(
            self.intents[self.intent[job]],
            expected_duration_sec=None if isnan(expected) else expected,
            deadline_at=self.deadline_at[job] or None,
            earliest_start_at=self.earliest_start_at[job] or None,
        )

    def extras_of(self, job: int) -> JobExtras:
        return self.extras.get(job, self.usual)

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, job: int) -> Arrival:
        return Arrival(self.at[job], self.intent_of(job), self.runs_for[job], *self.extras_of(job))

    def __iter__(self) -> Iterator[Arrival]:
        return (self[job] for job in range(len(self)))
