"""
Everything that is not a plain call in a worker thread: nodes with a timeout or retries, map nodes, nodes on the event
loop and in processes, and every node of a run that is recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context
from itertools import count
from typing import TYPE_CHECKING, Any

from penstock.core.calls.graph_plan import Binding, Queue
from penstock.core.errors import CallTimeout
from penstock.core.text import add_note
from penstock.graphs.run_context import RunContext, _current, call_elsewhere
from penstock.pools.timers import Timer, call_at, clock

if TYPE_CHECKING:
    from penstock.graphs.lanes import LaneWorker
    from penstock.graphs.run import Run

__all__ = ["NodeAttempt", "NodeAttempts"]


class NodeAttempts:
    """Those of one run. A run of plain nodes has none."""

    def __init__(self, run: Run) -> None:
        self.begun: set[int] = set()  # nodes; one between two attempts or two items is in no other list
        self.fans: dict[int, MapItems] = {}
        self._run = run
        self._flying: set[NodeAttempt] = set()
        self._pauses: dict[tuple[int, int], Timer] = {}  # what waits for its next attempt
        self._retrying: dict[int, int] = {}

    def begin(self, node: int, worker: LaneWorker | None = None) -> NodeAttempt | None:
        """Take what is to be done next for this node. None: there is nothing, or the run is over."""
        run = self._run
        if node in run.skipped:
            run.arrived(node)
            return None
        rules, item, number = run.plan.rules[node], -1, 1
        if rules.over is None:
            number = self._retrying.pop(node, 1)
        else:
            fan = self.fans.get(node) or self._spread(node)
            taken = fan.take() if fan is not None and node not in run.errors else None
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
            self._flying.add(attempt)
            self.begun.add(node)
        if rules.timeout is not None:
            attempt.timer = call_at(attempt.started + rules.timeout, self._time_out, attempt)
        return attempt

    def settle(self, attempt: NodeAttempt, value: Any, error: BaseException | None) -> bool:
        """True: the node is done, its successors may be told."""
        if not self._land(attempt, error):
            return False
        if error is None:
            return self._took(attempt, value)
        if attempt.overdue and self._run.cause is None:
            error = attempt.timeout_error()
        self._lost(attempt, error)
        return False

    def outside(self) -> bool:
        """Is any in flight that no worker thread is in? Those that are can be seen from the run."""
        return any(not attempt.in_thread for attempt in self._flying)

    def flying(self) -> list[NodeAttempt]:
        with self._run.lock:
            return list(self._flying)

    def tell(self) -> None:
        """Their run is over, but waits for them."""
        for attempt in self.flying():
            attempt.tell()

    def drop(self) -> None:
        """Nobody waits for them any more: whatever comes back changes nothing."""
        with self._run.lock:
            flying, self._flying = self._flying, set()
            pauses, self._pauses = self._pauses, {}
        for timer in pauses.values():
            timer.cancel()
        for attempt in flying:
            attempt.tell()

    def _land(self, attempt: NodeAttempt, error: BaseException | None) -> bool:
        """Take from it the right to say how it ended. False: somebody else has."""
        with self._run.lock:
            if attempt not in self._flying:
                return False
            self._flying.remove(attempt)
        if attempt.timer is not None:
            attempt.timer.cancel()
        if self._run.recorder is not None:
            self._run.recorder.note(attempt, clock(), error)
        return True

    def _spread(self, node: int) -> MapItems | None:
        """First visit of a map node: one more entry in the queue for each item to be worked on beside the first."""
        run = self._run
        rules, queue = run.plan.rules[node], run.plan.queues[node]
        try:
            [items], _ = Binding((rules.over or 0,)).arguments(run.values)
            fan = MapItems(list(items))
        except BaseException as error:  # noqa: BLE001  # iterating is the user's code: whatever it raises is the node's error
            run.failed(node, error)
            return None
        if not fan.items:
            run.values[node] = []
            run.arrived(node)
            return None
        self.fans[node] = fan
        width = min(len(fan.items), run.executor._lanes[queue].width, rules.limit or len(fan.items))
        run.push(queue, (node,) * (width - 1))
        return fan

    def _took(self, attempt: NodeAttempt, value: Any) -> bool:
        run, node = self._run, attempt.node
        if attempt.item < 0:
            run.values[node] = value
            return True
        fan = self.fans[node]
        fan.results[attempt.item] = value
        with run.lock:
            fan.left -= 1
            left = fan.left
        if left:
            run.push(run.plan.queues[node], (node,))
            return False
        run.values[node] = fan.results
        return True

    def _lost(self, attempt: NodeAttempt, error: BaseException, *, final: bool = False) -> None:
        """It failed: once more, or for good."""
        run, key = self._run, (attempt.node, attempt.item)
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
            self._again(*key, attempt.number + 1)
        else:
            with run.lock:
                if run.cause is None and not run.over:
                    self._pauses[key] = call_at(clock() + delay, self._again, *key, attempt.number + 1)

    def _again(self, node: int, item: int, number: int) -> None:
        self._pauses.pop((node, item), None)
        if item >= 0:
            self.fans[node].again.append((item, number))
        else:
            self._retrying[node] = number
        self._run.push(self._run.plan.queues[node], (node,))

    def _time_out(self, attempt: NodeAttempt) -> None:
        """
        A thread cannot be stopped: the node fails now, its worker is left in it, and there is no second attempt while
        the first still runs. Elsewhere the attempt is told to stop, and may be tried again once it has.
        """
        if attempt.in_thread:
            self._give_up_on(attempt)
            return
        with self._run.lock:
            if attempt not in self._flying:
                return
            attempt.overdue = True
        attempt.tell()
        call_at(clock() + self._run.executor.grace, self._give_up_on, attempt)

    def _give_up_on(self, attempt: NodeAttempt) -> None:
        error = attempt.timeout_error()
        if not self._land(attempt, error):
            return
        if attempt.worker is not None:
            self._run.watch(attempt.worker.number, attempt.node)
        self._lost(attempt, error, final=True)


class NodeAttempt:
    """
    The right to say how a node (or one item of a map node) ended. It is taken from the run once, by whoever comes first:
    the function's return, its timeout, or the end of the run. What comes later changes nothing.
    """

    __slots__ = ("handle", "item", "node", "number", "overdue", "run", "span", "started", "timer", "worker")

    def __init__(self, run: Run, node: int, item: int, number: int, worker: LaneWorker | None) -> None:
        self.run = run
        self.node = node
        self.item = item  # -1: the node is no map
        self.number = number
        self.worker = worker
        self.started = clock()
        self.handle: Any = None
        self.timer: Timer | None = None
        self.overdue = False
        self.span: Any = None  # of OpenTelemetry, if the run is sampled there

    @property
    def unwanted(self) -> bool:
        return self.run.cause is not None

    def node_name(self) -> str | None:
        return self.run.plan.names[self.node]

    def context(self) -> Context:
        context = self.run.context.copy()
        context.run(_current.set, RunContext(self.run, self.run.plan.names[self.node]))
        if self.span is not None:
            context.run(self.run.recorder.spans.enter, self.span)  # type: ignore[union-attr]  # its span came from there
        return context

    def call(self) -> Any:
        """In a worker thread, which is inside the context of the turn already: enough, unless there is a span."""
        return self.invoke() if self.span is None else self.context().run(self.invoke)

    def invoke(self) -> Any:
        args, kwargs = self._arguments()
        return self.run.plan.functions[self.node](*args, **kwargs)

    def remote(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        plan = self.run.plan
        call = plan.functions[self.node], *self._arguments()
        deadline = self.run.deadline
        where = self.run.id, plan.names[self.node], None if deadline is None else deadline - clock()
        return call_elsewhere, (where, *call), {}

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        run = self.run
        item = None
        if self.item >= 0 and run.attempts is not None:
            item = run.attempts.fans[self.node].items[self.item]
        return run.plan.bindings[self.node].arguments(run.values, item)

    def settle(self, value: Any, error: BaseException | None) -> None:
        """From a lane that only starts calls; a worker thread asks `Run.settle` itself and goes straight on."""
        if self.run.attempts is not None and self.run.attempts.settle(self, value, error):
            self.run.arrived(self.node)
        if self.run.cause is not None:
            self.run.wind_down()

    def tell(self) -> None:
        """Nobody waits for it any more."""
        if self.timer is not None:
            self.timer.cancel()
        if self.handle is not None:
            self.handle.cancel()

    def timeout_error(self) -> CallTimeout:
        name, timeout = self.run.plan.names[self.node], self.run.plan.rules[self.node].timeout
        text = f"node {name!r} took longer than its {timeout:g} s"
        return CallTimeout(text, phase="in-flight", timeout=timeout, node=name)

    @property
    def in_thread(self) -> bool:
        return self.run.plan.queues[self.node] in (Queue.COMPUTE, Queue.IO)


class MapItems:
    """
    The items of a map node while it runs. They are not queued one by one: the node itself stands in the queue, once
    for each item that may be worked on at the same time, and each time it is taken the next item is.
    """

    __slots__ = ("again", "fresh", "items", "left", "results")

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.results: list[Any] = [None] * len(items)
        self.left = len(items)
        self.fresh = count()
        self.again: deque[tuple[int, int]] = deque()  # (item, attempt) to be tried once more

    def take(self) -> tuple[int, int] | None:
        try:
            return self.again.popleft()
        except IndexError:
            item = next(self.fresh)
            return (item, 1) if item < len(self.items) else None
