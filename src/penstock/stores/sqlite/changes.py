"""
Changes and heartbeats as rows: what the decided step of a job or a dispatch means for the table that it is in, and for the one
that it goes to. A job that is done has no row of its own for that: its completed attempt says it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import apsw

from penstock.core.jobs.changes import DispatchStep, JobStep, Note, Renewal
from penstock.core.jobs.end_rules import DispatchPhase, EndReason
from penstock.core.jobs.job import EventKind, Place
from penstock.core.jobs.spending import windows
from penstock.core.jobs.states import IN_FLIGHT, JobState
from penstock.core.jobs.types import AddonId, JobId, Moment, Money, Span
from penstock.stores.api import NOTHING_SPENT, NotesFor, Standing
from penstock.stores.common.rows import parts_of
from penstock.stores.sqlite.connection import one, statements
from penstock.stores.sqlite.write_batch import NO_JOB, SqliteWriteBatch

__all__ = ["Moved", "move_dispatch", "move_job", "renew"]

_AS_THEY_ARE: Final = (None,) * 4


def move_dispatch(pages: SqliteWriteBatch, step: DispatchStep, no: int, events: int, now: Moment) -> None:
    """`events`: of its job, with those of this change."""
    limits = (step.expires_at, step.stop_at, step.stop_for, step.reason, step.worker)
    if step.target is DispatchPhase.ENDED:
        pages.update(
            "insert_ended_dispatch", no, events, *limits, now, step.end, step.result, step.error, step.source
        )
        pages.update("delete_dispatch", no, step.source)
        if step.end is EndReason.COMPLETED and no > 0:
            pages.done([no])
    else:
        started = now if step.target is DispatchPhase.LEASED else None
        pages.update("move_dispatches", no, step.target, started, *limits, step.source)


class Moved(NamedTuple):
    """A job by its number, with what follows from its step."""

    no: int
    #: With those of this change.
    events: int
    #: How long the attempt was that has just ended.
    active: Span
    now: Moment


def move_job(pages: SqliteWriteBatch, step: JobStep, moved: Moved) -> None:
    if step.place is not None:
        _to_queue(pages, step, step.place, moved)
    elif step.target is step.source or step.target in IN_FLIGHT:
        _note(pages, step, moved)
    elif step.target is not JobState.DONE:
        _settle(pages, step, moved)


def _note(pages: SqliteWriteBatch, step: JobStep, moved: Moved) -> None:
    if step.source is JobState.QUEUED:
        pages.update("note_queued", moved.no, moved.events)
    elif step.source in IN_FLIGHT:
        pages.update("note_dispatch", moved.no, moved.events)
    elif step.source is JobState.DONE:
        pages.update("note_ended_dispatch", moved.no, moved.events, step.fence)
    else:
        pages.update("note_settled", moved.no, moved.events, step.source)


def _settle(pages: SqliteWriteBatch, step: JobStep, moved: Moved) -> None:
    no, events, active, now = moved
    if step.source is JobState.QUEUED:
        pages.update("settle_queued", no, step.target, events, now, *_counters(step))
        pages.update("leave_queue", no)
    else:
        ran = step.source is JobState.RUNNING
        pages.update(
            "settle_job", no, step.target, step.fence, events, now, active, *_counters(step), ran, _own(step)
        )


def _to_queue(pages: SqliteWriteBatch, step: JobStep, place: Place, moved: Moved) -> None:
    no, events, active, now = moved
    its = (place.ready_at, place.priority, pages.number(place.admission_class))
    times = (place.earliest_start_at, place.not_before, place.deadline_at)
    if step.source is JobState.QUEUED:
        line = (place.line(now), place.turn, place.ready_at, place.urgent_at, *its[1:], place.deadline_at)
        pages.update("edit_job", no, *its, *times, *_counters(step))
        pages.update("edit_queued", no, events, *line)
        return
    fresh, ran = step.fresh, step.source is JobState.RUNNING
    pages.update(
        "requeue_job", no, step.fence, fresh, active, fresh, *_counters(step), ran, *its, *times, _own(step)
    )
    pages.update("insert_queued", no, place.line(now), place.turn, place.urgent_at, events)
    if step.source not in IN_FLIGHT:
        pages.update("blank_job", no)


def _counters(step: JobStep) -> tuple[Any, ...]:
    c = step.counters
    return _AS_THEY_ARE if c is None else (c.crash, c.unavailable, c.error, c.start)


def _own(step: JobStep) -> JobState | None:
    """What its own row says before."""
    return None if step.source in IN_FLIGHT else step.source


def renew(
    con: apsw.Connection, pages: SqliteWriteBatch, renewal: Renewal, notes_for: NotesFor, now: Moment
) -> Standing | None:
    job_id, fence = parts_of(renewal.dispatch_id)
    named = {"dispatch_id": renewal.dispatch_id, "job_id": job_id, "fence": fence}
    row = one(con, "dispatches_for_beats", named)
    if row is None:
        return None
    phase, expires_at, reason, addon_id, spent, no, job_id, job_spent, spent_before, n, limit, in_flight = row
    if phase not in (DispatchPhase.LEASED, DispatchPhase.ENDING) or expires_at <= now:
        return None
    until = renewal.expires_at if phase == DispatchPhase.LEASED else expires_at
    more = max(0, (renewal.spent or 0) - spent)
    if more:
        con.executemany(statements()["spend"], [(addon_id, w.name, more) for w in windows(now)])
    before = 0 if no is None else job_spent - spent_before
    standing = Standing(
        renewal.dispatch_id,
        None if job_id is None else JobId(job_id),
        AddonId(addon_id),
        DispatchPhase(phase),
        None if reason is None else EndReason(reason),
        until,
        before,
        before + more,
        limit,
        _addon_spent(con, addon_id, now) if more else NOTHING_SPENT,
    )
    told = list(notes_for(standing))
    if no is not None and (more or told or renewal.progress is not None or renewal.checkpoint is not None):
        if renewal.checkpoint is not None:
            con.execute(statements()["set_checkpoints"], (no, now, fence, renewal.checkpoint))
            told.insert(0, Note(EventKind.CHECKPOINT))
        con.execute(statements()["beat_jobs"], (renewal.progress, more, no))
    for note in told:
        whose = NO_JOB
        if note.of_job and no is not None:
            n += 1
            whose = (no, JobId(job_id), n, JobState.RUNNING)
        pages.note(now, note, whose, renewal.dispatch_id)
    con.execute(statements()["renew"], (until, renewal.progress, spent + more, n, renewal.pid, in_flight))
    return standing


def _addon_spent(con: apsw.Connection, addon_id: str, now: Moment) -> dict[str, Money]:
    return {
        window.kind: one(con, "spent_in", {"addon_id": addon_id, "period": window.name})[0]
        for window in windows(now)
    }
