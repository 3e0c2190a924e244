"""An exception of user code on an OpenTelemetry span. The SDK formats it unguarded, and would raise what its `__str__` raises."""

from __future__ import annotations

from opentelemetry.trace import Span, Status, StatusCode

from penstock.core.text import error_line, qualified_name, safe_str, traceback_text

__all__ = ["record_error"]


def record_error(span: Span, error: BaseException, timestamp: int | None = None) -> None:
    """The event that `Span.record_exception` adds, and the status."""
    attributes = {
        "exception.type": qualified_name(error),
        "exception.message": safe_str(error),
        "exception.stacktrace": traceback_text(error),
        "exception.escaped": "False",
    }
    span.add_event("exception", attributes, timestamp)
    span.set_status(Status(StatusCode.ERROR, error_line(error)))
