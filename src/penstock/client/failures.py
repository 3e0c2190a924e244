"""
What the scheduler refuses over HTTP is raised here as the same error that the library raises in process: who catches
StaleDispatch or QueueFull need not know which of the two it talks to.

    Unavailable
    └── Unreachable            no answer; `sent` says whether the request may have been carried out all the same

Every error that came as problem+json has its fields: `status`, `title`, `hint`, `problems`, `retry_after_sec`, and what the error knows by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.core import refusals
from penstock.core.errors import PenstockError
from penstock.core.refusals import Refused, Unavailable
from penstock.http.wire import ProblemDetails

__all__ = ["AccessDenied", "Unreachable", "error_of", "from_answer"]


class Unreachable(Unavailable):
    code = "unreachable"


class AccessDenied(Refused):
    """The token is missing, wrong, or may not do this."""

    code = "denied"
    status = 403


def from_answer(status: int, body: bytes) -> PenstockError:
    try:
        return error_of(msgspec.json.decode(body, type=ProblemDetails))
    except msgspec.MsgspecError:
        # Not from us: a proxy, or another program on that port.
        text = body[:200].decode("utf-8", "replace")
        kind = Unavailable if status >= 500 else Refused
        return kind(f"the answer {status} is not the scheduler's: {text!r}", status=status)


def error_of(problem: ProblemDetails) -> PenstockError:
    otherwise = (
        Unavailable if problem.status >= 500 else AccessDenied if problem.status in (401, 403) else Refused
    )
    kind = _KINDS.get(problem.code, otherwise)
    told: dict[str, Any] = {
        **problem.data,
        "title": problem.title,
        "hint": problem.hint,
        "problems": [{"field": one.field, "message": one.message} for one in problem.problems],
        "retry_after_sec": problem.retry_after_sec,
    }
    error = kind(problem.detail or problem.title, **told)
    # A code that this client does not know yet is still the one that was told.
    error.__dict__.update(code=problem.code, status=problem.status)
    if problem.hint:
        error.add_note(problem.hint)
    return error


def _kinds(root: type[PenstockError]) -> Iterator[tuple[str, type[PenstockError]]]:
    yield root.code, root
    for kind in root.__subclasses__():
        if kind.__module__ == refusals.__name__:
            yield from _kinds(kind)


_KINDS = dict(_kinds(Refused)) | dict(_kinds(Unavailable))
