"""
Schedules: the operations of people and programs (`ScheduleService`), and the upkeep that turns due moments
into jobs (`ScheduleFirer`).

Both read a schedule, let the core decide, and commit if the version of its row is still the same. If not, the
service decides again. The firer does nothing: the scheduler that changed the row has handled the moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec.structs import replace

from penstock.core.errors import KeyConflict, NotFound, QueueFull, Refused, Unavailable
from penstock.core.jobs import schedules
from penstock.core.jobs.alerts import Alert
from penstock.core.jobs.changes import Change, alert_note
from penstock.core.jobs.load_hours import HourAverage, quietest_line
from penstock.core.jobs.schedules import Schedule, ScheduleChange, ScheduleRecord
from penstock.core.jobs.states import SETTLED
from penstock.core.jobs.types import FAR_MOMENT, HOUR, MINUTE, SECOND, HostId, JobId, Moment, Span
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import (
    Apply,
    ChangeSchedule,
    Receipt,
    RecordLoad,
    ScheduleWritten,
    Store,
    committed,
)

log = logging.getLogger("penstock.schedules")

_TRIES: Final = 20
#: How soon to look again at a moment that could not become a job: the queue was full, or the row changed.
_AGAIN: Final[Span] = 1 * SECOND
#: How often to look at moments that wait for the end of a job. That end wakes the firer. But no event tells
#: other hosts that a moment has begun to wait, so they need this if the scheduler that committed it dies.
_WAITING: Final[Span] = 5 * SECOND
#: How long a moment is due before the owner is told that this host cannot fire it: another host may.
_STUCK: Final[Span] = 1 * MINUTE


class ScheduleService:
    """The operations on schedules. `by`: the principal, for the trail."""

    def __init__(self, store: Store, rules: SchedulerRules) -> None:
        self._store, self._rules = store, rules

    def list(self) -> list[ScheduleRecord]:
        return self._store.schedules()

    def get(self, name: str) -> ScheduleRecord:
        record = self._store.schedule(name)
        if record is None:
            raise NotFound(f"there is no schedule {name!r:.80}", schedule=name)
        return record

    def add(self, schedule: Schedule, by: str = "") -> ScheduleRecord:
        """Add a schedule. BadIntent names every problem. KeyConflict: the name is taken."""
        self.check(schedule)
        written = self._commit(schedules.add(schedule, self._store.now(), by))
        if written is None or written.record is None:
            raise KeyConflict(
                f"there is a schedule {schedule.name!r} already: edit it, or remove it first", field="name"
            )
        return written.record

    def set(self, schedule: Schedule, by: str = "") -> ScheduleRecord:
        """
        Add a schedule, or edit the one of that name. With this a program declares its schedules each time
        that it starts. A paused schedule stays paused.
        """
        self.check(schedule, self._store.schedule(schedule.name))
        for _ in range(_TRIES):
            record, now = self._store.schedule(schedule.name), self._store.now()
            change = (
                schedules.add(schedule, now, by)
                if record is None
                else schedules.edit(record, schedule, now, by)
            )
            if change is None:
                assert record is not None
                return record
            written = self._commit(change)
            if written is not None and written.record is not None:
                return written.record
        raise _busy(schedule.name)

    def edit(self, name: str, by: str = "", **fields: Any) -> ScheduleRecord:
        """Change fields of a `Schedule`. One of `cron`, `every_sec` and `at` replaces the others."""
        kinds = [kind for kind in ("cron", "every_sec", "at") if fields.get(kind) is not None]
        if kinds:
            fields = {"cron": None, "every_sec": None, "at": None, **fields}

        def decide(record: ScheduleRecord, now: Moment) -> ScheduleChange | None:
            edited = replace(record.schedule, **fields)
            self.check(edited, record.schedule)
            return schedules.edit(record, edited, now, by)

        return self._settle(name, decide)

    def pause(self, name: str, by: str = "") -> ScheduleRecord:
        return self._settle(name, lambda record, now: schedules.pause(record, now, by))

    def resume(self, name: str, by: str = "") -> ScheduleRecord:
        return self._settle(name, lambda record, now: schedules.resume(record, now, by))

    def remove(self, name: str, by: str = "") -> None:
        """Remove a schedule; its jobs stay."""
        for _ in range(_TRIES):
            if self._commit(schedules.remove(self.get(name), self._store.now(), by)) is not None:
                return
        raise _busy(name)

    def run_now(self, name: str, by: str = "", key: str = "") -> Receipt:
        """Submit a job of the schedule now. `key`: the same request again gives the same job."""
        for _ in range(_TRIES):
            record = self.get(name)
            ended = ended_jobs(self._store, record.state.active)
            written = self._commit(schedules.run_now(record, self._store.now(), by, ended, key))
            if written is not None and written.receipt is not None:
                return written.receipt
        raise _busy(name)

    def quietest_line(self, before: str, zone: str) -> str:
        """A daily cron line in the quietest of the twelve hours before "06:00", by the recorded load."""
        return quietest_line(self._store.load_hours(), before, zone, self._store.now())

    def check(self, schedule: Schedule, before: ScheduleRecord | Schedule | None = None) -> None:
        stored = before.schedule if isinstance(before, ScheduleRecord) else before
        most_units = self._rules.capacity.most
        schedules.check(schedule, self._store.now(), most_units=most_units, before=stored)

    def _settle(
        self, name: str, decide: Callable[[ScheduleRecord, Moment], ScheduleChange | None]
    ) -> ScheduleRecord:
        for _ in range(_TRIES):
            record = self.get(name)
            change = decide(record, self._store.now())
            if change is None:
                return record
            written = self._commit(change)
            if written is not None and written.record is not None:
                return written.record
        raise _busy(name)

    def _commit(self, change: ScheduleChange) -> ScheduleWritten | None:
        if change.target is not None:
            _ = change.target.due_at  # Unavailable: this host cannot write the row
        return committed(self._store, ChangeSchedule(change, self._rules.depth))


def _busy(name: str) -> Unavailable:
    return Unavailable(f"the schedule {name!r} changes all the time: try again")


def ended_jobs(store: Store, job_ids: Sequence[JobId]) -> set[JobId]:
    """The jobs that are settled or pruned: nothing happens to them by itself any more."""
    living = {job.job_id for job in store.jobs(job_ids) if job.state not in SETTLED} if job_ids else set()
    return set(job_ids) - living


class ScheduleFirer:
    """
    Upkeep that turns due moments into jobs. It sleeps until the next moment; without schedules, for an hour.
    A commit brings it forward, which costs one small query. `cancel` cancels a job.

    A schedule whose moments this host cannot compute (another host accepted its zone) is passed over: the
    others fire. If no other host fires it within a minute, the owner gets an alert.
    """

    def __init__(self, store: Store, rules: SchedulerRules, cancel: Callable[[JobId, str], object]) -> None:
        self._store, self._rules, self._cancel = store, rules, cancel
        #: The schedules that this host could not fire at the last step, and since when, by name and version.
        self._stuck: dict[tuple[str, int], Moment] = {}
        #: The alerts and warnings of these were given.
        self._reported: set[tuple[str, int]] = set()
        self._last_step: Moment = FAR_MOMENT

    def step(self, now: Moment) -> Moment:
        if now < self._last_step:  # the first step, or the clock was set back
            self._follow_clock(now)
        self._last_step = now
        alarm, stuck = self._store.schedule_alarm(), self._stuck
        self._stuck = {}
        if alarm is not None and alarm <= now:
            self._fire(self._store.schedules(due_by=now), now, stuck)
            alarm = self._store.schedule_alarm()
        if alarm is None:
            return now + HOUR
        # A moment that waits for the end of a job, or that this host cannot fire, hides the next moments of
        # other schedules.
        if alarm == 0 or self._stuck:
            moments = [_next_moment(record) for record in self._store.schedules()]
            return min([now + _WAITING, *(max(m, now + _AGAIN) for m in moments if m is not None)])
        return alarm if alarm > now else now + _AGAIN

    def _follow_clock(self, now: Moment) -> None:
        for record in self._store.schedules():
            change = schedules.follow_clock(record, now)
            if change is not None and change.target is not None and _can_be_timed(change.target):
                log.warning("schedule %s: the clock was set back, its moments count from now", record.name)
                committed(self._store, ChangeSchedule(change))

    def _fire(
        self, records: Sequence[ScheduleRecord], now: Moment, stuck: Mapping[tuple[str, int], Moment]
    ) -> None:
        """
        Fire the due moments of these schedules, in one transaction if the store can; each one can fail alone.
        `stuck`: those that the last step could not fire.
        """
        active = [job_id for record in records for job_id in record.state.active]
        ended = ended_jobs(self._store, active)
        changes: list[tuple[ScheduleRecord, ScheduleChange]] = []
        for record in records:
            try:
                change = schedules.look(record, now, ended)
            except Unavailable as problem:
                self._pass_over(record, now, stuck, problem)
                continue
            if change is not None:
                changes.append((record, change))
        current = {record.name: record for record in records}
        operations = [ChangeSchedule(change, self._rules.depth) for _, change in changes]
        answers = self._store.commit(*operations, wait=True) if operations else []
        for (record, change), answer in zip(changes, answers, strict=True):
            try:
                written: ScheduleWritten | None = answer.result()
            except KeyConflict:  # a job that no schedule submitted has the key of this moment
                log.warning("schedule %s: the key of a moment was used for another job", record.name)
                dropped = ChangeSchedule(schedules.drop_first(record, change, "key_conflict"))
                written = committed(self._store, dropped)
            except QueueFull as full:
                if (record.name, record.version) not in self._reported:  # this comes again each second
                    self._reported.add((record.name, record.version))
                    log.warning("schedule %s waits with its job: %s", record.name, full)
                continue
            if written is not None and written.record is not None:
                current[record.name] = written.record
        for record in current.values():
            for job_id in schedules.to_cancel(record, ended):
                self._cancel_job(record, job_id)

    def _pass_over(
        self,
        record: ScheduleRecord,
        now: Moment,
        stuck: Mapping[tuple[str, int], Moment],
        problem: Unavailable,
    ) -> None:
        key = (record.name, record.version)
        self._stuck[key] = since = stuck.get(key, now)
        if now < since + _STUCK or key in self._reported:
            return
        self._reported.add(key)
        text = f"schedule {record.name} does not fire: {problem}"
        alert = Alert(
            kind="schedule_stuck",
            addon_id=record.schedule.intent.addon_id,
            key=f"schedule_stuck/{record.name}",
            text=text,
            data={"schedule": record.name},
        )
        committed(self._store, Apply([Change(now, (alert_note(alert),))]))

    def _cancel_job(self, record: ScheduleRecord, job_id: JobId) -> None:
        with suppress(Refused):  # the job ended or was pruned meanwhile
            self._cancel(job_id, f"schedule {record.name}")


def _can_be_timed(record: ScheduleRecord) -> bool:
    """Whether this host can compute the moments of a schedule; another one may."""
    return record.schedule.problem() is None


def _next_moment(record: ScheduleRecord) -> Moment | None:
    """The next moment of a schedule; None also if this host cannot compute it."""
    return record.next_moment if _can_be_timed(record) else None


class LoadRecorder:
    """Upkeep that records once a minute how busy this host is, by hour of the week, for `quietest_line`."""

    def __init__(self, store: Store, host: HostId, busy: Callable[[Moment], float]) -> None:
        self._store, self._host, self._busy, self._average = store, host, busy, HourAverage()

    def step(self, now: Moment) -> Moment:
        over = self._average.add(now, self._busy(now))
        if over is not None:
            committed(self._store, RecordLoad(self._host, *over))
        return now + MINUTE
