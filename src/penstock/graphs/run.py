"""
One run of a plan: its values, its counts, the ready nodes of each lane, and its end.

One thread at a time counts. The right to count is one token in a list, `count_token`: `pop` takes it and
`append` returns it, both atomic, at a third of the cost of a lock. No thread waits for the token: a worker
that does not get it puts its finished node into `arrivals`, and the holder reads `arrivals` after returning
the token. So a thread that loses the interpreter while it counts blocks no other thread. `lock` guards the
other state of the run: attempts in flight, the first cause, the end. It is taken for everything but the
success of a plain node.

`node_by_worker` has the node of each worker. A worker writes it *before* it reads `cause`; the thread that
ends the run sets `cause` before it reads `node_by_worker`. So a node that is not in it then will never be
called.

`RunQueue._run_nodes` is the hot loop of graphs. It repeats the code of `Plan.count_done`, because a function call
per node would cost more than the counting. For a plain node it does this: record the node of the worker,
check whether the run is over, call the function, count, continue.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextvars import copy_context
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.core.calls.graph_plan import BOUND, Plan, RunStatus, Step
from penstock.core.errors import CallEnded
from penstock.core.text import add_note, is_kind
from penstock.graphs.node_attempts import NodeAttempts
from penstock.graphs.result import RunResult
from penstock.graphs.trace import Trace, TraceRecorder
from penstock.pools.future import AwaitableFuture
from penstock.pools.timers import Timer, call_at, clock

if TYPE_CHECKING:
    from penstock.graphs.executor import GraphExecutor
    from penstock.graphs.lanes import AnyLane, LaneWorker
    from penstock.graphs.node_attempts import NodeAttempt

#: The length of a turn: the most nodes, and the most seconds, for which a worker stays with one run while
#: others wait.
TURN_NODES: Final = 64
TURN_SECONDS: Final = 0.001


class RunQueue:
    """
    The ready nodes of one run in one lane, and the entries that the run may have in the lane's queue.

    No wake-up is lost: a thread that pushes adds the node first and then searches a free entry; a thread that
    retires an entry frees it first and then searches for nodes. So one of the two sees the other.
    """

    __slots__ = ("free_entries", "lane", "queue", "ready", "run")

    def __init__(self, run: Run, lane: AnyLane, queue: int) -> None:
        self.run = run
        self.lane = lane
        self.queue = queue
        self.ready: deque[int] = deque()
        self.free_entries = [None] * lane.entries

    def enter_lane(self, nodes: int) -> None:
        """Enter the lane's queue for this many more ready nodes, as far as there are free entries."""
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
        return self.run.attempts.begin(self.run, node)

    def end_broken_run(self, worker: LaneWorker, error: BaseException) -> None:
        node = self.run.node_by_worker.pop(worker, 0)
        self.run.failed(node, error, alone=False)

    def turn(self, worker: LaneWorker) -> None:
        run = self.run
        if self.ready:  # otherwise other workers have run them all, and this entry only has to retire
            run.context.copy().run(self._run_nodes, worker)
            run.node_by_worker.pop(worker, None)
        if run.cause is not None:
            self.ready.clear()
            run.end_if_idle()
        if self.has_more():
            worker.lane.items.append(self)

    def _run_nodes(self, worker: LaneWorker) -> None:  # noqa: C901, PLR0912, PLR0915  # a call per node would cost more than the node
        run = self.run
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
                at[worker] = node
                if run.cause is not None:
                    return
                if deadline is not None and clock() >= deadline:
                    del at[worker]  # the node was not called, so it must not count as begun
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
                        run.count_done(node)
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
                        run.push_ready(elsewhere)
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

    def _attempt(self, node: int, worker: LaneWorker) -> bool:
        attempts = self.run.attempts
        attempt = attempts.begin(self.run, node, worker)
        if attempt is None:
            return False
        try:
            value = attempt.call()
        except BaseException as error:  # noqa: BLE001  # as above
            return attempts.settle(attempt, None, error)
        return attempts.settle(attempt, value, None)


_ids: Final = count(1)
#: Shared by all runs without attempts, whose nodes are plain calls in threads.
_NO_ATTEMPTS: Final = NodeAttempts(threading.Lock())
_STOP_ERRORS: Final = (CancelledError, asyncio.CancelledError, CallEnded)


class Run(AwaitableFuture[RunResult]):
    """
    A run of a plan: the Future of its RunResult, which `submit` returns. It can be canceled and awaited.
    """

    # Slots, because with those of a Future there are more than thirty attributes: without slots the
    # interpreter would not share the keys of instances, and a run of ten nodes took half as long again.
    __slots__ = (
        "_failed_node", "_grace_timer", "_reason", "_run_queues", "_stopped", "arrivals", "attempts",
        "cause", "context", "count_token", "deadline", "deadline_timer", "env", "errors", "executor", "id",
        "lock", "node_by_worker", "over", "pending", "plan", "recorder", "skipped", "started", "steps",
        "values",
    )  # fmt: skip

    def __init__(
        self,
        executor: GraphExecutor,
        plan: Plan,
        env: Mapping[str, Any],
        deadline: float | None,
        recorder: TraceRecorder | None,
    ) -> None:
        self.id = next(_ids)
        self.plan = plan
        self.env = env
        self.deadline = deadline
        self.recorder = recorder
        self.executor = executor
        self.started = clock()
        self.cause: RunStatus | None = None
        self.over = False
        self.values: list[Any] = list(plan.values)
        if plan.env:
            for name, slot in plan.env.items():
                self.values[slot] = env[name]
        self.steps = (
            plan.steps if recorder is None and not plan.tolerant else plan.own_steps(recorder is not None)
        )
        self.pending = list(plan.pending)
        self.count_token = [None]
        # Done nodes that are not counted yet; ~node for a node whose failure skips only its dependents.
        self.arrivals: list[int] = []
        self.node_by_worker: dict[LaneWorker, int] = {}
        self.context = copy_context()
        self.lock = threading.Lock()
        simple = plan.simple and recorder is None
        self.attempts = _NO_ATTEMPTS if simple else NodeAttempts(self.lock)
        self.errors: dict[int, BaseException] = {}
        self.skipped: dict[int, int] = {}
        self._stopped: set[int] = set()  # nodes that stopped when their run had ended
        self._run_queues: dict[int, RunQueue] = {}
        for queue in plan.lanes:
            self._run_queues[queue] = RunQueue(self, executor.lane_queues[queue], queue)
        self._failed_node: int | None = None
        self._reason: str | None = None
        self.deadline_timer: Timer | None = None  # for its deadline
        self._grace_timer: Timer | None = None  # for the nodes in flight beside an error

    # For callers

    def cancel(self, reason: str | None = None) -> bool:
        """
        End the run now: no more nodes start, those in flight are stopped, and waiting callers get a RunResult
        with status `canceled`. False: the run had ended before.
        """
        return self._set_cause(
            RunStatus.CANCELED, None, f"was canceled: {reason}" if reason else "was canceled"
        )

    def start(self) -> None:
        if self.deadline is not None:
            if clock() >= self.deadline:
                self.expire()
                return
            self.deadline_timer = call_at(self.deadline, self.expire)
        try:
            for queue, nodes in self.plan.roots:
                self.push(queue, nodes)
        except BaseException:  # no thread could be started
            self.cancel("it could not be started")
            raise

    def expire(self) -> None:
        self._set_cause(RunStatus.DEADLINE, None, "ran out of time")

    # Nodes that become ready

    def ready(self) -> int:
        return sum(len(run_queue.ready) for run_queue in list(self._run_queues.values()))

    def push(self, queue: int, nodes: tuple[int, ...]) -> None:
        run_queue = self._run_queues.get(queue)
        if run_queue is not None and self.cause is None:  # otherwise the run is over
            run_queue.ready.extend(nodes)
            run_queue.enter_lane(len(nodes))

    def push_ready(self, nodes: list[int]) -> None:
        """Push each node into its lane. If the end of the plan is among them, end the run."""
        for node in nodes:
            if node == self.plan.end:
                self.end()
            else:
                self.push(self.plan.queues[node], (node,))

    def count_done(self, node: int) -> None:
        """Count a node that is done and has its value. May be called from any thread."""
        self.arrivals.append(node)
        self.take_arrivals()

    def take_arrivals(self) -> None:
        """
        Count the nodes in `arrivals`. None is missed: a thread puts its node there before it tries to get the
        token, and the holder reads `arrivals` again after returning the token.
        """
        arrivals, count_token, plan = self.arrivals, self.count_token, self.plan
        while arrivals:
            try:
                count_token.pop()
            except IndexError:
                return
            ready: list[int] = []
            try:
                while arrivals:
                    node = arrivals.pop()
                    if node < 0:
                        node = ~node
                        plan.skip_dependents(cast("list[Step]", self.steps), self.skipped, node)
                    ready += plan.count_done(self.pending, node)
            finally:
                count_token.append(None)
            self.push_ready(ready)

    # Ending

    def failed(self, node: int, error: BaseException, *, alone: bool = True) -> None:
        """Handle a node that failed for good. `alone`: its policy may limit the failure to its dependents."""
        with self.lock:
            if self.over or node in self.errors:
                return
            if self.cause is not None and is_kind(error, _STOP_ERRORS):
                self._stopped.add(node)
                return
            self.errors[node] = error
        add_note(error, f"in node {self.plan.names[node]!r} of graph {self.plan.name!r}")
        if alone and self.plan.rules[node].skip_dependents:
            self.arrivals.append(~node)
            self.take_arrivals()
        else:
            self._set_cause(RunStatus.ERROR, node, f"ended with the error of {self.plan.names[node]!r}")

    def _set_cause(self, status: RunStatus, failed_node: int | None, reason: str) -> bool:
        """
        Record the first cause, which is the status of the run, and end the run. After an error the run waits
        for the nodes in flight during the grace period, so that no node still works when the caller gets the
        error. Cancel and deadline wait for no node.
        """
        with self.lock:
            if self.over:
                return False
            first = self.cause is None
            if first:
                self.cause, self._failed_node, self._reason = status, failed_node, reason
        if status is not RunStatus.ERROR:
            self.end()
        elif first:
            self.attempts.stop_all()
            if not self.end_if_idle():
                self._grace_timer = call_at(clock() + self.executor.grace, self.end)
        return first

    def end_if_idle(self) -> bool:
        """End a run that has a cause, if no node is in flight any more."""
        with self.lock:
            if self.over:
                return True
            inside = any(node not in self.errors for node in list(self.node_by_worker.values()))
            if inside or self.attempts.outside_threads():
                return False
        self.end()
        return True

    def end(self) -> None:
        """End the run: every end comes here. Later results of nodes are dropped."""
        with self.lock:
            if self.over:
                return
            self.over = True
        for timer in (self.deadline_timer, self._grace_timer):
            if timer is not None:
                timer.cancel()
        self.attempts.abandon_all()
        run_queues, self._run_queues = self._run_queues, {}  # break the cycle of the run and its queues
        for run_queue in run_queues.values():
            run_queue.ready.clear()
        inside = list(self.node_by_worker.items()) if self.cause is not None else []
        result = self._make_result(inside)
        try:
            self.executor.on_run_end(self, result)
        finally:  # the caller gets the result, even if counting or telemetry fails
            self.set_outcome(result, None)
        for worker, node in inside:
            if node not in self.errors:  # those have returned, or are watched since they timed out
                self.replace_if_stuck(worker, node)

    def _make_result(self, inside: list[tuple[LaneWorker, int]]) -> RunResult:
        seconds = clock() - self.started
        # Copied, because a node that is left behind may still write its value.
        values = self.values if self.cause is None else self.values.copy()
        result = RunResult(self.plan, self.cause or RunStatus.OK, values, seconds)
        if self.cause is not None or self.errors:
            begun = self._stopped.union(self.attempts.begun, (node for _, node in inside))
            result.set_failures(self.errors, self.skipped, begun.difference(self.skipped))
            result.reason = self._reason
            result.cause = None if self._failed_node is None else self.plan.names[self._failed_node]
        if self.recorder is not None:
            result.trace = Trace(result, self.id, self.started, self.recorder)
            self.recorder.attempts = []  # break the cycle of the run and its attempts
            if self.recorder.spans is not None:
                self.recorder.spans.close(result, clock())
        return result

    def replace_if_stuck(self, worker: LaneWorker, node: int) -> None:
        """
        Replace the worker if its node, whose result is not needed any more, does not return soon.
        """
        call_at(clock() + self.executor.grace, self._replace_if_stuck, worker, node)

    def _replace_if_stuck(self, worker: LaneWorker, node: int) -> None:
        if self.node_by_worker.get(worker) == node:
            worker.lane.replace_worker(worker)
