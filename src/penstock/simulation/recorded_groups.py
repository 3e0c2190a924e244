"""
The arrays, batches and schedules of a recorded load.

Jobs of arrays and schedules do not arrive in the play when they were submitted, but when the rules submit
them: the next index when another one ends, the job of a moment when no earlier job is in its way. Index or
moment identify what the job did. If there is no recorded job for it, it does the same as another one of the
array or the schedule, which its number chooses.

The database has a schedule only as it is now. So the play of its moments begins with its last edit, and after
the last job that may have been pruned. Earlier jobs of it arrive when they were submitted, like those of a
removed schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from penstock.core.jobs.arrays import MOST_RANGES, ArrayRecord, ArraySpec, live_index, ranges_of
from penstock.core.jobs.dependencies import batch_of
from penstock.core.jobs.groups import batch_id
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Event, EventKind, Job
from penstock.core.jobs.schedules import Missed, Overlap, ScheduleRecord, ScheduleState, check
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import EndReason, JobId, Moment, member_of, moment_of
from penstock.scheduler.arrivals import (
    ArrayArrival,
    BatchArrival,
    Load,
    PlayedWork,
    ScheduleArrival,
    Works,
    plain,
)
from penstock.stores.api import Store

#: Returns the work of a recorded job. The second argument: the play decides whether the job is canceled.
WorkOf: TypeAlias = Callable[[Job, bool], PlayedWork]
#: Returns the work of a job without a record, by its intent.
UsualOf: TypeAlias = Callable[[Intent], PlayedWork]

#: Events that do not show that a scheduler ran: they are written without one too.
_NO_SCHEDULER: Final = {
    EventKind.SUBMITTED,
    EventKind.SCHEDULE_SET,
    EventKind.ARRAY_SUBMITTED,
    EventKind.BATCH_SUBMITTED,
}
_DID_ITS_WORK: Final = {JobState.DONE, JobState.FAILED}


class FiredJob(NamedTuple):
    """A job of a schedule. `moment`: None: a person ran it by hand."""

    schedule: str
    moment: Moment | None


class GroupTrail:
    """Reads the events of a trail about arrays, batches and schedules."""

    def __init__(self) -> None:
        self.fired: dict[JobId, FiredJob] = {}
        #: By schedule: when it was paused (True) and resumed (False).
        self.pauses: dict[str, list[tuple[Moment, bool]]] = defaultdict(list)
        #: Jobs that their schedule canceled because of overlap.
        self.overlapped: set[JobId] = set()
        self.array_canceled: dict[JobId, Moment] = {}
        self.array_retried: dict[JobId, list[Moment]] = defaultdict(list)
        self.batch_closed: dict[JobId, Moment] = {}
        self.away: list[tuple[Moment, Moment]] = []
        #: Jobs that ended before this moment may have been pruned.
        self.horizon: Moment = 0
        self.last: Moment = 0
        self._present: Moment = 0

    def read(self, event: Event) -> None:
        data, self.last = event.data, max(self.last, event.at)
        match event.kind:
            case EventKind.SCHEDULE_FIRED:
                moment = moment_of(datetime.fromisoformat(data["moment"])) if event.reason == "due" else None
                self.fired[JobId(data["job_id"])] = FiredJob(data["schedule"], moment)
            case EventKind.SCHEDULE_SET if event.reason in ("paused", "resumed"):
                self.pauses[data["schedule"]].append((event.at, event.reason == "paused"))
            case EventKind.CANCELED | EventKind.STOP_REQUESTED if event.job_id in self.fired:
                if (
                    event.job_id is not None
                    and data.get("by") == f"schedule {self.fired[event.job_id].schedule}"
                ):
                    self.overlapped.add(event.job_id)
            case EventKind.ARRAY_CANCELED:
                self.array_canceled[JobId(data["array_id"])] = event.at
            case EventKind.ARRAY_RETRIED:
                self.array_retried[JobId(data["array_id"])].append(event.at)
            case EventKind.BATCH_SUBMITTED if not data["open"]:
                self.batch_closed[batch_id(data["batch"])] = event.at
            case EventKind.BATCH_CLOSED:
                self.batch_closed[batch_id(data["batch"])] = event.at
            case EventKind.PRUNED:
                self.horizon = max(self.horizon, data["before"])
            case EventKind.SCHEDULER_STARTED if 0 < self._present < event.at:
                self.away.append((self._present, event.at))
            case _:
                pass
        if event.kind not in _NO_SCHEDULER and event.reason != EndReason.SCHEDULER_RESTARTED:
            self._present = event.at


def begin_of(record: ScheduleRecord, trail: GroupTrail) -> Moment:
    """The moment after which the play submits the jobs of a schedule by its rules."""
    return max(record.schedule.created_at, record.schedule.edited_at, trail.horizon)


class RecordedGroups:
    """
    Divides recorded jobs into those that arrays and schedules submit in a play, and others; adds groups to a
    load.
    """

    def __init__(self, store: Store, jobs: Iterable[Job], trail: GroupTrail) -> None:
        self._trail = trail
        self._schedules = {record.name: record for record in store.schedules()}
        self._arrays: dict[JobId, ArrayRecord | None] = {}
        self._indices: dict[JobId, list[Job]] = defaultdict(list)
        self._moments: dict[str, dict[Moment, Job]] = defaultdict(dict)
        self._schedule_jobs: dict[str, list[Job]] = defaultdict(list)
        #: The jobs that no array and no schedule submits in the play.
        self.others: list[Job] = []
        for job in jobs:
            self._assign(store, job)
        self.played: set[JobId] = {job.job_id for jobs in self._indices.values() for job in jobs}
        self.played |= self._indices.keys()
        self.played |= {job.job_id for jobs in self._moments.values() for job in jobs.values()}

    def _assign(self, store: Store, job: Job) -> None:
        member, fired = member_of(job.job_id), self._trail.fired.get(job.job_id)
        if member is not None:
            array_id = member[0]
            if array_id not in self._arrays:
                self._arrays[array_id] = store.array(array_id)
            if self._arrays[array_id] is not None:
                self._indices[array_id].append(job)
                return
        if fired is not None and (record := self._schedules.get(fired.schedule)) is not None:
            self._schedule_jobs[fired.schedule].append(job)
            if fired.moment is not None and fired.moment > begin_of(record, self._trail):
                self._moments[fired.schedule][fired.moment] = job
                return
        self.others.append(job)

    def add_batches(self, load: Load) -> None:
        members: dict[JobId, list[int]] = defaultdict(list)
        for number, job in enumerate(self.others):
            if (batch := batch_of(job.intent)) is not None:
                members[batch].append(number)
        for batch, numbers in members.items():
            addon = self.others[numbers[0]].intent.addon_id
            closed_at = self._trail.batch_closed.get(batch)
            load.batches.append(BatchArrival(batch, addon, tuple(numbers), closed_at))

    def add_arrays(self, load: Load, work_of: WorkOf, usual_of: UsualOf) -> None:
        for array_id, jobs in self._indices.items():
            record = self._arrays[array_id]
            if record is None:
                continue
            canceled_at, intent = self._trail.array_canceled.get(array_id), record.array.member_intent
            works = {}
            for job in jobs:
                ended_at = job.ended_at or self._trail.last
                works[job.job_id] = work_of(job, canceled_at is not None and ended_at >= canceled_at)
            spec, at = self._remaining(record, jobs)
            by_index: dict[Hashable, PlayedWork] = {
                tuple(live_index(job.job_id)): works[job.job_id] for job in jobs
            }
            load.arrays.append(
                ArrayArrival(
                    array_id,
                    at,
                    str(spec),
                    plain(intent),
                    Works(_other_works(jobs, works) or [usual_of(intent)], by_index),
                    canceled_at,
                    tuple(self._trail.array_retried[array_id]),
                )
            )

    def _remaining(self, record: ArrayRecord, jobs: Sequence[Job]) -> tuple[ArraySpec, Moment]:
        """The indices whose jobs were not pruned, and the moment at which the first of them was submitted."""
        spec, made = record.array.spec, record.progress.made
        seen = {live_index(job.job_id).number for job in jobs}
        if len(seen) >= made:
            return spec, record.array.created_at
        ranges = ranges_of([*seen, *spec.slice(made, spec.total)])
        return ArraySpec(ranges[-MOST_RANGES:], spec.at_once), min(job.created_at for job in jobs)

    def add_schedules(self, load: Load, work_of: WorkOf, usual_of: UsualOf) -> None:
        """Add the schedules. Call this after adding the jobs that may wait for jobs of a schedule."""
        numbers = {job.job_id: number for number, job in enumerate(self.others)}
        for name, record in self._schedules.items():
            moments, jobs = self._moments[name], self._schedule_jobs[name]
            begin = begin_of(record, self._trail)
            works = {job.job_id: work_of(job, job.job_id in self._trail.overlapped) for job in jobs}
            overlapped = [works[job.job_id] for job in jobs if job.job_id in self._trail.overlapped]
            others = _other_works(jobs, works) or overlapped or [usual_of(record.schedule.intent)]
            load.schedules.append(
                ScheduleArrival(
                    self._record_at_begin(record),
                    Works(others, {at: works[job.job_id] for at, job in moments.items()}),
                    self._trail.last,
                    tuple(numbers[job.job_id] for job in jobs if job.job_id in numbers),
                    tuple(pause for pause in self._trail.pauses[name] if pause[0] > begin),
                    {at: load.groups[job.job_id] for at, job in moments.items() if job.job_id in load.groups},
                )
            )

    def _record_at_begin(self, record: ScheduleRecord) -> ScheduleRecord:
        begin = begin_of(record, self._trail)
        later = [paused for at, paused in self._trail.pauses[record.name] if at > begin]
        paused = not later[0] if later else record.schedule.paused
        schedule = replace(record.schedule, intent=plain(record.schedule.intent), paused=paused)
        return ScheduleRecord(schedule, ScheduleState(begin), record.version)

    def notes(self) -> Iterator[str]:
        """Sentences about jobs of schedules that are not played by the schedule's rules."""
        old = sum(
            job.job_id in self._trail.fired and self._trail.fired[job.job_id].moment is not None
            for job in self.others
        )
        if old:
            yield (
                f"jobs of schedules that were edited or removed since ({old}) are played when they were submitted: "
                "the database has a schedule only as it is now"
            )


def _other_works(jobs: Iterable[Job], works: Mapping[JobId, PlayedWork]) -> list[PlayedWork]:
    """The works that a job without a record may have: those of other jobs of the same array or schedule."""
    return [works[job.job_id]._replace(canceled_at=None) for job in jobs if job.state in _DID_ITS_WORK]


#: The fields of a schedule that a simulation can change.
_FIELDS: Final = ("cron", "every_sec", "zone", "overlap", "missed")


def change_schedules(load: Load, changes: Mapping[str, Mapping[str, str]], *, most_units: int) -> Load:
    """
    The load with changed schedules. `changes`: by name of the schedule, its new fields, which are valid from
    where the play of the schedule begins. ValueError: there is no such schedule or field. BadIntent: a value
    is wrong.
    """
    if not changes:
        return load
    names = [each.record.name for each in load.schedules]
    for name in changes:
        if name not in names:
            listed = f"; there are {', '.join(names)}" if names else ""
            raise ValueError(f"schedules.{name}: the load has no schedule {name!r}{listed}")
    changed = copy(load)
    changed.schedules = [
        _changed(each, changes.get(each.record.name, {}), most_units) for each in load.schedules
    ]
    return changed


def _changed(arrival: ScheduleArrival, fields: Mapping[str, str], most_units: int) -> ScheduleArrival:
    before, values = arrival.record, dict[str, Any](fields)
    for field, value in fields.items():
        if field not in _FIELDS:
            raise ValueError(f"schedules.{before.name}.{field}: must be one of {', '.join(_FIELDS)}")
        if field == "every_sec":
            if not value.isdecimal():
                raise ValueError(f"schedules.{before.name}.every_sec: {value!r} is not a whole number")
            values[field] = int(value)
    if "cron" in values or "every_sec" in values:
        values = {"cron": None, "every_sec": None, "at": None, **values}
    schedule = replace(before.schedule, **values)
    check(schedule, before.state.last_moment, most_units=most_units, before=before.schedule)
    schedule = replace(
        schedule,
        overlap=Overlap(schedule.overlap),
        missed=Missed(schedule.missed),
        anchor=_anchor(before, values),
    )
    return arrival._replace(record=replace(before, schedule=schedule))


def _anchor(before: ScheduleRecord, values: Mapping[str, Any]) -> Moment:
    """The anchor of the interval: for a new interval, where the play of the schedule begins."""
    return before.state.last_moment if values.get("every_sec") else before.schedule.anchor
