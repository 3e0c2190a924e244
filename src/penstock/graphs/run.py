"""
One run of a plan: the values, the counts, and the one way it ends.

The right to count is one token in a list, `counting`: `pop` takes it and `append` gives it back, both atomic, for a third
of what a lock costs. Nobody waits for it: a worker that finds it gone leaves the node it has finished in `arrivals`, and the
holder looks there after giving it back. So a thread that loses the interpreter in the middle of counting stops nobody,
which a lock that is waited for would (each waiter would take it while without the interpreter, and every node after that
would cost a change of threads). `lock` is a lock, and guards the life of the run: what is in flight, the first cause, the
end. It is taken when something other than a plain node's success happens.

`at` says which node each worker is in. A worker writes it *before* it looks at `cause`; the one who ends the run sets
`cause` before it looks at `at`. So a node that is not in `at` by then is certain never to be called.
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
from penstock.graphs.lazy_future import LazyFuture
from penstock.graphs.node_calls import NodeAttempts
from penstock.graphs.result import RunResult
from penstock.graphs.run_queue import RunQueue
from penstock.graphs.trace import Trace, TraceRecorder
from penstock.pools.timers import Timer, call_at, clock

if TYPE_CHECKING:
    from penstock.graphs.executor import GraphExecutor

__all__ = ["Run"]

_ids: Final = count(1)
_TOLD_TO_STOP: Final = (CancelledError, asyncio.CancelledError, CallEnded)


class Run(LazyFuture[RunResult]):
    """What `submit` returns: a Future of the RunResult. It can be cancelled at any time, and awaited."""

    # Slots, because there are more than thirty attributes with those of a Future: then the interpreter gives up sharing
    # the keys of instances, and a run of ten nodes took half as long again.
    __slots__ = (
        "_culprit",
        "_patience",
        "_reason",
        "_shares",
        "_stopped",
        "_timer",
        "arrivals",
        "at",
        "attempts",
        "cause",
        "context",
        "counting",
        "deadline",
        "env",
        "errors",
        "executor",
        "id",
        "lock",
        "over",
        "pending",
        "plan",
        "recorder",
        "skipped",
        "started",
        "steps",
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
        self.counting = [None]
        self.arrivals: list[int] = []  # arrived, not yet counted; ~node for one that failed alone
        self.at: dict[int, int] = {}
        self.context = copy_context()
        self.lock = threading.Lock()
        self.attempts = None if plan.simple and recorder is None else NodeAttempts(self)
        self.errors: dict[int, BaseException] = {}
        self.skipped: dict[int, int] = {}
        self._stopped: set[int] = set()  # nodes that stopped by themselves, as they were asked to
        self._shares: dict[int, RunQueue] = {}
        for queue in plan.lanes:
            self._shares[queue] = RunQueue(self, executor._lanes[queue], queue)
        self._culprit: int | None = None
        self._reason: str | None = None
        self._timer: Timer | None = None  # for its deadline
        self._patience: Timer | None = None  # for what is in flight beside an error

    # From outside

    def cancel(self, reason: str | None = None) -> bool:
        """
        End the run now, whatever its nodes are doing: no more of them start, those in flight are told, and whoever
        waits gets a RunResult of status `canceled`. False if it had ended before, by itself or by another cause.
        """
        return self._strike(RunStatus.CANCELED, None, f"was canceled: {reason}" if reason else "was canceled")

    def start(self) -> None:
        if self.deadline is not None:
            if clock() >= self.deadline:
                self.expire()
                return
            self._timer = call_at(self.deadline, self.expire)
        try:
            for queue, nodes in self.plan.roots:
                self.push(queue, nodes)
        except BaseException:  # not one thread could be started
            self.cancel("it could not be started")
            raise

    def expire(self) -> None:
        self._strike(RunStatus.DEADLINE, None, "ran out of time")

    # Nodes that become ready

    def ready(self) -> int:
        return sum(len(share.ready) for share in list(self._shares.values()))

    def push(self, queue: int, nodes: tuple[int, ...]) -> None:
        share = self._shares.get(queue)
        if share is not None and self.cause is None:  # else the run is over
            share.ready.extend(nodes)
            share.offer(len(nodes))

    def arrived(self, node: int) -> None:
        """It is done and its value is in place: let its successors know. From any thread."""
        self.arrivals.append(node)
        self.take_arrivals()

    def take_arrivals(self) -> None:
        """
        Nothing is left behind: whoever fails to get the token has put its node there before trying, and the holder
        looks again after giving it back.
        """
        arrivals, counting, plan = self.arrivals, self.counting, self.plan
        while arrivals:
            try:
                counting.pop()
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
                counting.append(None)
            for node in ready:
                if node == plan.end:
                    self.end()
                else:
                    self.push(plan.queues[node], (node,))

    # Ending

    def failed(self, node: int, error: BaseException, *, alone: bool = True) -> None:
        """For good. Its policy says who suffers: if it may fail `alone`, only its dependents."""
        with self.lock:
            if self.over or node in self.errors:
                return
            if self.cause is not None and is_kind(error, _TOLD_TO_STOP):
                self._stopped.add(node)
                return
            self.errors[node] = error
        add_note(error, f"in node {self.plan.names[node]!r} of graph {self.plan.name!r}")
        if alone and self.plan.rules[node].skip_dependents:
            self.arrivals.append(~node)
            self.take_arrivals()
        else:
            self._strike(RunStatus.ERROR, node, f"ended with the error of {self.plan.names[node]!r}")

    def _strike(self, status: RunStatus, culprit: int | None, reason: str) -> bool:
        """
        The first cause is the status of the run. After an error the run waits for what is in flight, so that nothing
        still works when the error is seen, but only for the grace period. Cancel and deadline wait for nobody.
        """
        with self.lock:
            if self.over:
                return False
            first = self.cause is None
            if first:
                self.cause, self._culprit, self._reason = status, culprit, reason
        if status is not RunStatus.ERROR:
            self.end()
        elif first:
            if self.attempts is not None:
                self.attempts.tell()
            if not self.wind_down():
                self._patience = call_at(clock() + self.executor.grace, self.end)
        return first

    def wind_down(self) -> bool:
        """There is a cause: end the run if nothing is in flight any more."""
        with self.lock:
            if self.over:
                return True
            inside = any(node not in self.errors for node in list(self.at.values()))
            if inside or (self.attempts is not None and self.attempts.outside()):
                return False
        self.end()
        return True

    def end(self) -> None:
        """The only way out. After this nothing that comes back changes anything."""
        with self.lock:
            if self.over:
                return
            self.over = True
        for timer in (self._timer, self._patience):
            if timer is not None:
                timer.cancel()
        if self.attempts is not None:
            self.attempts.drop()
        shares, self._shares = self._shares, {}  # or run and shares hold each other
        for share in shares.values():
            share.ready.clear()
        inside = list(self.at.items()) if self.cause is not None else []
        result = self._result_of(inside)
        try:
            self.executor._forget(self, result)
        finally:  # whatever fails in counting or telemetry, the caller gets the result
            self._settle(result, None)
        for worker, node in inside:
            if node not in self.errors:  # those have come back, or are watched since they timed out
                self.watch(worker, node)

    def _result_of(self, inside: list[tuple[int, int]]) -> RunResult:
        seconds = clock() - self.started
        if self.cause is None:
            result = RunResult(self.plan, RunStatus.OK, self.values, seconds)
        else:
            # A node that is left behind may still write its value: not into what we hand out.
            result = RunResult(self.plan, self.cause, self.values.copy(), seconds)
            begun = self.attempts.begun if self.attempts is not None else ()
            result._canceled = self._stopped.union(begun, (node for _, node in inside)).difference(
                self.skipped
            )
            result.reason = self._reason
            result.cause = None if self._culprit is None else self.plan.names[self._culprit]
        if self.errors:
            result._errors, result._skipped = self.errors, self.skipped
        if self.recorder is not None:
            result.trace = Trace(result, self.id, self.started, self.recorder)
            if self.recorder.spans is not None:
                self.recorder.spans.close(result, clock())
        return result

    def watch(self, worker: int, node: int) -> None:
        """The worker is in a node that nobody waits for: if it does not come back soon, somebody takes its place."""
        call_at(clock() + self.executor.grace, self._write_off_if_stuck, worker, node)

    def _write_off_if_stuck(self, worker: int, node: int) -> None:
        if self.at.get(worker) == node:
            self.executor._write_off(worker)
