"""
Start ranges: when queued jobs will likely start, by simulating the scheduler (a play).

A play begins with the present state: the ready queues, the runs of all hosts, the ledger. It draws the
duration of each run from what was learned about its type, lets jobs arrive at their recent rates, and calls
the scheduler's own `run_round` whenever a run ended or a job arrived. So order, fair share, caps, kept units
and labels have their effect. Each play also draws new distributions that fit the observed durations, so that
few observations make wide ranges. Some dozens of plays give each job some dozens of starts. The range leaves
out the same number of them at both ends, so that the real start is in it with a probability of 80 %, if it is
drawn like the others: of 39 plays the range is from the fourth start to the fourth from the end.

The caller passes the dice, so that a play can be repeated. The work is bounded: at most a thousand jobs
ahead, and as many plays as the caller has time for.

Not played are changes of the hosts' conditions, retries, preemption, jobs that are not ready yet, and workers
that come or go. If all workers for a kind of job are busy now, as many such jobs as now run at once.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import log
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionClass, AdmissionLimits, Conditions, Ledger, keys_of
from penstock.core.jobs.learning import Dice, Distribution, Stretch
from penstock.core.jobs.ordering import Ordering, QueuedJob, order_key
from penstock.core.jobs.round import Placement, ReadyQueue, RoundInputs, RunningJob, run_round
from penstock.core.jobs.types import SECOND, JobId, Moment, Span

#: The part of the starts that a range should hold.
COVERAGE: Final = 0.8
#: After these numbers of plays a range has exactly that coverage; more plays make it steadier.
STAGES: Final = (9, 19, 39)
#: A play ends after this many steps: a job that has not started by then starts too late for a prediction.
MOST_STEPS: Final = 4_000
_FAR: Final[Moment] = 1 << 62


class StartRange(Struct, frozen=True):
    """
    A job starts between `low_at` and `high_at` in 8 of 10 cases; in half of the plays it starts by
    `middle_at`.
    """

    low_at: Moment
    middle_at: Moment
    high_at: Moment

    def covers(self, moment: Moment) -> bool:
        return self.low_at <= moment <= self.high_at

    def stretched(self, by: Stretch, now: Moment) -> StartRange:
        """The range with the same middle and with ends that are further from it or nearer to it."""
        low_at = self.middle_at - round(by.early * (self.middle_at - self.low_at))
        high_at = self.middle_at + round(by.late * (self.high_at - self.middle_at))
        return StartRange(max(now, low_at), self.middle_at, high_at)


class HostNow(Struct, frozen=True):
    """A host at the beginning of a play, with the units and the number of its runs."""

    conditions: Conditions
    units: int
    running: int


class RunNow(Struct, frozen=True):
    """A run at the beginning of a play. `host`: the number of its host. `duration`: None if it is unknown."""

    host: int
    admission_class: AdmissionClass
    started_at: Moment
    ends_at: Moment | None  # as its submitter expects
    duration: Distribution | None


class ArrivalStream(Struct, frozen=True):
    """Jobs that arrive at random, in bursts."""

    admission_class: AdmissionClass
    priority: int
    per_second: float
    burst: float = 1.0
    #: How many bursts were observed; each play draws a rate that fits them. None: the rate is certain.
    seen: float | None = None


class World(Struct, frozen=True):
    """The state with which a play begins."""

    now: Moment
    hosts: Sequence[HostNow]
    runs: Sequence[RunNow]
    queues: Sequence[tuple[AdmissionClass, bool, Sequence[QueuedJob]]]  # class, urgent, jobs in order
    ledger: Ledger  # the counts and accounts of all hosts
    limits: AdmissionLimits
    ordering: Ordering
    #: How long such a job will run; None: unknown.
    duration_of: Callable[[AdmissionClass, QueuedJob], Distribution | None]
    arrivals: Sequence[ArrivalStream] = ()


def start_ranges(
    world: World,
    targets: Collection[JobId],
    dice: Dice,
    *,
    may_go_on: Callable[[int], bool] = lambda _: True,
) -> dict[JobId, StartRange]:
    """
    The ranges of these jobs; a job that started in too few plays has none. `may_go_on` is called after each
    stage with the number of plays so far, and says whether there is time for more.
    """
    wanted = frozenset(targets)
    streams = [stream for stream in world.arrivals if _matters(stream, world, wanted)]
    starts: dict[JobId, list[Moment]] = {job_id: [] for job_id in targets}
    played = 0
    for stage in STAGES:
        while played < stage:
            began = _Play(world, streams, dice).run(wanted)
            for job_id, moments in starts.items():
                moments.append(began.get(job_id, _FAR))
            played += 1
        if not may_go_on(played):
            break
    ranges = {job_id: _range(sorted(moments)) for job_id, moments in starts.items()}
    return {job_id: one for job_id, one in ranges.items() if one is not None}


def _range(starts: Sequence[Moment]) -> StartRange | None:
    outside = round((1 - COVERAGE) / 2 * (len(starts) + 1)) - 1
    low, middle, high = starts[outside], starts[len(starts) // 2], starts[-1 - outside]
    return None if high >= _FAR else StartRange(low, middle, high)


def _matters(stream: ArrivalStream, world: World, targets: frozenset[JobId]) -> bool:
    """
    Whether arrivals of the stream may change the start of a target. Jobs that come after all targets in the
    same queue do not.
    """
    for admission_class, _, jobs in world.queues:
        own = admission_class == stream.admission_class
        for job in jobs:
            if job.job_id in targets and (not own or job.priority < stream.priority):
                return True
    return False


class _Play:
    def __init__(self, world: World, streams: Sequence[ArrivalStream], dice: Dice) -> None:
        self.world, self.dice, self.now = world, dice, world.now
        counts = dict(world.ledger.counts)
        accounts = {addon_id: replace(account) for addon_id, account in world.ledger.accounts.items()}
        self.ledgers = [
            Ledger(host.units, host.running, counts, accounts, world.ledger.spent) for host in world.hosts
        ]
        self.queues = {
            (admission_class, urgent): list(jobs) for admission_class, urgent, jobs in world.queues
        }
        #: The distributions that this play has drawn, by the identity of those in the world.
        self.durations: dict[int, Distribution] = {}
        self.running: list[dict[int, RunningJob]] = [{} for _ in world.hosts]
        self.number = 0
        #: The coming ends: moment, number of the run, host, class.
        self.ends: list[tuple[Moment, int, int, AdmissionClass]] = []
        for run in world.runs:
            self._run(run.host, run.admission_class, self._end_of(run), run.started_at, run.ends_at)
        heapify(self.ends)
        self.pauses = [self._mean_pause(stream) for stream in streams]
        self.coming = [(self._next_arrival(at), at) for at in range(len(streams))]
        heapify(self.coming)
        self.streams = streams

    def run(self, targets: frozenset[JobId]) -> dict[JobId, Moment]:
        """The starts of the targets that start."""
        began: dict[JobId, Moment] = {}
        remaining = set(targets)
        for _ in range(MOST_STEPS):
            for job_id in self._start():
                if job_id in remaining:
                    began[job_id] = self.now
                    remaining.discard(job_id)
            if not remaining or not self.ends:
                break
            self._advance()
        return began

    def _start(self) -> Iterator[JobId]:
        """
        Start jobs, and return their ids. Of several hosts the one with the most free units starts one job,
        then again the one with the most: real hosts, which all claim, also spread their jobs like this.
        """
        if len(self.ledgers) == 1:
            yield from self._round(0)
            return
        started: list[JobId] | None = None
        while started is None or started:
            started = []
            tried: set[Conditions] = set()
            for host in self._by_free_units():
                conditions = self.world.hosts[host].conditions
                if conditions in tried:  # an equal host with more free units could start nothing
                    continue
                tried.add(conditions)
                started = self._round(host, most=1)
                if started:
                    yield from started
                    break

    def _advance(self) -> None:
        """Go to the next moment at which runs end or jobs arrive."""
        self.now = min(self.ends[0][0], self.coming[0][0] if self.coming else _FAR)
        while self.ends and self.ends[0][0] <= self.now:
            _, number, host, admission_class = heappop(self.ends)
            self._give_back(number, host, admission_class)
        while self.coming and self.coming[0][0] <= self.now:
            _, at = heappop(self.coming)
            self._arrive(self.streams[at])
            heappush(self.coming, (self._next_arrival(at), at))

    def _by_free_units(self) -> list[int]:
        hosts = self.world.hosts
        return sorted(
            range(len(hosts)), key=lambda host: self.ledgers[host].units - hosts[host].conditions.capacity
        )

    # what ends

    def _end_of(self, run: RunNow) -> Moment | None:
        if run.duration is None:
            return None
        lasted: Span = self.now - run.started_at
        return run.started_at + self._drawn(run.duration).beyond(lasted, self.dice.random())

    def _drawn(self, duration: Distribution) -> Distribution:
        drawn = self.durations.get(id(duration))
        if drawn is None:
            drawn = self.durations[id(duration)] = duration.redrawn(self.dice)
        return drawn

    def _run(
        self,
        host: int,
        admission_class: AdmissionClass,
        end: Moment | None,
        started_at: Moment,
        expected: Moment | None,
    ) -> None:
        self.number += 1
        self.running[host][self.number] = RunningJob(admission_class.cost_units, started_at, expected)
        if end is not None:  # else it never returns its units, and jobs that need them do not start
            heappush(self.ends, (end, self.number, host, admission_class))

    def _give_back(self, number: int, host: int, admission_class: AdmissionClass) -> None:
        ledger, cost = self.ledgers[host], admission_class.cost_units
        del self.running[host][number]
        ledger.units -= cost
        ledger.running -= 1
        for key in keys_of(admission_class):
            ledger.counts[key] = ledger.counts.get(key, 0) - 1
        account = ledger.accounts.get(admission_class.addon_id)
        if account is not None:
            account.hold(-cost, self.now, self.world.ordering.sharing)

    # what arrives

    def _mean_pause(self, stream: ArrivalStream) -> float:
        """The mean time between two bursts, in seconds."""
        drawn = 1.0
        if stream.seen is not None:
            drawn = max(0.1, self.dice.gammavariate(stream.seen, 1.0 / stream.seen))
        return stream.burst / (stream.per_second * drawn)

    def _next_arrival(self, at: int) -> Moment:
        pause = -log(1.0 - self.dice.random()) * self.pauses[at]
        return self.now + max(1, round(pause * SECOND))

    def _arrive(self, stream: ArrivalStream) -> None:
        jobs = self.queues.setdefault((stream.admission_class, False), [])
        turn = order_key(stream.priority, self.now, self.world.ordering.aging)
        while True:
            self.number += 1
            arrived = QueuedJob(_FAR + self.number, JobId(""), stream.priority, turn, 0)
            insort(jobs, arrived, key=lambda job: (job.turn, job.no))
            if self.dice.random() * stream.burst < 1.0:  # a burst has a geometric number of jobs
                return

    # what starts

    def _round(self, host: int, most: int | None = None) -> list[JobId]:
        world, ledger = self.world, self.ledgers[host]
        free = world.hosts[host].conditions.capacity - ledger.units
        if all(each.cost_units > free for (each, _), jobs in self.queues.items() if jobs):
            return []  # the round would start nothing
        inputs = RoundInputs(
            _PlayedView(self.now, ledger, self.queues, self.running[host]),
            world.hosts[host].conditions,
            world.limits,
            world.ordering,
            lambda _: Placement.LEASE,
        )
        result = run_round(inputs, most_leases=most)
        started = []
        for pick in result.picks:
            jobs = self._queue_of(pick.admission_class, pick.waiting)
            jobs.remove(pick.waiting)
            duration = world.duration_of(pick.admission_class, pick.waiting)
            end = None if duration is None else self.now + self._drawn(duration).at(self.dice.random())
            self._run(host, pick.admission_class, end, self.now, pick.ends_at)
            started.append(pick.waiting.job_id)
        for waiting in result.passed:
            for jobs in self.queues.values():
                if jobs and jobs[0] is waiting:
                    jobs[0] = replace(waiting, passed_at=self.now)
        return started

    def _queue_of(self, admission_class: AdmissionClass, waiting: QueuedJob) -> list[QueuedJob]:
        """The queue of a pick. The picks before it are removed already, so it is the first of its queue."""
        urgent = self.queues.get((admission_class, True), [])
        return urgent if urgent and urgent[0] is waiting else self.queues[admission_class, False]


class _PlayedView:
    """What a round sees of a play: an `AdmissionView`."""

    def __init__(
        self,
        now: Moment,
        ledger: Ledger,
        queues: Mapping[tuple[AdmissionClass, bool], Sequence[QueuedJob]],
        running: Mapping[int, RunningJob],
    ) -> None:
        self.now, self.ledger = now, ledger
        self._queues, self._running = queues, running

    def ready_queues(self) -> Iterable[ReadyQueue]:
        for (admission_class, urgent), jobs in self._queues.items():
            if jobs:
                yield ReadyQueue(admission_class, urgent, iter(jobs))

    def running(self) -> Sequence[RunningJob]:
        return [*self._running.values()]

    def start_timeouts(self, _: QueuedJob) -> int:
        return 0
