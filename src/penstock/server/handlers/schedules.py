"""
Handlers for schedules: add, look, edit, pause, resume, run now, remove.

A schedule submits jobs later, so to add, edit, resume or run one takes the rights of a submit of its job,
those for commands included. A token that is bound to an addon sees and touches that addon's schedules alone.
"""

from __future__ import annotations

from typing import Any
from zoneinfo import ZoneInfo

from msgspec import UnsetType

from penstock import wire
from penstock.core.errors import BadIntent, NotFound
from penstock.core.jobs.intent import Intent, title_of
from penstock.core.jobs.schedules import Schedule, ScheduleRecord
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId, moment_of, when
from penstock.server.handlers.jobs import CONSTRAINT_FLAGS, amount, check_runner, intent_from, may_submit
from penstock.server.problems import naming_fields
from penstock.server.request import Request, as_answer, as_json, or_none

_SHOWN_MOMENTS = 5


def schedule_list(call: Request[wire.SchedulesQuery, None]) -> wire.ScheduleList:
    addon_id = call.addon(or_none(call.query.addon_id))
    records = [
        record
        for record in call.app_state.service.schedules.list()
        if addon_id in (None, record.schedule.intent.addon_id)
    ]
    return wire.ScheduleList(_infos(call, records))


def schedule_get(call: Request[None, None]) -> wire.ScheduleInfo:
    return _info(call, _own(call))


def schedule_add(call: Request[None, wire.ScheduleBody]) -> wire.ScheduleInfo:
    body = call.body
    intent = _intent(body.job)
    may_submit(call, intent, "job.")
    cron = body.cron
    if body.quietest_hour_before is not None:
        if [body.cron, body.every_sec, body.at].count(None) != 3:
            raise naming_fields(BadIntent, ("quietest_hour_before", "cannot be given beside another time"))
        cron = call.app_state.service.schedules.quietest_line(body.quietest_hour_before, body.zone)
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
    return _info(call, call.app_state.service.schedules.add(schedule, call.principal.name))


def schedule_edit(call: Request[None, wire.ScheduleEdit]) -> wire.ScheduleInfo:
    record, body = _own(call), call.body
    fields: dict[str, Any] = {}
    for name in ("cron", "every_sec", "zone", "overlap", "missed", "missed_limit"):
        if not isinstance(given := getattr(body, name), UnsetType):
            fields[name] = given
    if not isinstance(body.at, UnsetType):
        fields["at"] = moment_of(body.at)
    if not isinstance(body.job, UnsetType):
        fields["intent"] = _intent(body.job)
    if not isinstance(body.quietest_hour_before, UnsetType):
        zone = fields.get("zone", record.schedule.zone)
        fields["cron"] = call.app_state.service.schedules.quietest_line(body.quietest_hour_before, zone)
    if not fields:
        raise naming_fields(BadIntent, ("body", "must have a field to change"))
    may_submit(call, fields.get("intent", record.schedule.intent), "job.")
    return _info(call, call.app_state.service.schedules.edit(record.name, call.principal.name, **fields))


def schedule_pause(call: Request[None, None]) -> wire.ScheduleInfo:
    name = _own(call).name
    return _info(call, call.app_state.service.schedules.pause(name, call.principal.name))


def schedule_resume(call: Request[None, None]) -> wire.ScheduleInfo:
    record = _own(call)
    check_runner(call, record.schedule.intent)
    return _info(call, call.app_state.service.schedules.resume(record.name, call.principal.name))


def schedule_run(call: Request[None, wire.ScheduleRun]) -> wire.Submitted:
    record = _own(call)
    may_submit(call, record.schedule.intent)
    key = call.body.idempotency_key or ""
    receipt = call.app_state.service.schedules.run_now(record.name, call.principal.name, key)
    return as_answer(wire.Submitted, receipt)


def schedule_remove(call: Request[None, None]) -> wire.Ok:
    call.app_state.service.schedules.remove(_own(call).name, call.principal.name)
    return wire.Ok()


def _own(call: Request[Any, Any]) -> ScheduleRecord:
    """A schedule that does not exist and one of another addon get the same answer."""
    record = call.store.schedule(call.path)
    if record is None or not call.owns(record.schedule.intent.addon_id):
        raise NotFound(f"there is no schedule {call.path}", schedule=call.path)
    return record


def _intent(body: wire.SubmitBody) -> Intent:
    if body.wait_sec:
        raise naming_fields(BadIntent, ("job.wait_sec", "cannot be part of a schedule"))
    return intent_from(body)


def _info(call: Request[Any, Any], record: ScheduleRecord) -> wire.ScheduleInfo:
    [info] = _infos(call, [record])
    return info


def _infos(call: Request[Any, Any], records: list[ScheduleRecord]) -> list[wire.ScheduleInfo]:
    fired = [firing.job_id for record in records for firing in record.state.history]
    states = {job.job_id: job.state for job in call.store.jobs(fired)}
    return [_shown(record, states) for record in records]


def _shown(record: ScheduleRecord, states: dict[JobId, JobState]) -> wire.ScheduleInfo:
    schedule, state = record.schedule, record.state
    zone = ZoneInfo(schedule.zone)
    coming = [] if schedule.paused else schedule.next_moments(state.last_moment, _SHOWN_MOMENTS)
    return as_answer(
        wire.ScheduleInfo,
        schedule,
        addon_id=schedule.intent.addon_id,
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
        title=title_of(schedule.intent),
        job=_job(schedule.intent),
    )


def _job(intent: Intent) -> wire.ScheduledJob:
    return as_answer(
        wire.ScheduledJob,
        intent,
        constraints=CONSTRAINT_FLAGS[intent.constraints],
        payload=as_json(intent.payload),
        cost_limit=None if intent.cost_limit is None else amount(intent.cost_limit),
    )
