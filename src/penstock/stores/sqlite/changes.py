"""
Writes submits, changes, completions and heartbeats of jobs.

A change moves a dispatch to the table of its new phase, and a job into or out of `queue`. A job that starts
or completes keeps its row in `job` as it is: its dispatch shows the new state. Most jobs complete, so
completions move whole batches, which are read as one text: a cursor releases and takes the interpreter's lock
for every row, and the threads that run jobs need that lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from penstock.core.jobs.changes import Change
from penstock.core.jobs.groups import JobGroup, add_members, is_batch_id
from penstock.core.jobs.intent import Intent, all_but_payload
from penstock.core.jobs.job import DispatchStep, EventKind, Job, JobStep
from penstock.core.jobs.ordering import place
from penstock.core.jobs.spending import RenewedDispatch
from penstock.core.jobs.states import IN_FLIGHT, SETTLED, DispatchPhase, JobState
from penstock.core.jobs.types import SEPARATOR, EndReason, HostId, JobId, Span
from penstock.stores.api import CompletedDispatch, Depth, Receipt, Renew
from penstock.stores.common.dependencies import StateMove, move_of
from penstock.stores.common.reads import JOB_WIDTH
from penstock.stores.common.rows import changed_group_values, group_from, intent_row, job_row
from penstock.stores.common.writes import (
    NO_JOB,
    EventJob,
    Heartbeats,
    UsedKeys,
    key_of,
    new_dependencies,
    submit_intents,
)
from penstock.stores.sqlite.dependencies import depend
from penstock.stores.sqlite.transaction import Transaction, by_name, dispatch_key, listed

#: As text: the encoder takes twice as long for a member of an enumeration.
_SUBMITTED, _DONE = str(EventKind.SUBMITTED), str(EventKind.DONE)
_IS_QUEUED, _IS_DONE, _COMPLETED = str(JobState.QUEUED), str(JobState.DONE), str(EndReason.COMPLETED)
#: The denial columns in `job` of a queued job: its row in `queue` has the last denial.
_NOT_DENIED: Final = ("", None, None, None)

# submit


def submit(
    tx: Transaction,
    intents: Sequence[Intent],
    depth: Depth,
    job_ids: Sequence[JobId] = (),
    *,
    sure: bool = True,
) -> list[Receipt]:
    """
    Write new jobs. `job_ids`: the ids that they get. `sure`: False if another process may have written these
    jobs.
    """
    used: UsedKeys = {}
    for key in {key for intent in intents if (key := key_of(intent)) is not None}:
        tx.flush_jobs()
        for job_id, state, body in tx.execute("jobs_by_key", key):
            used[key] = (Receipt(job_id, JobState(state), created=False), body)

    dependencies: list[tuple[JobId, JobId, str, str]] = []

    def insert(at: int, intent: Intent) -> Receipt:
        receipt = _insert(tx, intent, job_ids[at] if job_ids else JobId(tx.new_id()))
        if intent.after or intent.tags:
            dependencies.extend(new_dependencies(receipt.job_id, intent))
        return receipt

    def existing(jobs: Collection[JobId]) -> set[JobId]:
        tx.flush_jobs()
        ids = {"ids": listed(list(jobs))}
        groups = {group_id for (group_id,) in tx.execute("known_groups", ids)}
        return groups | {job_id for _, job_id in tx.execute("known_jobs", ids)}

    def batches(ids: Collection[JobId]) -> dict[JobId, JobGroup]:
        groups = [group_from(row) for _, *row in tx.execute("lock_groups", {"ids": listed(list(ids))})]
        return {group.group_id: group for group in groups}

    def waiting(ids: Collection[JobId], parents: Collection[JobId]) -> list[tuple[JobId, JobId]]:
        values = {"batches": listed(list(ids)), "parents": listed(list(parents))}
        return list(tx.execute("waiting_for_groups", values))

    written = {} if sure else _written(tx, job_ids)
    receipts = submit_intents(
        *(intents, depth, used),
        queued=tx.totals.queued,
        insert=insert,
        existing=existing,
        batches=batches,
        waiting=waiting,
        written=written,
    )
    if dependencies:
        tx.flush_jobs()
        added = Counter(child for _, child, *_ in dependencies if is_batch_id(child))
        for group in batches(added).values() if added else ():
            tx.execute("set_group", changed_group_values(add_members(group, added[group.group_id])))
        depend(tx, dependencies, apply)
        receipts = _as_born(tx, receipts, {child for _, child, *_ in dependencies})
    return receipts


def _as_born(tx: Transaction, receipts: list[Receipt], children: set[JobId]) -> list[Receipt]:
    """The receipts with the present states of children: the end of a parent may have ended them at once."""
    rows = tx.execute("jobs_by_id", {"ids": listed(list(children))})
    states = {job_id: JobState(state) for _, job_id, state, *_ in rows}
    return [msgspec.structs.replace(r, state=states[r.job_id]) if r.job_id in states else r for r in receipts]


def _written(tx: Transaction, job_ids: Sequence[JobId]) -> dict[int, Receipt]:
    """Receipts of the jobs that exist already, by position."""
    tx.flush_jobs()
    states = {job_id: state for _, job_id, state, *_ in tx.execute("jobs_by_id", {"ids": listed(job_ids)})}
    return {
        i: Receipt(job_id, JobState(states[job_id]), created=True)
        for i, job_id in enumerate(job_ids)
        if job_id in states
    }


def _insert(tx: Transaction, intent: Intent, job_id: JobId) -> Receipt:
    """
    Add a job and its event. Jobs that are submitted together usually differ only by their payload, so the
    other columns are made once.
    """
    shared = all_but_payload(intent)
    template = tx.templates.get(shared)
    if template is None:
        template = tx.templates[shared] = _template(tx, intent)
    tx.add_job(job_id, intent, template)
    tx.add_events((tx.now, _SUBMITTED, job_id, 1, _IS_QUEUED, "", None, None))
    tx.totals.count(intent.addon_id, JobState.QUEUED, 1)
    return Receipt(job_id, JobState.QUEUED, created=True)


def _template(tx: Transaction, intent: Intent) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    job_place = place(intent, tx.now, None, tx.ordering)
    class_no = tx.classes.number(tx, job_place.admission_class)
    row = job_row(0, JobId(""), intent, job_place, class_no=class_no, now=tx.now)
    addon_id, _, line, turn, ready_at, urgent_at, priority, now, earliest, deadline, *limits, key = row[2:]
    of_job = (addon_id, class_no, ready_at, priority, now, earliest, deadline, *limits, key)
    of_queue = (class_no, line, turn, ready_at, urgent_at, deadline, priority, *limits)
    return of_job, of_queue, intent_row(0, intent)[2:]


# apply


def apply(tx: Transaction, change: Change) -> bool:
    """
    Write the change. False, and nothing is written: the job or the dispatch is not as the decider saw it.
    """
    tx.totals.leases.clear()
    tx.flush_jobs()
    step, ending = change.job, change.dispatch
    jobs = [] if step is None else tx.execute("jobs_by_id", {"ids": listed([step.job_id])})
    job = next(iter(tx.classes.jobs(tx, jobs)), None)
    if step is not None and not step.applies_to(job):
        return False
    dispatches = [] if ending is None else tx.execute("dispatches_by_id", dispatch_key(ending.dispatch_id))
    dispatch = next(iter(tx.classes.dispatches(tx, dispatches)), None)
    if ending is not None and not ending.applies_to(dispatch, tx.now):
        return False
    n = jobs[0][JOB_WIDTH] if jobs else 0
    active, events = 0, n + len(change.notes)
    if ending is not None and dispatch is not None:
        *_, class_no, number = dispatches[0]
        _move_dispatch(tx, ending, number, events)
        active = ending.apply(dispatch, tx.now).active
        if ending.target is DispatchPhase.ENDED:
            tx.give_back(dispatch.host, class_no, 1)
    if step is not None and job is not None:
        _move_job(tx, job, step, active, events)
        tx.totals.move(job.intent.addon_id, step.source, step.target)
        if (move := move_of(job.no, job.job_id, step.source, step.target)) is not None:
            tx.moves.append(move)
    for n_after, note in enumerate(change.notes, n + 1):
        event_job = (
            NO_JOB if job is None or step is None else EventJob(job.no, job.job_id, n_after, step.target)
        )
        tx.add_note(change.at, note, event_job, None if ending is None else ending.dispatch_id)
    return True


def _move_dispatch(tx: Transaction, step: DispatchStep, no: int, events: int) -> None:
    """
    Write the dispatch where its new phase is kept. `events`: how many its job has with those of this change.
    """
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


def _move_job(tx: Transaction, before: Job, step: JobStep, active: Span, events: int) -> None:
    """
    Write the job where its new state is kept. `active`: the length of the attempt that has just ended.
    `events`: how many the job has with those of this change.
    """
    job, place, no = step.apply(before, active, tx.now), step.place, before.no
    waits = job.state is JobState.QUEUED
    if job.state in IN_FLIGHT:
        tx.write("note_dispatch", (events, no))
    elif waits and place is None:
        tx.write("note_queued", (events, no))
    elif job.state is not JobState.DONE:
        intent, c = job.intent, job.counters
        denial = (job.denied, job.denied_data, job.denied_at, job.passed_at)
        row = (
            *(None if waits else job.state, job.fence, events, job.ended_at, job.active),
            *(c.crash, c.unavailable, c.error, c.start, job.spent_before),
            *(_NOT_DENIED if waits else denial),
            *(job.ready_at, intent.priority, intent.earliest_start_at, job.not_before, intent.deadline_at),
            None if place is None else tx.classes.number(tx, place.admission_class),
        )
        tx.write("move_jobs", (*row, before.state if before.state in SETTLED else None, no))
        if place is not None:
            tx.write("place_jobs", (place.line(tx.now), place.turn, place.urgent_at, *denial, no))
        elif before.state is JobState.QUEUED:
            tx.write("leave_queue", (listed([no]),))
    elif before.state is JobState.DONE:
        tx.write("note_ended_dispatch", (events, job.fence, no))


# complete

#: A lease to complete: the position of its report, the job's number and count of events, and the lease's
#: class number and host.
_Lease: TypeAlias = tuple[int, int, int, tuple[int, str]]
_leases: Final = msgspec.json.Decoder(list[_Lease]).decode


def complete(tx: Transaction, reports: Sequence[CompletedDispatch]) -> list[bool]:
    """Complete the jobs that still run under their leases, as `core.jobs.changes.completed` decides."""
    leases = _running_leases(tx, reports)
    answers = [False] * len(reports)
    if not leases:
        return answers
    now, with_children = tx.now, tx.has_dependencies
    results: list[tuple[int, str | None]] = []
    for at, no, n, _ in leases:
        dispatch_id, result = reports[at]
        answers[at] = True
        results.append((no, result))
        job_id, _, attempt = dispatch_id.rpartition(".")
        tx.events.append((now, _DONE, job_id, n + 1, _IS_DONE, _COMPLETED, attempt, None))
        # Only children and arrays react to an end, and few jobs have either.
        if with_children or SEPARATOR in job_id:
            tx.moves.append(StateMove(no, JobId(job_id), JobState.DONE))
    nos = [no for no, _ in results]
    tx.write("complete", (tx.batch, now, listed(results)), len(results))
    tx.write("delete_dispatch", (DispatchPhase.LEASED, listed(nos)), len(nos))
    tx.done += nos
    for (class_no, host), n in Counter([kind for *_, kind in leases]).items():
        admission_class = tx.give_back(HostId(host), class_no, n)
        tx.totals.move(admission_class.addon_id, JobState.RUNNING, JobState.DONE, n)
    return answers


def _running_leases(tx: Transaction, reports: Sequence[CompletedDispatch]) -> list[_Lease]:
    """
    The leases among the reported ones that are valid. Usually this writer granted all of them and still has
    them in memory; otherwise it reads all.
    """
    leases = [tx.totals.leases.pop(report.dispatch_id, None) for report in reports]
    if None not in leases:
        return [
            (at, lease.no, lease.events, lease.kind)
            for at, lease in enumerate(leases)
            if lease is not None and lease.expires_at > tx.now
        ]
    values = {"ids": by_name([report.dispatch_id for report in reports]), "now": tx.now}
    (text,) = tx.one("leases_to_complete", values)
    return _leases(text)


# renew


def renew(tx: Transaction, operation: Renew) -> list[RenewedDispatch | None]:
    """Write heartbeats. None: the lease is not valid any more."""
    tx.totals.leases.clear()
    tx.flush_jobs()
    ids = by_name({renewal.dispatch_id for renewal in operation.renewals})
    heartbeats = Heartbeats(tx.now, tx.execute("dispatches_for_beats", {"ids": ids}), tx.add_note)
    [renewed] = heartbeats.renew_all([operation], lambda rows: [tx.execute("spend", row)[0] for row in rows])
    for each in heartbeats.renewed:
        tx.execute("renew", (each.expires_at, each.progress, each.spent, each.events, each.pid, each.place))
        if each.job_changes:
            tx.execute("beat_jobs", (each.job_progress, each.job_spent, each.no))
    for checkpoint in heartbeats.checkpoints.values():
        tx.execute("set_checkpoints", checkpoint)
    return renewed
