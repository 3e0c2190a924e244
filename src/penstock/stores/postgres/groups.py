"""Batches and arrays as parents, as rows: see `core/jobs/groups.py`, which decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from penstock.core.jobs.groups import GroupChange, JobGroup, name_used, settle, submit_batch
from penstock.core.jobs.types import JobId, Moment
from penstock.stores.api import Receipt, Submit, SubmitBatch
from penstock.stores.common.dependencies import group_move, resolve
from penstock.stores.common.rows import changed_group_values, group_from, group_values
from penstock.stores.postgres.changes import Effects, PostgresWriteBatch
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.dependencies import PostgresDependencyRows
from penstock.stores.postgres.pipeline import array
from penstock.stores.postgres.submit import RowCache, SubmitBatcher


class GroupRow(NamedTuple):
    """A changed batch or array. `has_released`: jobs that waited for it have become ready."""

    group: JobGroup | None
    has_released: bool = False


def add_group(session: DatabaseSession, group: JobGroup) -> None:
    session.defer("add_group", group_values(group))


def add_batch(
    session: DatabaseSession, database: Database, submits: SubmitBatcher, operation: SubmitBatch
) -> list[Receipt]:
    """
    Submit a batch. If another transaction inserts a batch of this name meanwhile, this one runs again and
    finds it.
    """
    now, [known] = database.lock(session, ("lock_groups", {"ids": array([operation.group.group_id])}))
    group = replace(operation.group, created_at=now)
    if known:
        raise name_used(group.name)
    add_group(session, group)
    writes = PostgresWriteBatch()
    for note in submit_batch(group, operation.by).notes:
        writes.note(now, note)
    writes.defer(session)
    receipts = submits.submit_all_in(session, Submit(operation.intents, operation.depth))
    # A closed batch without members has ended.
    change_batch(session, database, submits.rows, group.group_id, settle)
    return receipts


def change_batch(
    session: DatabaseSession,
    database: Database,
    rows: RowCache,
    group_id: JobId,
    decide: Callable[[JobGroup, Moment], GroupChange | None],
) -> JobGroup | None:
    now, _ = database.lock(session, ("lock_groups", {"ids": array([group_id])}))
    writes = PostgresWriteBatch()
    changed = change_group(session, group_id, decide, rows=rows, writes=writes, now=now)
    writes.defer(session)
    return changed.group


def change_group(
    session: DatabaseSession,
    group_id: JobId,
    decide: Callable[[JobGroup, Moment], GroupChange | None],
    *,
    rows: RowCache,
    writes: PostgresWriteBatch,
    now: Moment,
) -> GroupRow:
    """
    Change a batch or array. Runs deferred statements first. `writes`: gets the events; the caller defers it.
    """
    [found] = session.flush(("lock_groups", {"ids": array([group_id])}))
    if not found:
        return GroupRow(None)
    no, before = found[0][0], group_from(found[0][1:])
    change = decide(before, now)
    if change is None or change == GroupChange(before):
        return GroupRow(before)
    session.defer("set_group", changed_group_values(change.group))
    for note in change.notes:
        writes.note(now, note)
    move = group_move(no, before, change.group)
    if move is None:
        return GroupRow(change.group)
    effects = Effects(now, writes=writes)
    dependencies = PostgresDependencyRows(session, effects, rows.classes, rows.ordering.aging)
    resolve(dependencies, [move])
    effects.defer(session, rows.classes)
    dependencies.defer()
    return GroupRow(change.group, dependencies.has_released)
