"""
How a job can have ended, for whoever waits for it, and how a run says so.

    PenstockError
    └── CallEnded
        ├── JobFailed     the job is FAILED or BLOCKED; `traceback` is the function's own, as text
        └── JobCanceled   somebody asked for that (also a concurrent.futures.CancelledError)

A failure crosses processes as text alone: an exception would have to be rebuilt from a file that others can write to.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import NamedTuple

from penstock.core.errors import CallEnded
from penstock.core.landing import EndReason
from penstock.core.text import error_text

__all__ = ["JobCanceled", "JobFailed", "Outcome", "failure"]


class JobFailed(CallEnded):
    """`job_id`, `state`, `reason` (which end it was), `traceback`."""

    code = "job_failed"


class JobCanceled(CallEnded, CancelledError):
    code = "job_canceled"


class Outcome(NamedTuple):
    """What a run reports. Where the job lands is decided by the table of the core."""

    end: EndReason
    result: str | None = None
    error: str | None = None


def failure(error: BaseException, end: EndReason = EndReason.JOB_ERROR) -> Outcome:
    """The first line says what it was; then the traceback, its middle cut out when it is long."""
    return Outcome(end, error=error_text(error))
