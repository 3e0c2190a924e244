"""Batches and arrays as parents, as rows: see `core/jobs/groups.py`, which decides."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from penstock.core.jobs.groups import GroupChange, JobGroup, name_used, settle, submit_batch
from penstock.core.jobs.types import JobId, Moment
from penstock.stores.api import Receipt, SubmitBatch
from penstock.stores.common.dependencies import group_move, resolve
from penstock.stores.common.rows import changed_group_values, group_from, group_values
from penstock.stores.common.writes import NO_JOB
from penstock.stores.sqlite.changes import apply, submit
from penstock.stores.sqlite.dependencies import SqliteDependencyRows
from penstock.stores.sqlite.transaction import Transaction, listed


def add_group(tx: Transaction, group: JobGroup) -> None:
    tx.execute("add_group", group_values(group))


def add_batch(tx: Transaction, operation: SubmitBatch) -> list[Receipt]:
    group = replace(operation.group, created_at=tx.now)
    if tx.one("group_by_id", {"group_id": group.group_id}) is not None:
        raise name_used(group.name)
    add_group(tx, group)
    for note in submit_batch(group, operation.by).notes:
        tx.add_note(tx.now, note, NO_JOB)
    receipts = submit(tx, operation.intents, operation.depth)
    change_group(tx, group.group_id, settle)  # a closed batch without members has ended
    return receipts


def change_group(
    tx: Transaction, group_id: JobId, decide: Callable[[JobGroup, Moment], GroupChange | None]
) -> JobGroup | None:
    row = tx.one("lock_groups", {"ids": listed([group_id])})
    if row is None:
        return None
    no, before = row[0], group_from(row[1:])
    change = decide(before, tx.now)
    if change is None or change == GroupChange(before):
        return before
    tx.execute("set_group", changed_group_values(change.group))
    for note in change.notes:
        tx.add_note(tx.now, note, NO_JOB)
    if (move := group_move(no, before, change.group)) is not None:
        tx.flush_jobs()
        resolve(SqliteDependencyRows(tx, apply), [move])
        tx.moves = []
    return change.group
