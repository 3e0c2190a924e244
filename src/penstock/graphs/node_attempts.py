"""
Attempts at nodes that need more than a plain call in a worker thread: nodes with a timeout or retries, map
nodes, nodes on the event loop and in processes, and every node of a recorded run.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from penstock.core.calls.graph_plan import Binding, Queue
from penstock.core.errors import CallTimeout
from penstock.core.text import add_note
from penstock.graphs.run_context import RunContext, call_in_worker, current_context
from penstock.pools.timers import Timer, call_at, clock

if TYPE_CHECKING:
    from penstock.graphs.lanes import LaneWorker
    from penstock.graphs.run import Run


class NodeAttempts:
    """
    The attempts of one run. A run of plain nodes has none. This object does not refer to the run, because the
    cycle would keep the run alive until a garbage collection.
    """

    __slots__ = ("_in_flight", "_lock", "_next_number", "begun", "map_items", "retry_timers")

    def __init__(self, lock: threading.Lock) -> None:
        """`lock` is the run's."""
        # Nodes with at least one attempt. Between two attempts or items a node is only in this list.
        self.begun: set[int] = set()
        self.map_items: dict[int, MapItems] = {}
        self._lock = lock
        self._in_flight: set[NodeAttempt] = set()
        # The timers of pauses before the next attempt, by (node, item).
        self.retry_timers: dict[tuple[int, int], Timer] = {}
        self._next_number: dict[int, int] = {}

    def begin(self, run: Run, node: int, worker: LaneWorker | None = None) -> NodeAttempt | None:
        """
        Begin the next attempt at this node or at its next item. None: nothing is left, or the run is over.
        """
        if node in run.skipped:
            run.count_done(node)
            return None
        rules, item, number = run.plan.rules[node], -1, 1
        if rules.over is None:
            number = self._next_number.pop(node, 1)
        else:
            map_items = self.map_items.get(node) or self._start_map(run, node)
            taken = map_items.take() if map_items is not None and node not in run.errors else None
            if taken is None:
                return None
            item, number = taken
        if run.deadline is not None and clock() >= run.deadline:
            run.expire()
            return None
        attempt = NodeAttempt(run, node, item, number, worker)
        if run.recorder is not None and run.recorder.spans is not None:
            attempt.span = run.recorder.spans.begin(attempt)
        with run.lock:
            if run.cause is not None or run.over:
                return None
            self._in_flight.add(attempt)
            self.begun.add(node)
        if rules.timeout is not None:
            attempt.timer = call_at(attempt.started + rules.timeout, self._time_out, attempt)
        return attempt

    def settle(self, attempt: NodeAttempt, value: Any, error: BaseException | None) -> bool:
        """End an attempt. True: the node is done, and its successors may be counted."""
        if not self._claim_end(attempt, error):
            return False
        if error is None:
            return self.store_value(attempt, value)
        if attempt.overdue and attempt.run.cause is None:
            error = attempt.timeout_error()
        self._attempt_failed(attempt, error)
        return False

    def outside_threads(self) -> bool:
        """
        Whether an attempt is in flight outside of worker threads. The run itself knows those in threads.
        """
        return any(not attempt.in_thread for attempt in self._in_flight)

    def in_flight(self) -> list[NodeAttempt]:
        with self._lock:
            return list(self._in_flight)

    def stop_all(self) -> None:
        """Stop all attempts of a run that has ended and waits for them."""
        for attempt in self.in_flight():
            attempt.stop()

    def abandon_all(self) -> None:
        """Forget all attempts: their results will be dropped."""
        if not self.begun:
            return
        with self._lock:
            in_flight, self._in_flight = self._in_flight, set()
            timers, self.retry_timers = self.retry_timers, {}
        for timer in timers.values():
            timer.cancel()
        for attempt in in_flight:
            attempt.stop()

    def _claim_end(self, attempt: NodeAttempt, error: BaseException | None) -> bool:
        """Claim the end of this attempt. False: another thread has claimed it before."""
        with self._lock:
            if attempt not in self._in_flight:
                return False
            self._in_flight.remove(attempt)
        if attempt.timer is not None:
            attempt.timer.cancel()
        if attempt.run.recorder is not None:
            attempt.run.recorder.record(attempt, error)
        return True

    def _start_map(self, run: Run, node: int) -> MapItems | None:
        """
        Begin a map node: add an entry to the queue for each further item that may run at once.
        """
        rules, queue = run.plan.rules[node], run.plan.queues[node]
        try:
            [items], _ = Binding((rules.over or 0,)).arguments(run.values)
            map_items = MapItems(list(items))
        except BaseException as error:  # noqa: BLE001  # iterating runs user code: any exception is the node's error
            run.failed(node, error)
            return None
        if not map_items.items:
            run.values[node] = []
            run.count_done(node)
            return None
        self.map_items[node] = map_items
        width = min(
            len(map_items.items), run.executor.lane_queues[queue].width, rules.limit or len(map_items.items)
        )
        run.push(queue, (node,) * (width - 1))
        return map_items

    def store_value(self, attempt: NodeAttempt, value: Any) -> bool:
        run, node = attempt.run, attempt.node
        if attempt.item < 0:
            run.values[node] = value
            return True
        map_items = self.map_items[node]
        map_items.results[attempt.item] = value
        with run.lock:
            map_items.remaining -= 1
            remaining = map_items.remaining
        if remaining:
            run.push(run.plan.queues[node], (node,))
            return False
        run.values[node] = map_items.results
        return True

    def _attempt_failed(self, attempt: NodeAttempt, error: BaseException, *, final: bool = False) -> None:
        """Handle a failed attempt: retry, or fail the node for good."""
        run, key = attempt.run, (attempt.node, attempt.item)
        delay = (
            None
            if final or run.cause is not None
            else run.plan.rules[attempt.node].retry_in(attempt.number, error)
        )
        if delay is None:
            if attempt.item >= 0:
                add_note(error, f"while working on item {attempt.item}")
            run.failed(attempt.node, error)
        elif delay <= 0:
            self._retry(run, *key, attempt.number + 1)
        else:
            with run.lock:
                if run.cause is None and not run.over:
                    when = clock() + delay
                    self.retry_timers[key] = call_at(when, self._retry, run, *key, attempt.number + 1)

    def _retry(self, run: Run, node: int, item: int, number: int) -> None:
        self.retry_timers.pop((node, item), None)
        if item >= 0:
            self.map_items[node].again.append((item, number))
        else:
            self._next_number[node] = number
        run.push(run.plan.queues[node], (node,))

    def _time_out(self, attempt: NodeAttempt) -> None:
        """
        Handle a timeout. A thread cannot be stopped, so the node fails now without a retry, and its worker
        stays in it. Elsewhere the attempt is stopped, and may be retried when it has ended.
        """
        if attempt.in_thread:
            self._give_up_on(attempt)
            return
        with self._lock:
            if attempt not in self._in_flight:
                return
            attempt.overdue = True
        attempt.stop()
        call_at(clock() + attempt.run.executor.grace, self._give_up_on, attempt)

    def _give_up_on(self, attempt: NodeAttempt) -> None:
        error = attempt.timeout_error()
        if not self._claim_end(attempt, error):
            return
        if attempt.worker is not None:
            attempt.run.replace_if_stuck(attempt.worker, attempt.node)
        self._attempt_failed(attempt, error, final=True)


@dataclass(slots=True, eq=False)
class NodeAttempt:
    """
    One attempt at a node, or at one item of a map node. It ends once, with whatever comes first: the
    function's return, its timeout, or the end of the run.
    """

    run: Run
    node: int
    item: int  # -1: the node is no map
    number: int
    worker: LaneWorker | None
    started: float = field(default_factory=clock)
    ended: float = math.inf  # this and the error are for the recorder of the run
    error: BaseException | None = None
    cancel_start: Callable[[], object] | None = None
    timer: Timer | None = None
    overdue: bool = False
    span: Any = None  # of OpenTelemetry, if the run is sampled

    @property
    def unwanted(self) -> bool:
        return self.run.cause is not None

    def node_name(self) -> str | None:
        return self.run.plan.names[self.node]

    def context(self) -> Context:
        context = self.run.context.copy()
        context.run(current_context.set, RunContext(self.run, self.run.plan.names[self.node]))
        if self.span is not None:
            context.run(self.run.recorder.spans.enter, self.span)  # type: ignore[union-attr]  # its span was made there
        return context

    def call(self) -> Any:
        """
        Call the function in a worker thread, which is already in the right context, unless there is a span.
        """
        return self.invoke() if self.span is None else self.context().run(self.invoke)

    def invoke(self) -> Any:
        args, kwargs = self._arguments()
        return self.run.plan.functions[self.node](*args, **kwargs)

    def remote(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        plan = self.run.plan
        call = plan.functions[self.node], *self._arguments()
        deadline = self.run.deadline
        where = self.run.id, plan.names[self.node], None if deadline is None else deadline - clock()
        return call_in_worker, (where, *call), {}

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        run = self.run
        item = self.run.attempts.map_items[self.node].items[self.item] if self.item >= 0 else None
        return run.plan.bindings[self.node].arguments(run.values, item)

    def settle(self, value: Any, error: BaseException | None) -> None:
        """
        End the attempt, from a lane that only starts calls. A worker thread calls `NodeAttempts.settle`
        itself.
        """
        if self.run.attempts.settle(self, value, error):
            self.run.count_done(self.node)
        if self.run.cause is not None:
            self.run.end_if_idle()

    def stop(self) -> None:
        """Stop the attempt, as far as possible: its result is not needed any more."""
        if self.timer is not None:
            self.timer.cancel()
        if self.cancel_start is not None:
            self.cancel_start()

    def timeout_error(self) -> CallTimeout:
        name, timeout = self.run.plan.names[self.node], self.run.plan.rules[self.node].timeout
        text = f"node {name!r} took longer than its {timeout:g} s"
        return CallTimeout(text, phase="in-flight", timeout=timeout, node=name)

    @property
    def in_thread(self) -> bool:
        return self.run.plan.queues[self.node] in (Queue.COMPUTE, Queue.IO)


class MapItems:
    """
    The items of a running map node. Items are not queued one by one: the node itself is in the queue, once
    for each item that may run at the same time, and each time it is taken it runs the next item.
    """

    __slots__ = ("again", "fresh", "items", "remaining", "results")

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.results: list[Any] = [None] * len(items)
        self.remaining = len(items)
        self.fresh = count()
        self.again: deque[tuple[int, int]] = deque()  # (item, attempt number) to be retried

    def take(self) -> tuple[int, int] | None:
        try:
            return self.again.popleft()
        except IndexError:
            item = next(self.fresh)
            return (item, 1) if item < len(self.items) else None
