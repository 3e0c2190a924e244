"""
What happens to a job, as rows: its submit, changes, completion and heartbeats.

A change moves a job or a dispatch from the table that it is in to the table of its new state. A job that is DONE has no row
of its own: its completed attempt says so. Most jobs complete, so completions move whole batches, read as one text: a
cursor releases and takes the interpreter's lock for every row, and the threads that run the jobs want that lock too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from penstock.core.jobs.changes import Change
from penstock.core.jobs.intent import Intent, all_but_payload
from penstock.core.jobs.job import DispatchStep, EventKind, JobStep
from penstock.core.jobs.ordering import place
from penstock.core.jobs.spending import Standing
from penstock.core.jobs.states import IN_FLIGHT, DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, EndReason, HostId, JobId, Span
from penstock.stores.api import CompletedDispatch, Depth, Receipt, Renew
from penstock.stores.common.rows import by_name, intent_row, job_row, listed
from penstock.stores.common.writes import NO_JOB, EventJob, Heartbeats, UsedKeys, key_of, take
from penstock.stores.sqlite.transaction import Transaction

#: As they are written: a word costs the encoder half of what the enumeration's member does.
_SUBMITTED, _DONE = str(EventKind.SUBMITTED), str(EventKind.DONE)
_IS_QUEUED, _IS_DONE, _COMPLETED = str(JobState.QUEUED), str(JobState.DONE), str(EndReason.COMPLETED)
_UNCHANGED: Final = (None,) * 4
#: In the place of a row of `jobs_for_changes`, for a change of a dispatch without a job.
_NO_ROW: Final = (0, "", 0, 0, AddonId(""), "")

# submit


def submit(
    tx: Transaction,
    intents: Sequence[Intent],
    depth: Depth,
    job_ids: Sequence[JobId] = (),
    *,
    sure: bool = True,
) -> list[Receipt]:
    """`job_ids`: the ids that the jobs shall have. Not `sure`: another process may have written them already."""
    used: UsedKeys = {}
    for key in {key for intent in intents if (key := key_of(intent)) is not None}:
        tx.flush_jobs()
        for job_id, state, body in tx.execute("jobs_by_key", key):
            used[key] = (Receipt(job_id, JobState(state), created=False), body)

    def insert(at: int, intent: Intent) -> Receipt:
        return _insert(tx, intent, job_ids[at] if job_ids else JobId(tx.new_id()))

    written = {} if sure else _written(tx, job_ids)
    return take(intents, depth, used, queued=tx.totals.queued, insert=insert, written=written)


def _written(tx: Transaction, job_ids: Sequence[JobId]) -> dict[int, Receipt]:
    tx.flush_jobs()
    states = {row[-1]: row[1] for row in tx.execute("jobs_for_changes", {"ids": listed(job_ids)})}
    return {
        i: Receipt(job_id, JobState(states[job_id]), created=True)
        for i, job_id in enumerate(job_ids)
        if job_id in states
    }


def _insert(tx: Transaction, intent: Intent, job_id: JobId) -> Receipt:
    """Most jobs that are submitted together differ by their payload alone, so the rest of their rows is made once."""
    rest = all_but_payload(intent)
    template = tx.templates.get(rest)
    if template is None:
        template = tx.templates[rest] = _template(tx, intent)
    tx.add_job(job_id, intent.payload, template)
    tx.add_events((tx.now, _SUBMITTED, job_id, 1, _IS_QUEUED, "", None, None))
    tx.totals.count(intent.addon_id, JobState.QUEUED, 1)
    return Receipt(job_id, JobState.QUEUED, created=True)


def _template(tx: Transaction, intent: Intent) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    its_place = place(intent, tx.now, None, tx.ordering)
    class_no = tx.classes.number(tx, its_place.admission_class)
    row = job_row(0, JobId(""), intent, its_place, class_no=class_no, now=tx.now)
    addon_id, _, line, turn, ready_at, urgent_at, priority, now, earliest, deadline, *limits, key = row[2:]
    of_job = (addon_id, class_no, ready_at, priority, now, earliest, deadline, *limits, key)
    of_queue = (class_no, line, turn, ready_at, urgent_at, deadline, priority, *limits)
    return of_job, of_queue, intent_row(0, intent)[2:]


# apply


def apply(tx: Transaction, change: Change) -> bool:
    job, dispatch = change.job, change.dispatch
    tx.totals.leases.clear()
    tx.flush_jobs()
    job_row: Any = _NO_ROW
    dispatch_row: Any = None
    if job is not None:
        job_row = tx.one("jobs_for_changes", {"ids": listed([job.job_id])})
        if not _job_matches(job, job_row):
            return False
    if dispatch is not None:
        dispatch_row = tx.one("dispatches_for_changes", {"ids": by_name([dispatch.dispatch_id])})
        if not _dispatch_matches(tx, dispatch, dispatch_row):
            return False
    no, _, _, n, addon_id, _ = job_row
    active, events = 0, n + len(change.notes)
    if dispatch is not None:
        _, _, class_no, host, started_at, dispatch_no, *_ = dispatch_row
        _move_dispatch(tx, dispatch, dispatch_no, events)
        if dispatch.target is DispatchPhase.ENDED:  # only here are units returned, and a row ends once
            tx.give_back(host, class_no, 1)
            active = 0 if started_at is None else max(0, tx.now - started_at)
    if job is not None:
        _move_job(tx, job, no, events, active)
        tx.totals.move(addon_id, job.source, job.target)
    for n_after, note in enumerate(change.notes, n + 1):
        event_job = NO_JOB if job is None else EventJob(no, job.job_id, n_after, job.target)
        tx.add_note(change.at, note, event_job, None if dispatch is None else dispatch.dispatch_id)
    return True


def _job_matches(step: JobStep, row: Any) -> bool:
    return row is not None and row[1] == step.source and row[2] == step.fence


def _dispatch_matches(tx: Transaction, step: DispatchStep, row: Any) -> bool:
    if row is None or row[0] != step.source or row[6] != step.source_reason:
        return False
    return row[1] > tx.now or not step.while_valid


def _move_dispatch(tx: Transaction, step: DispatchStep, no: int, events: int) -> None:
    """`events`: of its job, with those of this change."""
    limits = (step.expires_at, step.stop_at, step.stop_for, step.reason, step.worker)
    if step.target is DispatchPhase.ENDED:
        end = (tx.now, step.end, step.result, step.error)
        tx.write("insert_ended_dispatch", (events, *limits, *end, step.source, no))
        tx.write("delete_dispatch", (step.source, listed([no])))
        if step.end is EndReason.COMPLETED and no > 0:
            tx.done.append(no)
    else:
        started = tx.now if step.target is DispatchPhase.LEASED else None
        tx.write("move_dispatches", (step.target, started, *limits, step.source, no))


def _move_job(tx: Transaction, step: JobStep, no: int, events: int, active: Span) -> None:
    """`events`: of the job, with those of this change. `active`: how long the attempt was that has just ended."""
    if step.place is not None:
        _to_queue(tx, step, no, events, active)
    elif step.target is step.source or step.target in IN_FLIGHT:
        _count_events(tx, step, no, events)
    elif step.target is not JobState.DONE:
        _settle(tx, step, no, events, active)


def _count_events(tx: Transaction, step: JobStep, no: int, events: int) -> None:
    if step.source is JobState.QUEUED:
        tx.write("note_queued", (events, no))
    elif step.source in IN_FLIGHT:
        tx.write("note_dispatch", (events, no))
    elif step.source is JobState.DONE:
        tx.write("note_ended_dispatch", (events, step.fence, no))
    else:
        tx.write("note_settled", (events, step.source, no))


def _settle(tx: Transaction, step: JobStep, no: int, events: int, active: Span) -> None:
    if step.source is JobState.QUEUED:
        tx.write("settle_queued", (step.target, events, tx.now, *_counters(step), no))
        tx.write("leave_queue", (listed([no]),))
    else:
        attempt = (step.fence, events, tx.now, active)
        ran = step.source is JobState.RUNNING
        tx.write("settle_job", (step.target, *attempt, *_counters(step), ran, _own_state(step), no))


def _to_queue(tx: Transaction, step: JobStep, no: int, events: int, active: Span) -> None:
    assert step.place is not None
    place = step.place
    order = (place.ready_at, place.priority, tx.classes.number(tx, place.admission_class))
    times = (place.earliest_start_at, place.not_before, place.deadline_at)
    if step.source is JobState.QUEUED:
        line = (place.line(tx.now), place.turn, place.ready_at, place.urgent_at, *order[1:])
        tx.write("edit_job", (*order, *times, *_counters(step), no))
        tx.write("edit_queued", (events, *line, place.deadline_at, no))
        return
    fresh, ran = step.fresh, step.source is JobState.RUNNING
    attempt = (step.fence, fresh, active, fresh)
    tx.write("requeue_job", (*attempt, *_counters(step), ran, *order, *times, _own_state(step), no))
    tx.write("insert_queued", (place.line(tx.now), place.turn, place.urgent_at, events, no))
    if step.source not in IN_FLIGHT:
        tx.write("blank_job", (no,))


def _counters(step: JobStep) -> tuple[Any, ...]:
    c = step.counters
    return _UNCHANGED if c is None else (c.crash, c.unavailable, c.error, c.start)


def _own_state(step: JobStep) -> JobState | None:
    """What the job's own row says before the step."""
    return None if step.source in IN_FLIGHT else step.source


# complete

#: The position of a completion in what was reported, the job's number and events, and what leases that were granted
#: together share: the number of their class, and their host.
_Lease: TypeAlias = tuple[int, int, int, tuple[int, str]]
_leases: Final = msgspec.json.Decoder(list[_Lease]).decode


def complete(tx: Transaction, reports: Sequence[CompletedDispatch]) -> list[bool]:
    """As `changes.completed` says, for each job that still runs under its lease."""
    leases = _running_leases(tx, reports)
    answers = [False] * len(reports)
    results: list[tuple[int, str | None]] = []
    for at, no, n, _ in leases:
        dispatch_id, result = reports[at]
        answers[at] = True
        results.append((no, result))
        job_id, _, attempt = dispatch_id.rpartition(".")
        tx.add_events((tx.now, _DONE, job_id, n + 1, _IS_DONE, _COMPLETED, attempt, None))
    if results:
        nos = [no for no, _ in results]
        tx.write("complete", (tx.batch, tx.now, listed(results)), len(results))
        tx.write("delete_dispatch", (DispatchPhase.LEASED, listed(nos)), len(nos))
        tx.done += nos
    for (class_no, host), n in Counter(kind for *_, kind in leases).items():
        admission_class = tx.give_back(HostId(host), class_no, n)
        tx.totals.move(admission_class.addon_id, JobState.RUNNING, JobState.DONE, n)
    return answers


def _running_leases(tx: Transaction, reports: Sequence[CompletedDispatch]) -> list[_Lease]:
    """
    Most leases were granted by this writer, which knows them still; else all are read. Each is known once: a second report
    reads.
    """
    known = [tx.totals.leases.pop(report.dispatch_id, None) for report in reports]
    if None not in known:
        return [
            (at, lease.no, lease.events, lease.kind)
            for at, lease in enumerate(known)
            if lease is not None and lease.expires_at > tx.now
        ]
    values = {"ids": by_name([report.dispatch_id for report in reports]), "now": tx.now}
    (text,) = tx.one("leases_to_complete", values)
    return _leases(text)


# renew


def renew(tx: Transaction, operation: Renew) -> list[Standing | None]:
    tx.totals.leases.clear()
    tx.flush_jobs()
    ids = by_name({renewal.dispatch_id for renewal in operation.renewals})
    heartbeats = Heartbeats(tx.now, tx.execute("dispatches_for_beats", {"ids": ids}), tx.add_note)
    [standings] = heartbeats.standings(
        [operation], lambda rows: [tx.execute("spend", row)[0] for row in rows]
    )
    for each in heartbeats.renewed:
        tx.execute("renew", (each.expires_at, each.progress, each.spent, each.events, each.pid, each.place))
        if each.job_changes:
            tx.execute("beat_jobs", (each.job_progress, each.job_spent, each.no))
    for checkpoint in heartbeats.checkpoints.values():
        tx.execute("set_checkpoints", checkpoint)
    return standings
