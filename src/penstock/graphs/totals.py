"""
What an executor does and has done so far.

Many threads end runs, and none of them should wait for another to count them: each leaves a note, and whoever asks, or
finds that there are many, adds them up. The names are those of a pool's totals, so that whoever reads those can read
these: a node is to a graph what a call is to a pool. Runs are counted beside them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.calls.graph_plan import NodeStatus, RunStatus
from penstock.core.text import error_line

if TYPE_CHECKING:
    from penstock.graphs.executor import GraphExecutor
    from penstock.graphs.lanes import ThreadLane
    from penstock.graphs.result import RunResult

__all__ = ["GraphState", "GraphTotals"]

_MANY: Final = 1000
_NODES: Final = ("dispatched", "succeeded", "failed", "canceled", "timed_out", "rejected", "requeued")
_WORKERS: Final = ("spawned", "crashed", "terminated")


class GraphTotals:
    def __init__(self, *lanes: ThreadLane) -> None:
        self.last_error: str | None = None
        self._lanes = lanes
        self._sums = dict.fromkeys((*_NODES, *_WORKERS, *(f"runs_{status}" for status in RunStatus)), 0)
        self._notes: deque[tuple[str, int, int, int]] = deque()
        self._adding = threading.Lock()

    def __getattr__(self, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self.as_dict()[name]
        except KeyError:
            raise AttributeError(name) from None

    def add(self, result: RunResult) -> None:
        if result.whole:
            self._notes.append((result.status, len(result.plan), 0, 0))
        else:
            self._add_partial(result)
        if len(self._notes) > _MANY and self._adding.acquire(blocking=False):
            try:
                self._add_up()
            finally:
                self._adding.release()

    def _add_partial(self, result: RunResult) -> None:
        errors = result.errors
        self._notes.append(
            (result.status, len(result.values), len(errors), len(result.nodes(NodeStatus.CANCELED)))
        )
        for node, error in errors.items():
            self.last_error = f"node {node!r} of {result.plan.name!r}: {error_line(error)}"

    def as_dict(self) -> dict[str, int]:
        with self._adding:
            self._add_up()
            self._sums["spawned"] = sum(lane.hired for lane in self._lanes)
            self._sums["terminated"] = sum(lane.given_up for lane in self._lanes)
            return dict(self._sums)

    def _add_up(self) -> None:
        sums = self._sums
        for _ in range(len(self._notes)):
            status, succeeded, failed, canceled = self._notes.popleft()
            sums[f"runs_{status}"] += 1
            sums["dispatched"] += succeeded + failed + canceled
            sums["succeeded"] += succeeded
            sums["failed"] += failed
            sums["canceled"] += canceled


class Counts(NamedTuple):
    in_flight: int
    pending: int
    waiting: int


class GraphState:
    """What telemetry reads as it reads a pool's gate: its counts now."""

    def __init__(self, executor: GraphExecutor) -> None:
        self._executor = weakref.ref(executor)

    def state(self) -> Counts:
        executor = self._executor()
        if executor is None:
            return Counts(0, 0, 0)
        runs = list(executor._runs)
        inside = sum(len(run.at) for run in runs)
        outside = sum(len(lane.running) for lane in (executor._loop, executor._process, executor._cluster))
        return Counts(inside + outside, sum(run.ready() for run in runs), 0)
