"""One attempt at a node that is more than a plain call: it has a timeout, may be tried again, or runs elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context
from itertools import count
from typing import TYPE_CHECKING, Any

from penstock.core.graph import Queue
from penstock.local.graphs.context import RunContext, _current, call_in_process
from penstock.local.timers import Timer, clock

if TYPE_CHECKING:
    from penstock.local.graphs.lanes import Worker
    from penstock.local.graphs.run import Run

__all__ = ["Attempt", "Fan"]


class Attempt:
    """
    The right to say how a node (or one item of a map node) ended. It is taken from the run once, by whoever comes first:
    the function's return, its timeout, or the end of the run. What comes later changes nothing.
    """

    __slots__ = ("handle", "item", "node", "number", "overdue", "run", "started", "timer", "worker")

    def __init__(self, run: Run, node: int, item: int, number: int, worker: Worker | None) -> None:
        self.run = run
        self.node = node
        self.item = item  # -1: the node is no map
        self.number = number
        self.worker = worker
        self.started = clock()
        self.handle: Any = None
        self.timer: Timer | None = None
        self.overdue = False

    @property
    def unwanted(self) -> bool:
        return self.run.cause is not None

    def node_name(self) -> str | None:
        return self.run.plan.names[self.node]

    def context(self) -> Context:
        context = self.run.context.copy()
        context.run(_current.set, RunContext(self.run, self.run.plan.names[self.node]))
        return context

    def invoke(self) -> Any:
        args, kwargs = self._arguments()
        return self.run.plan.functions[self.node](*args, **kwargs)

    def remote(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        plan = self.run.plan
        call = plan.functions[self.node], *self._arguments()
        return call_in_process, ((self.run.id, plan.names[self.node], self.run.deadline), *call), {}

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        run = self.run
        item = run.fans[self.node].items[self.item] if self.item >= 0 else None
        return run.plan.bindings[self.node].arguments(run.values, item)

    def settle(self, value: Any, error: BaseException | None) -> None:
        """From a lane that only starts calls; a worker thread asks `Run.settle` itself and goes straight on."""
        if self.run.settle(self, value, error):
            self.run.arrived(self.node)
        if self.run.cause is not None:
            self.run.wind_down()

    def tell(self) -> None:
        """Nobody waits for it any more."""
        if self.timer is not None:
            self.timer.cancel()
        if self.handle is not None:
            self.handle.cancel()

    @property
    def in_thread(self) -> bool:
        return self.run.plan.queues[self.node] in (Queue.COMPUTE, Queue.IO)


class Fan:
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
