"""Arrays as rows: see `common/array_changes.py`, which decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from penstock.core.jobs.arrays import ArrayChange, ArrayRecord, chunks_of, indices_in
from penstock.core.jobs.groups import GroupChange, JobGroup
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, JobId, Moment
from penstock.stores.common.rows import array_from, array_progress, array_values, index_chunk
from penstock.stores.postgres.changes import PostgresWriteBatch
from penstock.stores.postgres.database import DatabaseSession
from penstock.stores.postgres.groups import add_group, change_group
from penstock.stores.postgres.pipeline import Values, array, columns
from penstock.stores.postgres.submit import RowCache, defer_named


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
        self.has_made_jobs = self.has_released = False
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
        self.has_released |= changed.has_released

    def write(self, change: ArrayChange, *, is_new: bool) -> None:
        record = change.record
        if change.jobs:
            jobs = list(zip(change.jobs, change.intents, strict=True))
            defer_named(self._session, self._cache, jobs, self._writes, self.now)
            self.has_made_jobs = True
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
