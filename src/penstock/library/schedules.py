"""
Schedules of a program's own functions: `@scheduler.schedule(...)` declares one, `scheduler.schedules()` lists
all.

A declaration is written when the program starts to run jobs, and not when its module is imported, so a worker
process or a test that imports the module writes nothing. The declaration replaces edits by hand, but a paused
schedule stays paused. If you remove a declaration from the code, its schedule stays: remove it with
`scheduler.get_schedule(name).remove()` or `penstock schedule rm`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from penstock.core.errors import BadIntent
from penstock.core.jobs.moments import local_moment, zone_or_utc, zone_problem
from penstock.core.jobs.schedules import MISSED_LIMIT, Missed, Overlap, Schedule, ScheduleRecord
from penstock.core.jobs.types import Moment, moment_of, when
from penstock.library.function import JobFunction
from penstock.library.handle import JobHandle
from penstock.library.options import Seconds, span_sec, whole
from penstock.stores.api import Query, Receipt

if TYPE_CHECKING:
    from penstock.library.scheduler import Scheduler

log = logging.getLogger("penstock.library")

OverlapWord: TypeAlias = Literal["skip", "queue", "cancel-running"]
MissedWord: TypeAlias = Literal["skip", "latest", "all"]


class ScheduleOptions(TypedDict, total=False):
    """
    The options of a schedule. It fires by a cron line, or `every` seconds or timedelta, or once `at` a
    datetime or "2026-12-01 06:00" in `zone`. `args`, `kwargs`: the arguments of each call.
    """

    every: Seconds
    at: datetime | str
    zone: str
    overlap: OverlapWord
    missed: MissedWord
    missed_limit: int
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def make_schedule(
    name: str, function: JobFunction[..., Any, Any], cron: str | None, options: ScheduleOptions
) -> Schedule:
    unknown = options.keys() - ScheduleOptions.__annotations__.keys()
    if unknown:
        known = ", ".join(ScheduleOptions.__annotations__)
        raise TypeError(f"{min(unknown)!r} is not an option of a schedule; there are cron, {known}")
    zone = options.get("zone", "UTC")
    for option, given in (("name", name), ("cron", "" if cron is None else cron), ("zone", zone)):
        if not isinstance(given, str):
            raise TypeError(f"{option} is {given!r}; it must be a string")
    if not hasattr(function, "template"):
        raise TypeError(f"{function!r} is not a job function: decorate it with @scheduler.job")
    every, at = options.get("every"), options.get("at")
    return Schedule(
        name=name,
        intent=function.template(tuple(options.get("args", ())), dict(options.get("kwargs", {}))),
        cron=cron,
        every_sec=None if every is None else _whole_seconds(every),
        at=None if at is None else _moment(at, zone),
        zone=zone,
        overlap=_word(Overlap, "overlap", options.get("overlap", "skip")),
        missed=_word(Missed, "missed", options.get("missed", "latest")),
        missed_limit=whole("missed_limit", options.get("missed_limit", MISSED_LIMIT)),
    )


def _whole_seconds(every: Seconds) -> int:
    span = span_sec("every", every)
    if span != int(span):
        raise ValueError(f"every is {every!r}; it must be whole seconds")
    return int(span)


def _moment(at: datetime | str, zone: str) -> Moment:
    problem = zone_problem(zone)
    if problem is not None:
        raise BadIntent.of(("zone", problem))
    if isinstance(at, datetime):
        return moment_of(at) if at.tzinfo is not None else local_moment(at.isoformat(), zone)
    try:
        return local_moment(at, zone)
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f'at is {at!r}; it must be a datetime, or like "2026-12-01 06:00"') from None


def _word(words: Any, option: str, given: Any) -> Any:
    try:
        return words(given)
    except ValueError:
        raise ValueError(f"{option} is {given!r}; it must be one of {', '.join(words)}") from None


class ScheduleHandle:
    """One schedule, to read, pause, resume, run now and remove. Each property reads the store."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler, self.name = scheduler, name

    @property
    def record(self) -> ScheduleRecord:
        """The schedule as it is now. NotFound: it was removed."""
        return self._scheduler.schedule_service.get(self.name)

    @property
    def schedule(self) -> Schedule:
        return self.record.schedule

    @property
    def paused(self) -> bool:
        return self.schedule.paused

    @property
    def next_moment(self) -> datetime | None:
        """When it fires next, in its zone. None: it is paused, or its last moment has passed."""
        record = self.record
        return None if record.next_moment is None else _local(record.next_moment, record.schedule)

    def next_moments(self, count: int = 5) -> list[datetime]:
        record = self.record
        moments = record.schedule.next_moments(record.state.last_moment, count)
        return [_local(moment, record.schedule) for moment in moments]

    @property
    def last_moment(self) -> datetime | None:
        """The last moment that became a job."""
        record = self.record
        due = [firing for firing in record.state.history if not firing.by]
        return _local(due[-1].moment, record.schedule) if due else None

    def jobs(self, limit: int = 100) -> list[JobHandle[Any]]:
        """The jobs of the schedule, newest first."""
        query = Query(tag=self.schedule.tag, newest_first=True, limit=limit)
        return [self._scheduler.get(job.job_id) for job in self._scheduler.store.find(query)]

    def pause(self) -> None:
        """Pause the schedule. Moments that pass until `resume` make no jobs."""
        self._scheduler.schedule_service.pause(self.name, self._scheduler.principal)

    def resume(self) -> None:
        self._scheduler.schedule_service.resume(self.name, self._scheduler.principal)

    def run(self) -> JobHandle[Any]:
        """Submit a job of the schedule now, whatever its overlap says and also while it is paused."""
        receipt: Receipt = self._scheduler.schedule_service.run_now(self.name, self._scheduler.principal)
        return self._scheduler.get(receipt.job_id)

    def remove(self) -> None:
        """Remove the schedule. Its jobs stay."""
        self._scheduler.schedule_service.remove(self.name, self._scheduler.principal)

    def __repr__(self) -> str:
        return f"<schedule {self.name} on {self._scheduler.where}>"


def _local(moment: Moment, schedule: Schedule) -> datetime:
    return when(moment).astimezone(zone_or_utc(schedule.zone))


def declare(scheduler: Scheduler, schedule: Schedule) -> None:
    """Write a declaration, unless its only moment passed before it was ever written."""
    store = scheduler.store
    if schedule.at is not None and schedule.at <= store.now() and store.schedule(schedule.name) is None:
        log.info("schedule %s is not added: its moment has passed", schedule.name)
        return
    scheduler.schedule_service.set(schedule, scheduler.principal)


def in_words(schedule: Schedule) -> str:
    """When the schedule fires, for messages."""
    if schedule.cron is not None:
        return f"{schedule.cron!r} in {schedule.zone}"
    if schedule.every_sec is not None:
        return f"every {timedelta(seconds=schedule.every_sec)}"
    return "never" if schedule.at is None else f"at {_local(schedule.at, schedule):%Y-%m-%d %H:%M %Z}"
