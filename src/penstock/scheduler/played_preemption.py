"""
Preemption in a play: at which ticks a host looks for a victim, and how the victim yields.

The choice of the victim (`wanted`, `choose`) and the steps of a cycle (`begin`, `advance`) are those of the
scheduler. The scheduler looks with every tick. A play looks only at ticks at which a waiting job has a
priority high enough above that of a running job, and while a cycle goes on.
"""

from __future__ import annotations

from typing import Final

from penstock.core.jobs.admission import admission_class_of
from penstock.core.jobs.job import Dispatch
from penstock.core.jobs.ordering import urgent_from
from penstock.core.jobs.preemption import Act, Candidate, Cycle, advance, begin, choose, still_wanted, wanted
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import DispatchId, EndReason, JobId, Moment
from penstock.scheduler.dispatcher import FOR_EVER
from penstock.scheduler.played_attempts import PlayedAttempts
from penstock.scheduler.played_hosts import HostInPlay, RunInPlay
from penstock.scheduler.played_queues import PlayedQueue
from penstock.scheduler.played_state import MomentKind, Play, PlayedState
from penstock.scheduler.played_waiting import PlayedQueues

#: Looked up once: in Python 3.11 the lookup of an enum's member takes longer than its use.
_LEASED: Final = DispatchPhase.LEASED


class PlayedPreemption:
    """Does in a play what the preempter does in the scheduler (`scheduler/preemption.py`)."""

    def __init__(self, play: Play, queues: PlayedQueues, attempts: PlayedAttempts) -> None:
        self._play, self._queues, self._attempts = play, queues, attempts
        #: The next tick that is planned.
        self._look_at: Moment | None = None
        #: The counts of `_changes` when it last looked.
        self._looked: tuple[int, int] | None = None

    def _changes(self) -> tuple[int, int]:
        return self._play.changes, self._play.waiting.head_changes

    def plan(self) -> None:
        """
        Plan a look at the next tick, if a waiting job could preempt a running one and anything has changed.
        """
        if self._look_at is None and self._may_preempt():
            self._look_by(self._play.next_tick())

    def _may_preempt(self) -> bool:
        threshold = self._play.rules.preemption.threshold
        if threshold is None or (self._looked == self._changes() and not self._queues.quiet_fors):
            return False
        waits, runs = self._queues.priorities, self._attempts.priorities
        return bool(waits) and bool(runs) and max(waits) - min(runs) >= threshold

    def wake(self, _: int) -> None:
        """The moment of a planned look is there: the loop calls `look` at every moment."""

    def look(self) -> None:
        """Look for victims and go on with cycles, if the present moment is a tick or a planned one."""
        now = self._play.now
        if self._look_at is not None and self._look_at <= now:
            self._look_at = None
        elif now % self._play.rules.tick or not self._may_preempt():
            return
        cycles = any(host.cycle is not None for host in self._play.hosts)
        for host in self._play.hosts:
            if host.cycle is not None:
                self._go_on(host, host.cycle)
            elif host.preempts and host.runs:
                self._find_victim(host)
        # A host whose cycle ends now looks for another victim at the next tick.
        self._looked = None if cycles else self._changes()

    def _find_victim(self, host: HostInPlay) -> None:
        play = self._play
        preemption = play.rules.preemption
        threshold = preemption.threshold or 0
        runs = [run for run in host.runs.values() if run.phase is _LEASED]
        most: dict[int, int] = {}  # by priority, the units of the largest dispatch
        for run in runs:
            if run.queue.cost > most.get(run.priority, 0):
                most[run.priority] = run.queue.cost
        lowest = min(most, default=101) + threshold
        free, view = host.units - host.ledger.units, host.view
        room: dict[int, int] = {}  # by the priority of a head, the units with its largest possible victim
        heads = []
        for queue in self._queues.ready.values():
            head = queue.head
            if head is None or head.priority < lowest:
                continue
            if head.priority not in room:
                limit = head.priority - threshold
                room[head.priority] = free + max(
                    units for priority, units in most.items() if priority <= limit
                )
            if queue.cost <= room[head.priority]:
                heads.append((-head.priority, head.turn, head.no, queue))
        heads.sort()
        if not heads:
            return
        runs.sort(key=lambda run: (run.as_seen.started_at, run.job))  # as a store lists them
        view.now, view.ledger = play.now, host.ledger
        inputs = play.round_inputs(host)
        for priority, _, _, queue in heads:
            candidates = [
                self._candidate(run)
                for run in runs
                if run.priority <= -priority - threshold and run.queue.cost + free >= queue.cost
            ]
            view.queues = [queue]
            for want in wanted(inputs):
                victim = choose(want, candidates, preemption)
                if victim is not None:
                    self._begin_cycle(host, int(victim.dispatch_id), queue)
                    return

    def _candidate(self, run: RunInPlay) -> Candidate:
        intent = self._play.load.intents[self._play.load.intent[run.job]]
        return Candidate(run.priority, _dispatch_of(run), intent.preemptible)

    def _begin_cycle(self, host: HostInPlay, job: int, queue: PlayedQueue) -> None:
        play = self._play
        assert queue.head is not None
        run, wanted_by = host.runs[job], queue.head.job_id
        host.cycle = begin(DispatchId(f"{job}.{run.fence}"), wanted_by, play.now, play.rules.preemption)
        self._ask_to_yield(run)
        self._wait_for_cycle(host.cycle)

    def _ask_to_yield(self, run: RunInPlay) -> None:
        play = self._play
        yields_after = play.load.extras_of(run.job).yields_after
        if yields_after is not None and play.now + yields_after < run.over_at:
            run.over_at, run.reason = play.now + yields_after, EndReason.COOPERATIVE_PREEMPTION
            self._attempts.push_end(run)

    def _wait_for_cycle(self, cycle: Cycle) -> None:
        self._look_by(min(self._play.next_tick(), cycle.due))

    def _look_by(self, moment: Moment) -> None:
        if self._look_at is None or moment < self._look_at:
            self._look_at = moment
            self._play.plan(moment, MomentKind.LOOK, 0)

    def _go_on(self, host: HostInPlay, cycle: Cycle) -> None:
        play = self._play
        job, _, fence = cycle.victim.partition(".")
        run = host.runs.get(int(job))
        victim_runs = run is not None and run.fence == int(fence) and run.phase is DispatchPhase.LEASED
        host.cycle, act = advance(
            cycle,
            victim_runs=victim_runs,
            still_wanted=run is not None and self._is_still_wanted(host, cycle, run),
            now=play.now,
            preemption=play.rules.preemption,
        )
        if run is not None and act is Act.ASK:
            self._ask_to_yield(run)
        if run is not None and act is Act.FORCE:
            self._attempts.finish(run, EndReason.PREEMPTION_TIMEOUT)
        if host.cycle is not None:
            self._wait_for_cycle(host.cycle)

    def _is_still_wanted(self, host: HostInPlay, cycle: Cycle, run: RunInPlay) -> bool:
        play, job = self._play, int(cycle.wanted_by)
        if play.state[job] != PlayedState.QUEUED:
            return False
        intent = play.load.intent_of(job)
        urgent_at = urgent_from(intent, play.ordering)
        host.view.now, host.view.ledger = play.now, host.ledger
        return still_wanted(
            play.round_inputs(host),
            admission_class_of(intent),
            run.queue.admission_class,
            [r.queue.admission_class for r in host.runs.values() if r.phase is DispatchPhase.ENDING],
            due=play.now >= cycle.due,
            urgent=urgent_at is not None and urgent_at <= play.now,
            ready_at=self._queues.ready_at.get(job, 0),
        )


def _dispatch_of(run: RunInPlay) -> Dispatch:
    """The dispatch that `choose` gets for a running job."""
    admission_class = run.queue.admission_class
    return Dispatch(
        DispatchId(str(run.job)), JobId(str(run.job)), admission_class.addon_id, run.host.name,
        admission_class, run.fence, run.phase, run.as_seen.started_at, FOR_EVER, run.started_at,
    )  # fmt: skip
