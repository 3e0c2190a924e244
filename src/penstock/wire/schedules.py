"""The types of schedules: the bodies of add and edit, and a schedule in an answer."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Raw, UnsetType

from penstock.core.jobs.moments import MAX_CRON
from penstock.core.jobs.schedules import MISSED_LIMIT, MOST_PENDING, Missed, Overlap
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import RunWhen
from penstock.wire.common import _NO_NUL, AddonName, Key, Seconds, When, WireAnswer, WireRequest, matching
from penstock.wire.jobs import Constraints, SubmitBody

ScheduleName: TypeAlias = Annotated[
    str,
    matching(
        r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,54}$(?!\n)",
        "must be 1..55 characters of A-Z a-z 0-9 _ . - and begin with a letter or digit",
        description="Unique in this store.",
    ),
]
CronLine: TypeAlias = Annotated[
    str,
    Meta(max_length=MAX_CRON, pattern=_NO_NUL, description="Five fields, or @daily and the like."),
]
ZoneName: TypeAlias = Annotated[
    str, Meta(max_length=100, pattern=_NO_NUL, description="As in the IANA database: Europe/Berlin.")
]
MissedLimit: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_PENDING)]
HourOfDay: TypeAlias = Annotated[
    str, matching(r"^([01][0-9]|2[0-3]):[0-5][0-9]$(?!\n)", "must be a time of day such as 06:00")
]


class ScheduleBody(WireRequest):
    """
    A schedule to add. Exactly one of `cron`, `every_sec`, `at` and `quietest_hour_before` must be given.
    `job`: its jobs, as in a submit, without `after`, `deadline_at`, `earliest_start_at`, `idempotency_key`
    and `wait_sec`.
    """

    name: ScheduleName
    job: SubmitBody
    cron: CronLine | None = None
    every_sec: Seconds | None = None
    at: When | None = None
    #: Daily, in the quietest of the twelve hours before this time, by the recorded load.
    quietest_hour_before: HourOfDay | None = None
    zone: ZoneName = "UTC"
    overlap: Overlap = Overlap.SKIP
    missed: Missed = Missed.LATEST
    #: For `missed` "all": the most moments that are made up for.
    missed_limit: MissedLimit = MISSED_LIMIT


class ScheduleEdit(WireRequest):
    """
    Changes of a schedule. A missing field stays as it is. `cron`, `every_sec` or `at` replaces the present
    one.
    """

    job: SubmitBody | UnsetType = UNSET
    cron: CronLine | UnsetType = UNSET
    every_sec: Seconds | UnsetType = UNSET
    at: When | UnsetType = UNSET
    quietest_hour_before: HourOfDay | UnsetType = UNSET
    zone: ZoneName | UnsetType = UNSET
    overlap: Overlap | UnsetType = UNSET
    missed: Missed | UnsetType = UNSET
    missed_limit: MissedLimit | UnsetType = UNSET


class ScheduleRun(WireRequest):
    """`idempotency_key`: a repeated request returns the same job."""

    idempotency_key: Key | None = None


class SchedulesQuery(WireRequest):
    addon_id: AddonName | UnsetType = UNSET


class FiringInfo(WireAnswer):
    """
    A moment that became a job. `by`: the user that ran it by hand; empty: it was due. `state` null: the job
    was pruned.
    """

    moment: datetime
    job_id: str
    at: datetime
    by: str
    state: JobState | None


class ScheduledJob(WireAnswer):
    """The jobs of a schedule: the fields of a submit."""

    addon_id: str
    job_type: str
    cost_units: int
    priority: int
    constraints: Constraints
    run_when: RunWhen
    quiet_for_sec: int
    expected_duration_sec: float | None
    payload: Raw
    tags: tuple[str, ...]
    labels: tuple[str, ...]
    max_runtime_sec: int | None
    max_active_sec: int | None
    cost_limit: float | None
    unit: str
    retry_delays_sec: tuple[int, ...]
    preemptible: bool


class ScheduleInfo(WireAnswer):
    """
    A schedule, with its moments in its time zone. `next`: the next five; none while it is paused. `last`: its last
    ten jobs, newest first. `waiting`: moments that wait for the end of an earlier job. `problem`: why this
    host cannot compute its moments (it does not know the zone, say); then the moments shown are in UTC.
    """

    name: str
    addon_id: str
    cron: str | None
    every_sec: int | None
    at: datetime | None
    zone: str
    overlap: Overlap
    missed: Missed
    missed_limit: int
    paused: bool
    created_at: datetime
    created_by: str
    edited_at: datetime
    edited_by: str
    next: list[datetime]
    last: list[FiringInfo]
    waiting: list[datetime]
    problem: str | None
    #: Its jobs in one line.
    title: str
    job: ScheduledJob


class ScheduleList(WireAnswer):
    schedules: list[ScheduleInfo]
