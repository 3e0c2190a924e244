"""
Arrays and batches of a play.

The functions of `core/jobs/arrays.py` play an array: at most `%n` of its jobs live at once, and the end of
one starts the next index. So the play decides when later indices come. The functions of `core/jobs/groups.py`
play a batch, which counts how its members end. Both can be parents: their end releases the jobs that wait for
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from heapq import nsmallest

from msgspec.structs import replace

from penstock.core.errors import IllegalMove
from penstock.core.jobs.arrays import (
    ArrayChange,
    ArrayRecord,
    JobArray,
    advance,
    cancel_array,
    live_index,
    retry_array,
    submit_array,
)
from penstock.core.jobs.groups import (
    JobGroup,
    array_moves,
    close_batch,
    end_members,
    group_of_array,
    settle,
)
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId
from penstock.scheduler.arrivals import ArrayArrival, Arrival, BatchArrival
from penstock.scheduler.played_state import Play, PlayedState
from penstock.scheduler.played_waiting import ENDED, PlayedQueues


class PlayedArrays:
    """Submits the jobs of all arrays of a play. `cancel` cancels a job by its number."""

    def __init__(self, play: Play, queues: PlayedQueues, cancel: Callable[[int], None]) -> None:
        self._play, self._queues, self._cancel_job = play, queues, cancel
        self._records: dict[JobId, ArrayRecord] = {}
        #: By array: the failed indices, and those that wait to run again.
        self._failed: dict[JobId, set[int]] = defaultdict(set)
        self._again: dict[JobId, set[int]] = defaultdict(set)
        #: The numbers of the jobs that have not ended.
        self._numbers: dict[JobId, int] = {}
        for array in play.load.arrays:
            play.at(array.at, partial(self._submit, array))

    def _submit(self, array: ArrayArrival) -> None:
        play = self._play
        name, indices, intent = array.array_id, array.indices, array.intent
        change = submit_array(JobArray(name, indices, intent, play.now))
        if not self._queues.is_valid(intent):
            for _ in range(change.record.array.spec.total):
                self._queues.refuse(Arrival(play.now, intent, 0))
            if name in play.load.groups:
                self._queues.refuse_group(play.load.groups[name])
            return
        self._write(array, None, change)
        for moment in array.retried_at:
            play.at(max(moment, play.now), partial(self._retry, array))
        if array.canceled_at is not None:
            play.at(max(array.canceled_at, play.now), partial(self._cancel, array))

    def _retry(self, array: ArrayArrival) -> None:
        """Run the failed indices again, if there are any."""
        record = self._records[array.array_id]
        try:
            change = retry_array(record)
        except IllegalMove:
            return
        self._write(array, record, change)
        self._advance(array, {})

    def _cancel(self, array: ArrayArrival) -> None:
        record = self._records[array.array_id]
        change = cancel_array(record, self._play.now)
        if change is not None:
            self._write(array, record, change)
            for job_id in record.live_jobs():
                if job_id in self._numbers:
                    self._cancel_job(self._numbers[job_id])

    def _write(self, array: ArrayArrival, before: ArrayRecord | None, change: ArrayChange) -> None:
        now, after = self._play.now, change.record
        self._records[array.array_id] = after
        failed, again = self._failed[array.array_id], self._again[array.array_id]
        failed.update(change.failed)
        again.difference_update(change.repeated)
        if change.retried:
            again |= failed
            failed.clear()
        for job_id in change.jobs:
            work = array.works.of(tuple(live_index(job_id)), now)
            job = self._numbers[job_id] = self._queues.make(Arrival(now, array.intent, *work))
            self._queues.followers[job] = partial(self._ended, array, job_id)
        number = self._play.load.groups.get(array.array_id)
        if number is not None and (before is None or array_moves(before, after)):
            group = group_of_array(after)
            if group.state is not None:
                self._queues.end_group(number, group.state)
            elif group.is_failing:
                self._queues.group_fails(number)
            else:
                self._queues.reopen_group(number)

    def _ended(self, array: ArrayArrival, job_id: JobId, state: PlayedState) -> None:
        """Note the end of a job of the array. A BLOCKED job has not ended."""
        if state not in ENDED:
            return
        del self._numbers[job_id]
        if job_id in self._play.load.groups:
            self._queues.end_group(self._play.load.groups[job_id], ENDED[state])
        self._advance(array, {job_id: ENDED[state]})

    def _advance(self, array: ArrayArrival, ends: Mapping[JobId, JobState]) -> None:
        record = self._records[array.array_id]
        first_again = partial(self._first_again, array.array_id)
        change = advance(record, ends, self._play.now, first_again)
        if change is not None:
            self._write(array, record, change)

    def _first_again(self, array_id: JobId, chunk: int, size: int) -> list[int]:  # noqa: ARG002 - a `FirstAgain`
        return nsmallest(size, self._again[array_id])


class PlayedBatches:
    """
    Counts the members of all batches of a play. They are known from the beginning, as the load has them.
    """

    def __init__(self, play: Play, queues: PlayedQueues) -> None:
        self._play, self._queues = play, queues
        self._groups: dict[int, JobGroup] = {}
        for batch in play.load.batches:
            self._add(batch)

    def _add(self, batch: BatchArrival) -> None:
        play = self._play
        number = play.load.group_of(batch.group_id)
        size = len(batch.members)
        self._groups[number] = JobGroup(batch.group_id, batch.addon_id, play.now, is_open=True, total=size)
        for job in batch.members:
            self._queues.followers[job] = partial(self._ended, number)
        if batch.closed_at is not None:
            play.at(max(batch.closed_at, play.now), partial(self._close, number))

    def _close(self, number: int) -> None:
        change = close_batch(self._groups[number], self._play.now)
        if change is not None:
            self._write(number, change.group)

    def _ended(self, number: int, state: PlayedState) -> None:
        group = self._groups[number]
        if state == PlayedState.REFUSED:
            self._write(number, settle(replace(group, total=group.total - 1), self._play.now).group)
        elif state in ENDED:
            self._write(number, end_members(group, {ENDED[state]: 1}, self._play.now).group)

    def _write(self, number: int, group: JobGroup) -> None:
        before = self._groups[number]
        self._groups[number] = group
        if not group.total and before.total:
            self._queues.refuse_group(number)
        elif group.state is not None:
            self._queues.end_group(number, group.state)
        elif group.is_failing and not before.is_failing:
            self._queues.group_fails(number)
