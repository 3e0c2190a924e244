"""
Handlers for batches: submit, get, wait, close, cancel, retry.

Submitting or retrying a batch needs the rights for each of its jobs, for commands too. A token that is bound
to an addon sees and changes only that addon's batches, and only that addon's jobs in them.
"""

from __future__ import annotations

from typing import Any, Final

from penstock import wire
from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs.dependencies import ParentCondition
from penstock.core.jobs.groups import JobGroup, batch_id
from penstock.core.jobs.intent import Intent, title_of
from penstock.core.jobs.job import EventKind, Job
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, JobId, when
from penstock.scheduler.batches import BatchChanged, BatchRequest, BatchService
from penstock.server.handlers.jobs import check_runner, check_submit, intent_from
from penstock.server.problems import Forbidden, OverLimit, naming_fields
from penstock.server.request import Request, or_none


def batch_submit(request: Request[None, wire.BatchBody]) -> wire.BatchInfo:
    body = request.body
    if not request.owns(body.addon_id):
        message = f"must be {request.principal.addon_id} with this token"
        raise naming_fields(OverLimit, ("addon_id", message))
    batch_request = BatchRequest(
        body.name,
        AddonId(body.addon_id),
        [_intent(request, f"jobs[{at}].", job) for at, job in enumerate(body.jobs)],
        None if body.on_end is None else _intent(request, "on_end.", body.on_end),
        None if body.on_failure is None else _intent(request, "on_failure.", body.on_failure),
        body.open,
        body.idempotency_key,
    )
    group, created, receipts = _service(request).submit(batch_request, request.principal.name)
    jobs = tuple(str(receipt.job_id) for receipt in receipts[: len(body.jobs)])
    return _info(request, group, created=created, jobs=jobs)


def _intent(request: Request[Any, Any], at: str, body: wire.SubmitBody) -> Intent:
    if body.wait_sec:
        raise naming_fields(BadIntent, (f"{at}wait_sec", "cannot be part of a batch"))
    if body.batch is not None:
        raise naming_fields(BadIntent, (f"{at}batch", "cannot be given here: the job is in this batch"))
    intent = intent_from(body)
    check_submit(request, intent, at)
    return intent


def batch_list(request: Request[wire.BatchesQuery, None]) -> wire.BatchList:
    addon_id = request.addon(or_none(request.query.addon_id))
    groups = _service(request).newest(request.query.limit, addon_id)
    return wire.BatchList([_info(request, group, callbacks=()) for group in groups])


async def batch_get(request: Request[wire.BatchQuery, None]) -> wire.BatchInfo:
    return await request.poll(
        request.query.wait_sec,
        lambda: request.run(_get, request),
        lambda batch: batch.state is not JobState.RUNNING,
        lambda event: event.kind is EventKind.BATCH_ENDED and event.data.get("batch") == request.path,
    )


def _get(request: Request[Any, None]) -> wire.BatchInfo:
    return _info(request, _own(request))


def batch_close(request: Request[None, None]) -> wire.BatchInfo:
    return _info(request, _service(request).close(_own(request).name, request.principal.name))


def batch_cancel(request: Request[None, None]) -> wire.BatchChangedAnswer:
    def check_job(job: Job) -> None:
        _check_owner(request, job)

    return _changed(request, _service(request).cancel(_own(request).name, request.principal.name, check_job))


def batch_retry(request: Request[None, None]) -> wire.BatchChangedAnswer:
    def check_job(job: Job) -> None:
        _check_owner(request, job)
        check_runner(request, job.intent)

    return _changed(request, _service(request).retry(_own(request).name, request.principal.name, check_job))


def _check_owner(request: Request[Any, Any], job: Job) -> None:
    """An administrator can put jobs of other addons into a batch."""
    if not request.owns(job.intent.addon_id):
        raise Forbidden("the job belongs to another addon", job_id=job.job_id)


def _changed(request: Request[Any, Any], result: BatchChanged) -> wire.BatchChangedAnswer:
    return wire.BatchChangedAnswer(result.changed, _info(request, result.group))


def _service(request: Request[Any, Any]) -> BatchService:
    return request.app_state.service.batches


def _own(request: Request[Any, Any]) -> JobGroup:
    """The batch, if the token may see it; else NotFound, as `Request.own_job`."""
    try:
        group = request.store.group(batch_id(str(request.path)))
    except ValueError:
        group = None
    if group is None or not request.owns(group.addon_id):
        raise NotFound(f"there is no batch {request.path}", batch=request.path)
    return group


_ON: Final = {ParentCondition.DONE: "end", ParentCondition.FAILED: "failure"}


def _callbacks(request: Request[Any, Any], group: JobGroup) -> tuple[wire.BatchCallback, ...]:
    callbacks: list[wire.BatchCallback] = []
    for job in _service(request).callbacks(group):
        after = [d for d in job.intent.after if d.job_id == JobId(group.group_id)]
        if after and request.owns(job.intent.addon_id):
            on = _ON.get(after[0].condition, "end")
            callbacks.append(wire.BatchCallback(on, job.job_id, job.state, title_of(job.intent)))
    return tuple(sorted(callbacks, key=lambda callback: callback.on))


def _info(request: Request[Any, Any], group: JobGroup, **more: Any) -> wire.BatchInfo:
    if "callbacks" not in more:
        more["callbacks"] = _callbacks(request, group)
    return wire.BatchInfo(
        name=group.name,
        addon_id=group.addon_id,
        state=group.state or JobState.RUNNING,
        open=group.is_open,
        total=group.total,
        live=group.live,
        done=group.done,
        failed=group.failed,
        canceled=group.canceled,
        created_at=when(group.created_at),
        ended_at=None if group.ended_at is None else when(group.ended_at),
        **more,
    )
