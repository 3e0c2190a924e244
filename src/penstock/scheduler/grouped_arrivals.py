"""
Arrays, schedules and batches of a load. Arrays and schedules submit jobs while the load is played: an array
when one of its jobs ends, a schedule when a moment is due. A batch only counts its jobs.

The settings that are played decide which jobs an array or a schedule submits, and when. They do not decide
what such a job does: that depends on its index or moment alone (`Works`), so two plays compare the same work.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.schedules import ScheduleRecord
from penstock.core.jobs.types import AddonId, EndReason, JobId, Moment, Money, Span


class PlayedAttempt(NamedTuple):
    """How one attempt goes if nothing interferes."""

    runs_for: Span
    end: EndReason = EndReason.COMPLETED


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
