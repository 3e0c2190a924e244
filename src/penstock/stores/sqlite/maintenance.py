"""
Writes what is no change of one job: addons, hosts, schedules, retention, a new order of the queue, a shift of
the clock, and an accepted loss.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from penstock.core.jobs.arrays import ArrayRecord
from penstock.core.jobs.changes import Note, addon_note, drain_note
from penstock.core.jobs.groups import JobGroup
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.ordering import Aging
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, HostId, Moment, Span
from penstock.stores.api import (
    ChangeArray,
    ChangeBatch,
    ChangeSchedule,
    DrainHost,
    Learn,
    Operation,
    Prune,
    Receipt,
    RecordLoad,
    RegisterHost,
    RemoveHost,
    Reorder,
    ScheduleWritten,
    SetAddon,
    Shift,
    SubmitBatch,
)
from penstock.stores.common.array_changes import change_array
from penstock.stores.common.rows import schedule_values, without_jobs
from penstock.stores.common.writes import NO_JOB, learn, new_job_id, record_load, register_host, remove_host
from penstock.stores.sqlite.changes import submit
from penstock.stores.sqlite.connection import SQL
from penstock.stores.sqlite.groups import SqliteArrayRows, add_batch, change_group
from penstock.stores.sqlite.guard import Loss
from penstock.stores.sqlite.transaction import Transaction, listed

_FORGET: Final = (
    *("forget_mentions", "forget_checkpoint", "forget_intent", "forget_dispatches", "forget_dependencies"),
    "forget_job",
)
_numbers: Final = msgspec.json.Decoder(list[int]).decode


class AcceptLoss(Operation[None], frozen=True):
    """Go on with a file that has lost events: see `guard.py`."""

    loss: Loss


def maintain(tx: Transaction, operation: Operation[Any]) -> Any:
    match operation:
        case SetAddon(addon_id, weight, paused, by):
            return _set_addon(tx, addon_id, weight, paused, by)
        case Prune(before, limit):
            return _prune(tx, before, limit)
        case Shift(by):
            return _shift(tx, by)
        case Reorder(aging, after, limit):
            return _reorder(tx, aging, after, limit)
        case RegisterHost() | RemoveHost() | DrainHost():
            return _change_host(tx, operation)
        case Learn():
            return learn(tx, operation)
        case AcceptLoss(loss):
            return _accept_loss(tx, loss)
    raise TypeError(f"{type(operation).__name__} is no operation of this store")


def _set_addon(tx: Transaction, addon_id: AddonId, weight: int | None, paused: bool | None, by: str) -> None:
    account = tx.totals.account(addon_id)
    account.weight = account.weight if weight is None else weight
    account.paused = account.paused if paused is None else paused
    tx.add_note(tx.now, addon_note(addon_id, account.weight, account.paused, by), NO_JOB)


def _change_host(tx: Transaction, operation: RegisterHost | RemoveHost | DrainHost) -> Any:
    match operation:
        case RegisterHost(host):
            return register_host(tx, host)
        case RemoveHost():
            return remove_host(tx, operation)
        case DrainHost(host_id, draining, by):
            return _drain_host(tx, host_id, draining, by)


def _drain_host(tx: Transaction, host: HostId, draining: bool, by: str) -> bool:
    if tx.one("drain_host", {"host": host, "draining": int(draining)}) is None:
        return False
    tx.add_note(tx.now, drain_note(host, draining, by), NO_JOB)
    return True


def change_record(
    tx: Transaction, operation: ChangeSchedule | RecordLoad | ChangeArray | SubmitBatch | ChangeBatch
) -> ScheduleWritten | ArrayRecord | JobGroup | list[Receipt] | None:
    """Write an array, a batch or a schedule with the jobs that it makes, or the load of an hour."""
    if isinstance(operation, ChangeArray):
        return change_array(SqliteArrayRows(tx), operation)
    if isinstance(operation, SubmitBatch):
        return add_batch(tx, operation)
    if isinstance(operation, ChangeBatch):
        return change_group(tx, operation.group_id, operation.decide)
    return _write_schedule(tx, operation)


def _write_schedule(tx: Transaction, operation: ChangeSchedule | RecordLoad) -> ScheduleWritten | None:
    """
    Write a decision about a schedule, or the load of an hour. None: the schedule has changed since the
    decision.
    """
    if isinstance(operation, RecordLoad):
        record_load(tx, operation, tx.now)
        return None
    change, depth = operation.change, operation.depth
    row = tx.one("lock_schedule", {"name": change.name})
    if change.version != (0 if row is None else row[0]):
        return None
    receipt = None if change.job is None else submit(tx, [change.job.intent], depth)[0]
    job_id = new_job_id(receipt)
    record = change.row(job_id)
    if record is None:
        tx.execute("remove_schedule", {"name": change.name})
    else:
        tx.execute("add_schedule" if row is None else "set_schedule", schedule_values(record))
    for note in change.events(job_id):
        tx.add_note(change.at, note, NO_JOB)
    return ScheduleWritten(record, receipt)


def _prune(tx: Transaction, before: Moment, limit: int) -> int:
    tx.flush_jobs()
    values = {"before": before, "most": limit}
    batches, done = _old_done(tx, values)
    settled = [tuple(row) for row in tx.execute("old_jobs", values)]
    old = sorted(settled + done)[:limit]
    _forget_events(tx, {no: job_id for _, no, job_id, *_ in old})
    for _, no, _, addon_id, state in old:
        for name in _FORGET:
            tx.execute(name, (no,))
        tx.totals.count(addon_id, state, -1)
    if old:
        _shorten_done(tx, batches, {no for _, no, *_ in old})
        tx.add_note(tx.now, Note(EventKind.PRUNED, data={"jobs": len(old), "before": before}), NO_JOB)
    if (
        len(old) < limit
    ):  # all old jobs are gone, so the key of an array and the name of a batch are free again
        for name in ("forget_array_chunks", "forget_arrays", "forget_memberships", "forget_groups"):
            tx.execute(name, {"before": before})
        tx.totals.arrays.clear()
    return len(old)


def _old_done(tx: Transaction, values: dict[str, int]) -> tuple[dict[int, list[int]], list[tuple[Any, ...]]]:
    """Old DONE jobs: their numbers by batch of completions, and all of them as rows of `old_jobs`."""
    batches: dict[int, list[int]] = {}
    rows: list[tuple[Any, ...]] = []
    lists: Any = tx.con.execute(SQL["old_ended_jobs"], values)
    for batch, at, jobs in lists:
        batches[batch] = _numbers(jobs)
        rows += [(at, *job, JobState.DONE) for job in tx.execute("done_jobs", {"nos": jobs})]
        if len(rows) >= values["most"]:
            break
    return batches, rows


def _shorten_done(tx: Transaction, batches: dict[int, list[int]], gone: set[int]) -> None:
    for batch, jobs in batches.items():
        kept = [no for no in jobs if no not in gone]
        if not kept:
            tx.execute("forget_ended_jobs", (batch,))
        elif len(kept) < len(jobs):
            tx.execute("shorten_ended_jobs", (listed(kept), batch))


def _forget_events(tx: Transaction, gone: dict[int, str]) -> None:
    jobs = set(gone.values())
    for batch, text in tx.execute("batches_of", {"nos": listed([*gone])}):
        rewritten = without_jobs(text, jobs)
        if rewritten is None:
            tx.execute("forget_batches", (batch,))
        else:
            tx.execute("rewrite_batches", (rewritten, batch))


def _reorder(tx: Transaction, aging: Aging, after: int, limit: int) -> int:
    tx.flush_jobs()
    (last,) = tx.one("last_to_reorder", {"after": after, "most": limit})
    if last is not None:
        values = {"after": after, "last": last, "per_point": aging.per_point}
        tx.execute("reorder", values)
    return last or 0


def _accept_loss(tx: Transaction, loss: Loss) -> None:
    """Continue the event numbers after the lost ones, so that no reader's cursor is ahead of the trail."""
    tx.batch = max(tx.batch, loss.known + 1)
    tx.add_note(tx.now, Note(EventKind.LOSS_ACCEPTED, data=loss._asdict()), NO_JOB)


def _shift(tx: Transaction, by: Span) -> int:
    tx.totals.leases.clear()
    tx.flush_jobs()
    tx.execute("shift", {"by": by})
    moved = tx.con.changes()
    tx.execute("shift_queue", {"by": by, "now": tx.now})
    tx.execute("shift_queued_jobs", {"by": by})
    tx.execute("shift_dispatched_jobs", {"by": by})
    tx.add_note(tx.now, Note(EventKind.CLOCK_SHIFTED, data={"by": by}), NO_JOB)
    return moved
