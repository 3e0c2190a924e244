"""Arrays in dictionaries. `common/array_changes.py` decides how they change."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING

from penstock.core.jobs.arrays import ArrayChange, ArrayRecord, IndexChunk, chunks_of
from penstock.core.jobs.groups import GroupChange, JobGroup
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, JobId, Moment

if TYPE_CHECKING:
    from penstock.stores.memory.store import MemoryStore


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

    # ruff: noqa: SLF001 - these rows are a part of the store
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
            self._store.add_group(group)
        else:
            self._store.change_group(group.group_id, lambda _, __: GroupChange(group))

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
