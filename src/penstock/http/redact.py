"""
What a token that is bound to an addon must not learn: that another addon's job exists, or which one it is.

The reasons of a wait name the jobs that are in the way. To their own addon they are names; to any other they are "another job".
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from penstock.core.words import JobId
from penstock.http import wire
from penstock.http.office import Call

__all__ = ["redacted"]

T = TypeVar("T", wire.Explained, wire.LeaseGranted)


def redacted(call: Call[Any, Any], told: T) -> T:
    if call.principal.addon_id is None:
        return told
    data = dict(told.reason_data or {})
    ahead: list[wire.Ahead] = told.ahead if isinstance(told, wire.Explained) else []
    heads: dict[str | None, str | None] = {head.job_id: head.addon_id for head in ahead}
    named: dict[str, str] = {name: data[name] for name in ("job_id", "kept_for") if data.get(name)}
    foreign = [
        job_id for job_id in {*heads, *named.values()} if job_id is not None and not _own(call, JobId(job_id))
    ]
    if not foreign:
        return told
    for name, job_id in named.items():
        if job_id in foreign:
            data[name] = None
    changes: dict[str, Any] = {"reason_data": data or None}
    if isinstance(told, wire.Explained):
        changes["text"] = _without(told.text, foreign, heads)
        changes["ahead"] = [
            wire.Ahead(None, None, head.why) if head.job_id in foreign else head for head in told.ahead
        ]
    else:
        changes["message"] = _without(told.message, foreign, heads)
    return msgspec.structs.replace(told, **changes)


def _own(call: Call[Any, Any], job_id: JobId) -> bool:
    job = call.store.job(job_id)
    return job is not None and call.owns(job.intent.addon_id)


def _without(text: str, foreign: list[str], heads: dict[str | None, str | None]) -> str:
    for job_id in foreign:
        short = f"job {job_id[-8:]}"
        text = text.replace(f"{short} of {heads.get(job_id)}", "another job").replace(short, "another job")
    return text
