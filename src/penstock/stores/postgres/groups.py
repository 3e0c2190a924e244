"""
Batches and arrays as rows. `core/jobs/groups.py` decides how a batch or an array ends for the jobs that wait
for it; `common/array_changes.py` decides how an array changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.core.jobs.arrays import ArrayChange, ArrayRecord, chunks_of, indices_in
from penstock.core.jobs.groups import GroupChange, JobGroup, name_used, settle, submit_batch
from penstock.core.jobs.ordering import place
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, JobId, Moment
from penstock.stores.api import Receipt, Submit, SubmitBatch
from penstock.stores.common.dependencies import group_move, resolve
from penstock.stores.common.rows import (
    array_from,
    array_progress,
    array_values,
    changed_group_values,
    group_from,
    group_values,
    index_chunk,
)
from penstock.stores.postgres.admission_view import NewHead
from penstock.stores.postgres.changes import Effects, PostgresWriteBatch
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.dependencies import PostgresDependencyRows
from penstock.stores.postgres.pipeline import Values, array, columns
from penstock.stores.postgres.submit import RowCache, SubmitBatcher, defer_named

# batches, and arrays as parents


class GroupRow(NamedTuple):
    """A changed batch or array. `released`: jobs that waited for it and have become ready."""

    group: JobGroup | None
    released: Sequence[NewHead] = ()


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
    return GroupRow(change.group, dependencies.released)


# arrays


def lock_arrays(array_ids: Collection[JobId]) -> tuple[str, Values]:
    """
    The call that locks rows of arrays until the COMMIT, so that only one of several hosts makes the next
    jobs. A transaction locks them after its dispatches and before the ledger.
    """
    return "lock_arrays", {"ids": array(sorted(array_ids))}


class PostgresArrayRows:
    """
    The arrays of one transaction. `rows`: of `lock_arrays`. `cache` has prepared the rows of their jobs.
    `writes`: gets the events; the caller defers it.
    """

    def __init__(
        self,
        session: DatabaseSession,
        rows: Sequence[Any],
        cache: RowCache,
        writes: PostgresWriteBatch,
        now: Moment,
    ) -> None:
        self._session, self._cache, self._writes, self.now = session, cache, writes, now
        records = map(array_from, rows)
        self.records = {record.array.array_id: record for record in records}
        #: The new jobs, one for each array, and the released ones.
        self.new_heads: list[NewHead] = []
        self._queued: Counter[AddonId] | None = None

    def record(self, array_id: JobId) -> ArrayRecord | None:
        return self.records.get(array_id)

    def states(self, job_ids: Sequence[JobId]) -> dict[JobId, JobState]:
        if not job_ids:
            return {}
        rows = self._session.execute("states_of", {"ids": array(sorted(job_ids))})
        return {job_id: JobState(state) for job_id, state in rows}

    def queued(self, addon_id: AddonId | None) -> int:
        if self._queued is None:
            *_, rows = self._session.execute_many(("lock_depth", None), ("queued", None))
            self._queued = Counter(dict(rows))
        return self._queued.total() if addon_id is None else self._queued[addon_id]

    def first_again(self, array_id: JobId, chunk: int, size: int) -> list[int]:
        values = {"array_id": array_id, "chunk": chunk, "most": size}
        # behind the deferred statements, which may have changed the indices
        [rows] = self._session.flush(("indices_again", values))
        return indices_in(map(index_chunk, rows))

    def change_group(self, group: JobGroup, *, is_new: bool) -> None:
        if is_new:
            add_group(self._session, group)
            return
        changed = change_group(
            *(self._session, group.group_id, lambda _, __: GroupChange(group)),
            rows=self._cache,
            writes=self._writes,
            now=self.now,
        )
        self.new_heads += changed.released

    def write(self, change: ArrayChange, *, is_new: bool) -> None:
        record = change.record
        if change.jobs:
            jobs = list(zip(change.jobs, change.intents, strict=True))
            defer_named(self._session, self._cache, jobs, self._writes, self.now)
            where = place(change.intents[0], self.now, None, self._cache.ordering)
            key = self._cache.classes.number(where.admission_class), where.line(self.now)
            self.new_heads.append(NewHead(key, where.turn))
        if is_new:
            self._session.defer("add_array", array_values(record))
        else:
            self._session.defer("set_array", array_progress(record))
        array_id = record.array.array_id
        for name, indices in (("fail_indices", change.failed), ("repeat_indices", change.repeated)):
            if indices:
                chunks, bits = columns(chunks_of(indices))
                self._session.defer(name, {"array_id": array_id, "chunks": chunks, "bits": bits})
        if change.retried:
            self._session.defer("retry_indices", {"array_id": array_id})
        self.records[array_id] = record
        for note in change.notes:
            self._writes.note(self.now, note)
