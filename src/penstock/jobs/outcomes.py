"""
How a job can have ended, for whoever waits for it, and how a run says so.

    PenstockError
    └── CallEnded
        ├── JobFailed     the job is FAILED or BLOCKED; `traceback` is the function's own, as text
        └── JobCanceled   somebody asked for that (also a concurrent.futures.CancelledError)

A failure crosses processes as text alone: an exception would have to be rebuilt from a file that others can write to.
"""

from __future__ import annotations

import traceback
from concurrent.futures import CancelledError
from typing import Final, NamedTuple

from penstock.core.errors import CallEnded
from penstock.core.landing import End

__all__ = ["JobCanceled", "JobFailed", "Outcome", "failure"]

MAX_ERROR: Final = 16_000


class JobFailed(CallEnded):
    """`job_id`, `state`, `reason` (which end it was), `traceback`."""

    code = "job_failed"


class JobCanceled(CallEnded, CancelledError):
    code = "job_canceled"


class Outcome(NamedTuple):
    """What a run reports. Where the job lands is decided by the table of the core."""

    end: End
    result: str | None = None
    error: str | None = None


def failure(error: BaseException, end: End = End.JOB_ERROR) -> Outcome:
    """The first line says what it was; then the traceback, its middle cut out when it is long."""
    frames = error.__traceback__
    # Ours come first, and say nothing about the job.
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("penstock."):
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    summary = traceback.format_exception_only(error)[-1].strip()
    text = f"{summary}\n{''.join(lines)}"
    if len(text) > MAX_ERROR:
        half = MAX_ERROR // 2
        text = f"{text[:half]}\n... {len(text) - MAX_ERROR} characters left out ...\n{text[-half:]}"
    return Outcome(end, error=text)
