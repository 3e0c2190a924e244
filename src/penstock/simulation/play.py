"""
Plays a load under some rules.

The deciding parts are real: the store in memory, the dispatcher, the maintenance and the core. Simulated are
the workers, which take every job and end it when the load says so, and time, which jumps to the next moment
at which something can happen.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from msgspec.structs import replace

from penstock.core.errors import Refused
from penstock.core.jobs.job import Dispatch
from penstock.core.jobs.ordering import MOST_PICKS
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment, Span
from penstock.scheduler.dispatcher import Dispatcher, PullingWorkers, WorkerKinds
from penstock.scheduler.host_load import HostLoad
from penstock.scheduler.job_service import EndReport, JobService
from penstock.scheduler.maintenance import Maintenance
from penstock.scheduler.rules import SchedulerRules
from penstock.simulation.load import Arrival
from penstock.stores.api import SetAddon, committed
from penstock.stores.memory.store import MemoryStore

__all__ = ["Played", "PlayedJob", "play"]

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
    tell: Callable[[int], object] = lambda _: None,
) -> Played:
    """`tell` hears how many jobs have ended or will never start."""
    stage = _Stage(_steady(rules), hosts, weights or {})
    stage.run(load, tell)
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
        self.job_service = JobService(self.store, self.rules, machine, self.dispatchers[0])
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

    def run(self, load: Sequence[Arrival], tell: Callable[[int], object]) -> None:
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
            tell(settled)

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
        The host with most room comes first, one job at a time, as if all had asked. When it finds nothing
        nobody does: hosts are alike.
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
