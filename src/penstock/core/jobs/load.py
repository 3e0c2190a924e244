"""
Host load: from signals to a busy score, from the score to a quiet state and to the units that may be used.

The score is the worst of the signals, not their mean: a machine whose disk is choked is busy, however idle
its cores are. Without a fresh reading of a needed signal, the score is that of a machine that admits nothing.

Processor time is shared: a job on busy cores runs slowly and harms nothing. So signals of the processor alone
make a machine BUSY at most. Processor load that a machine always has makes it NORMAL at most: otherwise a
host that is never idle would never start a job. Memory, disks and the signals of applications can make it
PANIC.

`Host` is one scheduler with a capacity of its own, as other hosts of the store see it. Its registration holds
until `until`. It decides only which process may use a host name, and what people see: jobs of a lost host
come back when their leases end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from math import isfinite, isnan
from typing import Final, TypeAlias

from msgspec import Struct, field

from penstock.core.jobs.types import HOUR, SECOND, HostId, Moment, Span
from penstock.core.jobs.workers import WorkerKinds

#: (x, y) with rising x; straight lines between, flat beyond the ends.
Points: TypeAlias = tuple[tuple[float, float], ...]

#: The score of a machine without readings.
BLIND: Final = 8.0


class QuietState(StrEnum):
    """What the load of a machine allows, from best to worst."""

    QUIET = "QUIET"
    NORMAL = "NORMAL"
    BUSY = "BUSY"
    PANIC = "PANIC"


class Reading(Struct, frozen=True):
    """
    One value of a signal. `source`: the application that reported it; empty: the host itself. `ttl`: how long
    it counts, if the reporter set that. `bound`: it was reported with an addon's own token, so it describes
    the addon and not the host.
    """

    name: str
    value: float
    at: Moment
    source: str = ""
    ttl: Span | None = None
    bound: bool = False
    #: The usual value of the last minutes; None: unknown.
    usual: float | None = None


class Busy(Struct, frozen=True):
    """A busy score from 0 to 10. `by`: the signal that decided it."""

    score: float
    by: str


#: The signals that applications may report about themselves.
REPORTED: Final = ("error_rate", "p95_ms", "in_flight")

SCALES: Final[dict[str, Points]] = {
    "cpu": ((0.0, 0), (0.20, 2), (0.50, 5), (0.70, 7), (0.90, 10)),
    "load_per_core": ((0.0, 0), (0.5, 2), (1.0, 5), (1.5, 7), (2.5, 10)),
    "memory": ((0.50, 0), (0.70, 2), (0.80, 5), (0.90, 7), (0.97, 10)),
    "cpu_pressure": ((0, 0), (5, 2), (20, 5), (40, 7), (70, 10)),
    "io_pressure": ((0, 0), (2, 2), (10, 5), (20, 7), (50, 10)),
    "memory_pressure": ((0, 0), (1, 2), (5, 5), (10, 7), (30, 10)),
    "error_rate": ((0.0, 0), (0.01, 2), (0.05, 5), (0.10, 7), (0.25, 10)),
    "p95_ms": ((0, 0), (250, 2), (1_000, 5), (2_500, 7), (5_000, 10)),
    "in_flight": ((0, 0), (10, 2), (50, 5), (100, 7), (250, 10)),
}


#: Signals of processor time.
SHARED: Final = frozenset({"cpu", "load_per_core", "cpu_pressure"})


class Senses(Struct, frozen=True):
    """
    How signals become scores. `needed`: without a fresh reading of one of these the score is at least
    `BLIND`. Other signals are ignored without one.
    """

    scales: Mapping[str, Points] = field(default_factory=lambda: SCALES)
    needed: frozenset[str] = frozenset({"cpu", "memory"})
    fresh_for: Span = 15 * SECOND


class Thresholds(Struct, frozen=True):
    """The highest scores of the states QUIET, NORMAL and BUSY."""

    quiet: float = 2.0
    normal: float = 5.0
    busy: float = 7.0
    #: How far below a threshold the score must fall before the state gets better.
    margin: float = 0.5

    @property
    def clearly_normal(self) -> float:
        """The highest score with which a machine that was worse is NORMAL again."""
        return max(0.0, self.normal - self.margin)

    @property
    def clearly_busy(self) -> float:
        """The highest score with which a machine that was in PANIC is BUSY again."""
        return max(0.0, self.busy - self.margin)

    def severity(self, score: float) -> int:
        return bisect_left((self.quiet, self.normal, self.busy), score)


_THRESHOLDS: Final = Thresholds()


def busy(
    readings: Iterable[Reading], now: Moment, senses: Senses, thresholds: Thresholds = _THRESHOLDS
) -> Busy:
    """
    The busy score of a machine: the worst of its signals. A bound reading gives a clearly NORMAL score at
    most, so that one addon may slow the others down, but not stop them.
    """
    fresh = [r for r in readings if r.name in senses.scales and is_fresh(r, now, senses)]
    scores = [
        Busy(
            _score(r, senses.scales[r.name], thresholds),
            f"{r.name} of {r.source}" if r.source else r.name,
        )
        for r in fresh
    ]
    # Signals of the host must come from the host; signals of applications from any application.
    measured = {r.name for r in fresh if bool(r.source) is (r.name in REPORTED)}
    scores += [Busy(BLIND, f"no fresh {name}") for name in sorted(senses.needed - measured)]
    return max(scores, default=Busy(BLIND, "no fresh signal"), key=lambda s: s.score)


def _score(reading: Reading, scale: Points, thresholds: Thresholds) -> float:
    score = _along(scale, reading.value)
    if reading.bound:
        return min(score, thresholds.clearly_normal)
    if reading.name not in SHARED or isnan(reading.value):
        return score
    most = thresholds.clearly_busy
    if reading.usual is not None:
        end = scale[-1][0]  # beyond it one value is as bad as another
        on_top = min(reading.value, end) - min(reading.usual, end)
        most = min(most, max(thresholds.clearly_normal, _along(scale, on_top)))
    return min(score, most)


def is_fresh(reading: Reading, now: Moment, senses: Senses) -> bool:
    return 0 <= now - reading.at <= (senses.fresh_for if reading.ttl is None else reading.ttl)


def reading_problems(values: Mapping[str, float], ttl: Span | None) -> Iterator[tuple[str, str]]:
    """What is wrong with the figures that an application reports, as pairs of a field and a message."""
    for name, value in values.items():
        if name not in REPORTED:
            yield name, f"is not a signal that applications report: {', '.join(REPORTED)}"
        elif not (isfinite(value) and value >= 0):
            yield name, "must be a number of 0 or more"
    if not values:
        yield "values", f"must name at least one of {', '.join(REPORTED)}"
    if ttl is not None and not SECOND <= ttl <= HOUR:
        yield "ttl_sec", "must be 1..3600"


_BY_SEVERITY: Final = (QuietState.QUIET, QuietState.NORMAL, QuietState.BUSY, QuietState.PANIC)


class Quiet(Struct, frozen=True):
    """The quiet state of a machine, and since when it holds."""

    state: QuietState
    since: Moment
    busy: Busy

    def streak(self, now: Moment) -> Span:
        """How long the machine has been QUIET without a break; 0 in another state."""
        return max(0, now - self.since) if self.state is QuietState.QUIET else 0


def observe(before: Quiet | None, score: Busy, now: Moment, thresholds: Thresholds) -> Quiet:
    """
    The quiet state after a new score. A worse state counts at once, a better one only if the score is better
    by `margin`, so that a score near a threshold does not flap.
    """
    worst = best = thresholds.severity(score.score)
    if before is not None:
        worst = thresholds.severity(score.score + thresholds.margin)
        best = max(best, min(_BY_SEVERITY.index(before.state), worst))
    state = _BY_SEVERITY[best]
    since = before.since if before is not None and before.state is state else now
    return Quiet(state, since, score)


class Capacity(Struct, frozen=True):
    """How many units may be in use at a busy score. `fixed`: always this many, for containers and tests."""

    total: int = 100
    reserve: int = 10
    curve: Points = ((2, 1.0), (3, 0.80), (4, 0.65), (5, 0.50), (6, 0.35), (7, 0.25), (8, 0.0))
    fixed: int | None = None

    @property
    def most(self) -> int:
        """The units of the quietest machine: a job that costs more can never start."""
        return self.fixed if self.fixed is not None else self.total - self.reserve

    def units(self, score: float) -> int:
        if self.fixed is not None:
            return self.fixed
        # Rounded first: as a float, 100 * 0.29 is 28.999999999999996.
        return int(round(self.most * _along(self.curve, score), 6))


def _along(points: Points, x: float) -> float:
    if not x > points[0][0]:
        # NaN comes here too. It counts as the far end, so that no job is admitted by it.
        return points[0][1] if x <= points[0][0] else points[-1][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


class Host(Struct, frozen=True, kw_only=True):
    """The registration of a host: one scheduler that shares the store."""

    host: HostId
    #: The installation that uses the name. It is the same after a restart, so that a restarted host need not
    #: wait until its old registration is over.
    instance: str
    capacity: int = 0
    quiet: QuietState = QuietState.QUIET
    labels: tuple[str, ...] = ()
    version: str = ""
    url: str = ""
    started_at: Moment = 0
    seen_at: Moment = 0
    until: Moment = 0
    #: Whether an operator drained the host, so that it starts no more jobs. This outlives the registration.
    draining: bool = False
    #: The units of its dispatches.
    units: int = 0
    #: The kinds of jobs that its present workers can run.
    workers: tuple[WorkerKinds, ...] = ()

    def alive(self, now: Moment) -> bool:
        return now < self.until
