"""
The functions of a worker by job type, and how one is called: a payload that is an object becomes keyword arguments, a list positional
ones, null none, anything else the one argument. What comes of it is an `Ending`, never an exception.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from penstock.client.context import JobContext
from penstock.core.errors import JobStopped, JobUnavailable
from penstock.core.refusals import Unavailable
from penstock.http.wire import Failure

__all__ = ["Done", "Ending", "Failed", "Given", "Handler", "call"]

Handler: TypeAlias = Callable[..., Any]
MAX_ERROR: Final = 16_000


@dataclass(frozen=True, slots=True)
class Done:
    result: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    error: str
    failure: Failure = Failure.JOB_ERROR


@dataclass(frozen=True, slots=True)
class Given:
    """The lease is given back without a result: it stopped as it was asked to, or never began."""


Ending: TypeAlias = Done | Failed | Given


def call(handler: Handler, job: JobContext) -> Ending:
    args, kwargs = _arguments(job)
    try:
        result = handler(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except JobStopped:
        return Given()
    except (JobUnavailable, Unavailable) as error:
        return Failed(_told(error), Failure.UNAVAILABLE)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a job raises is the job's own end
        if isinstance(error, TypeError) and _at_the_door(error):
            return Failed(f"the payload does not fit {_name(handler)}: {error}")
        return Failed(_told(error))
    try:
        return Done(msgspec.json.encode(result))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return Failed(f"{_name(handler)} returned what JSON has no form for: {error}")


def _arguments(job: JobContext) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match job.payload:
        case dict() as named:
            return (job,), named
        case list() as listed:
            return (job, *listed), {}
        case None:
            return (job,), {}
        case value:
            return (job, value), {}


def _at_the_door(error: TypeError) -> bool:
    """Raised by the call itself, before a line of the function ran. To bind the arguments first would cost every call what few need."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def _name(handler: Handler) -> str:
    return f"{getattr(handler, '__qualname__', type(handler).__name__)}()"


def _told(error: BaseException) -> str:
    """The first line says what it was; then the traceback, its middle cut out when it is long."""
    # The first frame is ours, and says nothing about the job.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    summary = traceback.format_exception_only(error)[-1].strip()
    text = summary + "\n" + "".join(traceback.format_exception(type(error), error, frames))
    if len(text) > MAX_ERROR:
        half = MAX_ERROR // 2
        text = f"{text[:half]}\n... {len(text) - MAX_ERROR} characters left out ...\n{text[-half:]}"
    return text.replace("\0", "\\0")
