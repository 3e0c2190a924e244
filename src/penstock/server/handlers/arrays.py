"""
Handlers for arrays: submit, look, wait, cancel, retry.

To submit or retry one takes the rights of a submit of its job, those for commands included. A token that is
bound to an addon sees and touches that addon's arrays alone.
"""

from __future__ import annotations

from typing import Any

from msgspec import UnsetType

from penstock import wire
from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs.arrays import ArrayRecord
from penstock.core.jobs.intent import title_of
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import when
from penstock.scheduler.arrays import ArrayService
from penstock.server.handlers.jobs import check_runner, intent_from, may_submit
from penstock.server.problems import naming_fields
from penstock.server.request import Request, or_none

_MOST_TEXT = 1_000


def array_submit(call: Request[None, wire.ArrayBody]) -> wire.ArrayInfo:
    body = call.body
    if body.job.wait_sec:
        raise naming_fields(BadIntent, ("job.wait_sec", "cannot be part of an array"))
    intent = intent_from(body.job)
    may_submit(call, intent, "job.")
    record, is_new = _service(call).submit(intent, body.array, call.principal.name)
    return _info(call, record, created=is_new)


def array_list(call: Request[wire.ArraysQuery, None]) -> wire.ArrayList:
    addon_id = call.addon(or_none(call.query.addon_id))
    return wire.ArrayList(
        [_info(call, record) for record in _service(call).newest(call.query.limit, addon_id)]
    )


async def array_get(call: Request[wire.ArrayQuery, None]) -> wire.ArrayInfo:
    return await call.poll(
        call.query.wait_sec,
        lambda: call.run(_get, call),
        lambda array: array.state is not JobState.RUNNING,
        lambda event: event.kind is EventKind.ARRAY_ENDED and event.data.get("array_id") == call.path,
    )


def _get(call: Request[wire.ArrayQuery, None]) -> wire.ArrayInfo:
    index = call.query.index
    job_id = None if isinstance(index, UnsetType) else _service(call).job_of(_own(call).array.array_id, index)
    return _info(call, _own(call), job_id=job_id)


def array_cancel(call: Request[None, None]) -> wire.ArrayInfo:
    return _info(call, _service(call).cancel(_own(call).array.array_id, call.principal.name))


def array_retry(call: Request[None, None]) -> wire.ArrayInfo:
    record = _own(call)
    check_runner(call, record.array.intent)
    return _info(call, _service(call).retry(record.array.array_id, call.principal.name))


def _service(call: Request[Any, Any]) -> ArrayService:
    return call.app_state.service.arrays


def _own(call: Request[Any, Any]) -> ArrayRecord:
    """An array that does not exist and one of another addon get the same answer."""
    record = call.store.array(call.job_id)
    if record is None or not call.owns(record.array.intent.addon_id):
        raise NotFound(f"there is no array {call.path}", array_id=call.path)
    return record


def _failed(call: Request[Any, Any], record: ArrayRecord) -> str:
    """As ranges; cut when they grow long."""
    text = ""
    for each in _service(call).failed_indices(record):
        text += f",{each}"
        if len(text) > _MOST_TEXT + 1:
            return f"{text[1 : _MOST_TEXT + 1].rpartition(',')[0]},..."
    return text[1:]


def _info(call: Request[Any, Any], record: ArrayRecord, **more: Any) -> wire.ArrayInfo:
    array, progress = record.array, record.progress
    spec = array.spec
    return wire.ArrayInfo(
        array_id=array.array_id,
        addon_id=array.intent.addon_id,
        job_type=array.intent.job_type,
        title=title_of(array.intent),
        state=record.state,
        indices=array.indices,
        total=spec.total,
        at_once=spec.at_once,
        waiting=progress.waiting(spec),
        live=len(progress.live),
        done=progress.done,
        failed=progress.failed,
        canceled=progress.canceled,
        failed_indices=_failed(call, record),
        live_jobs=[str(job_id) for job_id in record.live_jobs()],
        created_at=when(array.created_at),
        ended_at=None if progress.ended_at is None else when(progress.ended_at),
        **more,
    )
