"""
The player: plays a load forward in time under given rules, with the scheduler's own round.

`run_round`, the gates, the ledger, the end rules, preemption and the rules about present workers are those of
the scheduler, unchanged. The player holds the state that they read, in memory: ready queues as heaps, running
jobs as a heap of ends. It has no store and writes no trail. `penstock simulate` plays whole loads with it.
The plays of estimates are smaller, and begin with the jobs that run and wait now:
`core/jobs/start_ranges.py`.

Time jumps from one moment at which something can happen to the next. The scheduler also runs a round with
every tick, but the player may skip most of them. A job that a round has refused can start only

- after an end or an arrival,
- at a moment that is known beforehand (ready, urgent, a quiet state, a new day of a budget), or
- when units that were kept for one job are kept for another, because the order of heads changes with time.

At all other moments a round starts nothing, and a round that starts nothing changes nothing. For the same
reason a round need not see a queue whose head cannot start in it, unless the round marks the head as passed
over or keeps units for it.

A play makes these assumptions. Workers are always present and never die; they claim at once, or after a delay
of their own. An attempt that is stopped ends at once. Spending counts when an attempt ends. If several hosts
could start a job, the one with the most free units does.

This file has the loop, and the methods for users of the player. The parts, in the order in which they build
on each other: `arrivals` (the load), `played_queues`, `played_hosts`, `played_state`
(shared by all parts), `played_waiting` (from the submit to the start), `played_attempts` (from the start to
the end), `played_rounds` and `played_preemption`. `played_groups` (arrays and batches) and `played_schedules`
submit jobs of their own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop
from itertools import pairwise
from typing import Final

from penstock.core.jobs.admission import EVERYTHING, Account
from penstock.core.jobs.load import Busy, observe
from penstock.core.jobs.ordering import order_key
from penstock.core.jobs.round import RunningJob
from penstock.core.jobs.types import AddonId, EndReason, HostId, Moment
from penstock.scheduler.arrivals import Arrival, Load
from penstock.scheduler.dispatcher import FOR_EVER
from penstock.scheduler.played_attempts import PlayedAttempts
from penstock.scheduler.played_groups import PlayedArrays, PlayedBatches
from penstock.scheduler.played_hosts import PlayedHost, PlayedWorker, RunInPlay
from penstock.scheduler.played_preemption import PlayedPreemption
from penstock.scheduler.played_rounds import PlayedRounds
from penstock.scheduler.played_schedules import PlayedSchedules, ScheduleInPlay
from penstock.scheduler.played_state import MomentKind, Play, PlayedAccounts, PlayedState
from penstock.scheduler.played_waiting import PlayedQueues
from penstock.scheduler.rules import SchedulerRules

__all__ = ["PlayedHost", "PlayedState", "PlayedWorker", "Player"]


#: Looked up once: in Python 3.11 the lookup of an enum's member takes longer than its use.
_READY: Final[int] = MomentKind.READY
_EVERY_KIND: Final = len(MomentKind)


class Player:
    """
    Plays a load: `add` arrivals and the jobs that wait or run already, then `run`. The columns `state`,
    `started_at` (of the first attempt), `ended_at` and `host` have the result by the number of the job; -1
    stands for "never".
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
        self._accounts = PlayedAccounts(accounts or {}, rules.limits.budgets)
        self._play = play = Play(rules, hosts, Load() if load is None else load, self._accounts, now)
        self._queues = PlayedQueues(play)
        self._attempts = PlayedAttempts(play, self._queues, self._accounts)
        self._rounds = PlayedRounds(play, self._queues, self._attempts)
        self._preemption = PlayedPreemption(play, self._queues, self._attempts)
        self._arrays = PlayedArrays(play, self._queues, self.cancel)
        self._batches = PlayedBatches(play, self._queues)
        self._schedules = PlayedSchedules(play, self._queues, self.cancel)
        self._by_name = {host.name: host for host in play.hosts}
        due_actions: dict[MomentKind, Callable[[int], None]] = {
            MomentKind.CALL: self._call,
            MomentKind.CANCEL: self.cancel,
            MomentKind.DEADLINE: self._pass_deadline,
            MomentKind.READY: self._queues.become_ready,
            MomentKind.URGENT: self._queues.become_urgent,
            MomentKind.ASK: self._ask,
            MomentKind.TICK: self._rounds.tick,
            MomentKind.LOOK: self._preemption.wake,
        }
        self._due_actions = [due_actions[kind] for kind in MomentKind]
        self._coming: Iterator[int] | None = None
        self._next_job = -1
        self.rules, self.load = play.rules, play.load
        self.state, self.host = play.state, play.host
        self.started_at, self.ended_at = play.started_at, play.ended_at
        #: By addon, the units in use times microseconds.
        self.used = self._attempts.used

    @property
    def now(self) -> Moment:
        return self._play.now

    @property
    def settled(self) -> int:
        """The number of jobs that will never start again."""
        return self._play.settled

    @property
    def preemptions(self) -> int:
        return self._attempts.preemptions

    @property
    def retries(self) -> int:
        return self._attempts.retries

    @property
    def schedules(self) -> Sequence[ScheduleInPlay]:
        return self._schedules.all

    @property
    def host_names(self) -> list[HostId]:
        return list(self._by_name)

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
        Add a job that arrives; returns its number. A job that waits already has an `at` in the past: give
        `ready_at` if it became ready at another moment, `passed_at` if it was passed over, and its `fence`.
        """
        job = self.load.append(arrival)
        if ready_at is not None:
            self._queues.ready_at[job] = ready_at
        if passed_at is not None:
            self._play.waiting.passed_at[job] = passed_at
        if fence:
            self._play.waiting.fences[job] = fence
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
        """
        Add a job that runs now and ends at `over_at`. `expected_end`: the end that the scheduler expects.
        """
        play, on = self._play, self._by_name[host]
        job = self.load.append(arrival)
        play.grow()
        queue = self._queues.queue_of(job, urgent=False)
        turn = order_key(arrival.intent.priority, arrival.at, play.aging)
        as_seen = RunningJob(queue.cost, started_at, expected_end)
        run = RunInPlay(job, queue, on, play.waiting.head(turn, job), arrival.at, as_seen=as_seen)
        on.ledger.take(queue.admission_class, play.now, play.sharing, queue.keys)
        play.free.changed(on)
        play.count_change(on)
        on.runs[job] = run
        fitting = [w for w in on.workers if w.name == worker] or [w for w in on.workers if w.runs(queue)]
        self._attempts.lease(run, fitting[0] if fitting else None, started_at)
        run.over_at, run.reason = max(over_at, play.now), EndReason.COMPLETED
        self._attempts.push_end(run)
        self._coming = None
        return job

    def at(self, moment: Moment, call: Callable[[], None]) -> None:
        """Call a function at a moment; it may call `set_addon`, `set_load`, `drain` or `cancel`."""
        self._play.at(moment, call)

    def set_addon(self, addon_id: AddonId, *, weight: int | None = None, paused: bool | None = None) -> None:
        self._accounts.set_addon(addon_id, weight, paused)
        self._play.conditions_changed(self._play.hosts)

    def pause(self, paused: bool = True) -> None:
        """Pause everything."""
        self.set_addon(EVERYTHING, paused=paused)

    def set_load(self, host: HostId, score: float, by: str = "load") -> None:
        """Set the busy score of a host from now on. It changes nothing if the capacity is fixed."""
        on = self._by_name[host]
        if on.capacity.fixed is None:
            on.set_quiet(observe(on.quiet, Busy(score, by), self._play.now, self.rules.thresholds))
            self._play.free.changed(on)
            self._play.conditions_changed([on])
            self._queues.await_quiet([on])

    def drain(self, host: HostId, draining: bool = True) -> None:
        on = self._by_name[host]
        on.draining = draining
        self._play.conditions_changed([on])

    def cancel(self, job: int) -> None:
        """Cancel a job: a waiting one leaves the queue, a running one ends."""
        if self.state[job] == PlayedState.QUEUED:
            self._queues.leave(job, PlayedState.CANCELED)
        elif self.state[job] == PlayedState.RUNNING:
            self._attempts.finish(self._attempts.run_of(job), EndReason.CANCELED)

    # the loop

    def run(self, until: Moment | None = None, *, until_started: Iterable[int] | None = None) -> None:
        """
        Play until `until`, or until all jobs of `until_started` have started or will never start. Without
        either, play until nothing can happen any more.
        """
        self.next_moment()
        watched = None if until_started is None else set(until_started)
        while (moment := self._next()) < FOR_EVER:
            if until is not None and moment > until:
                break
            self._play.now = max(moment, self._play.now)
            self._arrive()
            self._attempts.end_due()
            # Jobs become ready with the round, and preemption looks before the round, as in the scheduler.
            self._pass_moments(_READY)
            self._preemption.look()
            self._pass_moments()
            self._rounds.start()
            self._preemption.plan()
            if watched is not None:
                watched = {j for j in watched if self.state[j] in (PlayedState.COMING, PlayedState.QUEUED)}
                if not watched:
                    break
        if until is not None:
            self._play.now = max(self._play.now, until)

    def next_moment(self) -> Moment | None:
        """The next moment at which something can happen; None: there is none."""
        self._play.grow()
        if self._coming is None:
            self._begin()
        moment = self._next()
        return moment if moment < FOR_EVER else None

    def _begin(self) -> None:
        at = self.load.at
        coming = [job for job in range(len(at)) if self.state[job] == PlayedState.COMING]
        if any(at[one] > at[other] for one, other in pairwise(coming)):
            coming.sort(key=at.__getitem__)
        self._coming = iter(array("l", coming))
        self._next_job = next(self._coming, -1)

    def _next(self) -> Moment:
        """The next moment of the loop; `FOR_EVER`: nothing can happen any more."""
        ends, due = self._attempts.ends, self._play.due
        moment = FOR_EVER if self._next_job < 0 else self.load.at[self._next_job]
        if ends and ends[0][0] < moment:
            moment = ends[0][0]
        if due and due[0][0] < moment:
            moment = due[0][0]
        return moment

    def _arrive(self) -> None:
        at, now, coming = self.load.at, self._play.now, self._coming
        assert coming is not None
        while (job := self._next_job) >= 0 and at[job] <= now:
            self._next_job = next(coming, -1)
            self._queues.submit(job)

    def _pass_moments(self, before: int = _EVERY_KIND) -> None:
        now, due = self._play.now, self._play.due
        while due and due[0][0] <= now and due[0][1] < before:
            _, what, number = heappop(due)
            self._due_actions[what](number)

    def _call(self, number: int) -> None:
        self._play.calls.pop(number)()

    def _pass_deadline(self, job: int) -> None:
        if self.state[job] == PlayedState.QUEUED:
            self._queues.leave(job, PlayedState.FAILED)

    def _ask(self, host: int) -> None:
        self._play.ask[host] = None
