"""
Handlers for arrays: submit, get, wait, cancel, retry.

Submitting or retrying an array needs the rights for its job, for commands too. A token that is bound to an
addon sees and changes only that addon's arrays.
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
from penstock.server.handlers.jobs import check_runner, check_submit, intent_from
from penstock.server.problems import naming_fields
from penstock.server.request import Request, or_none

_MOST_TEXT = 1_000


def array_submit(request: Request[None, wire.ArrayBody]) -> wire.ArrayInfo:
    body = request.body
    if body.job.wait_sec:
        raise naming_fields(BadIntent, ("job.wait_sec", "cannot be part of an array"))
    if body.job.batch is not None:
        problem = "cannot be given with an array, which is waited for and canceled as one itself"
        raise naming_fields(BadIntent, ("job.batch", problem))
    intent = intent_from(body.job)
    check_submit(request, intent, "job.")
    record, is_new = _service(request).submit(intent, body.array, request.principal.name)
    return _info(request, record, created=is_new)


def array_list(request: Request[wire.ArraysQuery, None]) -> wire.ArrayList:
    addon_id = request.addon(or_none(request.query.addon_id))
    return wire.ArrayList(
        [_info(request, record) for record in _service(request).newest(request.query.limit, addon_id)]
    )


async def array_get(request: Request[wire.ArrayQuery, None]) -> wire.ArrayInfo:
    return await request.poll(
        request.query.wait_sec,
        lambda: request.run(_get, request),
        lambda array: array.state is not JobState.RUNNING,
        lambda event: event.kind is EventKind.ARRAY_ENDED and event.data.get("array_id") == request.path,
    )


def _get(request: Request[wire.ArrayQuery, None]) -> wire.ArrayInfo:
    index = request.query.index
    job_id = (
        None
        if isinstance(index, UnsetType)
        else _service(request).job_of(_own(request).array.array_id, index)
    )
    return _info(request, _own(request), job_id=job_id)


def array_cancel(request: Request[None, None]) -> wire.ArrayInfo:
    return _info(request, _service(request).cancel(_own(request).array.array_id, request.principal.name))


def array_retry(request: Request[None, None]) -> wire.ArrayInfo:
    record = _own(request)
    check_runner(request, record.array.intent)
    return _info(request, _service(request).retry(record.array.array_id, request.principal.name))


def _service(request: Request[Any, Any]) -> ArrayService:
    return request.app_state.service.arrays


def _own(request: Request[Any, Any]) -> ArrayRecord:
    """The array, if the token may see it; else NotFound, as `Request.own_job`."""
    record = request.store.array(request.job_id)
    if record is None or not request.owns(record.array.intent.addon_id):
        raise NotFound(f"there is no array {request.path}", array_id=request.path)
    return record


def _failed(request: Request[Any, Any], record: ArrayRecord) -> str:
    """The failed indices as ranges, cut after `_MOST_TEXT` characters."""
    text = ""
    for each in _service(request).failed_indices(record):
        text += f",{each}"
        if len(text) > _MOST_TEXT + 1:
            return f"{text[1 : _MOST_TEXT + 1].rpartition(',')[0]},..."
    return text[1:]


def _info(request: Request[Any, Any], record: ArrayRecord, **more: Any) -> wire.ArrayInfo:
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
        failed_indices=_failed(request, record),
        live_jobs=[str(job_id) for job_id in record.live_jobs()],
        created_at=when(array.created_at),
        ended_at=None if progress.ended_at is None else when(progress.ended_at),
        **more,
    )
