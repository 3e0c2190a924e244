"""
The ready queues of a player, and the view of them that a round gets.

A queue has a heap of pairs (order key, job number) and one `QueuedJob`: its head. A round takes the jobs of a
queue in order, and takes the next one only after the last one has started. So the job taken last is the head
after the round. A job that leaves the queue in another way (canceled, past its deadline, now urgent) stays in
the heap, and is skipped when it comes to the top.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain
from math import isnan

from penstock.core.jobs.admission import AdmissionClass, Ledger, keys_of
from penstock.core.jobs.ordering import QueuedJob
from penstock.core.jobs.round import ReadyQueue, RunningJob
from penstock.core.jobs.states import Counters
from penstock.core.jobs.types import JobId, Moment
from penstock.scheduler.arrivals import Load

NOWHERE = -1


class WaitingJobs:
    """The waiting jobs, by number: the queue of each, and what else rounds need."""

    def __init__(self, load: Load) -> None:
        self.load = load
        #: The number of the queue that has the job; `NOWHERE` for a job that is not ready or does not wait.
        self.queue = array("l")
        #: Counts the changes of heads.
        self.head_changes = 0
        #: Fields that few jobs have: when they were first passed over, their fence, their counts of failures.
        self.passed_at: dict[int, Moment] = {}
        self.fences: dict[int, int] = {}
        self.counters: dict[int, Counters] = {}

    def grow(self) -> None:
        missing = len(self.load) - len(self.queue)
        if missing > 0:
            self.queue.extend([NOWHERE] * missing)

    def head(self, turn: Moment, job: int) -> QueuedJob:
        load = self.load
        expected = load.expected_sec[job]
        return QueuedJob(
            job,
            JobId(str(job)),
            load.intents[load.intent[job]].priority,
            turn,
            self.fences.get(job, 0),
            None if isnan(expected) else expected,
            self.passed_at.get(job),
        )


class PlayedQueue:
    """
    The ready jobs of one admission class, urgent or not. As an iterator it drops its head and gives the next
    one.
    """

    __slots__ = (
        "_heap", "_waiting", "admission_class", "alike", "cost", "head", "keys", "number", "urgent",
    )  # fmt: skip

    def __init__(
        self, number: int, admission_class: AdmissionClass, waiting: WaitingJobs, *, urgent: bool, alike: int
    ) -> None:
        self.number, self.admission_class, self.urgent = number, admission_class, urgent
        self.cost, self.keys = admission_class.cost_units, keys_of(admission_class)
        #: Queues with the same number get the same answer from every gate except those for units and kept
        #: units.
        self.alike = alike
        self.head: QueuedJob | None = None
        self._heap: list[tuple[Moment, int]] = []
        self._waiting = waiting

    def put(self, turn: Moment, job: int) -> bool:
        """Add a job. Returns whether it is the head now."""
        head = self.head
        self._waiting.queue[job] = self.number
        if head is not None and (turn, job) > (head.turn, head.no):
            heappush(self._heap, (turn, job))
            return False
        if head is not None:
            heappush(self._heap, (head.turn, head.no))
        self._waiting.head_changes += 1
        self.head = self._waiting.head(turn, job)
        return True

    def drop_head(self) -> None:
        heap, queue = self._heap, self._waiting.queue
        self._waiting.head_changes += 1
        while heap:
            turn, job = heappop(heap)
            if queue[job] == self.number:
                self.head = self._waiting.head(turn, job)
                return
        self.head = None

    def remove(self, job: int) -> bool:
        """Remove a job. Returns whether it was the head."""
        self._waiting.queue[job] = NOWHERE
        if self.head is None or self.head.no != job:
            return False
        self.drop_head()
        return True

    def mark_passed(self, job: int, now: Moment) -> None:
        self._waiting.passed_at[job] = now
        if self.head is not None and self.head.no == job:
            self._waiting.head_changes += 1
            self.head = self._waiting.head(self.head.turn, job)

    def __iter__(self) -> Iterator[QueuedJob]:
        return self

    def __next__(self) -> QueuedJob:
        if self.head is not None:
            self.drop_head()
        if self.head is None:
            raise StopIteration
        return self.head


class PlayedView:
    """
    The admission view of a host in a play. `queues`: those that the next round looks at. `keeps_gates`:
    whether gates hold from one round to the next, until conditions change.
    """

    def __init__(
        self,
        ledger: Ledger,
        waiting: WaitingJobs,
        running: Callable[[], Sequence[RunningJob]],
        *,
        keeps_gates: bool,
    ) -> None:
        self.now: Moment = 0
        self.ledger, self.running = ledger, running
        self.queues: Sequence[PlayedQueue] = ()
        self._keeps_gates = keeps_gates
        #: By the number of a queue, what rounds see of it, with its gates.
        self._ready: dict[int, ReadyQueue] = {}
        self._waiting = waiting

    def forget_gates(self) -> None:
        self._ready.clear()

    def ready_queues(self) -> list[ReadyQueue]:
        shown = []
        for queue in self.queues:
            if queue.head is None:
                continue
            jobs = chain((queue.head,), queue)
            ready = self._ready.get(queue.number)
            if ready is None:
                ready = ReadyQueue(queue.admission_class, queue.urgent, jobs)
                # How long the machine has been quiet changes from round to round.
                if self._keeps_gates and not queue.admission_class.quiet_for_sec:
                    self._ready[queue.number] = ready
            ready.jobs = jobs
            shown.append(ready)
        return shown

    def start_timeouts(self, waiting: QueuedJob) -> int:
        counters = self._waiting.counters.get(waiting.no)
        return 0 if counters is None else counters.start
