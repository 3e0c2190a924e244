"""
A load: jobs that arrive, and what each does when it runs. It is stored in columns: a million jobs take 50 MB.

An intent has twenty fields, and a million jobs have the same values in nearly all of them. So a load keeps
each distinct intent once, without its times, and its number for each job. Fields that few jobs have (failed
attempts, a cancel, spending) are kept apart.

A load also has arrays, schedules and batches. Arrays and schedules submit jobs while the load is played: an
array when one of its jobs ends, a schedule when a moment is due. A batch only counts its jobs. The settings
that are played decide which jobs an array or a schedule submits, and when. They do not decide what such a job
does: that depends on its index or moment alone (`Works`), so two plays compare the same work.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from hashlib import blake2b
from math import isnan, nan
from typing import NamedTuple

from msgspec.structs import replace

from penstock.core.jobs.dependencies import ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.schedules import ScheduleRecord
from penstock.core.jobs.types import AddonId, EndReason, JobId, Moment, Money, Span


class PlayedAttempt(NamedTuple):
    """How one attempt goes if nothing interferes."""

    runs_for: Span
    end: EndReason = EndReason.COMPLETED


class Arrival(NamedTuple):
    """
    A job that is submitted at a moment. `attempts`: how its attempts go; further attempts go like the last
    one. If it is empty, each attempt runs for `runs_for` and completes.
    """

    at: Moment
    intent: Intent
    runs_for: Span
    attempts: tuple[PlayedAttempt, ...] = ()
    #: When its owner cancels it, unless it has ended by then.
    canceled_at: Moment | None = None
    #: How much each attempt spends.
    spends: Money = 0
    #: How long after a request to yield it stops; None: only when it is stopped.
    yields_after: Span | None = None
    #: Whether its next attempt continues where an interrupted one stopped.
    resumes: bool = False
    #: The numbers of the jobs that it waits for; a negative number is that of a group (`Load.group_of`).
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


def plain(intent: Intent) -> Intent:
    """The intent without the fields that no rule of admission reads, so that more jobs share it."""
    return replace(intent, payload="null", tags=(), idempotency_key=None, after=())


class Load:
    """Arrivals in columns, by the number of the job."""

    def __init__(self, arrivals: Iterable[Arrival] = (), *, usual: JobExtras = NO_EXTRAS) -> None:
        #: The extra fields of every job that is not in `extras`.
        self.usual = usual
        self.at, self.runs_for = array("q"), array("q")
        #: By job, the number of its intent in `intents`.
        self.intent = array("l")
        self.intents: list[Intent] = []
        self._numbers: dict[Intent, int] = {}
        #: The times of each job's intent: NaN and 0 stand for None.
        self.expected_sec, self.deadline_at, self.earliest_start_at = array("d"), array("q"), array("q")
        self.extras: dict[int, JobExtras] = {}
        self.arrays: list[ArrayArrival] = []
        self.schedules: list[ScheduleArrival] = []
        self.batches: list[BatchArrival] = []
        #: The parents that are no job of the load (arrays, batches, and jobs that only the play makes): their
        #: numbers.
        self.groups: dict[JobId, int] = {}
        #: When no scheduler ran (from, to), in order: moments of schedules waited until one ran.
        self.away: list[tuple[Moment, Moment]] = []
        for arrival in arrivals:
            self.append(arrival)

    def addons(self) -> set[str]:
        """The addons that have jobs."""
        arrays = (array.intent for array in self.arrays)
        schedules = (one.record.schedule.intent for one in self.schedules)
        return {intent.addon_id for intent in (*self.intents, *arrays, *schedules)}

    def group_of(self, name: JobId) -> int:
        """The number that stands for this group among the parents of a job."""
        return self.groups.setdefault(name, -1 - len(self.groups))

    @property
    def began(self) -> Moment:
        """When the first job arrives; 0 if there is none."""
        firsts = [array.at for array in self.arrays]
        firsts += [first for each in self.schedules if (first := each.record.next_moment) is not None]
        return min([*firsts, min(self.at, default=firsts[0] if firsts else 0)])

    @property
    def last_at(self) -> Moment:
        """When the last job arrives, without later ones that only the play makes."""
        lasts = [array.at for array in self.arrays] + [each.until for each in self.schedules]
        return max([*lasts, max(self.at, default=0)])

    @property
    def is_empty(self) -> bool:
        return not (len(self) or self.arrays or self.schedules)

    def copy_to_play(self) -> Load:
        """
        A copy for one play, which adds the jobs of arrays and schedules. Without any of these the load
        itself.
        """
        if not (self.arrays or self.schedules):
            return self
        mine = copy(self)
        for name in ("at", "runs_for", "intent", "intents", "_numbers", "expected_sec", "deadline_at"):
            setattr(mine, name, copy(getattr(self, name)))
        mine.earliest_start_at, mine.extras = copy(self.earliest_start_at), copy(self.extras)
        return mine

    def append(self, arrival: Arrival) -> int:
        """Add an arrival; returns the number of its job."""
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
        """The number of an intent without times; adds it if it is new."""
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


# arrays, schedules and batches


class PlayedWork(NamedTuple):
    """What a job does when it runs: the fields of an `Arrival` after its intent."""

    runs_for: Span
    attempts: tuple[PlayedAttempt, ...] = ()
    canceled_at: Moment | None = None
    spends: Money = 0
    yields_after: Span | None = None
    resumes: bool = False


class Works(NamedTuple):
    """
    What the jobs of an array or a schedule do. `by_key`: by index and turn, or by moment. Each other job does
    the same as one of `others`, which is never empty.
    """

    others: Sequence[PlayedWork]
    by_key: Mapping[Hashable, PlayedWork] = {}

    def of(self, key: Hashable, now: Moment) -> PlayedWork:
        """
        What the job of this key does. Without an entry the key chooses one of `others`, so every play
        chooses the same. A cancel before now is left out: the job did not exist then.
        """
        work = self.by_key.get(key)
        if work is None:
            digest = blake2b(repr(key).encode(), digest_size=8).digest()
            work = self.others[int.from_bytes(digest) % len(self.others)]
        if work.canceled_at is not None and work.canceled_at < now:
            return work._replace(canceled_at=None)
        return work


class ArrayArrival(NamedTuple):
    """An array that is submitted at a moment. Its works are known by index and turn."""

    array_id: JobId
    at: Moment
    indices: str
    intent: Intent
    works: Works
    #: When a person cancels it, and when a person retries its failed indices.
    canceled_at: Moment | None = None
    retried_at: tuple[Moment, ...] = ()


class ScheduleArrival(NamedTuple):
    """
    A schedule. `record`: the schedule as the play begins; its moments after `last_moment` are played, up to
    `until`. Its works are known by moment.
    """

    record: ScheduleRecord
    works: Works
    until: Moment
    #: Jobs of the load that are its own too: those of earlier moments, and those that a person ran.
    jobs: tuple[int, ...] = ()
    #: When a person paused it (True) or resumed it (False).
    pauses: tuple[tuple[Moment, bool], ...] = ()
    #: Moments whose jobs are parents of others, each with the number of the group that stands for its job.
    parents: Mapping[Moment, int] = {}


class BatchArrival(NamedTuple):
    """A batch. `members`: jobs of the load. `closed_at`: it is open until then; None: it stays open."""

    group_id: JobId
    addon_id: AddonId
    members: tuple[int, ...]
    closed_at: Moment | None
