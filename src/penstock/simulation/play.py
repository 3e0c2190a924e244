"""
Plays a load under some rules: reads or makes the load, plays it, and computes the figures by which two
settings are compared.

The deciding parts are real: the store in memory, the dispatcher, the maintenance and the core. Simulated are
the workers, which take every job and end it when the load says so, and time, which jumps to the next moment
at which something can happen.

A load is jobs with their arrival and duration, from a trail or made up. A job that never ran has no duration:
its expected duration is taken, else the median of its type.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import median
from typing import Final, NamedTuple

from msgspec.structs import replace

from penstock.core.errors import Refused
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import ENDS, Dispatch, Event, EventKind, Job
from penstock.core.jobs.round import MOST_PICKS
from penstock.core.jobs.types import (
    HOUR,
    SECOND,
    AddonId,
    DispatchId,
    HostId,
    JobId,
    Moment,
    Priority,
    Span,
    seconds,
)
from penstock.scheduler.arrivals import Arrival
from penstock.scheduler.dispatcher import Dispatcher, PullingWorkers, WorkerKinds
from penstock.scheduler.hosts import HostLoad
from penstock.scheduler.job_service import EndReport, JobService, feed
from penstock.scheduler.maintenance import Maintenance
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Query, SetAddon, Store, committed
from penstock.stores.memory.store import MemoryStore

_FOR_EVER: Final[Span] = 1 << 60
_ANY: Final = WorkerKinds(own=True)


@dataclass(slots=True)
class PlayedJob:
    """`started`: None if the job never started: it was refused, or its deadline passed first."""

    arrival: Arrival
    refused: bool = False
    started: Moment | None = None

    @property
    def wait(self) -> Span | None:
        """From the moment at which the job could have started on an empty machine."""
        ready = max(self.arrival.at, self.arrival.intent.earliest_start_at or 0)
        return None if self.started is None else self.started - ready


@dataclass(slots=True)
class Played:
    outcomes: list[PlayedJob]
    capacity: int  # of all hosts
    lasted: Span  # from the first arrival to the last end


def play(
    load: Sequence[Arrival],
    rules: SchedulerRules,
    *,
    hosts: int = 1,
    weights: Mapping[str, int] | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> Played:
    """`progress` is called with the number of jobs that have ended or will never start."""
    stage = _Stage(_steady(rules), hosts, weights or {})
    stage.run(load, progress)
    most = stage.rules.capacity.most * hosts
    lasted = stage.now - load[0].at if load else 0
    return Played(stage.outcomes, most, lasted)


def _steady(rules: SchedulerRules) -> SchedulerRules:
    """The machine is quiet, workers never die, and nothing is forgotten: what is compared is policy."""
    capacity = replace(rules.capacity, fixed=rules.capacity.most)
    return replace(rules, capacity=capacity, lease_for=_FOR_EVER, fetch_for=_FOR_EVER, retention=_FOR_EVER)


@dataclass
class _Stage:
    rules: SchedulerRules
    hosts: int
    weights: Mapping[str, int]
    now: Moment = 0
    outcomes: list[PlayedJob] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbers = count(1)
        self.store = MemoryStore(
            lambda: self.now, ordering=self.rules.ordering, new_id=lambda: f"{next(numbers):012}"
        )
        machine = HostLoad(self.rules)
        self.dispatchers = [self._dispatcher(number, machine) for number in range(self.hosts)]
        self.free = [self.rules.capacity.most] * self.hosts
        self.job_service = JobService(self.store, self.rules, self.dispatchers[0])
        self.maintenance = Maintenance(self.store, self.rules)
        self.of_job: dict[JobId, PlayedJob] = {}
        self.ends: list[
            tuple[Moment, DispatchId, int, int]
        ] = []  # when, what, where, and the units it gives back
        self.moments: list[Moment] = []  # at which something becomes ready, urgent or too late
        for addon_id, weight in self.weights.items():
            committed(self.store, SetAddon(AddonId(addon_id), weight=weight))

    def _dispatcher(self, number: int, machine: HostLoad) -> Dispatcher:
        return Dispatcher(
            self.store, replace(self.rules, host=HostId(f"host{number}")), machine, PullingWorkers()
        )

    def run(self, load: Sequence[Arrival], progress: Callable[[int], object]) -> None:
        arrivals, settled = iter(load), 0
        coming = next(arrivals, None)
        while coming is not None or self.ends or self.moments:
            due = [end[0] for end in self.ends[:1]] + self.moments[:1]
            self.now = min(due if coming is None else [*due, coming.at])
            while coming is not None and coming.at <= self.now:
                settled += not self._arrive(coming)
                coming = next(arrivals, None)
            settled += self._end()
            self._pass_moments()
            self._start()
            progress(settled)

    def _arrive(self, arrival: Arrival) -> bool:
        outcome = PlayedJob(arrival)
        self.outcomes.append(outcome)
        try:
            [receipt] = self.job_service.submit([arrival.intent])
        except Refused:  # a queue that is full, or a cost that no host could ever give
            outcome.refused = True
            return False
        self.of_job[receipt.job_id] = outcome
        intent = arrival.intent
        for moment in (intent.earliest_start_at, intent.deadline_at):
            if moment is not None and moment > self.now:
                heapq.heappush(self.moments, moment)
        return True

    def _end(self) -> int:
        reports = []
        while self.ends and self.ends[0][0] <= self.now:
            _, dispatch_id, host, units = heapq.heappop(self.ends)
            reports.append(EndReport(dispatch_id))
            self.free[host] += units
        if reports:
            self.job_service.end_many(reports)
        return len(reports)

    def _pass_moments(self) -> None:
        if not self.moments or self.moments[0] > self.now:
            return
        while self.moments and self.moments[0] <= self.now:
            heapq.heappop(self.moments)
        self.maintenance.step(self.now)

    def _start(self) -> None:
        """
        The host with most free units claims first, one job at a time. When it gets nothing, no other host
        would: hosts are alike.
        """
        limit = MOST_PICKS if self.hosts == 1 else 1
        while self.of_job:
            host = self.free.index(max(self.free))
            claim = self.dispatchers[host].claim(_ANY, limit, "simulated")
            taken = [grant.dispatch for grant in committed(self.store, claim) if grant.job is not None]
            for dispatch in taken:
                self._began(dispatch, host)
            if len(taken) < limit:
                return

    def _began(self, dispatch: Dispatch, host: int) -> None:
        assert dispatch.job_id is not None
        outcome = self.of_job.pop(dispatch.job_id)
        outcome.started = self.now
        units = outcome.arrival.intent.cost_units
        self.free[host] -= units
        heapq.heappush(self.ends, (self.now + outcome.arrival.runs_for, dispatch.dispatch_id, host, units))


class AddonFigures(NamedTuple):
    addon_id: str
    jobs: int
    refused: int
    #: Jobs that started after their deadline, or never.
    late: int
    #: Seconds from ready to start: median, 95th percentile, longest.
    wait_p50: float | None
    wait_p95: float | None
    wait_max: float | None
    #: Of all unit-seconds that were used.
    share: float


class Figures(NamedTuple):
    addons: list[AddonFigures]
    everything: AddonFigures
    #: Share of all unit-seconds from the first arrival to the last end.
    used: float
    lasted_sec: float


def figures(played: Played) -> Figures:
    by_addon: dict[str, list[PlayedJob]] = defaultdict(list)
    for outcome in played.outcomes:
        by_addon[outcome.arrival.intent.addon_id].append(outcome)
    used = _used(played.outcomes)
    addons = [_of(name, outcomes, used) for name, outcomes in sorted(by_addon.items())]
    there_was = played.capacity * played.lasted / SECOND
    return Figures(
        addons,
        _of("all", played.outcomes, used),
        used / there_was if there_was else 0.0,
        seconds(played.lasted),
    )


def _of(name: str, outcomes: Sequence[PlayedJob], used: float) -> AddonFigures:
    waits = sorted(outcome.wait for outcome in outcomes if outcome.wait is not None)
    return AddonFigures(
        addon_id=name,
        jobs=len(outcomes),
        refused=sum(outcome.refused for outcome in outcomes),
        late=sum(_is_late(outcome) for outcome in outcomes),
        wait_p50=_at(waits, 0.5),
        wait_p95=_at(waits, 0.95),
        wait_max=_at(waits, 1.0),
        share=_used(outcomes) / used if used else 0.0,
    )


def _used(outcomes: Sequence[PlayedJob]) -> float:
    """Unit-seconds."""
    ran = (outcome.arrival for outcome in outcomes if outcome.started is not None)
    return sum(arrival.intent.cost_units * seconds(arrival.runs_for) for arrival in ran)


def _is_late(outcome: PlayedJob) -> bool:
    deadline = outcome.arrival.intent.deadline_at
    return deadline is not None and (outcome.started is None or outcome.started > deadline)


def _at(waits: Sequence[Span], part: float) -> float | None:
    return seconds(waits[min(len(waits) - 1, int(part * len(waits)))]) if waits else None


_PAGE: Final = 1_000
_BEGAN: Final[Moment] = 1_900_000_000 * SECOND
_UNKNOWN: Final[Span] = 60 * SECOND


def replayed(store: Store) -> list[Arrival]:
    """Every job that the store still has, in the order of arrival."""
    lengths = _lengths(feed(store))
    jobs = sorted(_jobs(store), key=_arrival)
    usual = _usual((job.intent.job_type, lengths[job.job_id]) for job in jobs if job.job_id in lengths)
    return [Arrival(_arrival(job), _plain(job.intent), _length(job, lengths, usual)) for job in jobs]


def _arrival(job: Job) -> Moment:
    """A job with parents arrives when they let it go: it keeps the moment that it had."""
    return max(job.created_at, job.ready_at) if job.intent.after else job.created_at


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


def _usual(samples: Iterable[tuple[str, Span]]) -> dict[str, Span]:
    by_type: dict[str, list[Span]] = defaultdict(list)
    for job_type, length in samples:
        by_type[job_type].append(length)
    return {job_type: round(median(lengths)) for job_type, lengths in by_type.items()}


def _length(job: Job, lengths: dict[JobId, Span], usual: dict[str, Span]) -> Span:
    expected = job.intent.expected_duration_sec
    if job.job_id in lengths:
        return lengths[job.job_id]
    return round(expected * SECOND) if expected else usual.get(job.intent.job_type, _UNKNOWN)


def _plain(intent: Intent) -> Intent:
    """
    Without what only a real run needs: nothing is carried, nothing spent, a key would make two jobs one, and the
    parents have other ids.
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
        after=(),
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
