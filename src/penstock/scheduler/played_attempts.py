"""
The attempts of a play: when and how each one ends, and what its end changes.

When a worker takes a job, the end of the attempt is fixed: it completes or fails as the load says, or a limit
stops it. A cancel, a preemption or a spent budget may end it sooner. The end rules of the scheduler then
decide whether the job is settled or returns to its queue.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from itertools import count
from typing import Final

from msgspec.structs import replace

from penstock.core.jobs.changes import PREEMPTED
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.round import stop_moment
from penstock.core.jobs.states import NONE_YET, DispatchPhase, JobState, resolve_end
from penstock.core.jobs.types import AddonId, EndReason, Moment, Money, Span
from penstock.scheduler.arrivals import PlayedAttempt
from penstock.scheduler.dispatcher import FOR_EVER
from penstock.scheduler.played_hosts import HostInPlay, RunInPlay, WorkerInPlay
from penstock.scheduler.played_state import (
    NOT_STARTED,
    MomentKind,
    Play,
    PlayedAccounts,
    PlayedState,
    count_in,
)
from penstock.scheduler.played_waiting import PlayedQueues

_SETTLED: Final = {
    JobState.DONE: PlayedState.DONE,
    JobState.FAILED: PlayedState.FAILED,
    JobState.CANCELED: PlayedState.CANCELED,
    JobState.BLOCKED: PlayedState.BLOCKED,
}


#: Looked up once: in Python 3.11 the lookup of an enum's member takes longer than its use.
_RESERVED, _LEASED, _ENDED = DispatchPhase.RESERVED, DispatchPhase.LEASED, DispatchPhase.ENDED
_RUNNING, _DONE, _COMPLETED = PlayedState.RUNNING, PlayedState.DONE, EndReason.COMPLETED


class PlayedAttempts:
    """
    Starts and ends attempts. `ends` is a heap of future ends; `used`, `preemptions` and `retries` are figures
    of the player.
    """

    def __init__(self, play: Play, queues: PlayedQueues, accounts: PlayedAccounts) -> None:
        self._play, self._queues, self._accounts = play, queues, accounts
        #: An entry counts only if the dispatch still has that end.
        self.ends: list[tuple[Moment, int, int, RunInPlay]] = []
        self._end_numbers = count()
        self.preemptions = self.retries = 0
        #: By addon, the units in use times microseconds.
        self.used: Counter[AddonId] = Counter()
        #: By priority, the number of running jobs; only priorities that occur.
        self.priorities: dict[int, int] = {}
        self._remaining: dict[int, Span] = {}  # what an interrupted job still has to do
        self._active: dict[int, Span] = {}
        self._job_spent: dict[int, Money] = {}
        self._tries: Counter[int] = Counter()
        self._caps = play.limits.caps if play.limits.caps.by_name else None
        for host in play.hosts:
            for worker in host.workers:
                self.show_room(host, worker, claimed=True)

    # the start

    def lease(self, run: RunInPlay, worker: WorkerInPlay | None, started_at: Moment) -> None:
        """Start the attempt, and fix when and how it ends."""
        play = self._play
        job, load = run.job, play.load
        run.phase, run.worker, run.started_at = _LEASED, worker, started_at
        play.count_change(run.host)
        if worker is not None:
            worker.take(run.queue)
        if play.started_at[job] == NOT_STARTED:
            play.started_at[job] = started_at
        play.state[job], play.host[job] = _RUNNING, run.host.number
        count_in(self.priorities, run.priority, 1)
        run.over_at, run.reason = started_at + load.runs_for[job], _COMPLETED
        intent = load.intents[load.intent[job]]
        if job in load.extras or job in self._remaining:
            self._plan_attempt(run, intent)
        if intent.max_runtime_sec is not None or intent.max_active_sec is not None:
            active = self._active.get(job, 0)
            stop_at, reason = stop_moment(intent.max_runtime_sec, intent.max_active_sec, active, started_at)
            if stop_at is not None and reason is not None and stop_at < run.over_at:
                run.over_at, run.reason = stop_at, reason
        if job in play.waiting.counters:
            play.waiting.counters[job] = replace(play.waiting.counters[job], start=0)

    def _plan_attempt(self, run: RunInPlay, intent: Intent) -> None:
        play = self._play
        extras = play.load.extras_of(run.job)
        attempts = extras.attempts or (PlayedAttempt(play.load.runs_for[run.job]),)
        attempt = attempts[min(self._tries[run.job], len(attempts) - 1)]
        span, run.reason = self._remaining.get(run.job, attempt.runs_for), attempt.end
        if intent.cost_limit is not None and extras.spends:
            remaining = max(0, intent.cost_limit - self._job_spent.get(run.job, 0))
            if extras.spends >= remaining:
                span, run.reason = span * remaining // extras.spends, EndReason.COST_LIMIT_REACHED
        run.over_at = run.started_at + span

    def push_end(self, run: RunInPlay) -> None:
        heappush(self.ends, (run.over_at, next(self._end_numbers), run.fence, run))

    def show_room(self, host: HostInPlay, worker: WorkerInPlay, *, claimed: bool = False) -> None:
        """Let rounds of this host see the free places of a worker; after a claim it counts as present."""
        play = self._play
        if host.alone:
            return
        host.present.has_room(worker.name, *worker.claims, FOR_EVER)
        if claimed:
            until = FOR_EVER if worker.claims_when_full else play.now + play.rules.fetch_for
            host.present.came(worker.kinds, until)
            if not worker.free and not worker.claims_when_full and host.reserves:
                play.plan(until, MomentKind.ASK, host.number)

    # the end

    def end_due(self) -> None:
        ends, now = self.ends, self._play.now
        while ends and ends[0][0] <= now:
            over_at, _, _, run = heappop(ends)
            if run.over_at == over_at and run.phase is not _ENDED:
                self.finish(run, run.reason)

    def run_of(self, job: int) -> RunInPlay:
        play = self._play
        return play.hosts[play.host[job]].runs[job]

    def finish(self, run: RunInPlay, reason: EndReason) -> None:
        """End a dispatch; the end rules decide where its job goes."""
        play = self._play
        job, queue, host, phase = run.job, run.queue, run.host, run.phase
        run.phase = _ENDED
        del host.runs[job]
        ledger, now = host.ledger, play.now
        ledger.units -= queue.cost
        ledger.running -= 1
        freed_cap = False
        for key in queue.keys:
            counted = ledger.counts[key]
            ledger.counts[key] = counted - 1
            if self._caps is not None and counted == self._caps.limit(*key):
                freed_cap = True
        ledger.accounts[queue.admission_class.addon_id].hold(-queue.cost, now, play.sharing)
        host.kept = None
        play.count_change(host)
        play.free.changed(host)
        play.ask[host.number] = None
        if freed_cap and len(play.hosts) > 1:
            play.ask_all()
        if phase is _RESERVED:
            host.reserved.pop(job, None)
        else:
            count_in(self.priorities, run.priority, -1)
            self.used[queue.admission_class.addon_id] += queue.cost * (now - run.started_at)
            if run.worker is not None:
                run.worker.report(run.queue, now)
                self.show_room(host, run.worker)
        if reason is _COMPLETED and job not in play.load.extras:
            self._queues.settle(job, _DONE)
        else:
            self._resolve(run, phase, reason)

    def _resolve(self, run: RunInPlay, phase: DispatchPhase, reason: EndReason) -> None:
        play = self._play
        job = run.job
        intent = play.load.intents[play.load.intent[job]]
        if phase is not DispatchPhase.RESERVED:
            self._count_work(run, reason)
        end = resolve_end(
            reason,
            phase,
            counters=play.waiting.counters.get(job, NONE_YET),
            schedules=play.rules.schedules,
            own_delays_sec=intent.retry_delays_sec,
        )
        if end.target is not JobState.QUEUED:
            self._queues.settle(job, _SETTLED[end.target])
            return
        play.waiting.counters[job], play.waiting.fences[job] = end.counters, run.fence
        # The age is that of `changes.end`.
        ready_at = play.now + end.delay if end.delay or reason in PREEMPTED else run.ready_at
        self._queues.put_back(job, ready_at)

    def _count_work(self, run: RunInPlay, reason: EndReason) -> None:
        """Count what an ended attempt has spent, its active time, and the work that remains."""
        play = self._play
        job, ran = run.job, play.now - run.started_at
        extras = play.load.extras_of(job)
        self._active[job] = self._active.get(job, 0) + ran
        attempts = extras.attempts or (PlayedAttempt(play.load.runs_for[job]),)
        whole = self._remaining.get(job, attempts[min(self._tries[job], len(attempts) - 1)].runs_for)
        if extras.spends:
            spent = extras.spends * min(ran, whole) // max(whole, 1)
            self._job_spent[job] = self._job_spent.get(job, 0) + spent
            self._spend(run.queue.admission_class.addon_id, spent)
        self._remaining.pop(job, None)
        if reason in PREEMPTED:
            self.preemptions += 1
            if extras.resumes:
                self._remaining[job] = max(0, whole - ran)
        elif reason is not EndReason.COMPLETED:
            self.retries += 1
            self._tries[job] += 1

    def _spend(self, addon_id: AddonId, amount: Money) -> None:
        """
        Count spending. If it reaches a budget, end all attempts of the addon; it may go on in the next
        window.
        """
        play = self._play
        reached = self._accounts.spend(addon_id, amount, play.now)
        if reached:
            play.conditions_changed(play.hosts)
        for window in reached:
            play.at(window.ends_at, self._new_window)
        for run in [run for host in play.hosts if reached for run in host.runs.values()]:
            mine = run.queue.admission_class.addon_id == addon_id
            if mine and run.phase is DispatchPhase.LEASED and run.job in run.host.runs:
                self.finish(run, EndReason.COST_LIMIT_REACHED)

    def _new_window(self) -> None:
        """A new day or month begins for a budget that was spent."""
        self._accounts.count_spending(self._play.now)
        self._play.conditions_changed(self._play.hosts)
