"""
Handlers for schedules: add, get, edit, pause, resume, run now, remove.

A schedule submits jobs later, so adding, editing, resuming or running one needs the rights for its job, for
commands too. A token that is bound to an addon sees and changes only that addon's schedules.
"""

from __future__ import annotations

from typing import Any

from msgspec import UnsetType

from penstock import wire
from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs.intent import Intent, title_of
from penstock.core.jobs.moments import zone_or_utc
from penstock.core.jobs.schedules import Schedule, ScheduleRecord
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId, moment_of, when
from penstock.server.handlers.jobs import CONSTRAINT_FLAGS, amount, check_runner, check_submit, intent_from
from penstock.server.problems import naming_fields
from penstock.server.request import Request, as_answer, or_none, raw_json

_SHOWN_MOMENTS = 5


def schedule_list(request: Request[wire.SchedulesQuery, None]) -> wire.ScheduleList:
    addon_id = request.addon(or_none(request.query.addon_id))
    records = [
        record
        for record in request.app_state.service.schedules.list()
        if addon_id in (None, record.schedule.intent.addon_id)
    ]
    return wire.ScheduleList(_infos(request, records))


def schedule_get(request: Request[None, None]) -> wire.ScheduleInfo:
    return _info(request, _own(request))


def schedule_add(request: Request[None, wire.ScheduleBody]) -> wire.ScheduleInfo:
    body = request.body
    intent = _intent(body.job)
    check_submit(request, intent, "job.")
    cron = body.cron
    if body.quietest_hour_before is not None:
        if [body.cron, body.every_sec, body.at].count(None) != 3:
            raise naming_fields(BadIntent, ("quietest_hour_before", "cannot be given beside another time"))
        cron = request.app_state.service.schedules.quietest_line(body.quietest_hour_before, body.zone)
    schedule = Schedule(
        name=body.name,
        intent=intent,
        cron=cron,
        every_sec=body.every_sec,
        at=None if body.at is None else moment_of(body.at),
        zone=body.zone,
        overlap=body.overlap,
        missed=body.missed,
        missed_limit=body.missed_limit,
    )
    return _info(request, request.app_state.service.schedules.add(schedule, request.principal.name))


def schedule_edit(request: Request[None, wire.ScheduleEdit]) -> wire.ScheduleInfo:
    record, body = _own(request), request.body
    fields: dict[str, Any] = {}
    for name in ("cron", "every_sec", "zone", "overlap", "missed", "missed_limit"):
        if not isinstance(given := getattr(body, name), UnsetType):
            fields[name] = given
    if not isinstance(body.at, UnsetType):
        fields["at"] = moment_of(body.at)
    if not isinstance(body.job, UnsetType):
        fields["intent"] = _intent(body.job)
    if not isinstance(body.quietest_hour_before, UnsetType):
        if fields.keys() & {"cron", "every_sec", "at"}:
            raise naming_fields(BadIntent, ("quietest_hour_before", "cannot be given beside another time"))
        zone = fields.get("zone", record.schedule.zone)
        fields["cron"] = request.app_state.service.schedules.quietest_line(body.quietest_hour_before, zone)
    if not fields:
        raise naming_fields(BadIntent, ("body", "must have a field to change"))
    check_submit(request, fields.get("intent", record.schedule.intent), "job.")
    return _info(
        request, request.app_state.service.schedules.edit(record.name, request.principal.name, **fields)
    )


def schedule_pause(request: Request[None, None]) -> wire.ScheduleInfo:
    name = _own(request).name
    return _info(request, request.app_state.service.schedules.pause(name, request.principal.name))


def schedule_resume(request: Request[None, None]) -> wire.ScheduleInfo:
    record = _own(request)
    check_runner(request, record.schedule.intent)
    return _info(request, request.app_state.service.schedules.resume(record.name, request.principal.name))


def schedule_run(request: Request[None, wire.ScheduleRun]) -> wire.Submitted:
    record = _own(request)
    check_submit(request, record.schedule.intent)
    key = request.body.idempotency_key or ""
    receipt = request.app_state.service.schedules.run_now(record.name, request.principal.name, key)
    return as_answer(wire.Submitted, receipt)


def schedule_remove(request: Request[None, None]) -> wire.Ok:
    request.app_state.service.schedules.remove(_own(request).name, request.principal.name)
    return wire.Ok()


def _own(request: Request[Any, Any]) -> ScheduleRecord:
    """The schedule, if the token may see it; else NotFound, as `Request.own_job`."""
    record = request.store.schedule(request.path)
    if record is None or not request.owns(record.schedule.intent.addon_id):
        raise NotFound(f"there is no schedule {request.path}", schedule=request.path)
    return record


def _intent(body: wire.SubmitBody) -> Intent:
    if body.wait_sec:
        raise naming_fields(BadIntent, ("job.wait_sec", "cannot be part of a schedule"))
    if body.batch is not None:
        problem = "cannot be part of a schedule: a batch takes no more jobs once it has ended"
        raise naming_fields(BadIntent, ("job.batch", problem))
    return intent_from(body)


def _info(request: Request[Any, Any], record: ScheduleRecord) -> wire.ScheduleInfo:
    [info] = _infos(request, [record])
    return info


def _infos(request: Request[Any, Any], records: list[ScheduleRecord]) -> list[wire.ScheduleInfo]:
    fired = [firing.job_id for record in records for firing in record.state.history]
    states = {job.job_id: job.state for job in request.store.jobs(fired)}
    return [_shown(record, states) for record in records]


def _shown(record: ScheduleRecord, states: dict[JobId, JobState]) -> wire.ScheduleInfo:
    schedule, state = record.schedule, record.state
    zone, problem = zone_or_utc(schedule.zone), schedule.problem()
    coming = (
        []
        if schedule.paused or problem is not None
        else schedule.next_moments(state.last_moment, _SHOWN_MOMENTS)
    )
    return as_answer(
        wire.ScheduleInfo,
        schedule,
        addon_id=schedule.intent.addon_id,
        at=None if schedule.at is None else when(schedule.at).astimezone(zone),
        next=[when(moment).astimezone(zone) for moment in coming],
        last=[
            wire.FiringInfo(
                moment=when(firing.moment).astimezone(zone),
                job_id=firing.job_id,
                at=when(firing.at),
                by=firing.by,
                state=states.get(firing.job_id),
            )
            for firing in reversed(state.history)
        ],
        waiting=[when(moment).astimezone(zone) for moment in state.pending],
        problem=problem,
        title=title_of(schedule.intent),
        job=_job(schedule.intent),
    )


def _job(intent: Intent) -> wire.ScheduledJob:
    return as_answer(
        wire.ScheduledJob,
        intent,
        constraints=CONSTRAINT_FLAGS[intent.constraints],
        payload=raw_json(intent.payload),
        cost_limit=None if intent.cost_limit is None else amount(intent.cost_limit),
    )
