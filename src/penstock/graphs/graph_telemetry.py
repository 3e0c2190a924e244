"""
Graphs in OpenTelemetry: the metrics of pools, a span for each run and a span for each attempt.

Gauges and counters are read at collection. A span begins where its run is submitted, so that the caller's
span is its parent. There the tracer's sampler decides once for the whole run; a run that is not sampled keeps
its fast path. Histograms are filled from recorded runs, whether a sampled span or the executor's `trace`
caused the recording.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import attach
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

from penstock.core.calls.graph_plan import RunStatus
from penstock.pools.timers import clock
from penstock.telemetry.registry import task_name
from penstock.telemetry.spans import record_error

if TYPE_CHECKING:
    from penstock.core.calls.graph_plan import Plan
    from penstock.graphs.node_attempts import NodeAttempt
    from penstock.graphs.result import RunResult
    from penstock.graphs.trace import Trace
    from penstock.telemetry.meters import Meters


log = logging.getLogger("penstock")


@contextmanager
def quietly() -> Iterator[None]:
    """
    Log exceptions in this block (or decorated function) and drop them: errors of span processors and
    exporters must not change a run.
    """
    try:
        yield
    except Exception:
        log.exception("telemetry of a graph failed")


class GraphTelemetry:
    """The telemetry of one executor."""

    def __init__(
        self, label: str, meters: Meters | None, provider: TracerProvider | None, *, spans: bool
    ) -> None:
        """`meters` is None without histograms."""
        self.labels = {"pool": label, "kind": "graph", "policy": "turns"}
        self._meters = meters
        self._tracer = trace.get_tracer("penstock", tracer_provider=provider) if spans else None

    def begin(self, plan: Plan) -> RunSpans | None:
        """None: there are no spans, or this run is not sampled."""
        if self._tracer is None:
            return None
        now = clock()
        zero = time.time_ns() - int(now * 1e9)
        attributes: dict[str, str | int] = {"graph": plan.name, "nodes": len(plan), **self.labels}
        span = self._tracer.start_span(
            f"penstock.graph {plan.name}",
            kind=SpanKind.PRODUCER,
            attributes=attributes,
            start_time=zero + int(now * 1e9),
        )
        return RunSpans(span, self._tracer, zero) if span.is_recording() else None

    @quietly()
    def measure(self, result: RunResult, recorded: Trace) -> None:
        """Fill the histograms from a recorded run."""
        if self._meters is None:
            return
        for event in recorded.events:
            fn = result.plan.functions[result.plan.index[event.node]]
            labels = {"task": task_name(fn), **self.labels}
            self._meters.wait.record(event.queue_delay * 1000, labels)
            self._meters.pending.record(event.queue_delay * 1000, labels)
            self._meters.duration.record(event.seconds * 1000, labels)


class RunSpans:
    """The spans of one sampled run."""

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

    @quietly()
    def enter(self, span: Span) -> None:
        """Make this span the parent of the node's own spans. Called in the context in which the node runs."""
        attach(trace.set_span_in_context(span))

    @quietly()
    def end(self, attempt: NodeAttempt) -> None:
        ended = self._zero + int(attempt.ended * 1e9)
        if attempt.error is not None:
            record_error(attempt.span, attempt.error, ended)
        attempt.span.end(ended)

    @quietly()
    def close(self, result: RunResult, at: float) -> None:
        self._span.set_attribute("outcome", str(result.status))
        if result.status in (RunStatus.ERROR, RunStatus.DEADLINE):
            self._span.set_status(Status(StatusCode.ERROR, f"the run {result.reason}"))
        self._span.end(self._zero + int(at * 1e9))
