"""
Changes arrays, alike in every store: by a decision of the caller (`ChangeArray`), and by the ends of their
jobs.

Every store calls `advance_arrays` for each job that ends, in the transaction that ends it: by a worker's
report, a lease that ran out, a cancel, a deadline. So the job of the next index is added in the commit that
ends the one before it, and a kill can come only before or after both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from penstock.core.jobs.arrays import ArrayChange, ArrayRecord, advance
from penstock.core.jobs.groups import JobGroup, array_moves, group_of_array
from penstock.core.jobs.states import ENDED, JobState
from penstock.core.jobs.types import SEPARATOR, AddonId, JobId, Moment, member_of
from penstock.stores.api import ChangeArray
from penstock.stores.common.dependencies import StateMove


class ArrayRows(Protocol):
    """The arrays of a store, read and written in one transaction."""

    @property
    def now(self) -> Moment: ...

    def record(self, array_id: JobId) -> ArrayRecord | None:
        """The array as it is in this transaction. No other transaction changes it before this one ends."""
        ...

    def states(self, job_ids: Sequence[JobId]) -> Mapping[JobId, JobState]:
        """The states of these jobs; jobs that do not exist are left out."""
        ...

    def queued(self, addon_id: AddonId | None) -> int:
        """
        How many jobs of the addon are queued; None: of all addons. No other submit that may reach a depth
        limit changes that before this transaction ends.
        """
        ...

    def first_again(self, array_id: JobId, chunk: int, size: int) -> list[int]:
        """The first indices that wait for another attempt: see `FirstAgain`."""
        ...

    def write(self, change: ArrayChange, *, is_new: bool) -> None:
        """Write the array, the chunks of its indices, its new jobs, and the events."""
        ...

    def change_group(self, group: JobGroup, *, is_new: bool) -> None:
        """Write the array as a parent (`JobGroup`); its end releases the jobs that wait for it."""
        ...


def change_array(rows: ArrayRows, operation: ChangeArray) -> ArrayRecord | None:
    """Carry out a `ChangeArray`; return the array after it."""
    record = rows.record(operation.array_id)
    states = {} if record is None else rows.states(record.live_jobs())
    first_again = partial(rows.first_again, operation.array_id)
    change = operation.decide(record, states, rows.now, first_again)
    if record is None and change is not None:
        operation.depth.check(change.intents, rows.queued)
    record = _write(rows, record, change)
    if change is not None and change.retried:  # the failed indices wait now, and some may start at once
        record = _write(rows, record, advance(record, {}, rows.now, first_again))
    return record


def advance_arrays(rows: ArrayRows, moves: Iterable[StateMove]) -> list[ArrayRecord]:
    """
    Add the next jobs of the arrays whose jobs have ended. `moves`: as `move_of` makes them. Return the
    changed arrays.
    """
    ends: dict[JobId, dict[JobId, JobState]] = {}
    for move in moves:
        if move.state in ENDED and (array_id := array_of_member(move.job_id)) is not None:
            ends.setdefault(array_id, {})[move.job_id] = move.state
    changed: list[ArrayRecord] = []
    for array_id in sorted(ends):  # every transaction locks arrays in this order, so none deadlocks
        record = rows.record(array_id)
        first_again = partial(rows.first_again, array_id)
        if (change := advance(record, ends[array_id], rows.now, first_again)) is not None:
            _write(rows, record, change)
            changed.append(change.record)
    return changed


def array_of_member(job_id: str) -> JobId | None:
    """The array that a job belongs to; None: to none."""
    member = member_of(job_id) if SEPARATOR in job_id else None  # few job ids have a separator
    return None if member is None else member[0]


def _write(rows: ArrayRows, record: ArrayRecord | None, change: ArrayChange | None) -> ArrayRecord | None:
    if change is None:
        return record
    rows.write(change, is_new=record is None)
    if record is None or array_moves(record, change.record):
        rows.change_group(group_of_array(change.record), is_new=record is None)
    return change.record
