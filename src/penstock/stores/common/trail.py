"""The events of a transaction as one text: an array each, in their order, and null for one that is forgotten."""

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
#: The character NUL as JSON writes it, which is not the letters of it behind an escaped backslash.
_NUL: Final = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")


def pack(events: Sequence[Sequence[Any] | None]) -> bytes:
    """Each is at, kind, job_id, n, state, reason, attempt, data."""
    text = _write(events)
    if (
        b"\\u0000" in text
    ):  # which PostgreSQL cannot make a text of, and a trail is the same text in every store
        text = _NUL.sub("\\1\N{SYMBOL FOR NULL}".encode(), text)
    return text


def unpack(before: int, text: str) -> Iterator[Event]:
    """`before`: the number of the event before the first of them."""
    for seq, told in enumerate(_read(text), before + 1):
        if told is not None:
            yield _event(seq, told)


def _event(seq: int, told: Sequence[Any]) -> Event:
    at, kind, job_id, n, state, reason, attempt, data = told
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
    """Without what it tells of these jobs; None when nothing is left."""
    left = [None if told is None or told[_JOB_ID] in gone else told for told in _read(text)]
    return pack(left).decode() if any(left) else None
