"""
Loads: jobs with their arrival and duration, read from a trail or made up.

A job that never ran has no duration: its expected duration is taken, else the median of its type.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from random import Random
from statistics import median
from typing import Final, NamedTuple

from msgspec.structs import replace

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Event, EventKind, Job
from penstock.core.jobs.types import HOUR, SECOND, AddonId, DispatchId, JobId, Moment, Priority, Span
from penstock.scheduler.job_service import feed
from penstock.scheduler.stats import ENDS
from penstock.stores.api import Query, Store

__all__ = ["Arrival", "made_up", "replayed"]

_PAGE: Final = 1_000
_BEGAN: Final[Moment] = 1_900_000_000 * SECOND
_UNKNOWN: Final[Span] = 60 * SECOND


class Arrival(NamedTuple):
    at: Moment
    intent: Intent
    runs_for: Span


def replayed(store: Store) -> list[Arrival]:
    """Every job that the store still knows, in the order in which they came."""
    lengths = _lengths(feed(store))
    jobs = sorted(_jobs(store), key=lambda job: job.created_at)
    usual = _usual((job.intent.job_type, lengths[job.job_id]) for job in jobs if job.job_id in lengths)
    return [Arrival(job.created_at, _plain(job.intent), _length(job, lengths, usual)) for job in jobs]


def _jobs(store: Store) -> Iterator[Job]:
    after = 0
    while page := store.find(Query(after=after, limit=_PAGE)):
        yield from page
        after = page[-1].no


def _lengths(events: Iterable[Event]) -> dict[JobId, Span]:
    """
    Of each job, how long all its runs took together: what it needs of the machine, whatever made it begin
    again.
    """
    began: dict[DispatchId, Moment] = {}
    lengths: dict[JobId, Span] = defaultdict(int)
    for event in events:
        if event.dispatch_id is None or event.job_id is None:
            continue
        if event.kind is EventKind.RUNNING:
            began[event.dispatch_id] = event.at
        elif event.kind in ENDS and (since := began.pop(event.dispatch_id, None)) is not None:
            lengths[event.job_id] += event.at - since
    return dict(lengths)


def _usual(known: Iterable[tuple[str, Span]]) -> dict[str, Span]:
    by_type: dict[str, list[Span]] = defaultdict(list)
    for job_type, length in known:
        by_type[job_type].append(length)
    return {job_type: round(median(lengths)) for job_type, lengths in by_type.items()}


def _length(job: Job, lengths: dict[JobId, Span], usual: dict[str, Span]) -> Span:
    expected = job.intent.expected_duration_sec
    if job.job_id in lengths:
        return lengths[job.job_id]
    return round(expected * SECOND) if expected else usual.get(job.intent.job_type, _UNKNOWN)


def _plain(intent: Intent) -> Intent:
    """
    Without what only a real run needs: nothing is carried, nothing spent, and a key would make two jobs one.
    """
    return replace(
        intent,
        payload="null",
        tags=(),
        idempotency_key=None,
        cost_limit=None,
        max_runtime_sec=None,
        max_active_sec=None,
        retry_delays_sec=(),
    )


def made_up(
    jobs: int, *, addons: int = 3, load: float = 0.9, capacity: int = 90, hosts: int = 1, seed: int = 1
) -> list[Arrival]:
    """
    Jobs that come by chance, most of them short and some very long, as in life. `load`: what they need of all
    the hosts' units together; above 1 the queue grows for as long as they come. Every addon is as busy as the
    others, and the first is in more of a hurry.
    """
    dice, at, arrivals = Random(seed), _BEGAN, []  # noqa: S311  # no secret: the same seed gives the same load
    shapes = [_shape(dice, f"addon{dice.randrange(addons)}", capacity) for _ in range(jobs)]
    needed = sum(intent.cost_units * runs_for for intent, runs_for in shapes)
    pause = needed / (load * capacity * hosts) / max(1, jobs)
    for intent, runs_for in shapes:
        at += round(dice.expovariate(1) * pause)
        urgent = intent.addon_id == "addon0" and dice.random() < 0.1
        deadline = at + runs_for + HOUR if urgent else None
        arrivals.append(Arrival(at, replace(intent, deadline_at=deadline, time_sensitive=urgent), runs_for))
    return arrivals


def _shape(dice: Random, addon: str, capacity: int) -> tuple[Intent, Span]:
    runs_for = round(dice.lognormvariate(3, 1.2) * SECOND)
    cost = min(capacity, dice.choices([2, 5, 10, 20, 40], [30, 30, 25, 10, 5])[0])
    priority = dice.choices([Priority.LOW, Priority.NORMAL, Priority.HIGH], [20, 70, 10])[0]
    about = runs_for / SECOND * dice.uniform(0.7, 1.5)
    intent = Intent(
        addon_id=AddonId(addon),
        job_type="made-up",
        cost_units=cost,
        priority=priority,
        expected_duration_sec=max(0.1, about),
    )
    return intent, runs_for
