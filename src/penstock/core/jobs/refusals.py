"""
What the durable scheduler raises, under the same root as everything else. The first level says whose move it is.

    PenstockError
    ├── Refused            the caller asked for what the rules forbid; nothing changed     HTTP 4xx
    │   ├── BadIntent      a field is out of bounds; `problems` names each (a ValueError)  422
    │   ├── NotFound       no such job, lease or addon, or not yours                       404
    │   ├── IllegalMove    the job's state has no such move                                409
    │   ├── StaleDispatch  a newer dispatch has taken over, or this one has ended          409
    │   ├── NotWritten     the store cannot write this operation, only this one            422
    │   ├── KeyConflict    the idempotency key was used with another body                  409
    │   └── QueueFull      the depth limit; `retry_after_sec`                              429
    └── Unavailable        something outside the caller is in the way; try again later     503
        ├── StoreFailed    disk full, read-only, damaged, locked; nothing was acknowledged
        │   └── OutcomeUnknown the commit failed half-way: it may be written; `job_ids` says what to ask for
        ├── SchemaNewer    the file belongs to a newer Penstock
        └── DispatcherHeld another process dispatches from this file; `holder` says which

A job that fails is none of these: it is an outcome, and lands by the table in `end_rule`.
"""

from __future__ import annotations

from typing import ClassVar

from penstock.core.errors import PenstockError

__all__ = [
    "BadIntent",
    "DispatcherHeld",
    "IllegalMove",
    "KeyConflict",
    "NotFound",
    "NotWritten",
    "OutcomeUnknown",
    "QueueFull",
    "Refused",
    "SchemaNewer",
    "StaleDispatch",
    "StoreFailed",
    "Unavailable",
]


class Refused(PenstockError):
    code = "refused"
    status: ClassVar[int] = 400


class BadIntent(Refused, ValueError):
    """`problems` is a list of {"field", "message"}: all of them, so that one round trip mends them all."""

    code = "bad_intent"
    status = 422


class NotFound(Refused, LookupError):
    code = "not_found"
    status = 404


class IllegalMove(Refused):
    """`state`, `move`, `allowed`: what was tried, and what could have been."""

    code = "illegal_move"
    status = 409


class StaleDispatch(Refused):
    code = "stale_dispatch"
    status = 409


class NotWritten(Refused):
    """Something in it is not fit for the database. What came with it was written."""

    code = "not_written"
    status = 422


class KeyConflict(Refused):
    code = "key_conflict"
    status = 409


class QueueFull(Refused):
    code = "queue_full"
    status = 429


class Unavailable(PenstockError):
    code = "unavailable"
    status: ClassVar[int] = 503


class StoreFailed(Unavailable):
    code = "store_failed"


class OutcomeUnknown(StoreFailed):
    """
    The database may or may not have written this. `job_ids`: of a submit, the jobs that exist if it has. Ask for them, or submit again with
    the same idempotency key; a second submit without a key may make a second job.
    """

    code = "outcome_unknown"


class SchemaNewer(Unavailable):
    code = "schema_newer"


class DispatcherHeld(Unavailable):
    code = "dispatcher_held"
