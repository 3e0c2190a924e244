"""
A schedule: a template of a job with the moments at which it is submitted, and the decisions about it.

A schedule is one row with a version. Every decision about it (add, edit, pause, resume, run now, remove,
fire, drop) is a `ScheduleChange`: it has the version that the decider saw, the new row, and the job to
submit. A store writes all of that in one transaction, and only if the version is still the same. So any
number of schedulers may decide about the same moment, and one of them wins. After a kill before the commit
the moment is still due; after the commit it has fired.

Every moment up to `last_moment` is handled, and no later one is. So no moment is handled twice, even if the
clock is set back. Only if it is set back by hours, so that it was wrong before, moments count from then on
(`follow_clock`): otherwise the schedule would be silent until the clock is there again.

A change submits at most one job. Moments that must wait for the end of an earlier job (overlap `queue` and
`cancel-running`, and missed moments that are made up for) are `pending` in the row, and become jobs one after
the other.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import BadIntent, Unavailable
from penstock.core.jobs.changes import Note, principal_data
from penstock.core.jobs.intent import MAX_SPAN_SEC, Intent
from penstock.core.jobs.intent import check as check_intent
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.moments import Timing, cron_problem, zone_problem
from penstock.core.jobs.types import BATCH_TAG, FAR_MOMENT, HOUR, MINUTE, JobId, Moment, Span, when

#: A name is part of a tag, which has at most 64 characters.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,54}")
#: With `missed="skip"`: a moment that is handled this much later was missed.
LATE: Final[Span] = 1 * MINUTE
#: A clock that is set back by more than this was wrong before. cron draws the line here too.
WRONG_CLOCK: Final[Span] = 3 * HOUR
MOST_PENDING: Final = 1_000
MISSED_LIMIT: Final = 100
#: How many of the last moments a schedule shows.
HISTORY: Final = 10
#: How many missed moments are counted at most.
_COUNTED: Final = 10_000
#: How many tags the template may have: the jobs have two more.
_MOST_TAGS: Final = 30
#: A longer key of a request is hashed: it becomes a part of the job's key, with the schedule's name and
#: moment.
_SHORT_KEY: Final = 100
TAG: Final = "schedule:"


class Overlap(StrEnum):
    """What happens at a moment while an earlier job of the schedule has not ended."""

    SKIP = "skip"  # the moment is dropped
    QUEUE = "queue"  # its job is submitted when the earlier one has ended
    CANCEL_RUNNING = (
        "cancel-running"  # the earlier job is canceled; the new one is submitted when it has ended
    )


class Missed(StrEnum):
    """What happens to moments at which no scheduler ran."""

    SKIP = "skip"  # they are dropped
    LATEST = "latest"  # the last of them is made up for
    ALL = "all"  # up to `missed_limit` are made up for, one after the other


class Schedule(Struct, frozen=True):
    """
    A schedule as defined. `intent`: the template of its jobs. `anchor`: the moment from which `every_sec`
    counts.
    """

    name: str
    intent: Intent
    cron: str | None = None
    every_sec: int | None = None
    at: Moment | None = None
    zone: str = "UTC"
    overlap: Overlap = Overlap.SKIP
    missed: Missed = Missed.LATEST
    missed_limit: int = MISSED_LIMIT
    paused: bool = False
    anchor: Moment = 0
    created_at: Moment = 0
    created_by: str = ""
    edited_at: Moment = 0
    edited_by: str = ""

    @property
    def timing(self) -> Timing:
        return Timing(self.cron, self.every_sec, self.at, self.zone, self.anchor)

    @property
    def tag(self) -> str:
        """The tag of all jobs of the schedule."""
        return TAG + self.name

    def problem(self) -> str | None:
        """Why this host cannot compute the moments of the schedule; None: it can."""
        try:
            self.timing.after(self.anchor)
        except Unavailable as error:
            return str(error)
        return None

    def next_moments(self, after: Moment, count: int) -> list[Moment]:
        moments = self.timing.moments(after)
        return [moment for _, moment in zip(range(count), moments, strict=False)]


#: The fields of the definition. If all of them are equal, an edit changes nothing.
DEFINITION: Final = ("intent", "cron", "every_sec", "at", "zone", "overlap", "missed", "missed_limit")
_TIMING: Final = ("cron", "every_sec", "at", "zone")


class Firing(Struct, frozen=True):
    """A moment that became a job. `by`: the principal who ran the schedule by hand; empty: it was due."""

    moment: Moment
    job_id: JobId
    at: Moment
    by: str = ""


class ScheduleState(Struct, frozen=True):
    """What a schedule has done so far. `active`: jobs that had not ended at the last decision."""

    last_moment: Moment
    pending: tuple[Moment, ...] = ()
    active: tuple[JobId, ...] = ()
    history: tuple[Firing, ...] = ()  # the newest last


class ScheduleRecord(Struct, frozen=True):
    """The row of a schedule."""

    schedule: Schedule
    state: ScheduleState
    version: int

    @property
    def name(self) -> str:
        return self.schedule.name

    @property
    def due_at(self) -> Moment | None:
        """When `look` must be called: 0 while moments wait for the end of a job; None: never."""
        if self.schedule.paused:
            return None
        return 0 if self.state.pending else self.next_moment

    @property
    def next_moment(self) -> Moment | None:
        return None if self.schedule.paused else self.schedule.timing.after(self.state.last_moment)


class DueJob(NamedTuple):
    """A job to submit for a moment."""

    moment: Moment
    intent: Intent


class ScheduleChange(Struct, frozen=True):
    """
    A decision about a schedule. `version`: of the row that the decider saw; 0: there was none. `target`: the
    new row; None: the schedule is removed.
    """

    at: Moment
    name: str
    version: int
    target: ScheduleRecord | None
    job: DueJob | None = None
    by: str = ""
    notes: tuple[Note, ...] = ()

    def row(self, job_id: JobId | None) -> ScheduleRecord | None:
        """The row to write. `job_id`: the job that was submitted with it."""
        if self.target is None or self.job is None or job_id is None:
            return self.target
        state = self.target.state
        firing = Firing(self.job.moment, job_id, self.at, self.by)
        history = (*state.history, firing)[-HISTORY:]
        return replace(self.target, state=replace(state, active=(*state.active, job_id), history=history))

    def events(self, job_id: JobId | None) -> tuple[Note, ...]:
        if self.job is None or job_id is None or self.target is None:
            return self.notes
        data = {"moment": when(self.job.moment).isoformat(), "job_id": job_id, **principal_data(self.by)}
        note = schedule_note(
            EventKind.SCHEDULE_FIRED, "run" if self.by else "due", self.target.schedule, data
        )
        return (*self.notes, note)


def schedule_note(kind: EventKind, reason: str, schedule: Schedule, data: dict[str, Any]) -> Note:
    return Note(kind, reason, {"schedule": schedule.name, "addon_id": schedule.intent.addon_id, **data})


# bounds


def check(schedule: Schedule, now: Moment, *, most_units: int, before: Schedule | None = None) -> None:
    """
    Refuse a schedule with problems (BadIntent names all). `before`: the schedule so far: its moment may have
    passed.
    """
    passed = before is not None and before.at == schedule.at
    problems = list(_problems(schedule, 0 if passed else now))
    try:
        check_intent(schedule.intent, now, most_units=most_units)
    except BadIntent as error:
        problems += [(problem["field"], problem["message"]) for problem in error.problems]
    if problems:
        raise BadIntent.of(*problems)


def _problems(schedule: Schedule, now: Moment) -> Iterator[tuple[str, str]]:
    if not _NAME.fullmatch(schedule.name):
        yield "name", "must be 1..55 characters of A-Z a-z 0-9 _ . - and begin with a letter or digit"
    zone = zone_problem(schedule.zone)
    if zone is not None:
        yield "zone", zone
    yield from _timing_problems(schedule, now)
    if schedule.overlap not in list(Overlap):
        yield "overlap", f"must be one of {', '.join(Overlap)}"
    if schedule.missed not in list(Missed):
        yield "missed", f"must be one of {', '.join(Missed)}"
    if not 1 <= schedule.missed_limit <= MOST_PENDING:
        yield "missed_limit", f"must be 1..{MOST_PENDING}"
    if any(tag.startswith(BATCH_TAG) for tag in schedule.intent.tags):
        yield "job.tags", "cannot name a batch, which takes no more jobs once it has ended"
    for field in ("earliest_start_at", "deadline_at", "idempotency_key"):
        if getattr(schedule.intent, field) is not None:
            yield field, "cannot be part of a schedule: each of its jobs has a moment of its own"
    if schedule.intent.after:
        yield "after", "cannot be part of a schedule: all of its jobs would wait for the same job"
    if len(schedule.intent.tags) > _MOST_TAGS:
        yield "tags", f"must be at most {_MOST_TAGS} tags: each job of a schedule gets two more"


def _timing_problems(schedule: Schedule, now: Moment) -> Iterator[tuple[str, str]]:
    if [schedule.cron, schedule.every_sec, schedule.at].count(None) != 2:
        yield "cron", "must be given, or every_sec, or at: exactly one of the three"
        return
    if schedule.cron is not None and (problem := cron_problem(schedule.cron)) is not None:
        yield "cron", problem
    if schedule.every_sec is not None and not 1 <= schedule.every_sec <= MAX_SPAN_SEC:
        yield "every_sec", f"must be 1..{MAX_SPAN_SEC}"
    if schedule.at is not None and schedule.at >= FAR_MOMENT:
        yield "at", "must lie before the year 9999"
    elif schedule.at is not None and schedule.at <= now:
        yield "at", "has passed already"


# requests of users


def _next_version(version: int, now: Moment) -> int:
    """A version above all that a schedule of this name ever had, also one that was removed."""
    return max(version + 1, now)


def _set(
    record: ScheduleRecord | None,
    target: ScheduleRecord,
    now: Moment,
    by: str,
    *,
    reason: str,
    data: dict[str, Any] | None = None,
) -> ScheduleChange:
    version = 0 if record is None else record.version
    target = replace(target, version=_next_version(version, now))
    note = schedule_note(
        EventKind.SCHEDULE_SET, reason, target.schedule, {**(data or {}), **principal_data(by)}
    )
    return ScheduleChange(now, target.name, version, target, notes=(note,))


def add(schedule: Schedule, now: Moment, by: str) -> ScheduleChange:
    """Add a schedule. Its first moment is the next one from now on."""
    schedule = replace(schedule, anchor=now, created_at=now, created_by=by, edited_at=now, edited_by=by)
    return _set(None, ScheduleRecord(schedule, ScheduleState(now), 0), now, by, reason="added")


def edit(record: ScheduleRecord, edited: Schedule, now: Moment, by: str) -> ScheduleChange | None:
    """Edit a schedule. None: nothing differs. New times count from now on; moments that have passed stay."""
    before = record.schedule
    differs = [name for name in DEFINITION if getattr(before, name) != getattr(edited, name)]
    if not differs:
        return None
    schedule = replace(
        before, **{name: getattr(edited, name) for name in DEFINITION}, edited_at=now, edited_by=by
    )
    state = record.state
    if any(name in differs for name in _TIMING):
        schedule = replace(schedule, anchor=now)
        state = replace(state, last_moment=max(now, state.last_moment))
    return _set(
        record, ScheduleRecord(schedule, state, 0), now, by, reason="edited", data={"fields": differs}
    )


def pause(record: ScheduleRecord, now: Moment, by: str) -> ScheduleChange | None:
    """Pause a schedule, and drop moments that wait for an earlier job. None: it is paused already."""
    if record.schedule.paused:
        return None
    paused = replace(record.schedule, paused=True)
    state = replace(record.state, pending=())
    change = _set(record, ScheduleRecord(paused, state, 0), now, by, reason="paused")
    return replace(change, notes=(*change.notes, *_skip_notes(paused, record.state.pending, "paused")))


def resume(record: ScheduleRecord, now: Moment, by: str) -> ScheduleChange | None:
    """Resume a schedule. Moments that passed in the pause make no jobs. None: it is not paused."""
    if not record.schedule.paused:
        return None
    state = replace(record.state, last_moment=max(now, record.state.last_moment))
    resumed = replace(record.schedule, paused=False)
    return _set(record, ScheduleRecord(resumed, state, 0), now, by, reason="resumed")


def run_now(
    record: ScheduleRecord, now: Moment, by: str, ended: Collection[JobId], key: str = ""
) -> ScheduleChange:
    """
    Submit a job at once, whatever `overlap` says and also while the schedule is paused. `ended`: as in
    `look`. `key`: repeated requests with the same key make one job.
    """
    running = tuple(job_id for job_id in record.state.active if job_id not in ended)
    state = replace(record.state, active=running)
    target = replace(record, state=state, version=_next_version(record.version, now))
    intent = _intent(record.schedule, now, f"run:{_short(key) or now}")
    if key:  # a repeated request has another moment and must have the same body
        intent = replace(intent, tags=(*record.schedule.intent.tags, record.schedule.tag))
    return ScheduleChange(
        now, record.name, record.version, target, job=DueJob(now, intent), by=by or "unknown"
    )


def remove(record: ScheduleRecord, now: Moment, by: str) -> ScheduleChange:
    note = schedule_note(EventKind.SCHEDULE_SET, "removed", record.schedule, principal_data(by))
    return ScheduleChange(now, record.name, record.version, None, notes=(note,))


# moments


def look(record: ScheduleRecord, now: Moment, ended: Collection[JobId]) -> ScheduleChange | None:
    """
    Decide what to do now; None: nothing. `ended`: the active jobs that have ended. A BLOCKED job counts as
    ended, because the schedule does not wait for a user's decision.
    """
    schedule, state = record.schedule, record.state
    if schedule.paused:
        return None
    running = tuple(job_id for job_id in state.active if job_id not in ended)
    due = _due(record, now)
    pending, skipped = _overlap(schedule, state.pending, due.moments, busy=bool(running))
    first = pending[0] if pending and not running else None
    if due.last is None and first is None:
        return None
    after = ScheduleState(
        last_moment=state.last_moment if due.last is None else due.last,
        pending=pending if first is None else pending[1:],
        active=running,
        history=state.history,
    )
    return ScheduleChange(
        at=now,
        name=record.name,
        version=record.version,
        target=ScheduleRecord(schedule, after, _next_version(record.version, now)),
        job=None if first is None else DueJob(first, _intent(schedule, first, _moment_text(first))),
        notes=(*_missed_notes(schedule, due), *_skip_notes(schedule, skipped, "overlap", running)),
    )


def follow_clock(record: ScheduleRecord, now: Moment) -> ScheduleChange | None:
    """
    Let moments count from now on, because the clock was wrong when the last one was handled. A moment that
    became a job then becomes no second one: its key is used. None: the clock was not set back so far.
    """
    schedule, state = record.schedule, record.state
    if state.last_moment <= now + WRONG_CLOCK:
        return None
    schedule = replace(schedule, anchor=min(schedule.anchor, now))
    pending = tuple(moment for moment in state.pending if moment <= now)
    state = replace(state, last_moment=now, pending=pending)
    return _set(record, ScheduleRecord(schedule, state, 0), now, "", reason="clock_set_back")


def to_cancel(record: ScheduleRecord, ended: Collection[JobId]) -> list[JobId]:
    """The jobs that a waiting moment cancels, until they have ended: a kill may prevent the first cancel."""
    if record.schedule.overlap != Overlap.CANCEL_RUNNING or not record.state.pending:
        return []
    return [job_id for job_id in record.state.active if job_id not in ended]


def drop_first(record: ScheduleRecord, change: ScheduleChange, reason: str) -> ScheduleChange:
    """The change without its job, because its moment cannot become one."""
    moments = () if change.job is None else (change.job.moment,)
    return replace(change, job=None, notes=(*change.notes, *_skip_notes(record.schedule, moments, reason)))


class _Due(NamedTuple):
    """
    Moments that have come. `last`: the last of them; None: there are none. `moments`: those that become jobs.
    """

    last: Moment | None
    moments: tuple[Moment, ...] = ()
    #: The first missed moment, and how many there are; None: more than `_COUNTED`.
    missed_from: Moment | None = None
    missed: int | None = 0


def _due(record: ScheduleRecord, now: Moment) -> _Due:
    schedule = record.schedule
    most = schedule.missed_limit if schedule.missed == Missed.ALL else 1
    came = _came(schedule.timing, record.state.last_moment, now, most)
    if came.last is None:
        return came
    moments = came.moments
    if schedule.missed == Missed.SKIP and moments[-1] < now - LATE:
        moments = ()
    missed = None if came.missed is None else came.missed - len(moments)
    return came._replace(moments=moments, missed=missed)


def _came(timing: Timing, after: Moment, now: Moment, most: int) -> _Due:
    """The last `most` moments between `after` and now, and how many there are in all."""
    latest: deque[Moment] = deque(maxlen=most)
    first, count = None, 0
    for moment in timing.moments(after):
        if moment > now:
            break
        first = first or moment
        latest.append(moment)
        count += 1
        if count > _COUNTED:
            return _Due(*_latest(timing, after, now, most), missed_from=first, missed=None)
    if first is None:
        return _Due(None)
    return _Due(latest[-1], tuple(latest), first, count)


def _latest(timing: Timing, after: Moment, now: Moment, most: int) -> tuple[Moment, tuple[Moment, ...]]:
    """The last moments if there are very many: searches from the end, in windows that double."""
    window = HOUR
    while True:
        start, latest = max(after, now - window), deque[Moment](maxlen=most)
        for moment in timing.moments(start):
            if moment > now:
                break
            latest.append(moment)
        if len(latest) == most or (start == after and latest):
            return latest[-1], tuple(latest)
        window *= 2


def _overlap(
    schedule: Schedule, pending: tuple[Moment, ...], due: tuple[Moment, ...], *, busy: bool
) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """
    The moments that wait from now on, and those that are dropped. If several are due at once, they become
    jobs one after the other, whatever `overlap` says: it decides only about a single moment that comes while
    an earlier job has not ended.
    """
    busy = busy or bool(pending)
    if len(due) == 1 and busy and schedule.overlap == Overlap.SKIP:
        return pending, due
    if len(due) == 1 and schedule.overlap == Overlap.CANCEL_RUNNING:
        return due, pending
    both = (*pending, *due)
    return both[:MOST_PENDING], both[MOST_PENDING:]


def _missed_notes(schedule: Schedule, due: _Due) -> Iterator[Note]:
    if due.missed == 0 or due.missed_from is None:
        return
    count = f"more than {_COUNTED}" if due.missed is None else due.missed
    data = {"count": count, "first": when(due.missed_from).isoformat()}
    yield schedule_note(EventKind.SCHEDULE_MISSED, str(schedule.missed), schedule, data)


def _skip_notes(
    schedule: Schedule, moments: Sequence[Moment], reason: str, running: Sequence[JobId] = ()
) -> Iterator[Note]:
    for moment in moments:
        data: dict[str, Any] = {"moment": when(moment).isoformat()}
        if running:
            data["job_id"] = running[0]
        yield schedule_note(EventKind.SCHEDULE_SKIPPED, reason, schedule, data)


def _intent(schedule: Schedule, moment: Moment, key: str) -> Intent:
    """
    The intent for a moment. Its key makes schedule and moment unique among the jobs of the store; its tags
    name both, so the job's function knows its moment.
    """
    intent = schedule.intent
    tags = (*intent.tags, schedule.tag, f"moment:{_moment_text(moment)}")
    # The time of creation is a part of the key: a removed schedule of this name may have had the same moment.
    key = f"schedule:{schedule.name}@{key}/{schedule.created_at}"
    return replace(intent, tags=tags, idempotency_key=key)


def _short(key: str) -> str:
    """The key, or a hash of a long one. Different keys stay different."""
    return (
        key
        if len(key) <= _SHORT_KEY
        else blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    )


def _moment_text(moment: Moment) -> str:
    return when(moment).strftime("%Y-%m-%dT%H:%M:%SZ")
