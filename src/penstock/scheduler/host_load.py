"""How busy everybody else is: two samples of the machine, with what is ours taken out, become readings for `HostLoad`.

Taking ours out is what lets the scheduler fill a machine without taking its own work for somebody's. Processor time, load and memory are subtracted.
Kernel pressure cannot be, for it is time in which somebody waited, so it counts by the share that others had in what was waited for:
nine of our jobs on two cores make pressure, and none of it is anybody else's. Memory pressure counts whole. It comes before
the machine kills somebody, and then it no longer matters whose fault it was.

The host as admission sees it: readings in, conditions out.

It is told readings by whoever takes them (the signals of this host, or an application over HTTP) and never takes one itself.
"""

#: A machine's load is an average over a minute, so what we take out of it must be one too.
#: Readings are kept in memory and looked at in every round.
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Final

from penstock.core.errors import BadIntent
from penstock.core.jobs.admission import Conditions
from penstock.core.jobs.load import TOLD, Quiet, QuietState, Reading, busy, is_fresh, observe
from penstock.core.jobs.types import HOUR, MILLISECOND, SECOND, AddonId, Moment, Span
from penstock.scheduler.probe import LoadProbe, Sample
from penstock.scheduler.rules import SchedulerRules

_LOAD_SEC: Final = 60.0


class LoadSampler:
    """
    A part of the scheduler. It is asked whenever anything happens and measures at its own pace. A measurement that fails reports nothing:
    the readings grow stale, and the machine counts as busy.
    """

    def __init__(
        self,
        machine: HostLoad,
        probe: Callable[[], Sample] | None = None,
        *,
        every: Span = 2 * SECOND,
        first_after: Span = 500 * MILLISECOND,
    ) -> None:
        self._machine, self._probe = machine, probe or LoadProbe()
        self._every, self._first_after = every, first_after
        self._before: Sample | None = None
        self._own_load = 0.0
        self._due: Moment = 0

    def step(self, now: Moment) -> Moment:
        # Not due, and not because the clock was set back: nobody may wait an hour for the next reading on that account.
        if now < self._due <= now + self._every:
            return self._due
        self._due = now + self._every
        after, before = self._probe(), self._before
        self._before = after
        if before is None:
            self._due = now + self._first_after
            return self._due
        others = _others(before, after)
        self._own_load = _averaged(self._own_load, others.own_load, others.elapsed)
        for name, value in figures(after, others, self._own_load).items():
            self._machine.report(Reading(name, value, now))
        return self._due


@dataclass(frozen=True, slots=True)
class Others:
    """What happened between two samples, without us. Seconds and cores are those of the machine."""

    elapsed: float
    cpu: float  # share of the machine
    boxed_cpu: float | None  # share of what our cgroup may use
    cpu_part: float  # of what was used, how much by others
    disk_part: float
    own_load: float
    own_memory: int


def _others(before: Sample, after: Sample) -> Others:
    total = max(after.cpu_total - before.cpu_total, 1e-6)
    used = max(0.0, after.cpu_busy - before.cpu_busy)
    elapsed = total / after.cores
    cpu, moved = _grown(before, after)
    moved_by_all = max(0, after.moved - before.moved)
    return Others(
        elapsed=elapsed,
        cpu=max(0.0, used - cpu) / total,
        boxed_cpu=_boxed(before, after, cpu, elapsed),
        cpu_part=_part(used - cpu, used),
        disk_part=_part(moved_by_all - moved, moved_by_all),
        # Load counts who runs and who wants to. Of a process with many threads only its time tells on how many cores it ran.
        own_load=max(cpu / elapsed, float(sum(own.runnable for own in after.own.values()))),
        own_memory=sum(own.private for own in after.own.values()),
    )


def figures(sample: Sample, others: Others, own_load: float) -> dict[str, float]:
    box = sample.box
    readings = {"cpu": max(others.cpu, others.boxed_cpu or 0.0)}
    if sample.load is not None:
        readings["load_per_core"] = max(0.0, sample.load - own_load) / sample.cores
    readings["memory"] = max(0, sample.memory_used - others.own_memory) / sample.memory
    if box.memory and box.memory_used is not None:
        boxed = max(0, box.memory_used - others.own_memory) / box.memory
        readings["memory"] = max(readings["memory"], boxed)
    parts = {"cpu": others.cpu_part, "io": others.disk_part, "memory": 1.0}
    return readings | {f"{name}_pressure": value * parts[name] for name, value in sample.pressure.items()}


def _boxed(before: Sample, after: Sample, own: float, elapsed: float) -> float | None:
    box = after.box
    if not box.cores or box.cpu is None or before.box.cpu is None:
        return None
    return max(0.0, box.cpu - before.box.cpu - own) / (box.cores * elapsed)


def _grown(before: Sample, after: Sample) -> tuple[float, int]:
    """
    What our processes used since. One that ended was waited for by its parent, whose figures now hold its whole life: what was
    counted of it before must come off again.
    """
    cpu, moved = 0.0, 0
    for process, own in after.own.items():
        then = before.own.get(process)
        if then is not None:
            cpu, moved = cpu + own.cpu - then.cpu, moved + own.moved - then.moved
        elif process.born >= before.taken_at:
            # One that is merely new to us has a past that was somebody else's.
            cpu, moved = cpu + own.cpu, moved + own.moved
    parents = {process.pid for process in after.own}
    for process, own in before.own.items():
        if process not in after.own and own.parent in parents:
            cpu, moved = cpu - own.cpu, moved - own.moved
    return max(0.0, cpu), max(0, moved)


def _averaged(before: float, value: float, elapsed: float) -> float:
    """As the kernel averages its own."""
    return value + (before - value) * math.exp(-elapsed / _LOAD_SEC)


def _part(others: float, everybody: float) -> float:
    return min(1.0, max(0.0, others / everybody)) if everybody > 0 else 1.0


MOST_SOURCES: Final = 200


class HostLoad:
    def __init__(self, rules: SchedulerRules) -> None:
        self._rules = rules
        self._labels = frozenset(rules.labels)
        self._readings: dict[tuple[str, str], Reading] = {}
        self._quiet: Quiet | None = None
        self._lock = Lock()
        #: It is about to stop.
        self.draining = False
        #: Somebody wants nothing more to start on this host, until they say the opposite.
        self.drained = False

    def report(self, reading: Reading) -> None:
        with self._lock:
            self._readings[reading.source, reading.name] = reading

    def hear(
        self,
        source: AddonId,
        values: Mapping[str, float],
        now: Moment,
        ttl: Span | None = None,
        *,
        bound: bool = False,
    ) -> None:
        """
        An application's own figures. It counts as long as it goes on telling them, and is forgotten when it stops. `bound`: told with a token
        of that addon alone. Such figures make the machine NORMAL at worst: other addons keep half of the units and what needs no quiet.
        """
        problems = [*_problems(values), *_ttl_problems(ttl)]
        if problems:
            first = problems[0]
            raise BadIntent(f"{first['field']} {first['message']}", problems=problems)
        with self._lock:
            senses = self._rules.senses
            kept = {k: r for k, r in self._readings.items() if not r.source or is_fresh(r, now, senses)}
            if len({r.source for r in kept.values()} | {source}) > MOST_SOURCES:
                raise BadIntent(
                    f"source must be one of the {MOST_SOURCES} that report already",
                    problems=[{"field": "source", "message": "too many applications report at once"}],
                )
            told = {
                (source, name): Reading(name, value, now, source, ttl, bound)
                for name, value in values.items()
            }
            self._readings = kept | told

    def readings(self) -> list[Reading]:
        with self._lock:
            return list(self._readings.values())

    def conditions(self, now: Moment) -> Conditions:
        capacity = self._rules.capacity
        if capacity.fixed is not None:
            # Nobody measures: always quiet, and quiet for as long as anybody could ask.
            return Conditions(
                capacity.fixed,
                QuietState.QUIET,
                streak=now,
                draining=self.draining or self.drained,
                labels=self._labels,
            )
        with self._lock:
            thresholds = self._rules.thresholds
            score = busy(self._readings.values(), now, self._rules.senses, thresholds.clearly_normal)
            self._quiet = quiet = observe(self._quiet, score, now, thresholds)
        units = capacity.units(score.score)
        return Conditions(
            units,
            quiet.state,
            quiet.streak(now),
            score,
            draining=self.draining or self.drained,
            labels=self._labels,
        )


def _problems(values: Mapping[str, float]) -> Iterator[dict[str, str]]:
    for name, value in values.items():
        if name not in TOLD:
            yield {"field": name, "message": f"is not a signal that applications report: {', '.join(TOLD)}"}
        elif not (math.isfinite(value) and value >= 0):
            yield {"field": name, "message": "must be a number of 0 or more"}
    if not values:
        yield {"field": "values", "message": f"must name at least one of {', '.join(TOLD)}"}


def _ttl_problems(ttl: Span | None) -> Iterator[dict[str, str]]:
    if ttl is not None and not SECOND <= ttl <= HOUR:
        yield {"field": "ttl_sec", "message": "must be 1..3600"}
