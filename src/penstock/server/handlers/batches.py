"""
Handlers for batches: submit, look, wait, close, cancel, retry.

To submit or retry one takes the rights of a submit of each of its jobs, those for commands included. A token that is
bound to an addon sees and touches that addon's batches alone.
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
from penstock.server.handlers.jobs import check_runner, intent_from, may_submit
from penstock.server.problems import OverLimit, naming_fields
from penstock.server.request import Request, or_none


def batch_submit(call: Request[None, wire.BatchBody]) -> wire.BatchInfo:
    body = call.body
    if not call.owns(body.addon_id):
        message = f"must be {call.principal.addon_id} with this token"
        raise naming_fields(OverLimit, ("addon_id", message))
    request = BatchRequest(
        body.name,
        AddonId(body.addon_id),
        [_intent(call, f"jobs[{at}].", job) for at, job in enumerate(body.jobs)],
        None if body.on_end is None else _intent(call, "on_end.", body.on_end),
        None if body.on_failure is None else _intent(call, "on_failure.", body.on_failure),
        body.open,
        body.idempotency_key,
    )
    group, created, receipts = _service(call).submit(request, call.principal.name)
    jobs = tuple(str(receipt.job_id) for receipt in receipts[: len(body.jobs)])
    return _info(call, group, created=created, jobs=jobs)


def _intent(call: Request[Any, Any], at: str, body: wire.SubmitBody) -> Intent:
    if body.wait_sec:
        raise naming_fields(BadIntent, (f"{at}wait_sec", "cannot be part of a batch"))
    if body.batch is not None:
        raise naming_fields(BadIntent, (f"{at}batch", "cannot be given here: the job is in this batch"))
    intent = intent_from(body)
    may_submit(call, intent, at)
    return intent


def batch_list(call: Request[wire.BatchesQuery, None]) -> wire.BatchList:
    addon_id = call.addon(or_none(call.query.addon_id))
    groups = _service(call).newest(call.query.limit, addon_id)
    return wire.BatchList([_info(call, group, callbacks=()) for group in groups])


async def batch_get(call: Request[wire.BatchQuery, None]) -> wire.BatchInfo:
    return await call.poll(
        call.query.wait_sec,
        lambda: call.run(_get, call),
        lambda batch: batch.state is not JobState.RUNNING,
        lambda event: event.kind is EventKind.BATCH_ENDED and event.data.get("batch") == call.path,
    )


def _get(call: Request[Any, None]) -> wire.BatchInfo:
    return _info(call, _own(call))


def batch_close(call: Request[None, None]) -> wire.BatchInfo:
    return _info(call, _service(call).close(_own(call).name, call.principal.name))


def batch_cancel(call: Request[None, None]) -> wire.BatchChangedAnswer:
    return _changed(call, _service(call).cancel(_own(call).name, call.principal.name))


def batch_retry(call: Request[None, None]) -> wire.BatchChangedAnswer:
    def check_job(job: Job) -> None:
        check_runner(call, job.intent)

    return _changed(call, _service(call).retry(_own(call).name, call.principal.name, check_job))


def _changed(call: Request[Any, Any], result: BatchChanged) -> wire.BatchChangedAnswer:
    return wire.BatchChangedAnswer(result.changed, _info(call, result.group))


def _service(call: Request[Any, Any]) -> BatchService:
    return call.app_state.service.batches


def _own(call: Request[Any, Any]) -> JobGroup:
    """A batch that does not exist and one of another addon get the same answer."""
    try:
        group = call.store.group(batch_id(str(call.path)))
    except ValueError:
        group = None
    if group is None or not call.owns(group.addon_id):
        raise NotFound(f"there is no batch {call.path}", batch=call.path)
    return group


_ON: Final = {ParentCondition.DONE: "end", ParentCondition.FAILED: "failure"}


def _callbacks(call: Request[Any, Any], group: JobGroup) -> tuple[wire.BatchCallback, ...]:
    found: list[wire.BatchCallback] = []
    for job in _service(call).callbacks(group):
        after = [d for d in job.intent.after if d.job_id == JobId(group.group_id)]
        if after and call.owns(job.intent.addon_id):
            on = _ON.get(after[0].condition, "end")
            found.append(wire.BatchCallback(on, job.job_id, job.state, title_of(job.intent)))
    return tuple(sorted(found, key=lambda callback: callback.on))


def _info(call: Request[Any, Any], group: JobGroup, **more: Any) -> wire.BatchInfo:
    if "callbacks" not in more:
        more["callbacks"] = _callbacks(call, group)
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
