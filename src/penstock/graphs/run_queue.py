"""
A run's share of one lane, and the loop that everything else exists for.

`_work` is written for speed and is the one place where the same thing is said twice: it contains `Plan.arrive`, unrolled,
because a function call a node would cost more than all the counting. What it does for a plain node: write down where
we are, look whether the run is over, call, count, go on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.core.calls.graph_plan import BOUND
from penstock.graphs.run_context import RunContext
from penstock.pools.timers import clock

if TYPE_CHECKING:
    from penstock.graphs.lanes import LaneQueue, LaneWorker
    from penstock.graphs.node_calls import NodeAttempt
    from penstock.graphs.run import Run

__all__ = ["RunQueue"]

#: How long a worker stays with one run while others wait: that many nodes, or that many seconds.
TURN_NODES: Final = 64
TURN_SECONDS: Final = 0.001


class RunQueue:
    """
    The nodes of one run that are ready in one lane, and the entries with which it may stand in the lane's queue.

    No wake-up is lost: who pushes adds the node first and then looks for a spare entry; who retires an entry makes it
    spare first and then looks for nodes. One of the two sees the other.
    """

    __slots__ = ("lane", "queue", "ready", "run", "spare")

    def __init__(self, run: Run, lane: LaneQueue, queue: int) -> None:
        self.run = run
        self.lane = lane
        self.queue = queue
        self.ready: deque[int] = deque()
        self.spare = [None] * lane.entries

    def offer(self, nodes: int) -> None:
        """That many more are ready: stand in the queue for them, as far as there are entries."""
        spare = self.spare
        while nodes > 0 and spare:
            try:
                spare.pop()
            except IndexError:
                return
            self.lane.push(self)
            nodes -= 1

    def has_more(self) -> bool:
        if self.ready:
            return True
        self.spare.append(None)
        if not self.ready:
            return False
        try:
            self.spare.pop()
        except IndexError:
            return False  # somebody pushed, saw the spare entry, and stands in the queue with it
        return True

    def next_call(self) -> NodeAttempt | None:
        try:
            node = self.ready.popleft()
        except IndexError:
            return None
        attempts = self.run.attempts
        return None if attempts is None else attempts.begin(node)

    def node_in(self, worker: LaneWorker) -> str | None:
        node = self.run.at.get(worker.number)
        return None if node is None else self.run.plan.names[node]

    def context_in(self, worker: LaneWorker) -> RunContext:
        return RunContext(self.run, worker.number)

    def broken(self, worker: LaneWorker, error: BaseException) -> None:
        node = self.run.at.pop(worker.number, 0)
        self.run.failed(node, error, alone=False)

    def turn(self, worker: LaneWorker) -> None:
        run = self.run
        if self.ready:  # else others have done it all, and this entry only has to retire
            run.context.copy().run(self._work, worker)
            run.at.pop(worker.number, None)
        if run.cause is not None:
            self.ready.clear()
            run.wind_down()
        if self.has_more():
            worker.lane.items.append(self)

    def _work(self, worker: LaneWorker) -> None:  # noqa: C901, PLR0912, PLR0915  # a call a node would cost more than the node
        run, me = self.run, worker.number
        ready, others, here = self.ready, worker.lane.items, self.queue
        at, values, pending, steps = run.at, run.values, run.pending, run.steps
        queues, deadline, spare = run.plan.queues, run.deadline, self.spare
        counting, take_counting, arrivals = run.counting, run.counting.pop, run.arrivals
        until = clock() + TURN_SECONDS
        node = -1
        while True:
            for _ in range(TURN_NODES):
                if node < 0:
                    if not ready:
                        return
                    try:
                        node = ready.popleft()
                    except IndexError:
                        return
                at[me] = node
                if run.cause is not None:
                    return
                if deadline is not None and clock() >= deadline:
                    del at[me]  # it was never called, and shall not count as if
                    run.expire()
                    return
                inputs, fn, a, b, c, following, pushes, shared = steps[node]
                try:
                    if inputs == 1:
                        values[node] = fn(values[a])
                    elif inputs == 2:
                        values[node] = fn(values[a], values[b])
                    elif inputs == 3:
                        values[node] = fn(values[a], values[b], values[c])
                    elif inputs == 0:
                        values[node] = fn()
                    elif inputs == BOUND:
                        values[node] = fn(values)
                    elif not self._attempt(node, worker):
                        node = -1
                        continue
                except BaseException as error:  # noqa: BLE001  # whatever a node raises is its error, and the worker lives on
                    run.failed(node, error)
                    node = -1
                    continue
                if shared:
                    try:
                        take_counting()
                    except IndexError:
                        run.arrived(node)
                        node = -1
                        continue
                    more, elsewhere = 0, None
                    for successor in shared:
                        left = pending[successor] - 1
                        pending[successor] = left
                        if left:
                            continue
                        if queues[successor] != here:
                            elsewhere = [successor] if elsewhere is None else [*elsewhere, successor]
                        elif following < 0:
                            following = successor
                        else:
                            ready.append(successor)
                            more += 1
                    counting.append(None)
                    if more and spare:
                        self.offer(more)
                    if elsewhere is not None:
                        self._pass_on(elsewhere)
                    if arrivals:
                        run.take_arrivals()
                for queue, nodes in pushes:
                    run.push(queue, nodes)
                node = following
                if others and clock() >= until:
                    break
            else:
                if not others:
                    continue
            if node >= 0:
                ready.appendleft(node)
            return

    def _pass_on(self, nodes: list[int]) -> None:
        run = self.run
        for node in nodes:
            if node == run.plan.end:
                run.end()
            else:
                run.push(run.plan.queues[node], (node,))

    def _attempt(self, node: int, worker: LaneWorker) -> bool:
        attempts = self.run.attempts
        attempt = None if attempts is None else attempts.begin(node, worker)
        if attempts is None or attempt is None:
            return False
        try:
            value = attempt.call()
        except BaseException as error:  # noqa: BLE001  # as above
            return attempts.settle(attempt, None, error)
        return attempts.settle(attempt, value, None)
