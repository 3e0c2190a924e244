"""
The functions of a worker by job type, and how one is called: a payload that is an object becomes keyword arguments, a list positional
ones, null none, anything else the one argument. What comes of it is an `Ending`, never an exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, TypeAlias

from penstock.client.context import JobContext, encoded
from penstock.core.errors import JobStopped, Unavailable
from penstock.core.text import error_text, is_kind, safe_str
from penstock.wire import Failure

__all__ = ["Ending", "Failed", "Handler", "Released", "Succeeded", "call"]

Handler: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Succeeded:
    result: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    error: str
    failure: Failure = Failure.JOB_ERROR


@dataclass(frozen=True, slots=True)
class Released:
    """The lease is given back without a result: it stopped as it was asked to, or never began."""


Ending: TypeAlias = Succeeded | Failed | Released


def call(handler: Handler, job: JobContext) -> Ending:
    args, kwargs = _arguments(job)
    try:
        result = handler(*args, **kwargs)
        if type(result) is CoroutineType:
            result, error = asyncio.run(_awaited(result))
            if error is not None:
                raise error
    except JobStopped:
        return Released()
    except Unavailable as error:
        return Failed(error_text(error), Failure.UNAVAILABLE)
    except BaseException as error:  # noqa: BLE001  # whatever a job raises is the job's own end, KeyboardInterrupt too
        if is_kind(error, TypeError) and _at_the_door(error):
            return Failed(f"the payload does not fit {_name(handler)}: {safe_str(error)}")
        return Failed(error_text(error))
    try:
        return Succeeded(encoded(result))
    except BaseException as error:  # noqa: BLE001  # a foreign type may raise anything
        return Failed(f"{_name(handler)} returned what JSON has no form for: {safe_str(error)}")


async def _awaited(coroutine: CoroutineType[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """What it raises must not pass through the event loop, which looks at its `__class__` and then never ends."""
    try:
        return await coroutine, None
    except BaseException as error:  # noqa: BLE001  # it is raised again outside
        return None, error


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
