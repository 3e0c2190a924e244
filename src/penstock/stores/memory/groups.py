"""
Batches and arrays in dictionaries. `core/jobs/groups.py` decides how a batch or an array ends for the jobs that
wait for it; `common/array_changes.py` decides how an array changes.
"""

# ruff: noqa: SLF001 - this module is a part of the store
from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.core.jobs.arrays import ArrayChange, ArrayRecord, IndexChunk, chunks_of
from penstock.core.jobs.groups import GroupChange, JobGroup, name_used, settle, submit_batch
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, JobId, Moment
from penstock.stores.api import Receipt, SubmitBatch
from penstock.stores.common.dependencies import group_move, resolve
from penstock.stores.memory.dependencies import MemoryDependencyRows

if TYPE_CHECKING:
    from penstock.stores.memory.store import MemoryStore


# batches, and arrays as parents


def add_group(store: MemoryStore, group: JobGroup) -> None:
    store._last_group += 1
    store._groups[group.group_id], store._group_nos[group.group_id] = group, store._last_group
    store._by_no[store._last_group] = group.group_id


def drop_group(store: MemoryStore, group_id: JobId) -> None:
    del store._groups[group_id], store._by_no[store._group_nos.pop(group_id)]


def add_batch(store: MemoryStore, operation: SubmitBatch) -> list[Receipt]:
    group = replace(operation.group, created_at=store._clock())
    if group.group_id in store._groups:
        raise name_used(group.name)
    add_group(store, group)
    try:
        receipts = store._submit(operation.intents, operation.depth)
    except Exception:
        drop_group(store, group.group_id)
        raise
    for note in submit_batch(group, operation.by).notes:
        store._note(group.created_at, note, None)
    change_group(store, group.group_id, settle)  # a closed batch without members has ended
    return [replace(r, state=store._jobs[r.job_id].state) for r in receipts]


def change_group(
    store: MemoryStore, group_id: JobId, decide: Callable[[JobGroup, Moment], GroupChange | None]
) -> JobGroup | None:
    before, now = store._groups.get(group_id), store._clock()
    change = None if before is None else decide(before, now)
    if before is None or change is None or change == GroupChange(before):
        return before
    store._groups[group_id] = change.group
    for note in change.notes:
        store._note(now, note, None)
    if (move := group_move(store._group_nos[group_id], before, change.group)) is not None:
        resolve(MemoryDependencyRows(store), [move])
    return store._groups[group_id]


# arrays


class MemoryIndices:
    """The failed indices of an array, and those that wait for another attempt."""

    def __init__(self) -> None:
        self._failed, self._again = set[int](), set[int]()

    def change(self, change: ArrayChange) -> None:
        self._failed.update(change.failed)
        self._again.difference_update(change.repeated)
        if change.retried:
            self._again |= self._failed
            self._failed.clear()

    def first_again(self, chunk: int, size: int) -> list[int]:  # noqa: ARG002 - a set is searched as a whole
        return nsmallest(size, self._again)

    @property
    def failed(self) -> list[IndexChunk]:
        return chunks_of(self._failed)


class MemoryArrayRows:
    """The `ArrayRows` of the memory store, which holds its lock meanwhile."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    @property
    def now(self) -> Moment:
        return self._store._clock()

    def record(self, array_id: JobId) -> ArrayRecord | None:
        return self._store._arrays.get(array_id)

    def states(self, job_ids: Sequence[JobId]) -> dict[JobId, JobState]:
        jobs = self._store._jobs
        return {job_id: jobs[job_id].state for job_id in job_ids if job_id in jobs}

    def queued(self, addon_id: AddonId | None) -> int:
        return self._store._queued(addon_id)

    def change_group(self, group: JobGroup, *, is_new: bool) -> None:
        if is_new:
            add_group(self._store, group)
        else:
            change_group(self._store, group.group_id, lambda _, __: GroupChange(group))

    def first_again(self, array_id: JobId, chunk: int, size: int) -> list[int]:
        return self._store._indices[array_id].first_again(chunk, size)

    def write(self, change: ArrayChange, *, is_new: bool) -> None:  # noqa: ARG002 - new or not, it is one assignment
        store = self._store
        for job_id, intent in zip(change.jobs, change.intents, strict=True):
            store._insert(0, intent, job_id)
        array_id = change.record.array.array_id
        store._arrays[array_id] = change.record
        store._indices.setdefault(array_id, MemoryIndices()).change(change)
        for note in change.notes:
            store._note(self.now, note, None)
