"""The events of one transaction as one JSON text: an array for each in their order, null for a pruned one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import msgspec

from penstock.core.jobs.job import Event, EventKind, dispatch_id_of
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import DispatchId, JobId

__all__ = ["forget", "pack", "unpack"]

_write: Final = msgspec.json.Encoder().encode
_read: Final = msgspec.json.Decoder(list[Any]).decode
_JOB_ID: Final = 2
#: The character NUL as JSON writes it. The same letters behind an escaped backslash are no NUL.
_NUL: Final = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")


def pack(events: Sequence[Sequence[Any] | None]) -> bytes:
    """Each is at, kind, job_id, n, state, reason, attempt, data."""
    text = _write(events)
    # PostgreSQL cannot store NUL in a text, and a trail is the same text in every store.
    if b"\\u0000" in text:
        text = _NUL.sub("\\1\N{SYMBOL FOR NULL}".encode(), text)
    return text


def unpack(before: int, text: str) -> Iterator[Event]:
    """`before`: the number of the event before the first of them."""
    for seq, row in enumerate(_read(text), before + 1):
        if row is not None:
            yield _event(seq, row)


def _event(seq: int, row: Sequence[Any]) -> Event:
    at, kind, job_id, n, state, reason, attempt, data = row
    dispatch_id = attempt
    if job_id is not None and attempt is not None:
        dispatch_id = dispatch_id_of(JobId(job_id), int(attempt))
    return Event(
        seq=seq,
        at=at,
        kind=EventKind(kind),
        job_id=None if job_id is None else JobId(job_id),
        n=n,
        state=None if state is None else JobState(state),
        reason=reason,
        dispatch_id=None if dispatch_id is None else DispatchId(dispatch_id),
        data=data or {},
    )


def forget(text: str, gone: Collection[str]) -> str | None:
    """The text without the events of these jobs; None when no event remains."""
    kept = [None if row is None or row[_JOB_ID] in gone else row for row in _read(text)]
    return pack(kept).decode() if any(kept) else None
