"""
One run of a plan: the values, the counts, and the one way it ends.

The right to count is one token in a list, `count_token`: `pop` takes it and `append` gives it back, both
atomic, for a third of the cost of a lock. No thread waits for it: a worker that finds it gone leaves the node
it has finished in `arrivals`, and the holder looks there after giving it back. So a thread that loses the
interpreter in the middle of counting stops no other, which a lock that is waited for would (each waiter would
take it while without the interpreter, and every node after that would cost a change of threads). `lock` is a
lock, and guards the life of the run: attempts in flight, the first cause, the end. It is taken when something
other than a plain node's success happens.

`node_by_worker` says which node each worker is in. A worker writes it *before* it reads `cause`; the thread
that ends the run sets `cause` before it reads `node_by_worker`. So a node that is not in it by then is
certain never to be called.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextvars import copy_context
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.core.calls.graph_plan import Plan, RunStatus, Step
from penstock.core.errors import CallEnded
from penstock.core.text import add_note, is_kind
from penstock.graphs.node_attempts import NodeAttempts
from penstock.graphs.result import RunResult
from penstock.graphs.run_queue import RunQueue
from penstock.graphs.trace import Trace, TraceRecorder
from penstock.pools.future import LazyFuture
from penstock.pools.timers import Timer, call_at, clock

if TYPE_CHECKING:
    from penstock.graphs.executor import GraphExecutor


_ids: Final = count(1)
_STOP_ERRORS: Final = (CancelledError, asyncio.CancelledError, CallEnded)


class Run(LazyFuture[RunResult]):
    """What `submit` returns: a Future of the RunResult. It can be canceled at any time, and awaited."""

    # Slots, because there are more than thirty attributes with those of a Future: then the interpreter no
    # longer shares the keys of instances, and a run of ten nodes took half as long again.
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
        self.arrivals: list[
            int
        ] = []  # nodes that are done and not yet counted; ~node for one that failed alone
        self.node_by_worker: dict[int, int] = {}
        self.context = copy_context()
        self.lock = threading.Lock()
        self.attempts = None if plan.simple and recorder is None else NodeAttempts(self)
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

    # From outside

    def cancel(self, reason: str | None = None) -> bool:
        """
        End the run now, whatever its nodes are doing: no more of them start, those in flight are stopped, and
        callers that wait get a RunResult of status `canceled`. False if it had ended before, by itself or by
        another cause.
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

    def arrived(self, node: int) -> None:
        """The node is done and its value is in place: count it for its successors. From any thread."""
        self.arrivals.append(node)
        self.take_arrivals()

    def take_arrivals(self) -> None:
        """
        Count the nodes in `arrivals`. None is left behind: a thread that does not get the token has put its
        node there before trying, and the holder looks again after giving it back.
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
                        plan.give_up(cast("list[Step]", self.steps), self.skipped, node)
                    ready += plan.arrive(self.pending, node)
            finally:
                count_token.append(None)
            for node in ready:
                if node == plan.end:
                    self.end()
                else:
                    self.push(plan.queues[node], (node,))

    # Ending

    def failed(self, node: int, error: BaseException, *, alone: bool = True) -> None:
        """The node failed for good. If it may fail `alone`, its policy can limit that to its dependents."""
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
        for the nodes in flight, so that no node still works when the caller sees the error, but only for the
        grace period. Cancel and deadline wait for no node.
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
            if self.attempts is not None:
                self.attempts.stop_all()
            if not self.end_if_idle():
                self._grace_timer = call_at(clock() + self.executor.grace, self.end)
        return first

    def end_if_idle(self) -> bool:
        """There is a cause: end the run if no node is in flight any more."""
        with self.lock:
            if self.over:
                return True
            inside = any(node not in self.errors for node in list(self.node_by_worker.values()))
            if inside or (self.attempts is not None and self.attempts.outside_threads()):
                return False
        self.end()
        return True

    def end(self) -> None:
        """The only way out. After this nothing that returns changes anything."""
        with self.lock:
            if self.over:
                return
            self.over = True
        for timer in (self.deadline_timer, self._grace_timer):
            if timer is not None:
                timer.cancel()
        if self.attempts is not None:
            self.attempts.abandon_all()
        run_queues, self._run_queues = self._run_queues, {}  # or the run and its queues hold each other
        for run_queue in run_queues.values():
            run_queue.ready.clear()
        inside = list(self.node_by_worker.items()) if self.cause is not None else []
        result = self._make_result(inside)
        try:
            self.executor.on_run_end(self, result)
        finally:  # whatever fails in counting or telemetry, the caller gets the result
            self.set_outcome(result, None)
        for worker, node in inside:
            if node not in self.errors:  # those have returned, or are watched since they timed out
                self.replace_if_stuck(worker, node)

    def _make_result(self, inside: list[tuple[int, int]]) -> RunResult:
        seconds = clock() - self.started
        if self.cause is None:
            result = RunResult(self.plan, RunStatus.OK, self.values, seconds)
            if self.errors:
                result.set_failures(errors=self.errors, skipped=self.skipped)
        else:
            # A node that is left behind may still write its value: not into this result.
            result = RunResult(self.plan, self.cause, self.values.copy(), seconds)
            begun = self.attempts.begun if self.attempts is not None else ()
            canceled = self._stopped.union(begun, (node for _, node in inside)).difference(self.skipped)
            result.set_failures(errors=self.errors, skipped=self.skipped, canceled=canceled)
            result.reason = self._reason
            result.cause = None if self._failed_node is None else self.plan.names[self._failed_node]
        if self.recorder is not None:
            result.trace = Trace(result, self.id, self.started, self.recorder)
            if self.recorder.spans is not None:
                self.recorder.spans.close(result, clock())
        return result

    def replace_if_stuck(self, worker: int, node: int) -> None:
        """
        The worker is in a node whose result is not wanted: replace the worker if it does not return soon.
        """
        call_at(clock() + self.executor.grace, self._replace_if_stuck, worker, node)

    def _replace_if_stuck(self, worker: int, node: int) -> None:
        if self.node_by_worker.get(worker) == node:
            self.executor.replace_worker(worker)
