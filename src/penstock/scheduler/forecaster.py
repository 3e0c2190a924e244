"""
The forecaster: predicts when queued jobs will start, by playing the rules forward from now (SPEC EX-4).

It reads the state of all hosts in a few bounded reads: at most a thousand jobs ahead, the live dispatches,
and what was learned. It holds no lock while it plays, and makes fewer plays if they take longer than
`budget_sec`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from random import Random
from typing import Final, NamedTuple

from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionClass, AdmissionLimits, Caps, Conditions, Ledger
from penstock.core.jobs.job import Dispatch
from penstock.core.jobs.learning import Distribution, Knowledge, Prediction, parts_of, record_name, size_of
from penstock.core.jobs.ordering import QueuedJob
from penstock.core.jobs.round import AdmissionView, Placement
from penstock.core.jobs.start_ranges import (
    ArrivalStream,
    HostNow,
    RunNow,
    StartRange,
    World,
    start_ranges,
)
from penstock.core.jobs.types import SECOND, HostId, JobId, Moment
from penstock.scheduler.dispatcher import Dispatcher
from penstock.scheduler.learning import SAMPLE_AHEAD, SAMPLE_JOBS, Learner
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Store

#: The most jobs that are read ahead of a job, and the most live dispatches.
MOST_AHEAD: Final = 1_000
MOST_RUNS: Final = 2_000
#: The most job types whose arrivals are played: those that arrive most often.
MOST_STREAMS: Final = 20
#: Rarer arrivals are not played: they hardly change when other jobs start.
_LEAST_PER_SECOND: Final = 1 / 3_600
BUDGET_SEC: Final = 0.25


class Forecaster:
    """
    Makes forecasts. `budget_sec`: the most seconds that the plays of one forecast take; None: no limit, so
    that a test gets the same plays each time.
    """

    def __init__(
        self,
        store: Store,
        rules: SchedulerRules,
        dispatcher: Dispatcher,
        learner: Learner,
        budget_sec: float | None = BUDGET_SEC,
    ) -> None:
        self._store, self._rules, self._dispatcher, self._learner = store, rules, dispatcher, learner
        self.budget_sec = budget_sec

    def predict(self, job_ids: Collection[JobId], *, quickly: bool = False) -> dict[JobId, StartRange]:
        """
        The start ranges of these jobs, recorded so that they are scored when the jobs start. `quickly`: for a
        submit that waits; with as few plays as a range needs, and only for jobs that have few jobs ahead.
        """
        if quickly:
            return self._record(self._forecast(job_ids, ahead=SAMPLE_AHEAD, budget_sec=0.0))
        return self._record(self._forecast(job_ids))

    def sample(self) -> dict[JobId, StartRange]:
        """
        Predict the starts of some waiting jobs, so that predictions are scored even if no client asks for
        one.
        """
        return self._record(self._forecast(most=SAMPLE_JOBS, ahead=SAMPLE_AHEAD, budget_sec=0.0))

    def ranges(
        self, job_ids: Collection[JobId] = (), *, most: int = 0, knowledge: Knowledge | None = None
    ) -> dict[JobId, StartRange]:
        """
        The start ranges of queued jobs: of `job_ids`, and of `most` more, taken evenly from all that wait.
        Empty while nothing was learned: a guess that looks like a promise is worse than none.
        """
        return self._forecast(job_ids, most=most, knowledge=knowledge).ranges

    def _forecast(
        self,
        job_ids: Collection[JobId] = (),
        *,
        most: int = 0,
        ahead: int = MOST_AHEAD,
        knowledge: Knowledge | None = None,
        budget_sec: float | None = None,
    ) -> _Forecast:
        """One forecast. `budget_sec`: None: the usual one; 0: only as many plays as a range needs."""
        knowledge = knowledge or self._learner.knowledge()
        if not knowledge.records:
            return _Forecast({}, {}, None)
        hosts, runs = self._hosts(), self._store.live(limit=MOST_RUNS)
        seen = self._store.read_view(self._rules.host, partial(self._read, job_ids, ahead))
        waiting = [job.job_id for _, _, jobs in seen.queues for job in jobs]
        targets = set(job_ids).intersection(waiting)
        targets.update(waiting[:: max(1, len(waiting) // most)][:most] if most else ())
        world = _world(seen, hosts, runs, knowledge, self._sizes(knowledge, seen, runs)) if targets else None
        if world is None:
            return _Forecast({}, {}, seen)
        played = start_ranges(
            world,
            sorted(targets),
            Random(seen.now),  # noqa: S311  # no secret: the same state gives the same answer
            may_go_on=self._time_limit(self.budget_sec if budget_sec is None else budget_sec),
        )
        return _Forecast(_stretched(played, seen, knowledge), played, seen)

    def _record(self, forecast: _Forecast) -> dict[JobId, StartRange]:
        """Give the predictions to the learner, which scores them, and return the ranges."""
        ranges, played, seen = forecast
        for admission_class, _, jobs in () if seen is None else seen.queues:
            for job in jobs:
                one = ranges.get(job.job_id)
                if seen is not None and one is not None and one.high_at > seen.now:
                    self._learner.predicted(
                        Prediction(
                            job.job_id,
                            job.fence,
                            record_name(admission_class),
                            seen.now,
                            one.low_at,
                            one.middle_at,
                            one.high_at,
                            played[job.job_id].low_at,
                            played[job.job_id].high_at,
                        )
                    )
        return ranges

    def _time_limit(self, budget_sec: float | None) -> Callable[[int], bool]:
        began = time.perf_counter()

        def may_go_on(played: int) -> bool:
            """Whether the next stage, twice as many plays, ends in time."""
            took = time.perf_counter() - began
            return budget_sec is None or took * (2 * played + 1) / played <= budget_sec

        return may_go_on

    def _hosts(self) -> dict[HostId, Conditions]:
        """The other hosts that are alive, as they last reported."""
        now, here = self._store.now(), self._rules.host
        return {
            host.host: Conditions(
                host.capacity, host.quiet, now, draining=host.draining, labels=frozenset(host.labels)
            )
            for host in self._store.hosts()
            if host.until > now and host.host != here
        }

    def _read(self, job_ids: Collection[JobId], ahead: int, view: AdmissionView) -> _HostView:
        """
        Read the ready queues, the first jobs of each. A job of `job_ids` that is not ready, or has more than
        `ahead` jobs before it, is not read.
        """
        inputs = self._dispatcher.inputs(view)
        ready_queues = list(view.ready_queues())
        each = max(20, ahead // max(1, len(ready_queues)))
        missing, queues = set(job_ids), []
        for queue in ready_queues:
            jobs = list(islice(queue.jobs, each))
            if missing and len(jobs) == each and missing.isdisjoint(job.job_id for job in jobs):
                jobs += islice(queue.jobs, max(0, ahead - each))
            missing.difference_update([job.job_id for job in jobs])
            queues.append((queue.admission_class, queue.urgent, jobs))
        busy_classes = {
            queue.admission_class
            for queue in ready_queues
            if inputs.offer(queue.admission_class) is Placement.LEAVE
        }
        ledger = replace(view.ledger, counts=dict(view.ledger.counts))
        rules = self._rules
        return _HostView(view.now, rules, inputs.conditions, inputs.limits, ledger, queues, busy_classes)

    def _sizes(self, knowledge: Knowledge, seen: _HostView, runs: Sequence[Dispatch]) -> dict[JobId, str]:
        """The size keys of jobs whose type has some. Jobs of other types are not read."""
        named = [(job.job_id, each) for each, _, jobs in seen.queues for job in jobs]
        named += [(run.job_id, run.admission_class) for run in runs if run.job_id is not None]
        sized = {name for name in {record_name(each) for _, each in named} if knowledge.sized(name)}
        wanted = [job_id for job_id, each in named if sized and record_name(each) in sized]
        return {JobId(job.job_id): size_of(job.tags) for job in self._store.observed_jobs(wanted)}


class _Forecast(NamedTuple):
    """
    The result of the plays. `played`: the ranges before they were stretched. `seen`: the state that they
    start from; None: nothing was learned yet.
    """

    ranges: dict[JobId, StartRange]
    played: dict[JobId, StartRange]
    seen: _HostView | None


class _HostView(NamedTuple):
    """The state of this host's queues, as one read of the store shows it."""

    now: Moment
    rules: SchedulerRules
    conditions: Conditions
    limits: AdmissionLimits
    ledger: Ledger
    queues: list[tuple[AdmissionClass, bool, list[QueuedJob]]]
    #: The classes whose workers on this host are all busy.
    busy_classes: set[AdmissionClass]


def _stretched(
    played: dict[JobId, StartRange], seen: _HostView, knowledge: Knowledge
) -> dict[JobId, StartRange]:
    """
    The ranges, widened for each job type so that they would have held eight of ten of the scored starts. The
    errors of past predictions show what plays leave out.
    """
    ranges = {}
    for admission_class, _, jobs in seen.queues:
        stretch = None
        for job in jobs:
            if job.job_id in played:
                stretch = stretch or knowledge.stretch(record_name(admission_class))
                ranges[job.job_id] = played[job.job_id].stretched(stretch, seen.now)
    return ranges


def _world(
    seen: _HostView,
    others: dict[HostId, Conditions],
    runs: Sequence[Dispatch],
    knowledge: Knowledge,
    sizes: dict[JobId, str],
) -> World | None:
    """The world from which the plays start; None: no worker is present that could take the jobs."""
    here = seen.rules.host
    conditions = {here: seen.conditions, **others}
    numbers = {host: number for number, host in enumerate(conditions)}
    runs = [run for run in runs if run.host in numbers]
    limits = seen.limits if others else _limits_with_busy_workers(seen, runs)
    if limits is None:
        return None
    units: Counter[HostId] = Counter()
    running: Counter[HostId] = Counter()
    for run in runs:
        units[run.host] += run.admission_class.cost_units
        running[run.host] += 1
    durations = _Durations(knowledge, sizes)
    return World(
        now=seen.now,
        hosts=[HostNow(each, units[host], running[host]) for host, each in conditions.items()],
        runs=[_run_now(run, numbers[run.host], durations) for run in runs],
        queues=seen.queues,
        ledger=seen.ledger,
        limits=limits,
        ordering=seen.rules.ordering,
        duration_of=durations.of_waiting,
        arrivals=list(_streams(knowledge, seen.now)),
    )


def _limits_with_busy_workers(seen: _HostView, runs: Sequence[Dispatch]) -> AdmissionLimits | None:
    """The limits; where all workers for a class are busy, also a cap: as many run at once as now."""
    if not seen.busy_classes:
        return seen.limits
    caps = seen.limits.caps
    if all(each in seen.busy_classes for each, _, _ in seen.queues):  # the workers of this host are full
        concurrent = len(runs) if caps.concurrent is None else min(len(runs), caps.concurrent)
        return replace(seen.limits, caps=replace(caps, concurrent=concurrent)) if runs else None
    counts = Counter(_cap_name(run.admission_class) for run in runs)
    types = {
        name: min(counts[name], limit) if (limit := caps.limit("type", name)) is not None else counts[name]
        for name in map(_cap_name, seen.busy_classes)
    }
    return replace(seen.limits, caps=_with_types(caps, types))


def _with_types(caps: Caps, types: dict[str, int]) -> Caps:
    return replace(caps, types={**caps.types, **types})


def _cap_name(admission_class: AdmissionClass) -> str:
    return f"{admission_class.addon_id}/{admission_class.job_type}"


def _run_now(run: Dispatch, host: int, durations: _Durations) -> RunNow:
    started_at = run.started_at or run.admitted_at
    expected = None if run.ends_at is None else max(1, run.ends_at - started_at) / SECOND
    duration = durations.of(run.admission_class, run.job_id, expected)
    return RunNow(host, run.admission_class, started_at, run.ends_at, duration)


def _streams(knowledge: Knowledge, now: Moment) -> Iterable[ArrivalStream]:
    """The arrivals of the most frequent job types, which a play continues."""
    rates = [
        (record.arrivals.per_second(now), name, record.arrivals)
        for name, record in list(knowledge.records.items())
        if record.arrivals.shapes
    ]
    rates.sort(key=lambda rate: -rate[0])
    for per_second, name, arrivals in rates[:MOST_STREAMS]:
        if per_second < _LEAST_PER_SECOND:
            continue
        addon_id, job_type, _ = parts_of(name)
        for shape in arrivals.shapes:
            yield ArrivalStream(
                shape.admission_class(addon_id, job_type),
                shape.priority,
                per_second / len(arrivals.shapes),
                arrivals.burst,
                max(1.0, arrivals.bursts),
            )


class _Durations:
    """The distributions of one forecast, each made once."""

    def __init__(self, knowledge: Knowledge, sizes: dict[JobId, str]) -> None:
        self._knowledge, self._sizes = knowledge, sizes
        self._made: dict[tuple[str, str, float | None], Distribution | None] = {}

    def of_waiting(self, admission_class: AdmissionClass, waiting: QueuedJob) -> Distribution | None:
        return self.of(admission_class, waiting.job_id, waiting.expected_sec)

    def of(
        self, admission_class: AdmissionClass, job_id: JobId | None, expected_sec: float | None
    ) -> Distribution | None:
        size = self._sizes.get(job_id, "") if job_id is not None else ""
        key = (record_name(admission_class), size, expected_sec)
        if key not in self._made:
            self._made[key] = self._knowledge.durations(*key)
        return self._made[key]
