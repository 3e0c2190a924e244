"""
Statements by name, and the conversion of rows to values and back, for both SQL stores.

Only this module and the SQL files know the order of columns. Each dialect has one file with named statements,
and a folder with the steps of its schema.

The events of one transaction are one JSON text: an array with an array for each event, in order, and null for
a pruned one. New ids are UUIDv7: they sort by time, so an index of a million ids grows at its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any, Final

import msgspec
import uuid_utils

from penstock.core.jobs.admission import AdmissionClass
from penstock.core.jobs.arrays import ArrayProgress, ArrayRecord, IndexChunk, JobArray
from penstock.core.jobs.dependencies import Dependency, IfUnmet, ParentCondition
from penstock.core.jobs.groups import JobGroup
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.learning import ObservedJob
from penstock.core.jobs.load import Host, QuietState
from penstock.core.jobs.ordering import Place, QueuedJob
from penstock.core.jobs.round import Placement
from penstock.core.jobs.schedules import Schedule, ScheduleRecord, ScheduleState
from penstock.core.jobs.states import IN_FLIGHT, NONE_YET, Counters, DispatchPhase, JobState
from penstock.core.jobs.types import (
    AddonId,
    Constraint,
    DispatchId,
    EndReason,
    HostId,
    JobId,
    Moment,
    RunWhen,
    dispatch_id_of,
)
from penstock.core.jobs.workers import WorkerKinds
from penstock.stores.api import Terms

_STATES: Final = {str(state): state for state in JobState}
_IN_FLIGHT: Final = frozenset(str(state) for state in IN_FLIGHT)
_PHASES: Final = {str(phase): phase for phase in DispatchPhase}
_json: Final = msgspec.json.Encoder().encode


@cache
def statements(dialect: str) -> dict[str, str]:
    """The statements of a dialect by name. `@name` in a statement stands for the text of another one."""
    text = (files("penstock.stores") / "sql" / f"{dialect}.sql").read_text("utf-8")
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)[1:]
    named = {name: sql.strip().removesuffix(";") for name, sql in zip(parts[::2], parts[1::2], strict=True)}
    return {name: re.sub(r"@(\w+)", lambda match: named[match[1]], sql) for name, sql in named.items()}


@cache
def migrations(dialect: str) -> tuple[str, ...]:
    """
    The steps of a dialect's schema: the first makes schema 1, the second turns it into schema 2, and so on.
    """
    folder = files("penstock.stores") / "sql" / dialect
    return tuple(step.read_text("utf-8") for step in sorted(folder.iterdir(), key=lambda f: f.name))


def encode(data: Mapping[str, Any]) -> str | None:
    return _json(data).decode() if data else None


#: Fields that the intent got after hashes had been stored, with their defaults. The hash leaves out a
#: default, so that a submit with an older idempotency key still has the same hash.
_LATER_FIELDS: Final[dict[str, object]] = {
    "labels": (),
    "preemptible": True,
    "after": (),
    "if_unmet": IfUnmet.CANCEL,
}


def body_hash(intent: Intent) -> bytes:
    """The hash by which a repeated submit with the same idempotency key is recognized as the same request."""
    # A parent in the same submit counts by its position: the repeated submit cannot know its id.
    parents = tuple((d.named or d.job_id, str(d.condition)) for d in intent.after)
    values = tuple(
        parents if name == "after" else value
        for name in Intent.__struct_fields__
        if (value := getattr(intent, name)) != _LATER_FIELDS.get(name, ...)
    )
    return blake2b(repr(values).encode(), digest_size=16).digest()


def class_row(admission_class: AdmissionClass) -> tuple[Any, ...]:
    return (
        admission_class.key,
        admission_class.addon_id,
        admission_class.job_type,
        admission_class.cost_units,
        int(admission_class.constraints),
        str(admission_class.run_when),
        admission_class.quiet_for_sec,
        int(admission_class.high),
        admission_class.duration_class,
        " ".join(admission_class.labels),
    )


def class_from(row: Sequence[Any]) -> AdmissionClass:
    addon_id, job_type, cost, constraints, run_when, quiet_for, high, duration_class, labels = row
    return AdmissionClass(
        AddonId(addon_id),
        job_type,
        cost,
        Constraint(constraints),
        RunWhen(run_when),
        quiet_for,
        bool(high),
        duration_class,
        tuple(labels.split()),
    )


def job_row(
    no: int, job_id: JobId, intent: Intent, place: Place, *, class_no: int, now: Moment
) -> tuple[Any, ...]:
    return (
        no,
        job_id,
        intent.addon_id,
        class_no,
        place.line(now),
        place.turn,
        place.ready_at,
        place.urgent_at,
        place.priority,
        now,
        place.earliest_start_at,
        place.deadline_at,
        None if intent.expected_duration_sec is None else float(intent.expected_duration_sec),
        intent.max_runtime_sec,
        intent.max_active_sec,
        intent.idempotency_key,
    )


def intent_row(no: int, intent: Intent) -> tuple[Any, ...]:
    return (
        no,
        intent.payload,
        json.dumps(intent.tags) if intent.tags else None,
        intent.unit,
        intent.cost_limit,
        int(intent.time_sensitive),
        json.dumps(intent.retry_delays_sec) if intent.retry_delays_sec else None,
        int(intent.preemptible),
        dependencies_text(intent),
        body_hash(intent) if intent.idempotency_key is not None else None,
    )


def dependencies_text(intent: Intent) -> str | None:
    """The job's dependencies as JSON: `if_unmet`, then each parent with its condition. None: it has none."""
    if not intent.after:
        return None
    return _json([intent.if_unmet, *((d.job_id, d.condition) for d in intent.after)]).decode()


#: The position of the number of the admission class in a row of `job_columns`.
ADMISSION_CLASS: Final = 27


def job_from(row: Sequence[Any], fixed: Sequence[Any], admission_class: AdmissionClass) -> Job:
    """
    A job from a row of `job_columns`. `fixed`: the fields that `intent_from` takes, then the pid of the
    process that runs the job and the number of its unmet parents.
    """
    (no, job_id, state, created_at, ready_at, not_before, fence, crash, unavailable, error, start) = row[:11]
    (active, spent, spent_before, progress, denied, denied_data, denied_at, passed_at, ended_at) = row[11:20]
    return Job(
        no,
        job_id,
        intent_from(admission_class, row[20:ADMISSION_CLASS], fixed[:-2]),
        _STATES[state],
        created_at,
        ready_at,
        not_before,
        fence,
        dispatch_id_of(job_id, fence) if state in _IN_FLIGHT else None,
        Counters(crash, unavailable, error, start) if crash or unavailable or error or start else NONE_YET,
        active,
        spent,
        spent_before,
        progress,
        denied,
        denied_data or "{}",
        denied_at,
        passed_at,
        ended_at,
        *fixed[-2:],
    )


def intent_from(admission_class: AdmissionClass, editable: Sequence[Any], fixed: Sequence[Any]) -> Intent:
    """`editable`: the fields that an edit may change; they are in the job's own row. `fixed`: the others."""
    (priority, earliest, deadline, expected, max_runtime, max_active, key) = editable
    (payload, tags, unit, cost_limit, time_sensitive, retry_delays, preemptible, dependencies) = fixed
    after, if_unmet = _dependencies_from(dependencies) if dependencies else _NO_DEPENDENCIES
    return Intent(
        admission_class.addon_id,
        admission_class.job_type,
        admission_class.cost_units,
        priority,
        admission_class.constraints,
        admission_class.run_when,
        admission_class.quiet_for_sec,
        expected,
        payload,
        tuple(json.loads(tags)) if tags else (),
        bool(time_sensitive),
        deadline,
        earliest,
        max_runtime,
        max_active,
        cost_limit,
        unit,
        key,
        tuple(json.loads(retry_delays)) if retry_delays else (),
        admission_class.labels,
        bool(preemptible),
        after,
        if_unmet,
    )


_NO_DEPENDENCIES: Final[tuple[tuple[Dependency, ...], IfUnmet]] = ((), IfUnmet.CANCEL)


def _dependencies_from(text: str) -> tuple[tuple[Dependency, ...], IfUnmet]:
    """The inverse of `dependencies_text`."""
    if_unmet, *parents = json.loads(text)
    after = tuple(Dependency(job_id, ParentCondition(condition)) for job_id, condition in parents)
    return after, IfUnmet(if_unmet)


def dispatch_from(row: Sequence[Any], admission_class: AdmissionClass) -> Dispatch:
    (dispatch_id, job_id, addon_id, host, fence, phase, admitted_at, expires_at, started_at, ends_at) = row[
        :10
    ]
    (stop_at, stop_for, reason, worker, spent, progress, ended_at, how, result, failure, pid, _) = row[10:]
    return Dispatch(
        dispatch_id,
        job_id,
        addon_id,
        host,
        admission_class,
        fence,
        _PHASES[phase],
        admitted_at,
        expires_at,
        started_at,
        ends_at,
        stop_at,
        None if stop_for is None else EndReason(stop_for),
        None if reason is None else EndReason(reason),
        worker,
        spent,
        progress,
        ended_at,
        None if how is None else EndReason(how),
        result,
        failure,
        pid,
    )


def observed_from(row: Sequence[Any], admission_class: AdmissionClass) -> ObservedJob:
    """From a row of `observed_jobs`."""
    (job_id, _, priority, tags, expected_sec, created_at, fence, started_at, ended_at, end) = row[:10]
    spent, settled = row[10:]
    return ObservedJob(
        job_id,
        admission_class,
        priority,
        tuple(json.loads(tags)) if tags else (),
        expected_sec,
        created_at,
        fence,
        started_at,
        ended_at,
        end,
        spent,
        bool(settled),
    )


_workers: Final = msgspec.json.Decoder(tuple[WorkerKinds, ...]).decode


def host_values(host: Host) -> dict[str, Any]:
    """The columns that a host writes about itself: all but `draining` and `units`."""
    values = msgspec.structs.asdict(host)
    del values["draining"], values["units"]
    workers = msgspec.json.encode(host.workers).decode()
    return values | {"quiet": str(host.quiet), "labels": json.dumps(host.labels), "workers": workers}


def host_from(row: Sequence[Any]) -> Host:
    """The columns are in the order of the fields."""
    values = dict(zip(Host.__struct_fields__, row, strict=True))
    values["quiet"], values["draining"] = QuietState(values["quiet"]), bool(values["draining"])
    values["labels"] = tuple(json.loads(values["labels"]))
    values["workers"] = _workers(values["workers"])
    return Host(**values)


_schedule: Final = msgspec.json.Decoder(Schedule).decode
_schedule_state: Final = msgspec.json.Decoder(ScheduleState).decode


def schedule_values(record: ScheduleRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "addon_id": record.schedule.intent.addon_id,
        "version": record.version,
        "due_at": record.due_at,
        "body": _json(record.schedule).decode(),
        "state": _json(record.state).decode(),
    }


def schedule_from(row: Sequence[Any]) -> ScheduleRecord:
    body, state, version = row
    return ScheduleRecord(_schedule(body), _schedule_state(state), version)


_array: Final = msgspec.json.Decoder(JobArray).decode
_array_progress: Final = msgspec.json.Decoder(ArrayProgress).decode


def array_values(record: ArrayRecord) -> dict[str, Any]:
    return {
        "addon_id": record.array.intent.addon_id,
        "created_at": record.array.created_at,
        "body": _json(record.array).decode(),
        **array_progress(record),
    }


def array_progress(record: ArrayRecord) -> dict[str, Any]:
    """The columns of an array that change."""
    progress = record.progress
    state = _json(progress).decode()
    return {"array_id": record.array.array_id, "ended_at": progress.ended_at, "state": state}


def array_from(row: Sequence[Any]) -> ArrayRecord:
    body, state = row
    return ArrayRecord(_array(body), _array_progress(state))


def index_chunk(row: Sequence[Any]) -> IndexChunk:
    number, bits = row
    return IndexChunk(number, bits)


def group_values(group: JobGroup) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "addon_id": group.addon_id,
        "created_at": group.created_at,
        "is_open": int(group.is_open),
        "total": group.total,
        "done": group.done,
        "failed": group.failed,
        "canceled": group.canceled,
        "state": None if group.state is None else str(group.state),
        "ended_at": group.ended_at,
        "digest": group.digest,
    }


def changed_group_values(group: JobGroup) -> dict[str, Any]:
    """The columns that a change of a group may write."""
    fixed = ("addon_id", "created_at", "digest")
    return {name: value for name, value in group_values(group).items() if name not in fixed}


def group_from(row: Sequence[Any]) -> JobGroup:
    """A group from a row of `group_columns` without its number."""
    group_id, addon_id, created_at, is_open, total, done, failed, canceled, state, ended_at, digest = row
    return JobGroup(
        group_id,
        addon_id,
        created_at,
        bool(is_open),
        *(total, done, failed, canceled),
        None if state is None else JobState(state),
        ended_at,
        digest,
    )


#: The inverse of `pack_events`: the rows of events from the text of a batch.
event_rows: Final = msgspec.json.Decoder(list[Any]).decode
_KIND, _JOB_ID, _DATA = 1, 2, 7
_FIRED: Final = str(EventKind.SCHEDULE_FIRED)
#: The character NUL as JSON writes it. After an escaped backslash the same letters are plain text.
_NUL: Final = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")


def pack_events(events: Sequence[Sequence[Any] | None]) -> bytes:
    """
    The text of a batch of the trail. Each event is at, kind, job_id, n, state, reason, attempt, data
    (`writes.EventRow`).
    """
    text = _json(events)
    # PostgreSQL cannot store NUL in a text, and the trail has the same text in every store.
    if b"\\u0000" in text:
        text = _NUL.sub("\\1\N{SYMBOL FOR NULL}".encode(), text)
    return text


def without_jobs(text: str, gone: Collection[str]) -> str | None:
    """The text of a batch with null in place of the events of these jobs; None when no event remains."""
    kept = [None if row is None or _job_of(row) in gone else row for row in event_rows(text)]
    return pack_events(kept).decode() if any(kept) else None


def _job_of(row: Sequence[Any]) -> str | None:
    """The job with which an event is pruned: its own, or the job that a fired schedule became."""
    job_id: str | None = row[_DATA]["job_id"] if row[_KIND] == _FIRED else row[_JOB_ID]
    return job_id


class Queued(QueuedJob, frozen=True, gc=False):
    """A queued job with the columns that a store needs to start it."""

    events: int = 0
    max_runtime_sec: int | None = None
    max_active_sec: int | None = None
    active: int = 0


def spent_from(rows: Iterable[Any], day: str) -> dict[AddonId, dict[str, int]]:
    """
    The amounts spent per addon today and this month. `day`: the period that is today; any other one is this
    month.
    """
    spent: dict[AddonId, dict[str, int]] = {}
    for addon_id, period, amount in rows:
        spent.setdefault(addon_id, {})["day" if period == day else "month"] = amount
    return spent


def new_dispatch(
    dispatch_id: DispatchId,
    waiting: QueuedJob | None,
    admission_class: AdmissionClass,
    offer: Placement,
    terms: Terms,
    *,
    host: HostId,
    now: Moment,
    ends_at: Moment | None = None,
    limits: tuple[Moment | None, EndReason | None] = (None, None),
) -> Dispatch:
    """The dispatch of a job that starts, the same in every store. `waiting` None: a standalone lease."""
    leased = offer is Placement.LEASE
    stop_at, stop_for = limits if leased else (None, None)
    return Dispatch(
        dispatch_id,
        None if waiting is None else waiting.job_id,
        admission_class.addon_id,
        host,
        admission_class,
        0 if waiting is None else waiting.fence + 1,
        DispatchPhase.LEASED if leased else DispatchPhase.RESERVED,
        now,
        now + (terms.lease_for if leased else terms.reserve_for),
        now if leased else None,
        ends_at,
        stop_at,
        stop_for,
        worker=terms.worker if leased else "",
    )


def uuid7() -> str:
    return str(uuid_utils.uuid7())
