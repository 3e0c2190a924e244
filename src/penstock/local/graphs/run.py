"""
One run of a plan: the values, the counts, and the one way it ends.

Two locks, never held together. `counting` guards the pending counts and is never waited for: a worker that finds it taken
leaves the node it has finished in `arrivals`, and the holder looks there after letting go. So a thread that loses the
interpreter in the middle of counting stops nobody, which a lock that is waited for would (each waiter would take it
while without the interpreter, and every node after that would cost a change of threads). `gate` guards the life of the run:
what is in flight, the first cause, the end. It is taken when something other than a plain node's success happens.

`at` says which node each worker is in. A worker writes it *before* it looks at `cause`; the one who ends the run sets
`cause` before it looks at `at`. So a node that is not in `at` by then is certain never to be called.
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

from penstock.core.errors import CallEnded, CallTimeout
from penstock.core.graph import UNSET, Plan, RunStatus, Step
from penstock.local.graphs.attempt import Attempt, Fan
from penstock.local.graphs.promise import Promise
from penstock.local.graphs.result import RunResult
from penstock.local.graphs.share import Share
from penstock.local.graphs.trace import Recorder, Trace
from penstock.local.timers import Timer, call_at, clock

if TYPE_CHECKING:
    from penstock.local.graphs.executor import GraphExecutor
    from penstock.local.graphs.lanes import Worker

__all__ = ["Run"]

_ids: Final = count(1)
_TOLD_TO_STOP: Final = (CancelledError, asyncio.CancelledError, CallEnded)


class Run(Promise[RunResult]):
    """What `submit` returns: a Future of the RunResult. It can be cancelled at any time, and awaited."""

    def __init__(
        self,
        executor: GraphExecutor,
        plan: Plan,
        env: Mapping[str, Any],
        deadline: float | None,
        recorder: Recorder | None,
    ) -> None:
        self.id = next(_ids)
        self.plan = plan
        self.env = env
        self.deadline = deadline
        self.recorder = recorder
        self.started = clock()
        self.cause: RunStatus | None = None
        self.values: list[Any] = list(plan.values)
        for name, slot in plan.env.items():
            self.values[slot] = env[name]
        self.steps = plan.steps_for(watched=recorder is not None)
        self.pending = list(plan.pending)
        self.counting = threading.Lock()
        self.arrivals: deque[int] = deque()  # arrived, not yet counted; ~node for one that failed alone
        self.at: dict[int, int] = {}
        self.context = copy_context()
        self.fans: dict[int, Fan] = {}
        self._executor = executor
        self._shares: list[Share | None] = [None, None, None, None]
        self._gate = threading.Lock()
        self._flying: set[Attempt] = set()
        self._pauses: dict[tuple[int, int], Timer] = {}  # what waits for its next attempt
        self._retrying: dict[int, int] = {}
        self._errors: dict[int, BaseException] = {}
        self._skipped: dict[int, int] = {}
        self._begun: set[int] = (
            set()
        )  # by an attempt; those between two attempts or two items are in no other list
        self._culprit: int | None = None
        self._reason: str | None = None
        self._timer: Timer | None = None
        self._over = False

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
        return sum(len(share.ready) for share in self._shares if share is not None)

    def push(self, queue: int, nodes: tuple[int, ...]) -> None:
        if self.cause is not None:
            return
        share = self._shares[queue]
        if share is None:
            with self._gate:
                share = self._shares[queue]
                if share is None:
                    share = self._shares[queue] = Share(self, self._executor._lane(queue), queue)
        share.ready.extend(nodes)
        share.offer(len(nodes))

    def arrived(self, node: int) -> None:
        """It is done and its value is in place: let its successors know. From any thread."""
        self.arrivals.append(node)
        self.take_arrivals()

    def take_arrivals(self) -> None:
        """
        Nothing is left behind: whoever fails to get the lock has put its node there before trying, and the holder
        looks again after letting go.
        """
        arrivals, counting, plan = self.arrivals, self.counting, self.plan
        while arrivals and counting.acquire(blocking=False):
            ready: list[int] = []
            try:
                while arrivals:
                    node = arrivals.popleft()
                    if node < 0:
                        node = ~node
                        plan.give_up(cast("list[Step]", self.steps), self._skipped, node)
                    ready += plan.arrive(self.pending, node)
            finally:
                counting.release()
            for node in ready:
                if node == plan.end:
                    self.end()
                else:
                    self.push(plan.queues[node], (node,))

    # Attempts: everything that is not a plain call in a worker thread

    def begin(self, node: int, worker: Worker | None = None) -> Attempt | None:
        """Take what is to be done next for this node. None: there is nothing, or the run is over."""
        if node in self._skipped:
            self.arrived(node)
            return None
        rules, item, number = self.plan.rules[node], -1, 1
        if rules.over is None:
            number = self._retrying.pop(node, 1)
        else:
            fan = self.fans.get(node) or self._spread(node)
            taken = fan.take() if fan is not None and node not in self._errors else None
            if taken is None:
                return None
            item, number = taken
        attempt = Attempt(self, node, item, number, worker)
        with self._gate:
            if self.cause is not None:
                return None
            self._flying.add(attempt)
            self._begun.add(node)
        if rules.timeout is not None:
            attempt.timer = call_at(attempt.started + rules.timeout, self._time_out, attempt)
        return attempt

    def settle(self, attempt: Attempt, value: Any, error: BaseException | None) -> bool:
        """True: the node is done, its successors may be told."""
        with self._gate:
            if attempt not in self._flying:
                return False
            self._flying.remove(attempt)
        if attempt.timer is not None:
            attempt.timer.cancel()
        if self.recorder is not None:
            self.recorder.note(attempt, clock(), error)
        if error is None:
            return self._took(attempt, value)
        if attempt.overdue and self.cause is None:
            error = self._timeout_error(attempt)
        self._lost(attempt, error)
        return False

    def _spread(self, node: int) -> Fan | None:
        """First visit of a map node: one more entry in the queue for each item that can be worked on beside the first."""
        over, limit = self.plan.rules[node].over, self.plan.rules[node].limit
        try:
            source = (
                [self.values[slot] for slot in over] if isinstance(over, tuple) else self.values[over or 0]
            )
            fan = Fan(list(source))
        except BaseException as error:  # noqa: BLE001  # iterating is the user's code: whatever it raises is the node's error
            self.failed(node, error)
            return None
        if not fan.items:
            self.values[node] = []
            self.arrived(node)
            return None
        self.fans[node] = fan
        queue = self.plan.queues[node]
        width = min(len(fan.items), self._executor._lane(queue).width, limit or len(fan.items))
        self.push(queue, (node,) * (width - 1))
        return fan

    def _took(self, attempt: Attempt, value: Any) -> bool:
        node = attempt.node
        if attempt.item < 0:
            self.values[node] = value
            return True
        fan = self.fans[node]
        fan.results[attempt.item] = value
        with self._gate:
            fan.left -= 1
            left = fan.left
        if left:
            self.push(self.plan.queues[node], (node,))
            return False
        self.values[node] = fan.results
        return True

    def _lost(self, attempt: Attempt, error: BaseException, *, final: bool = False) -> None:
        """It failed: once more, or for good."""
        node, rules = attempt.node, self.plan.rules[attempt.node]
        delay = None if final or self.cause is not None else rules.retry_in(attempt.number, error)
        if delay is None:
            if attempt.item >= 0:
                error.add_note(f"while working on item {attempt.item}")
            self.failed(node, error)
        elif delay <= 0:
            self._again(node, attempt.item, attempt.number + 1)
        else:
            with self._gate:
                if self.cause is None:
                    key = (node, attempt.item)
                    self._pauses[key] = call_at(clock() + delay, self._again, *key, attempt.number + 1)

    def _again(self, node: int, item: int, number: int) -> None:
        self._pauses.pop((node, item), None)
        if item >= 0:
            self.fans[node].again.append((item, number))
        else:
            self._retrying[node] = number
        self.push(self.plan.queues[node], (node,))

    def _time_out(self, attempt: Attempt) -> None:
        """
        A thread cannot be stopped: the node fails now, its worker is left in it, and there is no second attempt while
        the first still runs. Elsewhere the attempt is told to stop, and may be tried again once it has.
        """
        if attempt.in_thread:
            self._give_up_on(attempt)
            return
        with self._gate:
            if attempt not in self._flying:
                return
            attempt.overdue = True
        attempt.tell()
        call_at(clock() + self._executor.grace, self._give_up_on, attempt)

    def _give_up_on(self, attempt: Attempt) -> None:
        with self._gate:
            if attempt not in self._flying:
                return
            self._flying.remove(attempt)
        error = self._timeout_error(attempt)
        if self.recorder is not None:
            self.recorder.note(attempt, clock(), error)
        if attempt.worker is not None:
            self._watch(attempt.worker.number, attempt.node)
        self._lost(attempt, error, final=True)

    def _timeout_error(self, attempt: Attempt) -> CallTimeout:
        timeout = self.plan.rules[attempt.node].timeout
        text = f"node {self.plan.names[attempt.node]!r} took longer than its {timeout:g} s"
        return CallTimeout(text, phase="in-flight", timeout=timeout, node=self.plan.names[attempt.node])

    # Ending

    def failed(self, node: int, error: BaseException, *, alone: bool = True) -> None:
        """For good. Its policy says who suffers: if it may fail `alone`, only its dependents."""
        with self._gate:
            if self._over or node in self._errors:
                return
            if self.cause is not None and isinstance(error, _TOLD_TO_STOP):
                self._begun.add(node)
                return
            self._errors[node] = error
        error.add_note(f"in node {self.plan.names[node]!r} of graph {self.plan.name!r}")
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
        with self._gate:
            if self._over:
                return False
            first = self.cause is None
            if first:
                self.cause, self._culprit, self._reason = status, culprit, reason
            flying = list(self._flying)
        if status is not RunStatus.ERROR:
            self.end()
        elif first:
            for attempt in flying:
                attempt.tell()
            if not self.wind_down():
                call_at(clock() + self._executor.grace, self.end)
        return first

    def wind_down(self) -> bool:
        """There is a cause: end the run if nothing is in flight any more."""
        with self._gate:
            if self._over:
                return True
            busy = any(node not in self._errors for node in list(self.at.values()))
            if busy or any(not attempt.in_thread for attempt in self._flying):
                return False
        self.end()
        return True

    def end(self) -> None:
        """The only way out. After this nothing that comes back changes anything."""
        with self._gate:
            if self._over:
                return
            self._over = True
            flying, self._flying = self._flying, set()
            pauses, self._pauses = self._pauses, {}
        for timer in (self._timer, *pauses.values()):
            if timer is not None:
                timer.cancel()
        for attempt in flying:
            attempt.tell()
        for share in self._shares:
            if share is not None:
                share.ready.clear()
        inside = list(self.at.items())
        self._shares = [None, None, None, None]  # or run and shares hold each other
        result = self._result_of(inside)
        self._executor._forget(self, result)
        self._settle(result, None)
        if self.cause is not None:
            for worker, node in inside:
                self._watch(worker, node)

    def _result_of(self, inside: list[tuple[int, int]]) -> RunResult:
        status = self.cause or RunStatus.OK
        # A node that is left behind may still write its value: not into what we hand out.
        values = self.values if status is RunStatus.OK else self.values.copy()
        canceled = self._begun.union(node for _, node in inside).difference(self._skipped)
        result = RunResult(
            self.plan,
            status,
            values,
            errors=self._errors,
            skipped=self._skipped,
            canceled=frozenset(node for node in canceled if values[node] is UNSET),
            cause=self._culprit,
            reason=self._reason,
            seconds=clock() - self.started,
        )
        if self.recorder is not None:
            result.trace = Trace(result, self.id, self.started, self.recorder)
        return result

    def _watch(self, worker: int, node: int) -> None:
        """The worker is in a node that nobody waits for: if it does not come back soon, somebody takes its place."""
        call_at(clock() + self._executor.grace, self._write_off_if_stuck, worker, node)

    def _write_off_if_stuck(self, worker: int, node: int) -> None:
        if self.at.get(worker) == node:
            self._executor._write_off(worker)
