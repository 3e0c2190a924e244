"""
Batches and arrays as rows. `core/jobs/groups.py` decides how a batch or an array ends for the jobs that wait
for it; `common/array_changes.py` decides how an array changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from penstock.core.jobs.arrays import ArrayChange, ArrayRecord, chunks_of, indices_in
from penstock.core.jobs.groups import GroupChange, JobGroup, name_used, settle, submit_batch
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, JobId, Moment
from penstock.stores.api import NO_LIMIT, Receipt, SubmitBatch
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
from penstock.stores.common.writes import NO_JOB
from penstock.stores.sqlite.changes import apply, submit
from penstock.stores.sqlite.dependencies import SqliteDependencyRows
from penstock.stores.sqlite.transaction import Transaction, listed

# batches, and arrays as parents


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


# arrays


class SqliteArrayRows:
    """The rows of one transaction. `SqliteTotals` keeps open arrays from one commit to the next."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    @property
    def now(self) -> Moment:
        return self._tx.now

    def record(self, array_id: JobId) -> ArrayRecord | None:
        record = self._tx.totals.arrays.get(array_id)
        if record is None and (row := self._tx.one("lock_arrays", {"array_id": array_id})) is not None:
            record = array_from(row)
        return record

    def states(self, job_ids: Sequence[JobId]) -> dict[JobId, JobState]:
        self._tx.flush_jobs()
        rows = self._tx.execute("states_of", {"ids": listed(job_ids)})
        return {job_id: JobState(state) for job_id, state in rows}

    def queued(self, addon_id: AddonId | None) -> int:
        return self._tx.totals.queued(addon_id)

    def first_again(self, array_id: JobId, chunk: int, size: int) -> list[int]:
        values = {"array_id": array_id, "chunk": chunk, "most": size}
        return indices_in(map(index_chunk, self._tx.execute("indices_again", values)))

    def change_group(self, group: JobGroup, *, is_new: bool) -> None:
        if is_new:
            add_group(self._tx, group)
        else:
            change_group(self._tx, group.group_id, lambda _, __: GroupChange(group))

    def write(self, change: ArrayChange, *, is_new: bool) -> None:
        tx, record = self._tx, change.record
        if change.jobs:
            submit(tx, change.intents, NO_LIMIT, change.jobs)
        if is_new:
            tx.execute("add_array", array_values(record))
        else:
            tx.execute("set_array", array_progress(record))
        array_id = record.array.array_id
        for name, indices in (("fail_indices", change.failed), ("repeat_indices", change.repeated)):
            for chunk, bits in chunks_of(indices):
                tx.execute(name, {"array_id": array_id, "chunk": chunk, "bits": bits})
        if change.retried:
            tx.execute("retry_indices", {"array_id": array_id})
        tx.totals.keep_array(record)
        for note in change.notes:
            tx.add_note(tx.now, note, NO_JOB)
