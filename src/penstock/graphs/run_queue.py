"""
The ready nodes of a run in one lane, and the loop that runs them: the hot loop of graphs.

`_run_nodes` is written for speed, and is the one place that repeats code: it contains `Plan.arrive`,
unrolled, because a function call per node would cost more than all the counting. For a plain node it does
this: write down where the worker is, check whether the run is over, call, count, go on.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.core.calls.graph_plan import BOUND
from penstock.graphs.run_context import RunContext
from penstock.pools.timers import clock

if TYPE_CHECKING:
    from penstock.graphs.lanes import LaneQueue, LaneWorker
    from penstock.graphs.node_attempts import NodeAttempt
    from penstock.graphs.run import Run


#: How long a worker stays with one run while others wait: so many nodes, or so many seconds.
TURN_NODES: Final = 64
TURN_SECONDS: Final = 0.001


class RunQueue:
    """
    The nodes of one run that are ready in one lane, and the entries with which the run may be in the lane's
    queue.

    No wake-up is lost: a thread that pushes adds the node first and then looks for a free entry; a thread
    that retires an entry frees it first and then looks for nodes. One of the two sees the other.
    """

    __slots__ = ("free_entries", "lane", "queue", "ready", "run")

    def __init__(self, run: Run, lane: LaneQueue, queue: int) -> None:
        self.run = run
        self.lane = lane
        self.queue = queue
        self.ready: deque[int] = deque()
        self.free_entries = [None] * lane.entries

    def enter_lane(self, nodes: int) -> None:
        """So many more nodes are ready: enter the lane's queue for them, as far as there are free entries."""
        free_entries = self.free_entries
        while nodes > 0 and free_entries:
            try:
                free_entries.pop()
            except IndexError:
                return
            self.lane.push(self)
            nodes -= 1

    def has_more(self) -> bool:
        if self.ready:
            return True
        self.free_entries.append(None)
        if not self.ready:
            return False
        try:
            self.free_entries.pop()
        except IndexError:
            return False  # another thread pushed, took the free entry, and is in the queue with it
        return True

    def next_call(self) -> NodeAttempt | None:
        try:
            node = self.ready.popleft()
        except IndexError:
            return None
        attempts = self.run.attempts
        return None if attempts is None else attempts.begin(node)

    def node_in(self, worker: LaneWorker) -> str | None:
        node = self.run.node_by_worker.get(worker.number)
        return None if node is None else self.run.plan.names[node]

    def context_in(self, worker: LaneWorker) -> RunContext:
        return RunContext(self.run, worker.number)

    def broken(self, worker: LaneWorker, error: BaseException) -> None:
        node = self.run.node_by_worker.pop(worker.number, 0)
        self.run.failed(node, error, alone=False)

    def turn(self, worker: LaneWorker) -> None:
        run = self.run
        if self.ready:  # otherwise other workers have run them all, and this entry only has to retire
            run.context.copy().run(self._run_nodes, worker)
            run.node_by_worker.pop(worker.number, None)
        if run.cause is not None:
            self.ready.clear()
            run.end_if_idle()
        if self.has_more():
            worker.lane.items.append(self)

    def _run_nodes(self, worker: LaneWorker) -> None:  # noqa: C901, PLR0912, PLR0915  # a call per node would cost more than the node
        run, me = self.run, worker.number
        ready, others, own_queue = self.ready, worker.lane.items, self.queue
        at, values, pending, steps = run.node_by_worker, run.values, run.pending, run.steps
        queues, deadline, free_entries = run.plan.queues, run.deadline, self.free_entries
        count_token, take_token, arrivals = run.count_token, run.count_token.pop, run.arrivals
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
                    del at[me]  # it was never called, and must not count as if
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
                except BaseException as error:  # noqa: BLE001  # any exception is the node's error, and the worker goes on
                    run.failed(node, error)
                    node = -1
                    continue
                if shared:
                    try:
                        take_token()
                    except IndexError:
                        run.arrived(node)
                        node = -1
                        continue
                    more, elsewhere = 0, None
                    for successor in shared:
                        remaining = pending[successor] - 1
                        pending[successor] = remaining
                        if remaining:
                            continue
                        if queues[successor] != own_queue:
                            elsewhere = [successor] if elsewhere is None else [*elsewhere, successor]
                        elif following < 0:
                            following = successor
                        else:
                            ready.append(successor)
                            more += 1
                    count_token.append(None)
                    if more and free_entries:
                        self.enter_lane(more)
                    if elsewhere is not None:
                        self._push_elsewhere(elsewhere)
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

    def _push_elsewhere(self, nodes: list[int]) -> None:
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
