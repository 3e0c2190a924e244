"""
What submits jobs while a load is played: arrays, whose next job is made when one ends, and schedules, whose moments
become jobs by the rules of overlap. And batches, which only count their jobs.

Which jobs an array or a schedule submits, and when, depends on the settings that are played. What such a job does
does not: the index or the moment decides it (`Works`), so two plays compare the same work.
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
    """What a job does when it runs: the fields of an `Arrival` behind its intent."""

    runs_for: Span
    attempts: tuple[PlayedAttempt, ...] = ()
    canceled_at: Moment | None = None
    spends: Money = 0
    yields_after: Span | None = None
    resumes: bool = False


class Works(NamedTuple):
    """`known`: by index and turn, or by moment. Any other job does what one of `others` did; never empty."""

    others: Sequence[PlayedWork]
    known: Mapping[Hashable, PlayedWork] = {}

    def of(self, key: Hashable, now: Moment) -> PlayedWork:
        """Drawn by the key, so that every play draws the same. Nobody cancels a job before it is submitted."""
        work = self.known.get(key)
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
    #: When people cancel it, and when they run its failed indices again.
    canceled_at: Moment | None = None
    retried_at: tuple[Moment, ...] = ()


class ScheduleArrival(NamedTuple):
    """
    A schedule. `record`: as it is when its part in the play begins; its moments are played from `last_moment` on, up
    to `until`. Its works are known by moment.
    """

    record: ScheduleRecord
    works: Works
    until: Moment
    #: Jobs of the load that are its own too: those of earlier moments, and those that people ran by hand.
    jobs: tuple[int, ...] = ()
    #: When people paused it (True) and resumed it.
    pauses: tuple[tuple[Moment, bool], ...] = ()
    #: The jobs of these moments are parents, by the number of the group that stands for each.
    parents: Mapping[Moment, int] = {}


class BatchArrival(NamedTuple):
    """`members`: jobs of the load. `closed_at`: until then it is open; None: it stays open."""

    group_id: JobId
    addon_id: AddonId
    members: tuple[int, ...]
    closed_at: Moment | None
