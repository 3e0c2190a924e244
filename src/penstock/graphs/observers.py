"""Graphs in OpenTelemetry: the pools' metrics with the pools' names, a span a run and a span an attempt.

Gauges and counters are read when somebody collects them. Spans are begun where the run is submitted, so that the caller's
span is their parent, and the tracer's sampler decides there, once for the whole run: a run that is not sampled keeps
its fast path. Histograms are filled from the runs that are recorded, by a sampled span or by the executor's own `trace`.

What an executor does and has done so far.

Many threads end runs, and none of them should wait for another to count them: each leaves a note, and whoever asks, or
finds that there are many, adds them up. The names are those of a pool's totals, so that whoever reads those can read
these: a node is to a graph what a call is to a pool. Runs are counted beside them.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec

from opentelemetry import trace
from opentelemetry.context import attach
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

from penstock.core.calls.graph_plan import NodeStatus, RunStatus
from penstock.core.text import error_line
from penstock.pools.options import task_name
from penstock.pools.span_errors import record_error
from penstock.pools.timers import clock
from penstock.telemetry.meters import Meters, _Watched

if TYPE_CHECKING:
    from penstock.core.calls.graph_plan import Plan
    from penstock.graphs.executor import GraphExecutor
    from penstock.graphs.lanes import ThreadLane
    from penstock.graphs.node_calls import NodeAttempt
    from penstock.graphs.result import RunResult
    from penstock.graphs.trace import Trace

__all__ = ["GraphState", "GraphTelemetry", "GraphTotals", "RunSpans"]

P = ParamSpec("P")

log = logging.getLogger("penstock")


def quietly(fn: Callable[P, None]) -> Callable[P, None]:
    """Processors and exporters are somebody's code. What they raise is logged, and the run ends as it would have."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            fn(*args, **kwargs)
        except Exception:
            log.exception("telemetry of a graph failed")

    return call


class GraphTelemetry:
    """Of one executor; `watch` is what `instrument()` calls."""

    def __init__(self, executor: GraphExecutor, meters: Meters | None, tracer: Tracer | None) -> None:
        self._labels = {"pool": executor.label, "kind": "graph", "policy": "turns"}
        self._meters = meters
        self._tracer = tracer

    @classmethod
    def watch(
        cls,
        executor: GraphExecutor,
        meters: Meters,
        tracer_provider: TracerProvider | None,
        *,
        histograms: bool,
        spans: bool,
    ) -> None:
        """Asked again, with another provider, the last one counts."""
        tracer = trace.get_tracer("penstock", tracer_provider=tracer_provider) if spans else None
        executor._telemetry = telemetry = cls(executor, meters if histograms else None, tracer)
        labels = tuple(telemetry._labels.items())
        lock: Any = weakref.ref(executor._state)  # read as a pool's gate and totals are
        totals: Any = executor._totals
        with meters._lock:
            if not any(watched.totals is totals for watched in meters._watched):
                meters._watched.append(_Watched(lock, totals, labels))

    def begin(self, plan: Plan) -> RunSpans | None:
        """None: there are no spans, or this run is not sampled."""
        if self._tracer is None:
            return None
        now = clock()
        zero = time.time_ns() - int(now * 1e9)
        attributes: dict[str, str | int] = {"graph": plan.name, "nodes": len(plan), **self._labels}
        span = self._tracer.start_span(
            f"penstock.graph {plan.name}",
            kind=SpanKind.PRODUCER,
            attributes=attributes,
            start_time=zero + int(now * 1e9),
        )
        return RunSpans(span, self._tracer, zero) if span.is_recording() else None

    @quietly
    def measure(self, result: RunResult, recorded: Trace) -> None:
        """The histograms, from a run that was recorded."""
        if self._meters is None:
            return
        for event in recorded.events:
            fn = result.plan.functions[result.plan.index[event.node]]
            labels = {"task": task_name(fn), **self._labels}
            self._meters.wait.record(event.queue_delay * 1000, labels)
            self._meters.pending.record(event.queue_delay * 1000, labels)
            self._meters.duration.record(event.seconds * 1000, labels)


class RunSpans:
    """The spans of one run that is sampled."""

    def __init__(self, span: Span, tracer: Tracer, zero: int) -> None:
        self._span = span
        self._tracer = tracer
        self._zero = zero
        self._inside = trace.set_span_in_context(span)

    def begin(self, attempt: NodeAttempt) -> Span:
        plan = attempt.run.plan
        name = plan.names[attempt.node]
        attributes: dict[str, str | int] = {
            "node": name,
            "lane": str(plan.lane(attempt.node)),
            "attempt": attempt.number,
        }
        if attempt.item >= 0:
            attributes["item"] = attempt.item
        begun = self._zero + int(attempt.started * 1e9)
        return self._tracer.start_span(
            f"penstock.node {name}", self._inside, attributes=attributes, start_time=begun
        )

    @quietly
    def enter(self, span: Span) -> None:
        """Inside the context in which the node will be called: what it does there belongs to its span."""
        attach(trace.set_span_in_context(span))

    @quietly
    def end(self, span: Span, at: float, error: BaseException | None) -> None:
        if error is not None:
            record_error(span, error, self._zero + int(at * 1e9))
        span.end(self._zero + int(at * 1e9))

    @quietly
    def close(self, result: RunResult, at: float) -> None:
        self._span.set_attribute("outcome", str(result.status))
        if result.status in (RunStatus.ERROR, RunStatus.DEADLINE):
            self._span.set_status(Status(StatusCode.ERROR, f"the run {result.reason}"))
        self._span.end(self._zero + int(at * 1e9))


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
