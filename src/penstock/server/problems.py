"""
Turns every error into application/problem+json: what happened, which fields are wrong, and what to do about
it.

Errors of the core have a code, a status and data. This file adds the refusals of HTTP itself to the same
tree. Any other error is a bug of Penstock: it is logged with its traceback, and the client learns only that
it happened.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from penstock.core.errors import PenstockError, Refused, Unavailable
from penstock.wire import FieldProblem, ProblemDetails

log = logging.getLogger("penstock.server")


class BadFields(Refused, ValueError):
    """Fields of the request are wrong. `problems` lists them, as in BadIntent."""

    code = "bad_fields"
    status = 422


class NotUtf8(BadFields):
    """The body is not UTF-8. `problems` names the field."""

    code = "not_utf8"
    status = 400


class BadToken(Refused):
    code = "unauthorized"
    status = 401


class Forbidden(Refused):
    code = "forbidden"
    status = 403


class OverLimit(Refused):
    """The request goes beyond the limits of its token: its addon, units, priority or rights."""

    code = "over_token_limit"
    status = 403


class NoRoute(Refused, LookupError):
    code = "no_route"
    status = 404


class WrongVerb(Refused):
    """The path does not have this verb. `allowed`: the verbs that it has."""

    code = "method_not_allowed"
    status = 405


class TooSlow(Refused):
    code = "too_slow"
    status = 408


class TooLarge(Refused):
    code = "too_large"
    status = 413


class NotJson(Refused):
    code = "not_json"
    status = 415


class TooMany(Refused):
    code = "too_many"
    status = 429


class Stopping(Unavailable):
    code = "stopping"


R = TypeVar("R", bound=Refused)


def naming_fields(kind: type[R], *problems: tuple[str, str], **data: object) -> R:
    """A refusal with the problems of all fields. Its message is the first problem."""
    [(field, message), *_] = problems
    listed = [{"field": name, "message": text} for name, text in problems]
    return kind(f"{field} {message}", problems=listed, **data)


#: By code: the title, and what to do.
HINTS: Final[dict[str, tuple[str, str]]] = {
    "bad_intent": ("The job cannot be accepted", "Correct the fields in `problems` and submit again."),
    "bad_fields": ("The request is not well-formed", "Correct the fields in `problems` and send it again."),
    "not_utf8": ("The request is not UTF-8", "Encode the field in `problems` as UTF-8 and send it again."),
    "not_found": ("Not found", "Check the id; a list shows what this token may see."),
    "no_route": ("There is no such path", "openapi.json lists the paths."),
    "illegal_move": ("The job's state does not allow this", "`data.allowed` lists what is allowed now."),
    "stale_dispatch": ("This lease no longer counts", "Stop the attempt: its job gets another lease."),
    "not_written": ("The database cannot keep this", "Send a shorter text; the log has the details."),
    "key_conflict": ("The key or name is taken", "Use another one. A key also accepts the same body again."),
    "queue_full": ("The queue is full", "Submit again after `retry_after_sec`, or give `wait_sec`."),
    "unauthorized": ("A token is needed", "Send `Authorization: Bearer <token>` with a token that is valid."),
    "forbidden": ("This is not allowed", "`detail` says what the token or the host lacks."),
    "over_token_limit": ("The token does not allow that much", "Ask for less, or use another token."),
    "method_not_allowed": ("The path does not allow this method", "Use one of the methods in `Allow`."),
    "too_slow": ("The request took too long to arrive", "Send the whole request at once."),
    "too_large": ("The request is too large", "Keep large data elsewhere; send its address."),
    "not_json": ("Only JSON is understood", "Send `Content-Type: application/json` and a JSON body."),
    "too_many": ("Too many at once with this token", "Finish some of what is open, then try again."),
    "store_failed": ("The database is not available", "Nothing was accepted; try again. The log says why."),
    "outcome_unknown": (
        "It may or may not have been written",
        "Ask for the jobs in `data.job_ids`, or submit again with the same idempotency key.",
    ),
    "schema_newer": ("The database is newer than this program", "The operator must start the newer version."),
    "dispatcher_held": ("Another process dispatches", "Send the request to that process."),
    "stopping": ("The scheduler is stopping", "Try again when it is back."),
}
_OURS: Final = ("Something went wrong in Penstock", "The log of the daemon has the details.")


#: The most wrong fields in an answer, and the most characters of a message and of a field's name: an answer
#: must not be larger than its request.
MOST_PROBLEMS: Final = 20
_MOST_WORDS: Final = 1_000
_MOST_NAME: Final = 100


def problem_of(error: BaseException) -> ProblemDetails:
    """The answer for an error. Logs an error that is no refusal."""
    if not isinstance(error, (Refused, Unavailable)):
        log.error("a request failed", exc_info=error)
        return ProblemDetails(
            type="urn:penstock:internal",
            title=_OURS[0],
            status=500,
            detail="an unexpected error",
            code="internal",
            hint=_OURS[1],
        )
    if isinstance(error, Unavailable):
        log.warning("a request failed: %s", error)
    title, hint = HINTS.get(error.code, (error.code.replace("_", " "), ""))
    data = dict(error.data)
    return ProblemDetails(
        type=f"urn:penstock:{error.code}",
        title=title,
        status=error.status,
        detail=_short(str(error)),
        code=error.code,
        hint=hint,
        problems=_field_problems(data.pop("problems", ())),
        retry_after_sec=_retry_after(error, data),
        data=_plain(data),
    )


def _field_problems(problems: Sequence[Mapping[str, str]]) -> list[FieldProblem]:
    listed = [FieldProblem(p["field"][:_MOST_NAME], _short(p["message"])) for p in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        listed.append(FieldProblem("body", f"has more problems; the first {MOST_PROBLEMS} are listed"))
    return listed


def _short(words: str) -> str:
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}..."


def _retry_after(error: PenstockError, data: dict[str, Any]) -> float | None:
    seconds = data.pop("retry_after_sec", None)
    if seconds is None and isinstance(error, Unavailable):
        return 5.0
    return None if seconds is None else math.ceil(float(seconds) * 1_000) / 1_000


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(data, enc_hook=str)
    return plain
