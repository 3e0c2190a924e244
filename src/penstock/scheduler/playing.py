"""
The player: plays a load forward in time under given rules, with the scheduler's own round.

`run_round`, the gates, the ledger, the end rules, preemption and the rules about present workers are those of
the scheduler, unchanged. The player holds the state that they read, in memory: ready queues as heaps, running
jobs as a heap of ends. It has no store and writes no trail. `penstock simulate` plays whole loads with it. The
plays of estimates are smaller and begin with what runs and waits now: `core/jobs/start_ranges.py`.

Time jumps from one moment at which something can happen to the next. The scheduler also looks at its queues
with every tick, but time alone opens no gate, save one: a job that a round has refused can start only after an
end, an arrival, or a moment that is known beforehand (ready, urgent, a quiet state, a new day of a budget), or
when units that were kept for one job are kept for another, because the order of heads changes with time. At all
other moments rounds start nothing, and a round that starts nothing changes nothing. For the same reason a round
need not see a queue whose head cannot start in it, unless the head is about to count as passed over, or to have
units kept for it.

What is assumed: workers claim at once and never die; an attempt that is stopped ends at once; spending counts
when an attempt ends. When several hosts could start a job, the host with the most free units is first.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import Final, NamedTuple

from msgspec.structs import replace

from penstock.core.errors import BadIntent
from penstock.core.jobs.admission import (
    EVERYTHING,
    Account,
    Conditions,
    Kept,
    Ledger,
    admission_class_of,
    windows,
)
from penstock.core.jobs.dependencies import Fate, ParentCondition, fate
from penstock.core.jobs.intent import Intent, check
from penstock.core.jobs.job import Dispatch
from penstock.core.jobs.load import Busy, Capacity, Quiet, QuietState, observe
from penstock.core.jobs.ordering import QueuedJob, head_key, order_key, urgent_from
from penstock.core.jobs.preemption import Act, Candidate, Cycle, advance, begin, choose, wanted
from penstock.core.jobs.reasons import BudgetSpent, CapReached, Paused
from penstock.core.jobs.round import (
    MOST_PICKS,
    Pick,
    Placement,
    RoundInputs,
    RoundResult,
    RunningJob,
    run_round,
    stop_moment,
)
from penstock.core.jobs.states import NONE_YET, DispatchPhase, JobState, resolve_end
from penstock.core.jobs.types import (
    SECOND,
    AddonId,
    DispatchId,
    EndReason,
    HostId,
    JobId,
    Moment,
    Money,
    Span,
)
from penstock.scheduler.arrivals import Arrival, Load, PlayedAttempt
from penstock.scheduler.dispatcher import FOR_EVER, PullingWorkers, RoundWorkers, WorkerKinds
from penstock.scheduler.played_queues import NOWHERE, PlayedQueue, PlayedView, WaitingJobs
from penstock.scheduler.rules import SchedulerRules

#: More places than any host has units for.
NO_LIMIT: Final = 1 << 30
ANY_JOB: Final = WorkerKinds(own=True)
_NOT_STARTED: Final[Moment] = -1


class PlayedWorker(NamedTuple):
    """
    A worker that is always there. `places`: how many jobs it runs at once. `claims_when_full`: it counts as
    present also while all of its places are taken, as the runner does; a worker that does not counts as gone
    when it has been full for `fetch_for`.
    """

    name: str = "any"
    kinds: WorkerKinds = ANY_JOB
    places: int = NO_LIMIT
    claims_when_full: bool = True


class PlayedHost(NamedTuple):
    """
    A host and its workers. `capacity`: None for that of the rules. `preempts`: it makes running jobs yield, as
    the daemon does. `reserves`: jobs that no worker here claims are reserved, as in the daemon.
    """

    name: HostId = HostId("local")
    workers: tuple[PlayedWorker, ...] = (PlayedWorker(),)
    labels: tuple[str, ...] = ()
    capacity: Capacity | None = None
    preempts: bool = True
    reserves: bool = True


class PlayedState(IntEnum):
    COMING = 0  # not submitted yet
    QUEUED = 1
    RUNNING = 2
    DONE = 3
    FAILED = 4
    CANCELED = 5
    BLOCKED = 6
    REFUSED = 7


_SETTLED: Final = {
    JobState.DONE: PlayedState.DONE,
    JobState.FAILED: PlayedState.FAILED,
    JobState.CANCELED: PlayedState.CANCELED,
    JobState.BLOCKED: PlayedState.BLOCKED,
}


#: What a child sees of a parent that has ended.
_ENDED: Final = {
    PlayedState.DONE: JobState.DONE,
    PlayedState.FAILED: JobState.FAILED,
    PlayedState.CANCELED: JobState.CANCELED,
}


class _Due(IntEnum):
    """What happens at a moment. Of what happens at one moment, the first goes first."""

    CALL = 0
    CANCEL = 1
    DEADLINE = 2
    READY = 3
    URGENT = 4
    ASK = 5  # a host should run a round
    TICK = 6  # of a host that keeps units: they may be kept for another job now
    LOOK = 7  # a tick of the preemption


class _Run:
    """A dispatch. `ends_at`: expected, as the rounds see it; `over_at`: when it really ends."""

    __slots__ = (
        "admitted_at",
        "ends_at",
        "fence",
        "host",
        "job",
        "over_at",
        "phase",
        "priority",
        "queue",
        "ready_at",
        "reason",
        "started_at",
        "worker",
    )  # fmt: skip

    def __init__(
        self, job: int, queue: PlayedQueue, host: _Host, waiting: QueuedJob, ready_at: Moment
    ) -> None:
        self.job, self.queue, self.host = job, queue, host
        self.priority, self.fence, self.ready_at = waiting.priority, waiting.fence + 1, ready_at
        self.worker: _Worker | None = None
        self.phase = DispatchPhase.RESERVED
        self.admitted_at = self.started_at = self.over_at = 0
        self.ends_at: Moment | None = None
        self.reason = EndReason.COMPLETED


class _Worker:
    __slots__ = ("claims_when_full", "fits", "free", "kinds", "name")

    def __init__(self, worker: PlayedWorker) -> None:
        self.name, self.kinds, self.free, self.claims_when_full = worker
        #: By the number of a queue, whether the worker runs its jobs.
        self.fits: dict[int, bool] = {}

    def runs(self, queue: PlayedQueue) -> bool:
        fits = self.fits.get(queue.number)
        if fits is None:
            fits = self.fits[queue.number] = self.kinds.fits(queue.admission_class)
        return fits


class _Host:
    def __init__(self, number: int, host: PlayedHost, capacity: Capacity, ledger: Ledger) -> None:
        self.number, self.name, self.labels = number, host.name, frozenset(host.labels)
        self.capacity, self.preempts, self.ledger = capacity, host.preempts, ledger
        self.workers = [_Worker(worker) for worker in host.workers]
        #: One worker that runs every job: no round need know who else is there.
        self.alone = len(self.workers) == 1 and self.workers[0].kinds == ANY_JOB
        self.reserves = host.reserves and not self.alone
        self.present = PullingWorkers()
        if not host.reserves:
            self.present.came(ANY_JOB, FOR_EVER)
        self.runs: dict[int, _Run] = {}
        self.reserved: dict[int, _Run] = {}
        self.quiet: Quiet | None = None
        self.draining = False
        #: What the last round kept, until something on this host changes.
        self.kept: Kept | None = None
        self.tick_planned = False
        self.cycle: Cycle | None = None
        self.changed = True

    def conditions(self, now: Moment) -> Conditions:
        if self.quiet is None:  # nothing is measured: always quiet, for longer than a job can ask
            return Conditions(self.capacity.most, streak=now, draining=self.draining, labels=self.labels)
        quiet = self.quiet
        units = self.capacity.units(quiet.busy.score)
        streak = quiet.streak(now)
        return Conditions(units, quiet.state, streak, quiet.busy, draining=self.draining, labels=self.labels)

    @property
    def units(self) -> int:
        """That may be in use now."""
        return self.capacity.most if self.quiet is None else self.capacity.units(self.quiet.busy.score)

    def running(self) -> list[RunningJob]:
        return [RunningJob(run.queue.cost, run.admitted_at, run.ends_at) for run in self.runs.values()]


class Player:
    """
    `add` arrivals (and what waits or runs already), then `run`. The columns `state`, `started_at` (of the first
    attempt), `ended_at` and `host` say by number what became of each job; -1 stands for "never".
    """

    def __init__(
        self,
        rules: SchedulerRules,
        hosts: Sequence[PlayedHost] = (PlayedHost(),),
        *,
        now: Moment = 0,
        load: Load | None = None,
        accounts: Mapping[AddonId, Account] | None = None,
    ) -> None:
        self.rules, self.now, self.load = rules, now, load or Load()
        self._ordering, self._limits = rules.ordering, rules.limits
        self._sharing, self._aging = rules.ordering.sharing, rules.ordering.aging
        self.state = bytearray()
        self.started_at, self.ended_at, self.host = array("q"), array("q"), array("l")
        #: How many jobs will never start again.
        self.settled = 0
        self.preemptions = self.retries = 0
        self._accounts = {addon: replace(account) for addon, account in (accounts or {}).items()}
        self._counts: dict[tuple[str, str], int] = {}
        self._spent: Counter[tuple[AddonId, str]] = Counter()
        self._spent_now: dict[AddonId, dict[str, Money]] = {}
        self._waiting = WaitingJobs(self.load)
        self._queues: list[PlayedQueue] = []
        self._queue_numbers: dict[tuple[int, int, bool], int] = {}
        self._classes: dict[object, int] = {}
        self._alike: dict[object, int] = {}
        self._ready: dict[int, PlayedQueue] = {}
        self._costs: Counter[int] = Counter()  # of queues that are not empty
        self._queued: Counter[AddonId] = Counter()
        self._ready_at: dict[int, Moment] = {}  # where it is not the moment of the arrival
        self._left: dict[int, Span] = {}  # what an interrupted job still has to do
        self._active: dict[int, Span] = {}
        self._job_spent: dict[int, Money] = {}
        self._tries: Counter[int] = Counter()
        self._valid: dict[int, bool] = {}
        self._quiet_fors: set[Span] = set()
        self._children: dict[int, list[tuple[int, ParentCondition]]] = defaultdict(list)
        self._unmet: Counter[int] = Counter()
        #: Unit-microseconds by addon.
        self.used: Counter[AddonId] = Counter()
        self._ends: list[tuple[Moment, int, int, _Run]] = []
        self._due: list[tuple[Moment, int, int]] = []
        self._calls: dict[int, Callable[[], None]] = {}
        self._call_numbers, self._end_numbers = count(), count()
        self._coming: Iterator[int] | None = None
        self._next_job = -1
        self._hosts = [self._host(number, host) for number, host in enumerate(hosts)]
        self._by_name = {host.name: host for host in self._hosts}
        self._views = [PlayedView(host.ledger, self._waiting, host.running) for host in self._hosts]
        #: Hosts to ask, and queues whose head has not been offered to every host.
        self._ask: dict[int, None] = {}
        self._heads: dict[int, None] = {}
        self._free = _FreeUnits(self._hosts)
        self._keeping: dict[JobId, set[int]] = defaultdict(set)
        self._caps = rules.limits.caps
        self._waiting_priorities, self._running_priorities = [0] * 101, [0] * 101
        self._look_at: Moment | None = None
        self._most_units = max((host.capacity.most for host in self._hosts), default=0)

    def _host(self, number: int, host: PlayedHost) -> _Host:
        ledger = Ledger(counts=self._counts, accounts=self._accounts, spent=self._spent_now)
        played = _Host(number, host, host.capacity or self.rules.capacity, ledger)
        for worker in played.workers:
            self._show_room(played, worker, claimed=True)
        return played

    # what is played

    def add(
        self,
        arrival: Arrival,
        *,
        ready_at: Moment | None = None,
        passed_at: Moment | None = None,
        fence: int = 0,
    ) -> int:
        """
        A job that arrives; returns its number. A job that waits already has an `at` in the past: give `ready_at`
        if it became ready at another moment, `passed_at` if it was passed over, and its `fence`.
        """
        job = self.load.append(arrival)
        if ready_at is not None:
            self._ready_at[job] = ready_at
        if passed_at is not None:
            self._waiting.passed_at[job] = passed_at
        if fence:
            self._waiting.fences[job] = fence
        self._coming = None
        return job

    def add_running(
        self,
        arrival: Arrival,
        host: HostId,
        *,
        started_at: Moment,
        over_at: Moment,
        worker: str = "",
        expected_end: Moment | None = None,
    ) -> int:
        """A job that runs now, and ends at `over_at`. `expected_end`: what the scheduler expects."""
        job = self.load.append(arrival)
        self._grow()
        on = self._by_name[host]
        queue = self._queue_of(job, urgent=False)
        turn = order_key(arrival.intent.priority, arrival.at, self._aging)
        run = _Run(job, queue, on, self._waiting.head(turn, job), arrival.at)
        run.admitted_at, run.ends_at = started_at, expected_end
        on.ledger.take(queue.admission_class, self.now, self._sharing, queue.keys)
        self._free.changed(on)
        on.runs[job] = run
        fitting = [w for w in on.workers if w.name == worker] or [w for w in on.workers if w.runs(queue)]
        self._lease(run, fitting[0] if fitting else None, started_at)
        run.over_at, run.reason = max(over_at, self.now), EndReason.COMPLETED
        self._push_end(run)
        self._coming = None
        return job

    def at(self, moment: Moment, call: Callable[[], None]) -> None:
        """Call this at that moment: one of `set_addon`, `set_load`, `drain`, or `cancel`."""
        number = next(self._call_numbers)
        self._calls[number] = call
        heappush(self._due, (moment, _Due.CALL, number))

    def set_addon(self, addon_id: AddonId, *, weight: int | None = None, paused: bool | None = None) -> None:
        account = self._accounts.setdefault(addon_id, Account())
        account.weight = account.weight if weight is None else weight
        account.paused = account.paused if paused is None else paused
        self._ask_all()

    def pause(self, paused: bool = True) -> None:
        """Pause everything."""
        self.set_addon(EVERYTHING, paused=paused)

    def set_load(self, host: HostId, score: float, by: str = "load") -> None:
        """The busy score of a host from now on. Where the capacity is fixed, it changes nothing."""
        on = self._by_name[host]
        if on.capacity.fixed is None:
            on.quiet = observe(on.quiet, Busy(score, by), self.now, self.rules.thresholds)
            self._free.changed(on)
            on.changed = True
            self._ask[on.number] = None
            self._await_quiet([on])

    def _await_quiet(self, hosts: Iterable[_Host]) -> None:
        """Ask these hosts again when they have been quiet for as long as some job wants."""
        for host in hosts:
            if host.quiet is not None and host.quiet.state is QuietState.QUIET:
                for span in self._quiet_fors:
                    if host.quiet.since + span > self.now:
                        heappush(self._due, (host.quiet.since + span, _Due.ASK, host.number))

    @property
    def host_names(self) -> list[HostId]:
        return list(self._by_name)

    def drain(self, host: HostId, draining: bool = True) -> None:
        on = self._by_name[host]
        on.draining = draining
        self._ask[on.number] = None

    def cancel(self, job: int) -> None:
        """A waiting job leaves the queue, a running one ends."""
        if self.state[job] == PlayedState.QUEUED:
            self._leave(job)
            self._settle(job, PlayedState.CANCELED)
        elif self.state[job] == PlayedState.RUNNING:
            self._finish(self._run_of(job), EndReason.CANCELED)

    # the loop

    def run(self, until: Moment | None = None, *, until_started: Iterable[int] | None = None) -> None:
        """
        Play until this moment, or until all of these jobs have started or will never start; without either
        until nothing can happen any more.
        """
        self.next_moment()
        watched = None if until_started is None else set(until_started)
        while (moment := self._next()) is not None:
            if until is not None and moment > until:
                break
            self.now = max(moment, self.now)
            self._arrive()
            self._end_due()
            self._pass_moments()
            self._start()
            if watched is not None:
                watched = {j for j in watched if self.state[j] in (PlayedState.COMING, PlayedState.QUEUED)}
                if not watched:
                    break
        if until is not None:
            self.now = max(self.now, until)

    def next_moment(self) -> Moment | None:
        """When the next thing happens; None: nothing can happen any more."""
        self._grow()
        if self._coming is None:
            self._begin()
        return self._next()

    def _grow(self) -> None:
        missing = len(self.load) - len(self.state)
        if missing > 0:
            self.state.extend(bytes(missing))
            never = [_NOT_STARTED] * missing
            for column in (self.started_at, self.ended_at, self.host):
                column.extend(never)
            self._waiting.grow()

    def _begin(self) -> None:
        at = self.load.at
        coming = [job for job in range(len(at)) if self.state[job] == PlayedState.COMING]
        if any(at[one] > at[other] for one, other in pairwise(coming)):
            coming.sort(key=at.__getitem__)
        self._coming = iter(array("l", coming))
        self._next_job = next(self._coming, -1)

    def _next(self) -> Moment | None:
        moment: Moment | None = None if self._next_job < 0 else self.load.at[self._next_job]
        for heap in (self._ends, self._due):
            if heap and (moment is None or heap[0][0] < moment):
                moment = heap[0][0]
        return moment

    def _arrive(self) -> None:
        at, now, coming = self.load.at, self.now, self._coming
        assert coming is not None
        while (job := self._next_job) >= 0 and at[job] <= now:
            self._next_job = next(coming, -1)
            self._submit(job)

    def _submit(self, job: int) -> None:
        load = self.load
        number = load.intent[job]
        intent, deadline = load.intents[number], load.deadline_at[job]
        if not self._is_valid(job, number, deadline) or self._is_full(intent.addon_id):
            self._settle(job, PlayedState.REFUSED)
            return
        self.state[job] = PlayedState.QUEUED
        self._queued[intent.addon_id] += 1
        if deadline:
            heappush(self._due, (deadline, _Due.DEADLINE, job))
        extras = load.extras.get(job)
        if extras is not None and extras.canceled_at is not None:
            heappush(self._due, (max(extras.canceled_at, self.now), _Due.CANCEL, job))
        if extras is not None and extras.parents:
            self._await_parents(job, extras.parents)
            return
        self._place(job, max(self._ready_at.get(job, load.at[job]), load.earliest_start_at[job]))

    def _await_parents(self, job: int, parents: Sequence[tuple[int, ParentCondition]]) -> None:
        """The job is ready when the last of its parents has ended as it should; perhaps at once."""
        self._unmet[job] = len(parents)
        for parent, condition in parents:
            self._children[parent].append((job, condition))
        for parent, _ in parents:
            if self.state[parent] in _ENDED:
                self._judge_children(parent)

    def _judge_children(self, parent: int) -> None:
        state = _ENDED[PlayedState(self.state[parent])]
        for child, condition in self._children.pop(parent, ()):
            if self.state[child] != PlayedState.QUEUED:
                continue
            intent = self.load.intents[self.load.intent[child]]
            match fate(condition, state, intent.if_unmet):
                case Fate.MEET:
                    self._unmet[child] -= 1
                    if not self._unmet[child] and self._waiting.queue[child] == NOWHERE:
                        self._ready_at[child] = max(self.now, self.load.earliest_start_at[child])
                        self._place(child, self._ready_at[child])
                case Fate.WAIT:
                    self._children[parent].append((child, condition))
                case Fate.CANCEL:
                    self._leave(child)
                    self._settle(child, PlayedState.CANCELED)
                case Fate.FAIL:
                    self._leave(child)
                    self._settle(child, PlayedState.FAILED)

    def _is_valid(self, job: int, number: int, deadline: Moment) -> bool:
        """What the submit checks. It is the same for all jobs of one intent, except for the deadline."""
        if deadline and deadline <= self.now:
            return False
        valid = self._valid.get(number)
        if valid is None:
            try:
                check(self.load.intent_of(job), self.now, most_units=self._most_units)
                valid = True
            except BadIntent:
                valid = False
            self._valid[number] = valid
        return valid

    def _is_full(self, addon_id: AddonId) -> bool:
        def queued(addon_id: AddonId | None) -> int:
            return self._queued.total() if addon_id is None else self._queued[addon_id]

        depth = self.rules.depth
        if depth.total is None and depth.per_addon is None:
            return False
        if len(self.load) <= min(depth.total or NO_LIMIT, depth.per_addon or NO_LIMIT):
            return False
        return depth.reached([addon_id], queued) is not None

    # the queues

    def _place(self, job: int, ready_at: Moment) -> None:
        """Put a queued job where it belongs now."""
        if ready_at > self.now:
            self._ready_at[job] = ready_at
            heappush(self._due, (ready_at, _Due.READY, job))
            return
        urgent_at = None
        if self.load.deadline_at[job]:
            urgent_at = urgent_from(self.load.intent_of(job), self._ordering)
        urgent = urgent_at is not None and urgent_at <= self.now
        if urgent_at is not None and not urgent:
            heappush(self._due, (urgent_at, _Due.URGENT, job))
        self._enter(job, self._queue_of(job, urgent=urgent), ready_at)

    def _enter(self, job: int, queue: PlayedQueue, ready_at: Moment) -> None:
        priority = self.load.intents[self.load.intent[job]].priority
        self._waiting_priorities[priority] += 1
        if queue.head is None:
            self._ready[queue.number] = queue
            self._costs[queue.cost] += 1
        if queue.put(order_key(priority, ready_at, self._aging), job):
            self._heads[queue.number] = None

    def _queue_of(self, job: int, *, urgent: bool) -> PlayedQueue:
        """By its intent and the whole seconds of its expected duration, which decide about its class."""
        load = self.load
        expected = load.expected_sec[job]
        key = (load.intent[job], -1 if expected != expected else int(-(-expected // 1)), urgent)  # noqa: PLR0124 - NaN
        number = self._queue_numbers.get(key)
        if number is None:
            admission_class = admission_class_of(load.intent_of(job))
            same = (admission_class, urgent)
            number = self._classes.get(same)
            if number is None:
                number = self._classes[same] = len(self._queues)
                kind = (replace(admission_class, cost_units=1, duration_class=0), urgent)
                alike = self._alike.setdefault(kind, len(self._alike))
                queue = PlayedQueue(number, admission_class, self._waiting, urgent=urgent, alike=alike)
                self._queues.append(queue)
                if admission_class.quiet_for_sec:
                    self._quiet_fors.add(admission_class.quiet_for_sec * SECOND)
                    self._await_quiet(self._hosts)
            self._queue_numbers[key] = number
        return self._queues[number]

    def _out(self, queue: PlayedQueue, job: int, priority: int) -> None:
        """A job has left its queue."""
        self._waiting_priorities[priority] -= 1
        self._waiting.passed_at.pop(job, None)
        if queue.head is None and self._ready.pop(queue.number, None) is not None:
            self._costs[queue.cost] -= 1
        if self._keeping and (hosts := self._keeping.pop(JobId(str(job)), None)):
            for number in hosts:
                self._hosts[number].kept = None
                self._ask[number] = None

    def _leave(self, job: int) -> None:
        """A queued job goes without a start."""
        number = self._waiting.queue[job]
        if number != NOWHERE:
            queue = self._queues[number]
            if queue.remove(job):
                self._heads[number] = None
            self._out(queue, job, self.load.intents[self.load.intent[job]].priority)
        self._queued[self.load.intents[self.load.intent[job]].addon_id] -= 1

    def _settle(self, job: int, state: PlayedState) -> None:
        self.state[job] = state
        self.ended_at[job] = self.now
        self.settled += 1
        self._ready_at.pop(job, None)
        if job in self._children and state in _ENDED:
            self._judge_children(job)

    # moments

    def _pass_moments(self) -> None:
        due = self._due
        while due and due[0][0] <= self.now:
            _, what, number = heappop(due)
            match what:
                case _Due.CALL:
                    self._calls.pop(number)()
                case _Due.CANCEL:
                    self.cancel(number)
                case _Due.DEADLINE if self.state[number] == PlayedState.QUEUED:
                    self._leave(number)
                    self._settle(number, PlayedState.FAILED)
                case _Due.READY if self._is_due(number):
                    self._place(number, self._ready_at[number])
                case _Due.URGENT if self._waiting.queue[number] != NOWHERE:
                    self._hurry(number)
                case _Due.ASK:
                    self._ask[number] = None
                case _Due.TICK:
                    self._tick(self._hosts[number])
                case _Due.LOOK if self._look_at is not None and self._look_at <= self.now:
                    self._look()
                case _:
                    pass

    def _is_due(self, job: int) -> bool:
        queued = self.state[job] == PlayedState.QUEUED and self._waiting.queue[job] == NOWHERE
        return queued and self._ready_at.get(job, self.now + 1) <= self.now

    def _hurry(self, job: int) -> None:
        """A waiting job becomes urgent, and keeps its place in the order."""
        queue = self._queues[self._waiting.queue[job]]
        urgent = self._queue_of(job, urgent=True)
        if queue is urgent:
            return
        passed_at = self._waiting.passed_at.get(job)
        if queue.remove(job):
            self._heads[queue.number] = None
        self._out(queue, job, self.load.intents[self.load.intent[job]].priority)
        if passed_at is not None:
            self._waiting.passed_at[job] = passed_at
        load = self.load
        self._enter(job, urgent, max(self._ready_at.get(job, load.at[job]), load.earliest_start_at[job]))

    def _new_window(self) -> None:
        """A day or a month is over in which a budget was spent."""
        self._count_spending()
        self._ask_all()

    # rounds

    def _ask_all(self) -> None:
        self._ask.update(dict.fromkeys(range(len(self._hosts))))

    def _start(self) -> None:
        """Ask hosts until none of them can start anything."""
        hosts = self._hosts
        if len(hosts) == 1 and self._order_changed(hosts[0]):
            self._ask[0] = None
        while self._ask or self._heads:
            if len(hosts) == 1:
                asked = bool(self._ask) or self._some_head_fits(hosts[0])
                self._ask.clear()
                self._heads.clear()
                if asked and self._ready:
                    self._ask_host(hosts[0])
            elif self._ask:
                number = max(self._ask, key=lambda number: (self._free.of(number), -number))
                del self._ask[number]
                self._ask_host(hosts[number])
            else:
                number, _ = self._heads.popitem()
                self._offer_head(self._queues[number])
        if self._look_at is None and self.rules.preemption.threshold is not None:
            self._plan_look()

    def _some_head_fits(self, host: _Host) -> bool:
        free = host.units - host.ledger.units
        return any(
            queue.head is not None and queue.cost <= free
            for queue in map(self._queues.__getitem__, self._heads)
        )

    def _order_changed(self, host: _Host) -> bool:
        """
        Whether the job that units are kept for is no longer the first: the order of heads changes with time.
        Then a job that was refused may start before it, or units are kept for another job.
        """
        if host.kept is None:
            return False
        units, now, ordering = host.units, self.now, self._ordering
        free = units - host.ledger.units
        first: tuple[tuple[float, ...], JobId] | None = None
        for queue in self._ready.values():
            head = queue.head
            if head is None or queue.cost > units:
                continue
            if queue.cost > free and (head.passed_at is None or now - head.passed_at < ordering.patience):
                continue
            share = host.ledger.share(queue.admission_class.addon_id, now, self._sharing)
            key = head_key(head, urgent=queue.urgent, share=share, now=now, aging=self._aging)
            first = min(first or (key, head.job_id), (key, head.job_id))
        return first is None or first[1] != host.kept.job_id

    def _tick(self, host: _Host) -> None:
        host.tick_planned = False
        if self._order_changed(host):
            self._ask[host.number] = None
        self._plan_tick(host)

    def _plan_tick(self, host: _Host) -> None:
        free = host.units - host.ledger.units
        if (
            host.kept is not None
            and not host.tick_planned
            and any(self._costs[c] for c in range(1, free + 1))
        ):
            host.tick_planned = True
            heappush(self._due, (self._next_tick(), _Due.TICK, host.number))

    def _next_tick(self) -> Moment:
        tick = self.rules.tick
        return self.now - self.now % tick + tick

    def _offer_head(self, queue: PlayedQueue) -> None:
        """Ask the hosts that may have room for the head of this queue, until one of them starts it."""
        head = queue.head
        if head is None:
            return
        for number in self._free.at_least(queue.cost):
            host = self._hosts[number]
            kept = host.kept
            if kept is not None and not kept.lets_past(queue.cost, head.ends_at(self.now)):
                continue
            if (
                not any(worker.free > 0 and worker.runs(queue) for worker in host.workers)
                and not host.reserves
            ):
                continue
            result = self._ask_host(host)
            if queue.head is not head:
                if queue.head is not None:
                    self._heads[queue.number] = None
                return
            if result is not None and _holds_everywhere(result, head):
                return

    def _ask_host(self, host: _Host) -> RoundResult | None:
        """Let the workers of a host claim until none of them gets a job. The last result."""
        if host.alone:
            worker, result = host.workers[0], None
            while worker.free > 0 and (latest := self._round(host, worker)) is not None:
                result = latest
                # Units that are kept may be kept for longer now that more runs: then more may slip past.
                if len(result.picks) < MOST_PICKS and not (result.picks and result.kept is not None):
                    break
            return result
        result = None
        started = True
        while started:
            started = False
            for worker in host.workers:
                started |= self._take_up(host, worker)
                if worker.free > 0 and (claimed := self._round(host, worker)) is not None:
                    result = claimed
                    started |= bool(result.picks)
            if host.reserves and (reserved := self._round(host, None)) is not None:
                result = reserved
                started |= bool(result.picks)
        return result

    def _round(self, host: _Host, worker: _Worker | None) -> RoundResult | None:
        """None: no job could start in it, so there was none."""
        queues = self._queues_for(host, worker)
        if not queues:
            return None
        view, ledger = self._views[host.number], host.ledger
        view.now, view.queues = self.now, queues
        offer: Callable[..., Placement] = _lease
        workers = None
        if not host.alone:
            workers = RoundWorkers(
                host.present,
                self.now,
                None if worker is None else worker.kinds,
                worker.name if worker else "",
            )
            offer = workers.offer
            # A copy, as in a store: what the round sets aside leaves no trace in the accounts.
            accounts = {addon: replace(account) for addon, account in ledger.accounts.items()}
            view.ledger = replace(ledger, counts=dict(ledger.counts), accounts=accounts)
        inputs = RoundInputs(view, host.conditions(self.now), self._limits, self._ordering, offer)
        if workers is not None:
            inputs = inputs._replace(take_place=workers.take_place)
        result = run_round(inputs, most_leases=None if worker is None else worker.free)
        for queue in queues:
            if queue.head is None and self._ready.pop(queue.number, None) is not None:
                self._costs[queue.cost] -= 1
        self._take_over(host, worker, result)
        return result

    def _queues_for(self, host: _Host, worker: _Worker | None) -> list[PlayedQueue]:
        """
        The queues that a round of this host can do something about; none if nothing can start. A head that does
        not fit matters only if it has not been marked as passed over yet, or if units are to be kept for it.
        """
        units, now, patience = host.units, self.now, self._ordering.patience
        free = units - host.ledger.units
        if free <= 0 or not self._ready:
            return []
        chosen, startable = [], False
        waited: dict[int, PlayedQueue] = {}
        for queue in self._ready.values():
            head = queue.head
            if queue.cost <= free:
                chosen.append(queue)
                startable = startable or worker is None or host.alone or worker.runs(queue)
            elif queue.cost <= units and head is not None:
                if head.passed_at is None:
                    chosen.append(queue)
                elif now - head.passed_at >= patience:
                    # Units are kept for the first of them only.
                    first = waited.setdefault(queue.alike, queue).head
                    if first is not None and (head.turn, head.no) < (first.turn, first.no):
                        waited[queue.alike] = queue
        chosen += waited.values()
        if worker is None and startable:
            present = host.present.at(now)
            startable = any(
                queue.cost <= free and not present.claims(queue.admission_class) for queue in chosen
            )
        return chosen if startable else []

    def _take_over(self, host: _Host, worker: _Worker | None, result: RoundResult) -> None:
        """Do what the round decided."""
        for pick in result.set_aside:
            queue = self._queues[self._waiting.queue[pick.waiting.no]]
            if queue.head is None:
                self._ready[queue.number] = queue
                self._costs[queue.cost] += 1
            queue.put(pick.waiting.turn, pick.waiting.no)
        for waiting in result.passed:
            self._queues[self._waiting.queue[waiting.no]].mark_passed(waiting.no, self.now)
        for pick in result.picks:
            self._dispatch(host, worker, pick)
        if result.picks:
            self._free.changed(host)
            host.changed = True
        if worker is not None and not host.alone:
            self._show_room(host, worker, claimed=True)
        self._keep(host, result.kept)

    def _keep(self, host: _Host, kept: Kept | None) -> None:
        before, host.kept = host.kept, kept
        if before is not None:
            self._keeping[before.job_id].discard(host.number)
        if kept is not None:
            self._keeping[kept.job_id].add(host.number)
            self._plan_tick(host)

    def _dispatch(self, host: _Host, worker: _Worker | None, pick: Pick) -> None:
        job, queue = pick.waiting.no, self._queues[self._waiting.queue[pick.waiting.no]]
        ready_at = pick.waiting.turn + pick.waiting.priority * self._aging.per_point
        run = _Run(job, queue, host, pick.waiting, ready_at)
        run.admitted_at, run.ends_at = self.now, pick.ends_at
        self._waiting.queue[job] = NOWHERE
        if not host.alone:
            host.ledger.take(queue.admission_class, self.now, self._sharing, queue.keys)
            if queue.head is not None:
                self._heads[queue.number] = None
        elif len(self._hosts) > 1 and queue.head is not None:
            self._heads[queue.number] = None
        self._out(queue, job, run.priority)
        self._queued[queue.admission_class.addon_id] -= 1
        host.runs[job] = run
        self.state[job], self.host[job] = PlayedState.RUNNING, host.number
        if pick.offer is Placement.LEASE:
            self._lease(run, worker, self.now)
        else:
            host.reserved[job] = run
            run.over_at, run.reason = self.now + self.rules.reserve_for, EndReason.START_TIMEOUT
        self._push_end(run)

    def _take_up(self, host: _Host, worker: _Worker) -> bool:
        """Lease jobs that are reserved for such a worker."""
        taken = False
        for job, run in list(host.reserved.items()):
            if worker.free > 0 and worker.runs(run.queue):
                del host.reserved[job]
                self._lease(run, worker, self.now)
                self._push_end(run)
                taken = True
        if taken:
            self._show_room(host, worker, claimed=True)
        return taken

    def _show_room(self, host: _Host, worker: _Worker, *, claimed: bool = False) -> None:
        if host.alone:
            return
        host.present.has_room(worker.name, worker.kinds, worker.free, FOR_EVER)
        if claimed:
            until = FOR_EVER if worker.claims_when_full else self.now + self.rules.fetch_for
            host.present.came(worker.kinds, until)
            if not worker.free and not worker.claims_when_full and host.reserves:
                heappush(self._due, (until, _Due.ASK, host.number))

    # attempts

    def _lease(self, run: _Run, worker: _Worker | None, started_at: Moment) -> None:
        """The attempt begins; when and how it ends is known now."""
        job, load = run.job, self.load
        run.phase, run.worker, run.started_at = DispatchPhase.LEASED, worker, started_at
        if worker is not None:
            worker.free -= 1
        if self.started_at[job] == _NOT_STARTED:
            self.started_at[job] = started_at
        self.state[job], self.host[job] = PlayedState.RUNNING, run.host.number
        self._running_priorities[run.priority] += 1
        run.over_at, run.reason = started_at + load.runs_for[job], EndReason.COMPLETED
        intent = load.intents[load.intent[job]]
        if job in load.extras or job in self._left:
            self._plan_attempt(run, intent)
        if intent.max_runtime_sec is not None or intent.max_active_sec is not None:
            active = self._active.get(job, 0)
            stop_at, reason = stop_moment(intent.max_runtime_sec, intent.max_active_sec, active, started_at)
            if stop_at is not None and reason is not None and stop_at < run.over_at:
                run.over_at, run.reason = stop_at, reason
        if job in self._waiting.counters:
            self._waiting.counters[job] = replace(self._waiting.counters[job], start=0)

    def _plan_attempt(self, run: _Run, intent: Intent) -> None:
        extras = self.load.extras_of(run.job)
        attempts = extras.attempts or (PlayedAttempt(self.load.runs_for[run.job]),)
        attempt = attempts[min(self._tries[run.job], len(attempts) - 1)]
        span, run.reason = self._left.get(run.job, attempt.runs_for), attempt.end
        if intent.cost_limit is not None and extras.spends:
            left = max(0, intent.cost_limit - self._job_spent.get(run.job, 0))
            if extras.spends >= left:
                span, run.reason = span * left // extras.spends, EndReason.COST_LIMIT_REACHED
        run.over_at = run.started_at + span

    def _push_end(self, run: _Run) -> None:
        heappush(self._ends, (run.over_at, next(self._end_numbers), run.fence, run))

    def _end_due(self) -> None:
        ends, now = self._ends, self.now
        while ends and ends[0][0] <= now:
            over_at, _, _, run = heappop(ends)
            if run.over_at == over_at and run.phase is not DispatchPhase.ENDED:
                self._finish(run, run.reason)

    def _run_of(self, job: int) -> _Run:
        return self._hosts[self.host[job]].runs[job]

    def _finish(self, run: _Run, reason: EndReason) -> None:
        """The dispatch ends, and the end rules decide where its job goes."""
        job, queue, host, phase = run.job, run.queue, run.host, run.phase
        run.phase = DispatchPhase.ENDED
        del host.runs[job]
        ledger, now = host.ledger, self.now
        ledger.units -= queue.cost
        ledger.running -= 1
        freed_cap = False
        for key in queue.keys:
            counted = ledger.counts[key]
            ledger.counts[key] = counted - 1
            if counted == self._caps.limit(*key):
                freed_cap = True
        ledger.accounts[queue.admission_class.addon_id].hold(-queue.cost, now, self._sharing)
        host.kept, host.changed = None, True
        self._free.changed(host)
        self._ask[host.number] = None
        if freed_cap and len(self._hosts) > 1:
            self._ask_all()
        if phase is DispatchPhase.RESERVED:
            host.reserved.pop(job, None)
        else:
            self._running_priorities[run.priority] -= 1
            self.used[queue.admission_class.addon_id] += queue.cost * (now - run.started_at)
            if run.worker is not None:
                run.worker.free += 1
                self._show_room(host, run.worker)
        if reason is EndReason.COMPLETED and job not in self.load.extras:
            self._settle(job, PlayedState.DONE)
        else:
            self._resolve(run, phase, reason)

    def _resolve(self, run: _Run, phase: DispatchPhase, reason: EndReason) -> None:
        job = run.job
        intent = self.load.intents[self.load.intent[job]]
        if phase is not DispatchPhase.RESERVED:
            self._count_work(run, reason)
        end = resolve_end(
            reason,
            phase,
            counters=self._waiting.counters.get(job, NONE_YET),
            schedules=self.rules.schedules,
            own_delays_sec=intent.retry_delays_sec,
        )
        if end.target is not JobState.QUEUED:
            self._settle(job, _SETTLED[end.target])
            return
        self._waiting.counters[job], self._waiting.fences[job] = end.counters, run.fence
        self.state[job] = PlayedState.QUEUED
        self._queued[intent.addon_id] += 1
        # Without a delay the job keeps its age.
        ready_at = self.now + end.delay if end.delay else run.ready_at
        self._ready_at[job] = ready_at
        self._place(job, ready_at)

    def _count_work(self, run: _Run, reason: EndReason) -> None:
        """What an attempt that has run leaves behind: spending, active time, and what is left to do."""
        job, ran = run.job, self.now - run.started_at
        extras = self.load.extras_of(job)
        self._active[job] = self._active.get(job, 0) + ran
        attempts = extras.attempts or (PlayedAttempt(self.load.runs_for[job]),)
        whole = self._left.get(job, attempts[min(self._tries[job], len(attempts) - 1)].runs_for)
        if extras.spends:
            spent = extras.spends * min(ran, whole) // max(whole, 1)
            self._job_spent[job] = self._job_spent.get(job, 0) + spent
            self._spend(run.queue.admission_class.addon_id, spent)
        interrupted = reason in (EndReason.COOPERATIVE_PREEMPTION, EndReason.PREEMPTION_TIMEOUT)
        self._left.pop(job, None)
        if interrupted:
            self.preemptions += 1
            if extras.resumes:
                self._left[job] = max(0, whole - ran)
        elif reason is not EndReason.COMPLETED:
            self.retries += 1
            self._tries[job] += 1

    # budgets

    def _spend(self, addon_id: AddonId, amount: Money) -> None:
        for window in windows(self.now):
            self._spent[addon_id, window.name] += amount
        self._count_spending()
        budget = self._limits.budgets.get(addon_id)
        if budget is None:
            return
        spent = self._spent_now.get(addon_id, {})
        reached = [w for w, limit in budget.limits(self.now) if spent.get(w.kind, 0) >= limit]
        for window in reached:
            self.at(window.ends_at, self._new_window)
        for run in [run for host in self._hosts if reached for run in host.runs.values()]:
            mine = run.queue.admission_class.addon_id == addon_id
            if mine and run.phase is DispatchPhase.LEASED and run.job in run.host.runs:
                self._finish(run, EndReason.COST_LIMIT_REACHED)

    def _count_spending(self) -> None:
        self._spent_now.clear()
        for window in windows(self.now):
            for (addon_id, name), amount in self._spent.items():
                if name == window.name:
                    self._spent_now.setdefault(addon_id, {})[window.kind] = amount

    # preemption

    def _plan_look(self) -> None:
        """At the next tick, if a job waits that could preempt one that runs, and anything has changed since."""
        threshold = self.rules.preemption.threshold
        waits, runs = self._waiting_priorities, self._running_priorities
        highest = next((priority for priority in range(100, 0, -1) if waits[priority]), 0)
        lowest = next((priority for priority in range(1, 101) if runs[priority]), 101)
        if threshold is not None and highest - lowest >= threshold:
            self._look_by(self._next_tick())

    def _look(self) -> None:
        self._look_at = None
        for host in self._hosts:
            if host.cycle is not None:
                self._go_on(host, host.cycle)
            elif host.preempts and host.runs:
                self._find_victim(host)

    def _find_victim(self, host: _Host) -> None:
        preemption = self.rules.preemption
        threshold = preemption.threshold or 0
        runs = [run for run in host.runs.values() if run.phase is DispatchPhase.LEASED]
        runs.sort(key=lambda run: (run.admitted_at, run.job))  # as a store lists them
        lowest = min((run.priority for run in runs), default=101)
        heads = [
            (-queue.head.priority, queue.head.turn, queue.head.no, queue)
            for queue in self._ready.values()
            if queue.head is not None and queue.head.priority - threshold >= lowest
        ]
        if not heads:
            return
        free = host.units - host.ledger.units
        intents = self.load.intents
        running = [
            Candidate(run.priority, _dispatch_of(run), intents[self.load.intent[run.job]].preemptible)
            for run in runs
        ]
        view = self._views[host.number]
        view.now = self.now
        for priority, _, _, queue in sorted(heads, key=lambda head: head[:3]):
            # Units are needed whatever else is: without enough of them no victim is worth a look.
            most = max((run.queue.cost for run in runs if run.priority <= -priority - threshold), default=0)
            if most + free < queue.cost:
                continue
            view.queues, view.ledger = [queue], host.ledger
            inputs = RoundInputs(view, host.conditions(self.now), self._limits, self._ordering, _lease)
            for want in wanted(inputs):
                victim = choose(want, running, preemption)
                if victim is not None:
                    self._begin_cycle(host, int(victim.dispatch_id), queue)
                    return

    def _begin_cycle(self, host: _Host, job: int, queue: PlayedQueue) -> None:
        assert queue.head is not None
        run, wanted_by = host.runs[job], queue.head.job_id
        host.cycle = begin(DispatchId(f"{job}.{run.fence}"), wanted_by, self.now, self.rules.preemption)
        self._ask_to_yield(run)
        self._wait_for_cycle(host.cycle)

    def _ask_to_yield(self, run: _Run) -> None:
        yields_after = self.load.extras_of(run.job).yields_after
        if yields_after is not None and self.now + yields_after < run.over_at:
            run.over_at, run.reason = self.now + yields_after, EndReason.COOPERATIVE_PREEMPTION
            self._push_end(run)

    def _wait_for_cycle(self, cycle: Cycle) -> None:
        self._look_by(min(self._next_tick(), cycle.due))

    def _look_by(self, moment: Moment) -> None:
        if self._look_at is None or moment < self._look_at:
            self._look_at = moment
            heappush(self._due, (moment, _Due.LOOK, 0))

    def _go_on(self, host: _Host, cycle: Cycle) -> None:
        job, _, fence = cycle.victim.partition(".")
        run = host.runs.get(int(job))
        victim_runs = run is not None and run.fence == int(fence) and run.phase is DispatchPhase.LEASED
        host.cycle, act = advance(
            cycle,
            victim_runs=victim_runs,
            still_wanted=self.state[int(cycle.wanted_by)] == PlayedState.QUEUED,
            now=self.now,
            preemption=self.rules.preemption,
        )
        if run is not None and act is Act.ASK:
            self._ask_to_yield(run)
        if run is not None and act is Act.FORCE:
            self._finish(run, EndReason.PREEMPTION_TIMEOUT)
        if host.cycle is not None:
            self._wait_for_cycle(host.cycle)


def _lease(_: object) -> Placement:
    return Placement.LEASE


def _dispatch_of(run: _Run) -> Dispatch:
    """A running job as `choose` sees it."""
    admission_class = run.queue.admission_class
    return Dispatch(
        DispatchId(str(run.job)), JobId(str(run.job)), admission_class.addon_id, run.host.name,
        admission_class, run.fence, run.phase, run.admitted_at, FOR_EVER, run.started_at,
    )  # fmt: skip


def _holds_everywhere(result: RoundResult, head: QueuedJob) -> bool:
    """Whether the head was refused for a reason that holds on every host."""
    for denial in result.denials:
        if denial.waiting is head:
            match denial.reason:
                case Paused() | BudgetSpent():
                    return True
                case CapReached(scope=scope):
                    return scope != "concurrent"
                case _:
                    return False
    return False


class _FreeUnits:
    """The hosts by their free units, so that those with the most are found without a search."""

    def __init__(self, hosts: Sequence[_Host]) -> None:
        self._hosts = hosts
        self._free = [0] * len(hosts)
        self._by_free: list[dict[int, None]] = [{} for _ in range(101)]
        for host in hosts:
            self._by_free[0][host.number] = None
            self.changed(host)

    def of(self, number: int) -> int:
        return self._free[number]

    def changed(self, host: _Host) -> None:
        number, free = host.number, max(0, host.units - host.ledger.units)
        if free != self._free[number]:
            del self._by_free[self._free[number]][number]
            self._by_free[free][number] = None
            self._free[number] = free

    def at_least(self, units: int) -> Iterator[int]:
        """As they are now, the most free units first."""
        for free in range(100, max(units, 1) - 1, -1):
            yield from list(self._by_free[free])
