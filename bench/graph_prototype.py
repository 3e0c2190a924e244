"""
The bare prototype: pending counts, one queue, persistent threads, and going straight on with one ready successor.

Nothing else: no lanes, no errors, no cancel, no deadline, no turns between runs, no results by name. What
Penstock's graphs cost beyond this is what those things cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class BareGraph:
    def __init__(
        self, functions: Sequence[Callable[..., Any]], needs: Sequence[Sequence[int]], gather: set[int]
    ) -> None:
        self.functions = functions
        self.needs = needs
        self.gather = gather  # nodes that take their inputs as one list
        self.successors: list[list[int]] = [[] for _ in needs]
        for node, inputs in enumerate(needs):
            for one in inputs:
                self.successors[one].append(node)
        self.pending = [len(inputs) for inputs in needs]
        self.roots = [node for node, inputs in enumerate(needs) if not inputs]
        self.sinks = sum(not successors for successors in self.successors)


class BareRun:
    __slots__ = ("finished", "graph", "lock", "pending", "sinks", "values")

    def __init__(self, graph: BareGraph) -> None:
        self.graph = graph
        self.values: list[Any] = [None] * len(graph.needs)
        self.pending = list(graph.pending)
        self.sinks = graph.sinks
        self.lock = threading.Lock()
        self.finished = threading.Event()


class BareExecutor:
    def __init__(self, workers: int) -> None:
        self._queue: SimpleQueue[tuple[BareRun, int] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, graph: BareGraph) -> BareRun:
        run = BareRun(graph)
        for root in graph.roots:
            self._queue.put((run, root))
        return run

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        queue = self._queue
        while (item := queue.get()) is not None:
            run, node = item
            graph, values, pending, lock = run.graph, run.values, run.pending, run.lock
            while node >= 0:
                inputs = [values[one] for one in graph.needs[node]]
                function = graph.functions[node]
                values[node] = function(inputs) if node in graph.gather else function(*inputs)
                following = -1
                with lock:
                    for successor in graph.successors[node]:
                        pending[successor] -= 1
                        if not pending[successor]:
                            if following < 0:
                                following = successor
                            else:
                                queue.put((run, successor))
                    if not graph.successors[node]:
                        run.sinks -= 1
                        if not run.sinks:
                            run.finished.set()
                node = following
