"""
The four loads on which start estimates are measured, and the seeds.

The loads and both lists of seeds are fixed: `TUNING_SEEDS` are for trying things out, `PUBLISHED_SEEDS` only for
the table of docs/estimates.md and for the tests. A change of a load makes all figures void that were published
before it.

Each source of a load is a stream without end, so the load is the same at each moment that is measured. An earlier
version gave each source a number of jobs. Its streams ended one after the other, and the last waits of each play
were shorter than the rates said.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from random import Random
from statistics import fmean
from typing import NamedTuple

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import SECOND, AddonId, Moment, Priority, Span

T0: Moment = 1_900_000_000 * SECOND
TUNING_SEEDS = range(1, 21)
PUBLISHED_SEEDS = range(101, 113)


@dataclass(frozen=True)
class Source:
    """Jobs of one type: how long they run, what they ask for, and how they come."""

    intent: Intent
    duration_sec: Callable[[Random], float]
    share: float = 1.0  # of the load
    burst: float = 1.0  # how many come together, on average


@dataclass(frozen=True)
class Load:
    name: str
    about: str
    sources: Sequence[Source]
    use: float  # of the units of all hosts
    hosts: int = 1
    capacity: int = 40
    weights: dict[str, int] = field(default_factory=dict)


def _intent(addon: str, job_type: str, cost: int = 10, priority: int = Priority.NORMAL) -> Intent:
    return Intent(addon_id=AddonId(addon), job_type=job_type, cost_units=cost, priority=priority)


def _exponential(mean: float) -> Callable[[Random], float]:
    return lambda dice: dice.expovariate(1 / mean)


def _lognormal(middle: float, width: float) -> Callable[[Random], float]:
    return lambda dice: middle * dice.lognormvariate(0, width)


LOADS = (
    Load(
        "steady",
        "one type, 10 units each, exponential durations (mean 20 s), 92 % of one host with 40 units",
        [Source(_intent("app", "steady"), _exponential(20))],
        use=0.92,
    ),
    Load(
        "bursty",
        "the same host; jobs come in bursts of 12 on average, log-normal durations (middle 15 s, width 0.5)",
        [Source(_intent("app", "burst"), _lognormal(15, 0.5), burst=12)],
        use=0.75,
    ),
    Load(
        "wide",
        "two types of 5 and 10 units with log-normal durations of width 1.4 (middles 4 and 8 s): one in ten takes six times the middle",
        [
            Source(_intent("app", "quick", 5), _lognormal(4, 1.4), 1),
            Source(_intent("app", "slow", 10), _lognormal(8, 1.4), 2),
        ],
        use=0.9,
    ),
    Load(
        "several",
        "three hosts of 40 units; four addons with weights, priorities and durations of their own, one in bursts",
        [
            Source(_intent("mail", "send", 5), _exponential(6), 1),
            Source(_intent("video", "encode", 20), _lognormal(20, 0.7), 3),
            Source(_intent("shop", "report", 10, Priority.HIGH), _lognormal(12, 1.0), 1),
            Source(_intent("scan", "page", 10, Priority.LOW), _lognormal(10, 0.5), 2, burst=20),
        ],
        use=1.0,
        hosts=3,
        weights={"video": 200},
    ),
)


class Arrival(NamedTuple):
    at: Moment
    source: Source
    runs_for: Span


def arrivals(load: Load, seed: int) -> Iterator[Arrival]:
    """The jobs of a load, in the order of their arrival, without end."""
    streams = [
        _stream(load.sources[number], rate, Random(f"{load.name} {seed} {number}"))
        for number, rate in rates(load).items()
    ]
    return heapq.merge(*streams, key=attrgetter("at"))


def _stream(source: Source, rate: float, dice: Random) -> Iterator[Arrival]:
    at = float(T0)
    while True:
        at += dice.expovariate(rate / source.burst) * SECOND
        together = 1
        while dice.random() * source.burst >= 1:
            together += 1
        for _ in range(together):
            yield Arrival(round(at), source, max(1, round(source.duration_sec(dice) * SECOND)))


def rates(load: Load) -> dict[int, float]:
    """Jobs per second of each source, by its number."""
    shares = sum(source.share for source in load.sources)
    units = load.use * load.capacity * load.hosts
    return {
        number: units * source.share / shares / (source.intent.cost_units * _mean_sec(source.duration_sec))
        for number, source in enumerate(load.sources)
    }


@cache
def _mean_sec(duration_sec: Callable[[Random], float]) -> float:
    dice = Random(7)
    return fmean(duration_sec(dice) for _ in range(200_000))
