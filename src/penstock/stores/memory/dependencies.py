"""Dependencies in dictionaries. `common/dependencies.py` decides what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.core.jobs.changes import Change, Note
from penstock.core.jobs.dependencies import DependencyStatus
from penstock.core.jobs.groups import JobGroup
from penstock.core.jobs.job import Job
from penstock.core.jobs.ordering import Place, released_place
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId, Moment
from penstock.stores.common.dependencies import OpenDependency, StateMove
from penstock.stores.memory.tables import DependencyRow

if TYPE_CHECKING:
    from penstock.stores.memory.store import MemoryStore


class MemoryDependencyRows:
    """The `DependencyRows` of the memory store, which holds its lock meanwhile."""

    # ruff: noqa: SLF001 - these rows are a part of the store
    def __init__(self, store: MemoryStore) -> None:
        self._store, self._ids = store, store._by_no

    @property
    def now(self) -> Moment:
        return self._store._clock()

    def children(self, ends: Sequence[StateMove], limit: int) -> list[OpenDependency]:
        rows: list[OpenDependency] = []
        for end in ends:
            dependencies = self._store._children.get(end.job_id, {}).values()
            rows += sorted(
                (row for row in self._open(dependencies) if row.child_no > end.after),
                key=lambda row: row.child_no,
            )
        return rows[:limit]

    def parents(self, children: Sequence[int]) -> list[OpenDependency]:
        dependencies = (
            dependency
            for no in children
            for dependency in self._store._dependencies.get(self._ids[no], {}).values()
        )
        return sorted(self._open(dependencies), key=lambda row: (row.child_no, row.parent_no))

    def _open(self, dependencies: Iterable[DependencyRow]) -> Iterator[OpenDependency]:
        for dependency in dependencies:
            if dependency.status is not DependencyStatus.OPEN:
                continue
            child = self._store._jobs.get(dependency.child)
            if child is None:  # it is a batch
                yield self._row(dependency)
            elif child.state is JobState.QUEUED:
                events = len(self._store._trails[child.job_id])
                yield self._row(dependency)._replace(unmet=child.unmet, events=events)

    def _row(self, dependency: DependencyRow) -> OpenDependency:
        number = self._store._number_of
        parent, child = dependency.parent, dependency.child
        return OpenDependency(
            *(number(parent), parent, self._store._parent_state(dependency), number(child), child),
            *(dependency.condition, dependency.if_unmet, 0, 0),
        )

    def memberships(self, members: Sequence[int]) -> list[OpenDependency]:
        rows = (row for no in members for row in self._store._children.get(self._ids[no], {}).values())
        return [
            self._row(row)
            for row in rows
            if row.child in self._store._groups and row.status is DependencyStatus.MET
        ]

    def groups(self, nos: Sequence[int]) -> dict[int, JobGroup]:
        return {no: self._store._groups[self._ids[no]] for no in nos}

    def set_groups(self, groups: Mapping[int, JobGroup], notes: Sequence[Note]) -> None:
        for group in groups.values():
            self._store._groups[group.group_id] = group
        for note in notes:
            self._store._note(self.now, note, None)

    def end(self, child: OpenDependency, decide: Callable[[Job], Change]) -> None:
        if not self._store._apply(decide(self._store._jobs[child.child_id])):
            raise AssertionError(f"{child.child_id}: a queued child could not be ended")

    def settle(self, pairs: Sequence[tuple[int, int]], status: DependencyStatus) -> None:
        for parent, child in pairs:
            self._store._dependencies[self._ids[child]][self._ids[parent]].status = status

    def void(self, children: Sequence[int]) -> None:
        for child in children:
            for dependency in self._store._dependencies.get(self._ids[child], {}).values():
                if dependency.status is DependencyStatus.OPEN:
                    dependency.status = DependencyStatus.VOID

    def wait(self, unmet: Sequence[tuple[int, int]]) -> None:
        for no, count in unmet:
            self._put(self._ids[no], self._store._lines.place(self._ids[no]), unmet=count)

    def release(self, ready: Sequence[tuple[OpenDependency, Note]]) -> None:
        store, now = self._store, self.now
        for row, note in ready:
            place = released_place(store._lines.place(row.child_id), now, store._ordering.aging)
            self._put(row.child_id, place, unmet=0, ready_at=place.ready_at)
            store._note(now, note, store._jobs[row.child_id])

    def _put(self, job_id: JobId, place: Place, **fields: int) -> None:
        store = self._store
        job = store._jobs[job_id] = replace(store._jobs[job_id], **fields)
        store._lines.put(job, place, self.now)

    def postpone(self, ends: Sequence[StateMove]) -> None:
        for end in ends:
            self._store._pending[end.no] = end
