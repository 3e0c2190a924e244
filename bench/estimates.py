"""
How good the start estimates are: four loads on a virtual clock, nothing told by the user.

    .venv/bin/python -m bench.estimates            the table of docs/estimates.md
    .venv/bin/python -m bench.estimates --tuning --first 6 --load wide

The loads and the seeds are those of `bench/estimate_loads.py`.
The scheduler is real: store, service, rounds, learner, forecaster. Simulated are the workers, which end a job
when the load says so, and time. Each job that cannot start when it is submitted gets a prediction, and is
scored when it starts. The first 200 jobs are for learning and are not scored.

Compared are the same plays with the true distributions and rates (the oracle: no estimate can be much
better), and the plain moving average of the last 50 waits of the type.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import count
from random import Random
from statistics import fmean, median, stdev
from typing import NamedTuple

from msgspec.structs import replace

from bench.estimate_loads import (
    LOADS,
    PUBLISHED_SEEDS,
    T0,
    TUNING_SEEDS,
    Arrival,
    Load,
    Source,
    arrivals,
    rates,
)
from penstock.core.jobs.admission import admission_class_of
from penstock.core.jobs.learning import Arrivals, Knowledge, Shape, Sketch, TypeRecord, record_name
from penstock.core.jobs.load import Capacity, Host, QuietState
from penstock.core.jobs.round import MOST_PICKS
from penstock.core.jobs.start_ranges import StartRange
from penstock.core.jobs.types import SECOND, AddonId, DispatchId, HostId, JobId, Moment, Span
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.dispatcher import Dispatcher, PullingWorkers
from penstock.scheduler.hosts import HostLoad
from penstock.scheduler.job_service import EndReport, JobService
from penstock.scheduler.learning import Learner
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import RegisterHost, SetAddon, committed
from penstock.stores.memory.store import MemoryStore

LEARNING_JOBS = 200
_ANY = WorkerKinds(own=True)
_FOR_EVER: Span = 1 << 60


class TrueArrivals(Arrivals):
    """The rate that the load is drawn from."""

    true_rate: float = 0.0

    def per_second(self, _: Moment) -> float:
        return self.true_rate


def oracle(load: Load) -> Knowledge:
    """What can be known: the distributions and rates that the load is drawn from."""
    dice, records = Random(11), {}
    for number, rate in rates(load).items():
        source = load.sources[number]
        weights: Counter[int] = Counter()
        for _ in range(20_000):
            one = Sketch()
            one.observe(round(source.duration_sec(dice) * SECOND))
            weights.update(list(one.weights))
        true = TrueArrivals(
            jobs=source.burst * 1e6,  # so many that the rate is certain
            bursts=1e6,
            shapes=[Shape(source.intent.priority, source.intent.cost_units, high=_is_high(source))],
            true_rate=rate,
        )
        durations = Sketch(20_000, {bucket: float(times) for bucket, times in weights.items()})
        records[record_name(admission_class_of(source.intent))] = TypeRecord(durations, arrivals=true)
    return Knowledge(records)


def _is_high(source: Source) -> bool:
    return admission_class_of(source.intent).high


class Outcome(NamedTuple):
    """One scored job: the waits from its prediction on, in seconds."""

    wait: float
    learned: StartRange
    oracle: StartRange | None
    average: float | None  # the moving average of waits
    predicted_at: Moment

    def error(self, middle_at: Moment) -> float:
        return abs((middle_at - self.predicted_at) / SECOND - self.wait)


class Stage:
    """The real scheduler on a virtual clock, with workers that end a job when its load says so."""

    def __init__(self, load: Load, *, every: int = 1) -> None:
        self.load, self.now, self.every = load, T0, every
        numbers = count(1)
        rules = SchedulerRules(
            capacity=Capacity(fixed=load.capacity),
            lease_for=_FOR_EVER,
            fetch_for=_FOR_EVER,
            host=HostId("host0"),
        )
        self.store = MemoryStore(
            lambda: self.now, ordering=rules.ordering, new_id=lambda: f"{next(numbers):012}"
        )
        self.learner = Learner(self.store)
        self.store.on_change(self.learner.changed.set)
        self.workers = [PullingWorkers() for _ in range(load.hosts)]
        self.dispatchers = []
        for number, workers in enumerate(self.workers):
            here = replace(rules, host=HostId(f"host{number}"))
            self.dispatchers.append(Dispatcher(self.store, here, HostLoad(here), workers))
            committed(self.store, RegisterHost(self._host(number)))
        self.service = JobService(self.store, rules, self.dispatchers[0], learner=self.learner)
        self.service.forecaster.budget_sec = None
        self.learner.sample = self.service.forecaster.sample
        for addon, weight in load.weights.items():
            committed(self.store, SetAddon(AddonId(addon), weight=weight))
        self.free = [load.capacity] * load.hosts
        self.ends: list[tuple[Moment, DispatchId, int, int]] = []
        self.lengths: dict[JobId, tuple[Span, int]] = {}
        self.predictions: dict[JobId, tuple[StartRange, StartRange | None, float | None, Moment, str]] = {}
        self.waits: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=50))
        self.truth = oracle(load)
        self.outcomes: list[Outcome] = []
        self.queued = 0

    def _host(self, number: int) -> Host:
        return Host(
            host=HostId(f"host{number}"),
            instance="only",
            capacity=self.load.capacity,
            quiet=QuietState.QUIET,
            labels=(),
            version="",
            url="",
            started_at=T0,
            seen_at=T0,
            until=_FOR_EVER,
        )

    def run(self, load: Iterable[Arrival], jobs: int) -> list[Outcome]:
        """
        The scored jobs, in the order of their starts. After `jobs` arrivals no more predictions are made; jobs
        arrive until the last predicted one has started.
        """
        with ExitStack() as present:
            for workers in self.workers:
                present.enter_context(workers.waiting("simulated", _ANY, 1_000))
            learns_at = T0
            for number, arrival in enumerate(load):
                if number >= jobs and not self.predictions:
                    break
                self._pass_until(arrival.at)
                if self.now >= learns_at:
                    learns_at = self.learner.step(self.now)
                job_id = self._arrive(arrival)
                if job_id in self.lengths and LEARNING_JOBS <= number < jobs and number % self.every == 0:
                    self._predict(job_id, arrival.source)
        return self.outcomes

    def _pass_until(self, moment: Moment) -> None:
        while self.ends and self.ends[0][0] <= moment:
            self.now = self.ends[0][0]
            reports = []
            while self.ends and self.ends[0][0] <= self.now:
                _, dispatch_id, host, units = heapq.heappop(self.ends)
                reports.append(EndReport(dispatch_id))
                self.free[host] += units
            self.service.end_many(reports)
            self._start()
        self.now = moment

    def _arrive(self, arrival: Arrival) -> JobId:
        [receipt] = self.service.submit([arrival.source.intent])
        self.lengths[receipt.job_id] = (arrival.runs_for, arrival.source.intent.cost_units)
        self.queued += 1
        self._start()
        return receipt.job_id

    def _predict(self, job_id: JobId, source: Source) -> None:
        forecaster, name = self.service.forecaster, source.intent.job_type
        learned = forecaster.ranges([job_id]).get(job_id)
        if learned is None:
            raise RuntimeError(f"no range for {job_id} of {name}")
        true = forecaster.ranges([job_id], knowledge=self.truth).get(job_id)
        waits = self.waits[name]
        average = fmean(waits) if waits else None
        self.predictions[job_id] = (learned, true, average, self.now, name)

    def _start(self) -> None:
        """The host with most free units claims first, one job at a time."""
        limit = MOST_PICKS if self.load.hosts == 1 else 1
        while self.queued:
            host = self.free.index(max(self.free))
            grants = committed(self.store, self.dispatchers[host].claim(_ANY, limit, "simulated"))
            for grant in grants:
                self._began(grant.dispatch.dispatch_id, grant.dispatch.job_id, host)
            if len(grants) < limit:
                return

    def _began(self, dispatch_id: DispatchId, job_id: JobId | None, host: int) -> None:
        assert job_id is not None
        runs_for, units = self.lengths.pop(job_id)
        self.queued -= 1
        self.free[host] -= units
        heapq.heappush(self.ends, (self.now + runs_for, dispatch_id, host, units))
        job = self.store.job(job_id)
        assert job is not None
        self.waits[job.intent.job_type].append((self.now - job.created_at) / SECOND)
        if job_id in self.predictions:
            learned, true, average, at, _ = self.predictions.pop(job_id)
            self.outcomes.append(Outcome((self.now - at) / SECOND, learned, true, average, at))


class Figures(NamedTuple):
    """
    `covered`: the part of the starts within their range. The errors are medians: of the distance between the
    predicted middle and the start, as a part of the wait.
    """

    scored: int
    wait_sec: float
    covered: float
    error: float
    oracle_covered: float | None
    oracle_error: float | None
    average_error: float


def figures(outcomes: Sequence[Outcome]) -> Figures:
    def started_at(one: Outcome) -> Moment:
        return one.predicted_at + round(one.wait * SECOND)

    with_oracle = [(one, one.oracle) for one in outcomes if one.oracle is not None]
    return Figures(
        scored=len(outcomes),
        wait_sec=median(one.wait for one in outcomes),
        covered=fmean(one.learned.covers(started_at(one)) for one in outcomes),
        error=median(one.error(one.learned.middle_at) / one.wait for one in outcomes),
        oracle_covered=fmean(true.covers(started_at(one)) for one, true in with_oracle)
        if with_oracle
        else None,
        oracle_error=(
            median(one.error(true.middle_at) / one.wait for one, true in with_oracle) if with_oracle else None
        ),
        average_error=median(
            abs(one.average - one.wait) / one.wait for one in outcomes if one.average is not None
        ),
    )


def outcomes_of(load: Load, *, jobs: int, seed: int, every: int) -> list[Outcome]:
    return Stage(load, every=every).run(arrivals(load, seed), jobs)


def measured(load: Load, *, jobs: int, seeds: Sequence[int], every: int) -> Figures:
    return figures([one for seed in seeds for one in outcomes_of(load, jobs=jobs, seed=seed, every=every)])


def rows(loads: Sequence[Load], jobs: int, seeds: Sequence[int], every: int) -> Iterator[str]:
    yield (
        "| load | scored starts | median wait | within the range (80 % promised) | median error | oracle: within "
        "| oracle: error | moving average: error |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    with ProcessPoolExecutor() as processes:
        results = {
            load.name: [processes.submit(_one_play, load.name, jobs, seed, every) for seed in seeds]
            for load in loads
        }
        for load in loads:
            by_seed = [result.result() for result in results[load.name]]
            result = figures([one for outcomes in by_seed for one in outcomes])
            noise = stdev(figures(outcomes).covered for outcomes in by_seed if outcomes) / len(by_seed) ** 0.5
            yield (
                f"| {load.name} | {result.scored:,} | {result.wait_sec:.0f} s | {result.covered:.0%} ± {noise:.0%} "
                f"| {result.error:.0%} | {result.oracle_covered or 0:.0%} | {result.oracle_error or 0:.0%} "
                f"| {result.average_error:.0%} |"
            )


def _one_play(name: str, jobs: int, seed: int, every: int) -> list[Outcome]:
    [load] = [load for load in LOADS if load.name == name]
    return outcomes_of(load, jobs=jobs, seed=seed, every=every)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1_200, help="jobs of each load and seed (1,200)")
    parser.add_argument("--tuning", action="store_true", help="the seeds for trying things out")
    parser.add_argument("--first", type=int, help="only so many of the seeds")
    parser.add_argument("--every", type=int, default=20, help="predict every so many jobs (20)")
    parser.add_argument("--load", choices=[load.name for load in LOADS], help="only this load")
    given = parser.parse_args()
    seeds = (TUNING_SEEDS if given.tuning else PUBLISHED_SEEDS)[: given.first]
    for row in rows(
        [load for load in LOADS if given.load in (None, load.name)], given.jobs, seeds, given.every
    ):
        print(row, flush=True)


if __name__ == "__main__":
    main()
