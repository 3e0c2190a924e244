"""
Traces of calls, from the caller through the queue into the worker.

A call has two spans. `penstock.call` begins with the call, ends with the outcome, and has an event for each
step (queued, dispatch, requeue). Its child `penstock.run` is one attempt in a worker; spans of the function
there join the caller's trace. The context is sent in the W3C format, whatever propagator the program uses
elsewhere, because Penstock is on both ends.

Times come from the pools' clock (DQ-10), converted to the wall clock once per call. So an event "dispatched
after 3 ms" is 3 ms after the span's beginning, even if the machine's time is changed meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.core.errors import CallCanceled, CallTimeout, QueueDropError
from penstock.core.text import error_line, is_kind, qualified_name, safe_str, traceback_text
from penstock.pools.context import current_call
from penstock.pools.future import Call
from penstock.pools.timers import clock
from penstock.telemetry.hooks import QueueHooks
from penstock.telemetry.registry import labels_of, task_name

if TYPE_CHECKING:
    from penstock.pools.calling import PoolInternals

_propagator = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])


def trace_calls(pool: PoolInternals, provider: TracerProvider | None) -> None:
    """Make a span for each call of this pool. The provider of the last call of this function counts."""
    tracer = trace.get_tracer("penstock", tracer_provider=provider)
    if isinstance(pool.tracing, CallSpans):
        pool.tracing.tracer = tracer
        return
    pool.tracing = tracing = CallSpans(tracer, pool)
    pool.call_queue.hooks.add(tracing)


class CallSpans(QueueHooks):
    """Begins and ends the spans of one pool's callers."""

    def __init__(self, tracer: Tracer, pool: PoolInternals) -> None:
        self.tracer = tracer
        self._labels = {**labels_of(pool), "pool": pool.name}
        self._target = pool.options.target
        self._same_process = pool.group.kind == "thread"

    def begin(self, call: Call[Any]) -> None:
        """
        Begin the span, before the call enters the queue. Called on the caller's thread, whose current span is
        the parent.
        """
        task = task_name(call.fn, self._target)
        now = clock()
        zero = time.time_ns() - int(now * 1e9)
        span = self.tracer.start_span(
            f"penstock.call {task}",
            kind=SpanKind.PRODUCER,
            attributes={"task": task, **self._labels},
            start_time=zero + int((call.called_at or now) * 1e9),  # a reservation was called before
        )
        if not span.get_span_context().is_valid and not get_current():
            return  # tracing is off, and there is no baggage to send
        context = trace.set_span_in_context(span)
        if self._same_process:
            call.extra = _ThreadTrace(context, self.tracer)
        else:
            carrier: dict[str, str] = {}
            _propagator.inject(carrier, context)
            call.extra = carrier or None
        if span.is_recording():
            call.span = CallSpan(span, zero)

    def on_queued(self, call: Call[Any]) -> None:
        if call.span is not None:
            call.span.note("queued", call.entered_at, {"waiting_ms": call.waiting_for * 1000})

    def on_dispatch(self, call: Call[Any]) -> None:
        if call.span is not None:
            wait = call.last_wait - (call.waiting_for if call.attempt == 1 else 0.0)
            call.span.note(
                "dispatch", call.entered_at + wait, {"attempt": call.attempt, "pending_ms": wait * 1000}
            )

    def on_requeue(self, call: Call[Any]) -> None:
        if call.span is not None:
            call.span.note("requeue", call.entered_at, {"attempt": call.attempt, "crashes": call.crashes})

    def on_settle(self, call: Call[Any]) -> None:
        if call.span is not None:
            call.span.end(call, call.error)


class CallSpan:
    """
    The span of a call while it is traced. `on_settle` ends it, after the other hooks; the call queue ends it
    for calls that end otherwise.
    """

    __slots__ = ("_span", "_zero")

    def __init__(self, span: Span, zero: int) -> None:
        self._span = span
        self._zero = zero

    def note(self, event: str, at: float, attributes: dict[str, float]) -> None:
        self._span.add_event(event, attributes, self._zero + int(at * 1e9))

    def end(self, call: Call[Any], error: BaseException | None) -> None:
        span, call.span = self._span, None
        span.set_attributes(
            {
                "outcome": _outcome(error),
                "attempt": call.attempt,
                "wait_ms": call.waited * 1000,
                "waiting_ms": call.waiting_for * 1000,
                "pending_ms": call.pending_for * 1000,
                "duration_ms": call.ran_for * 1000,
            }
        )
        if call.key is not None:
            span.set_attribute("key", safe_str(call.key, 200))
        if is_kind(error, (CallCanceled, CallTimeout)):
            span.set_attribute("phase", str(error.phase))
        if error is not None and not is_kind(error, CallCanceled):  # a requested cancel is no error
            record_error(span, error, self._zero + int(clock() * 1e9))
        span.end(self._zero + int(clock() * 1e9))


def _outcome(error: BaseException | None) -> str:
    match error:
        case None:
            return "success"
        case CallCanceled():
            return "canceled"
        case CallTimeout():
            return "timed_out"
        case QueueDropError():
            return "rejected"
        case _:
            return "failure"


class _ThreadTrace(NamedTuple):
    """The trace context for a thread of this process, without serialization."""

    context: Context
    tracer: Tracer


def run_as_child(
    carried: _ThreadTrace | dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """
    Run the function in a span that is a child of the caller's.

    The caller's context is attached first, with its baggage. So requests that the function sends continue the
    trace, even without an SDK in this process.
    """
    if isinstance(carried, _ThreadTrace):
        context, tracer = carried
    else:
        context, tracer = _propagator.extract(carried), _worker_tracer
    task, call = task_name(fn), current_call()
    attempt = call.attempt if call is not None else 1
    token = attach(context)
    try:
        with tracer.start_as_current_span(
            f"penstock.run {task}",
            kind=SpanKind.CONSUMER,
            attributes={"task": task, "attempt": attempt, "pid": os.getpid()},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                return fn(*args, **kwargs)
            except Exception as error:
                record_error(span, error)
                raise
    finally:
        detach(token)


#: The tracer of the global provider, even if an initializer sets it later.
_worker_tracer = trace.get_tracer("penstock")


def record_error(span: Span, error: BaseException, timestamp: int | None = None) -> None:
    """
    Add an exception of user code to a span, as `Span.record_exception` does, and set the status. The SDK
    formats exceptions unguarded, and would raise what their `__str__` raises.
    """
    attributes = {
        "exception.type": qualified_name(error),
        "exception.message": safe_str(error),
        "exception.stacktrace": traceback_text(error),
        "exception.escaped": "False",
    }
    span.add_event("exception", attributes, timestamp)
    span.set_status(Status(StatusCode.ERROR, error_line(error)))
