"""Arrays in dictionaries: see `common/array_changes.py`, which decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.core.jobs.arrays import ArrayChange, ArrayRecord
from penstock.core.jobs.groups import GroupChange, JobGroup
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId, Moment

if TYPE_CHECKING:
    from penstock.stores.memory.store import MemoryStore


class MemoryArrayRows:
    """A part of the store, which has the lock."""

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

    def change_group(self, group: JobGroup, *, is_new: bool) -> None:
        if is_new:
            self._store.add_group(group)
        else:
            self._store.change_group(group.group_id, lambda _, __: GroupChange(group))

    def write(self, change: ArrayChange, *, is_new: bool) -> None:  # noqa: ARG002 - a dictionary takes both alike
        store = self._store
        for job_id, intent in zip(change.jobs, change.intents, strict=True):
            store._insert(0, intent, job_id)
        store._arrays[change.record.array.array_id] = change.record
        for note in change.notes:
            store._note(self.now, note, None)
