"""What the workers of test_otel.py run. A module of its own, because they import it by name."""

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from opentelemetry import baggage, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from penstock import current_call


class FileExporter(SpanExporter):
    """A line for each span, written at once: a worker may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._path.open("a") as file:
            for span in spans:
                assert span.context is not None
                line = {
                    "name": span.name,
                    "trace": span.context.trace_id,
                    "id": span.context.span_id,
                    "parent": span.parent.span_id if span.parent else None,
                    "attributes": dict(span.attributes or {}),
                    "status": span.status.status_code.name,
                }
                file.write(json.dumps(line) + "\n")
        return SpanExportResult.SUCCESS


def set_up_sdk(path: Path) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter(path)))
    trace.set_tracer_provider(provider)


def work(x: int) -> int:
    with trace.get_tracer("the user's").start_as_current_span("inside"):
        return x * 2


def fail() -> None:
    raise ValueError("no")


def where_am_i() -> tuple[int, int, object]:
    context = trace.get_current_span().get_span_context()
    return context.trace_id, context.span_id, baggage.get_baggage("tenant")


def die_once() -> int:
    call = current_call()
    assert call is not None
    if call.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return call.attempt


def until_canceled(began: Path) -> None:
    call = current_call()
    assert call is not None
    began.touch()
    while not call.canceled:
        time.sleep(0.001)


def hang(began: Path) -> None:
    began.touch()
    time.sleep(60)


class Model:
    def predict(self, x: int) -> int:
        return x
