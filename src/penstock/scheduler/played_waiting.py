"""
The waiting jobs of a play: from their submit until they start, or leave the queue without a start.

The submit checks a job as the scheduler does. Then the job waits for its parents and its earliest start,
enters the ready queue of its class, and may become urgent there. Jobs that will never start again are settled
here too, because their children depend on that. `played_queues` has the queues themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from penstock.core.errors import BadIntent
from penstock.core.jobs.admission import admission_class_of
from penstock.core.jobs.dependencies import Fate, IfUnmet, ParentCondition, fate
from penstock.core.jobs.intent import Intent, check
from penstock.core.jobs.load import QuietState
from penstock.core.jobs.ordering import order_key, urgent_from
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import SECOND, AddonId, JobId, Moment, Span
from penstock.scheduler.arrivals import Arrival
from penstock.scheduler.played_hosts import NO_LIMIT, HostInPlay
from penstock.scheduler.played_queues import NOWHERE, PlayedQueue
from penstock.scheduler.played_state import MomentKind, Play, PlayedState, count_in

#: The states in which a parent has ended, as its children see them.
ENDED: Final = {
    PlayedState.DONE: JobState.DONE,
    PlayedState.FAILED: JobState.FAILED,
    PlayedState.CANCELED: JobState.CANCELED,
}


#: Looked up once: in Python 3.11 the lookup of an enum's member takes longer than its use.
_QUEUED: Final = PlayedState.QUEUED


class PlayedQueues:
    """All ready queues of a play, and the jobs on their way into and out of them."""

    def __init__(self, play: Play) -> None:
        self._play = play
        #: All queues by number; those that are not empty; and the lowest cost of a job in one of these.
        self.all: list[PlayedQueue] = []
        self.ready: dict[int, PlayedQueue] = {}
        self.cheapest = NO_LIMIT
        #: By cost, the number of queues that are not empty; only costs that occur.
        self._costs: dict[int, int] = {}
        #: When a job becomes ready, if that is not the moment of its arrival.
        self.ready_at: dict[int, Moment] = {}
        #: By priority, the number of jobs in ready queues; only priorities that occur.
        self.priorities: dict[int, int] = {}
        self._queued: Counter[AddonId] = Counter()
        self._queued_in_all = 0
        depth = play.rules.depth
        #: With fewer queued jobs no limit of the depth is reached.
        self._depth = min(limit for limit in (depth.total, depth.per_addon, NO_LIMIT) if limit is not None)
        self._queue_numbers: dict[tuple[int, int, bool], int] = {}
        self._classes: dict[object, int] = {}
        self._alike: dict[object, int] = {}
        self._valid: dict[int, bool] = {}
        #: The values of `quiet_for_sec` that occur: how long the machine must have been quiet for a job.
        self.quiet_fors: set[Span] = set()
        self._children: dict[int, list[tuple[int, ParentCondition]]] = defaultdict(list)
        self._unmet: Counter[int] = Counter()
        #: By number: groups that have ended, and how; groups of which a member has failed; refused groups.
        self._groups: dict[int, JobState] = {}
        self._failing: set[int] = set()
        self._refused: set[int] = set()
        #: Ended parents whose children must still be resolved. A queue and not recursion: a chain may be
        #: long.
        self._judging: deque[tuple[int, JobState | None]] = deque()
        self._is_judging = False
        #: By job, the function that is called with its state when it will never start again.
        self.followers: dict[int, Callable[[PlayedState], None]] = {}
        self._most_units = max((host.capacity.most for host in play.hosts), default=0)

    # the submit

    def submit(self, job: int) -> None:
        play = self._play
        load = play.load
        number = load.intent[job]
        intent, deadline = load.intents[number], load.deadline_at[job]
        if not self._is_valid(job, number, deadline) or self.is_full(intent.addon_id):
            self.settle(job, PlayedState.REFUSED)
            return
        self._accept(job, intent, deadline)

    def refuse(self, arrival: Arrival) -> None:
        """Add a job that is submitted now and refused."""
        job = self._play.load.append(arrival)
        self._play.grow()
        self.settle(job, PlayedState.REFUSED)

    def make(self, arrival: Arrival) -> int:
        """Add a job that an array or a schedule submits now, and has checked. Returns its number."""
        play = self._play
        job = play.load.append(arrival)
        play.grow()
        self._accept(job, arrival.intent, play.load.deadline_at[job])
        return job

    def _accept(self, job: int, intent: Intent, deadline: Moment) -> None:
        play = self._play
        load = play.load
        play.state[job] = _QUEUED
        self._count_queued(intent.addon_id, 1)
        if deadline:
            play.plan(deadline, MomentKind.DEADLINE, job)
        extras = load.extras.get(job)
        if extras is not None and extras.canceled_at is not None:
            play.plan(max(extras.canceled_at, play.now), MomentKind.CANCEL, job)
        if extras is not None and extras.parents:
            self._await_parents(job, extras.parents)
            return
        self._place(job, max(self.ready_at.get(job, load.at[job]), load.earliest_start_at[job]))

    def _is_valid(self, job: int, number: int, deadline: Moment) -> bool:
        """
        Whether the submit accepts the job. Except for the deadline, that is the same for all jobs of an
        intent.
        """
        play = self._play
        if deadline and deadline <= play.now:
            return False
        valid = self._valid.get(number)
        if valid is None:
            valid = self._valid[number] = self.is_valid(play.load.intent_of(job))
        return valid

    def is_valid(self, intent: Intent) -> bool:
        try:
            check(intent, self._play.now, most_units=self._most_units)
        except BadIntent:
            return False
        return True

    def is_full(self, addon_id: AddonId) -> bool:
        def queued(addon_id: AddonId | None) -> int:
            return self._queued_in_all if addon_id is None else self._queued[addon_id]

        return self._queued_in_all >= self._depth and (
            self._play.rules.depth.reached([addon_id], queued) is not None
        )

    # parents

    def _await_parents(self, job: int, parents: Sequence[tuple[int, ParentCondition]]) -> None:
        """Let a job wait for its parents. Those that have ended already are resolved at once."""
        self._unmet[job] = len(parents)
        for parent, condition in parents:
            self._children[parent].append((job, condition))
        for parent, _ in parents:
            if self._is_refused(parent):
                self._judging.append((parent, None))
            elif (state := self._end_of(parent)) is not None:
                self._judging.append((parent, state))
            elif parent in self._failing:
                self.group_fails(parent)
        self._judge()

    def _end_of(self, parent: int) -> JobState | None:
        if parent < 0:
            return self._groups.get(parent)
        return ENDED.get(PlayedState(self._play.state[parent]))

    def _is_refused(self, parent: int) -> bool:
        return parent in self._refused or (parent >= 0 and self._play.state[parent] == PlayedState.REFUSED)

    def end_group(self, group: int, state: JobState) -> None:
        """End a parent that is no job of the load: an array, a batch, or a job that only the play has."""
        self._groups[group] = state
        self._judging.append((group, state))
        self._judge()

    def refuse_group(self, group: int) -> None:
        """Refuse the children of a group that was not accepted."""
        self._refused.add(group)
        self._judging.append((group, None))
        self._judge()

    def reopen_group(self, group: int) -> None:
        """Reopen an array whose failed indices run again: jobs that are submitted from now on wait for it."""
        self._groups.pop(group, None)
        self._failing.discard(group)

    def group_fails(self, group: int) -> None:
        """
        Note the first failed member: it is enough for children that wait for a failure with `if_unmet` `any`.
        """
        self._failing.add(group)
        children = self._children.pop(group, [])
        intents, number = self._play.load.intents, self._play.load.intent
        for child, condition in children:
            early = condition is ParentCondition.FAILED and intents[number[child]].if_unmet is IfUnmet.ANY
            if early:
                self._judge_child(group, JobState.FAILED, child, condition)
            else:
                self._children[group].append((child, condition))

    def _judge(self) -> None:
        """Resolve the children of every ended parent. Their ends add more parents to `_judging`."""
        judging = self._judging
        if self._is_judging:
            return
        self._is_judging = True
        while judging:
            parent, state = judging.popleft()
            for child, condition in self._children.pop(parent, ()):
                self._judge_child(parent, state, child, condition)
        self._is_judging = False

    def _judge_child(
        self, parent: int, state: JobState | None, child: int, condition: ParentCondition
    ) -> None:
        """Resolve one dependency of a child. `state`: how the parent ended; None: it was refused."""
        play = self._play
        if play.state[child] != PlayedState.QUEUED or not self._unmet[child]:  # one of `any` was enough
            return
        if state is None:
            self.leave(child, PlayedState.REFUSED)
            return
        intent = play.load.intents[play.load.intent[child]]
        match fate(condition, state, intent.if_unmet):
            case Fate.MEET:
                self._unmet[child] = 0 if intent.if_unmet is IfUnmet.ANY else self._unmet[child] - 1
                if not self._unmet[child] and play.waiting.queue[child] == NOWHERE:
                    self.ready_at[child] = max(play.now, play.load.earliest_start_at[child])
                    self._place(child, self.ready_at[child])
            case Fate.WAIT:
                self._children[parent].append((child, condition))
            case Fate.DROP if self._unmet[child] > 1:
                self._unmet[child] -= 1
            case Fate.CANCEL | Fate.DROP:
                self.leave(child, PlayedState.CANCELED)
            case Fate.FAIL:
                self.leave(child, PlayedState.FAILED)

    # the queues

    def _place(self, job: int, ready_at: Moment) -> None:
        """Put a queued job into its ready queue, or plan the moment at which it becomes ready."""
        play = self._play
        if ready_at > play.now:
            self.ready_at[job] = ready_at
            play.plan(ready_at, MomentKind.READY, job)
            return
        urgent_at = None
        if play.load.deadline_at[job]:
            urgent_at = urgent_from(play.load.intent_of(job), play.ordering)
        urgent = urgent_at is not None and urgent_at <= play.now
        if urgent_at is not None and not urgent:
            play.plan(urgent_at, MomentKind.URGENT, job)
        self._enter(job, self.queue_of(job, urgent=urgent), ready_at)

    def _enter(self, job: int, queue: PlayedQueue, ready_at: Moment) -> None:
        play = self._play
        priority = play.load.intents[play.load.intent[job]].priority
        count_in(self.priorities, priority, 1)
        play.entries += 1
        if self.put(queue, order_key(priority, ready_at, play.aging), job):
            play.heads[queue.number] = None

    def put(self, queue: PlayedQueue, turn: Moment, job: int) -> bool:
        """Put a job into a queue. Returns whether it is the head now."""
        if queue.head is None:
            self.ready[queue.number] = queue
            count_in(self._costs, queue.cost, 1)
            self.cheapest = min(self.cheapest, queue.cost)
        return queue.put(turn, job)

    def drop_empty(self, queue: PlayedQueue) -> None:
        """Remove a queue from the ready ones if it is empty."""
        if queue.head is None and self.ready.pop(queue.number, None) is not None:
            count_in(self._costs, queue.cost, -1)
            self.cheapest = min(self._costs) if self._costs else NO_LIMIT

    def put_back(self, job: int, ready_at: Moment) -> None:
        """Let a job wait again after an attempt, unless its deadline has passed: then it fails."""
        play = self._play
        deadline = play.load.deadline_at[job]
        if deadline and deadline <= play.now:
            self.settle(job, PlayedState.FAILED)
            return
        play.state[job] = PlayedState.QUEUED
        self._count_queued(play.load.intents[play.load.intent[job]].addon_id, 1)
        self.ready_at[job] = ready_at
        self._place(job, ready_at)

    def queue_of(self, job: int, *, urgent: bool) -> PlayedQueue:
        """The queue of a job's class, found by its intent and the whole seconds of its expected duration."""
        play = self._play
        load = play.load
        expected = load.expected_sec[job]
        key = (load.intent[job], -1 if expected != expected else int(-(-expected // 1)), urgent)  # noqa: PLR0124 - NaN
        number = self._queue_numbers.get(key)
        if number is None:
            admission_class = admission_class_of(load.intent_of(job))
            same = (admission_class, urgent)
            number = self._classes.get(same)
            if number is None:
                number = self._classes[same] = len(self.all)
                kind = (replace(admission_class, cost_units=1, duration_class=0), urgent)
                alike = self._alike.setdefault(kind, len(self._alike))
                queue = PlayedQueue(number, admission_class, play.waiting, urgent=urgent, alike=alike)
                self.all.append(queue)
                if admission_class.quiet_for_sec:
                    self.quiet_fors.add(admission_class.quiet_for_sec * SECOND)
                    self.await_quiet(play.hosts)
            self._queue_numbers[key] = number
        return self.all[number]

    def await_quiet(self, hosts: Iterable[HostInPlay]) -> None:
        """
        Plan rounds of these hosts for the moments at which they have been quiet for long enough for some job.
        """
        play = self._play
        for host in hosts:
            if host.quiet is not None and host.quiet.state is QuietState.QUIET:
                for span in self.quiet_fors:
                    if host.quiet.since + span > play.now:
                        play.plan(host.quiet.since + span, MomentKind.ASK, host.number)

    def become_ready(self, job: int) -> None:
        """Put a job into its ready queue, unless it has left or a later moment was set."""
        play = self._play
        if play.state[job] == PlayedState.QUEUED and play.waiting.queue[job] == NOWHERE:
            ready_at = self.ready_at.get(job)
            if ready_at is not None and ready_at <= play.now:
                self._place(job, ready_at)

    def become_urgent(self, job: int) -> None:
        """Move a job to the urgent queue of its class, if it is still in a queue. It keeps its order key."""
        play = self._play
        if play.waiting.queue[job] == NOWHERE:
            return
        queue = self.all[play.waiting.queue[job]]
        urgent = self.queue_of(job, urgent=True)
        if queue is urgent:
            return
        passed_at = play.waiting.passed_at.get(job)
        if queue.remove(job):
            play.heads[queue.number] = None
        self._out(queue, job, play.load.intents[play.load.intent[job]].priority)
        if passed_at is not None:
            play.waiting.passed_at[job] = passed_at
        load = play.load
        self._enter(job, urgent, max(self.ready_at.get(job, load.at[job]), load.earliest_start_at[job]))

    # the ways out

    def start(self, queue: PlayedQueue, job: int, priority: int) -> None:
        """Note that a round has taken this job out of its queue."""
        self._out(queue, job, priority)
        self._count_queued(queue.admission_class.addon_id, -1)

    def _count_queued(self, addon_id: AddonId, more: int) -> None:
        self._queued[addon_id] += more
        self._queued_in_all += more

    def _out(self, queue: PlayedQueue, job: int, priority: int) -> None:
        """Note that a job has left its queue; hosts that kept units for it run a round."""
        play = self._play
        count_in(self.priorities, priority, -1)
        play.waiting.passed_at.pop(job, None)
        self.drop_empty(queue)
        if play.keeping and (hosts := play.keeping.pop(JobId(str(job)), None)):
            for number in hosts:
                play.hosts[number].kept = None
                play.ask[number] = None

    def leave(self, job: int, state: PlayedState) -> None:
        """End a queued job without a start."""
        play = self._play
        intent, number = play.load.intents[play.load.intent[job]], play.waiting.queue[job]
        if number != NOWHERE:
            queue = self.all[number]
            if queue.remove(job):
                play.heads[number] = None
            self._out(queue, job, intent.priority)
        self._count_queued(intent.addon_id, -1)
        self.settle(job, state)

    def settle(self, job: int, state: PlayedState) -> None:
        """Settle a job, which will never start again."""
        play = self._play
        play.state[job] = state
        play.ended_at[job] = play.now
        play.settled += 1
        self.ready_at.pop(job, None)
        if job in self._children and (state in ENDED or state == PlayedState.REFUSED):
            self._judging.append((job, ENDED.get(state)))
            self._judge()
        if self.followers and (follower := self.followers.pop(job, None)) is not None:
            follower(state)
