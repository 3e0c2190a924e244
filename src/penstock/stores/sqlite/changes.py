"""
Changes and heartbeats as rows: one by one, and in batches.

A change moves a job or a dispatch from the table that it is in to the table of its new state. A job that is
DONE has no row of its own: its completed attempt says so. Most jobs are claimed and complete, so those two
changes move whole batches.

The batch functions compute everything that is the same for a batch once, and read it as one text: a cursor
releases and takes the interpreter's lock for every row, and the threads that run the jobs want that lock too.
"""

#: One that starts, and when it is expected to end.
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, cast

import apsw

from penstock.core.jobs.admission import FairShare
from penstock.core.jobs.changes import Note, Renewal, running_data, stop_moment
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import Dispatch, DispatchStep, EventKind, JobStep, Place, dispatch_id_of
from penstock.core.jobs.ordering import Ordering, Pick, Placement
from penstock.core.jobs.spending import windows
from penstock.core.jobs.states import IN_FLIGHT, DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, EndReason, HostId, JobId, Moment, Money, Span
from penstock.stores.api import NOTHING_SPENT, CompletedDispatch, Grant, NotesFor, Standing, Terms
from penstock.stores.common.rows import parts_of
from penstock.stores.sqlite.admission_view import Queued
from penstock.stores.sqlite.connection import one, statements
from penstock.stores.sqlite.write_batch import NO_JOB, SqliteWriteBatch, Started

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


_Starts: TypeAlias = tuple[Queued, Moment | None]
#: What picks that are taken together have in common.
_KIND: Final = attrgetter("admission_class", "offer")
_FIRST: Final = "1"
#: So many of one kind are not worth a statement of their own.
FEW: Final = 8
#: As they are written: a word costs the encoder half of what the enumeration's member does.
_DISPATCHING, _RUNNING, _DONE = str(EventKind.DISPATCHING), str(EventKind.RUNNING), str(EventKind.DONE)
_DISPATCHED, _RUNS, _IS_DONE, _COMPLETED = (
    *(str(state) for state in (JobState.DISPATCHING, JobState.RUNNING, JobState.DONE)),
    str(EndReason.COMPLETED),
)


def take(
    pages: SqliteWriteBatch,
    picks: Sequence[Pick],
    terms: Terms,
    ordering: Ordering,
    *,
    host: HostId,
    now: Moment,
) -> list[Grant]:
    """What a round has picked becomes dispatches, in its order."""
    made: list[Grant] = []
    fresh = pages.fresh
    said = pages.said(
        [p.waiting.no for p in picks if p.offer is Placement.LEASE and p.waiting.no not in fresh]
    )
    for (admission_class, offer), its in groupby(picks, _KIND):
        alike = [(cast("Queued", pick.waiting), pick.ends_at) for pick in its]
        if offer is Placement.LEASE:
            started = Started(admission_class, fresh, said, ordering.aging.per_point)
            made += _lease(pages, alike, terms, started, admission_class=admission_class, host=host, now=now)
        else:
            made += _reserve(pages, alike, terms, admission_class=admission_class, host=host, now=now)
        pages.start([queued.no for queued, _ in alike])
        pages.hold(host, pages.number(admission_class), len(alike))
        state = JobState.RUNNING if offer is Placement.LEASE else JobState.DISPATCHING
        pages.moved(admission_class.addon_id, JobState.QUEUED, state, len(alike))
        pages.touched.add(admission_class.addon_id)  # its account was changed by the round, as it picked
    return made


def _reserve(
    pages: SqliteWriteBatch,
    picks: Sequence[_Starts],
    terms: Terms,
    *,
    admission_class: AdmissionClass,
    host: HostId,
    now: Moment,
) -> list[Grant]:
    addon_id, until = admission_class.addon_id, now + terms.reserve_for
    made, rows, class_no, phase = (
        [],
        list[tuple[Any, ...]](),
        pages.number(admission_class),
        DispatchPhase.RESERVED,
    )
    for queued, ends_at in picks:
        no, job_id, fence, n = queued.no, queued.job_id, queued.fence + 1, queued.events + 1
        dispatch_id = dispatch_id_of(job_id, fence)
        pages.tell((now, _DISPATCHING, job_id, n, _DISPATCHED, "admitted", str(fence), None))
        rows.append((no, None, class_no, host, fence, phase, n, pages.batch, now, None, until, ends_at, None, None, ""))  # fmt: skip
        dispatch = Dispatch(
            dispatch_id, job_id, addon_id, host, admission_class, fence, phase, now, until, None, ends_at
        )
        made.append(Grant(dispatch))
    pages.add_live(rows)
    return made


def _lease(
    pages: SqliteWriteBatch,
    picks: Sequence[_Starts],
    terms: Terms,
    started: Started,
    *,
    admission_class: AdmissionClass,
    host: HostId,
    now: Moment,
) -> list[Grant]:
    """They run from now on, and their workers get the jobs as well."""
    addon_id, until, worker = admission_class.addon_id, now + terms.lease_for, terms.worker
    class_no, phase, batch, per_point = (
        pages.number(admission_class),
        DispatchPhase.LEASED,
        pages.batch,
        started.per_point,
    )
    kind, waited, told = (class_no, host, until), -1, running_data(worker, 0)
    made, plain, rows, events = [], list[int](), list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    fresh, leases, few, job_of = pages.fresh, pages.leased, len(picks) < FEW, started.job
    for queued, ends_at in picks:
        no, job_id, fence, n = queued.no, queued.job_id, queued.fence + 1, queued.events
        attempt, stop_at, stop_for = _FIRST, None, None
        if fence > 1:
            attempt = str(fence)
        if queued.max_runtime_sec is not None or queued.max_active_sec is not None:
            stop_at, stop_for = stop_moment(queued.max_runtime_sec, queued.max_active_sec, queued.active, now)
        if waited != (waits := now - queued.turn - queued.priority * per_point):
            waited, told = waits, running_data(worker, waits)
        dispatch_id: DispatchId = f"{job_id}.{attempt}"  # type: ignore[assignment]  # as `dispatch_id_of` makes it
        events += (
            (now, _DISPATCHING, job_id, n + 1, _DISPATCHED, "admitted", attempt, None),
            (now, _RUNNING, job_id, n + 2, _RUNS, "", attempt, told),
        )
        if few or ends_at is not None or stop_at is not None or no in fresh:
            rows.append(
                (no, None, class_no, host, fence, phase, n + 2, batch, now, now, until, ends_at, stop_at, stop_for, worker)
            )  # fmt: skip
        else:
            plain.append(no)
        dispatch = Dispatch(
            dispatch_id, job_id, addon_id, host, admission_class, fence, phase, now, until, now, ends_at,
            stop_at, stop_for, None, worker
        )  # fmt: skip
        made.append(Grant(dispatch, job_of(queued, dispatch_id)))
        leases[dispatch_id] = (no, n + 2, kind)
    pages.tell(*events)
    pages.lease(kind, worker, plain)
    pages.add_live(rows)
    return made


def complete(
    pages: SqliteWriteBatch, done: Sequence[CompletedDispatch], sharing: FairShare, now: Moment
) -> list[bool]:
    """As `changes.completed` says, for each that still runs under its lease."""
    pages.flush_rows()
    answers = [False] * len(done)
    plain, with_result = list[int](), list[tuple[int, str]]()
    events: list[tuple[Any, ...]] = []
    leases = pages.leases([each[0] for each in done], now)
    for at, no, n, _ in leases:
        dispatch_id, result = done[at]
        answers[at] = True
        if result is None:
            plain.append(no)
        else:
            with_result.append((no, result))
        job_id, _, attempt = dispatch_id.rpartition(".")
        events.append((now, _DONE, job_id, n + 1, _IS_DONE, _COMPLETED, attempt, None))
    pages.tell(*events)
    pages.complete(plain, with_result)
    for (class_no, host, _), n in Counter(kind for *_, kind in leases).items():
        admission_class = pages.give_back(HostId(host), class_no, n, sharing, now)
        pages.moved(admission_class.addon_id, JobState.RUNNING, JobState.DONE, n)
    return answers
