"""
Arrays: the operations of people and programs (`ArrayService`), and a check of the open ones
(`ArrayAdvancer`).

The transaction that ends a job of an array also starts the next index, so no end is missed. Versions before
that rule started the next index in a later commit. If such a version was killed in between, or still runs
beside this one, `ArrayAdvancer` finds the array behind and starts its next indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final
from uuid import UUID

from msgspec.structs import replace

from penstock.core.errors import BadIntent, KeyConflict, NotFound, Refused
from penstock.core.jobs import arrays
from penstock.core.jobs.arrays import (
    WINDOW,
    ArrayChange,
    ArrayDecision,
    ArrayRecord,
    ArraySpec,
    FirstAgain,
    IndexRange,
    JobArray,
    member_id,
    ranges_in,
)
from penstock.core.jobs.changes import Change
from penstock.core.jobs.dependencies import batch_of
from penstock.core.jobs.intent import Intent, check
from penstock.core.jobs.job import Job
from penstock.core.jobs.states import ENDED, JobState, Move
from penstock.core.jobs.types import MINUTE, AddonId, JobId, Moment, Span
from penstock.scheduler.job_service import JobService
from penstock.scheduler.rules import SchedulerRules
from penstock.stores.api import Apply, ChangeArray, Store, committed
from penstock.stores.common.rows import uuid7

#: How often `ArrayAdvancer` looks at open arrays.
_AGAIN: Final[Span] = 1 * MINUTE
#: How many arrays `ArrayAdvancer` looks at in one step.
_MOST_OPEN: Final = 1_000
#: How many arrays a list of one addon searches.
_MOST_SEARCHED: Final = 10_000
_TRIES: Final = 8


class ArrayService:
    """The operations on arrays. `by`: the principal, for the trail."""

    def __init__(self, store: Store, rules: SchedulerRules, job_service: JobService) -> None:
        self._store, self._rules, self._job_service = store, rules, job_service

    def submit(self, intent: Intent, indices: ArraySpec | str, by: str = "") -> tuple[ArrayRecord, bool]:
        """
        Submit an array, durable when this returns. Also returns whether it is new: the same request again
        with its idempotency key finds the array. Raises BadIntent, KeyConflict or
        QueueFull: there is no room for its first jobs.
        """
        spec = self._checked(intent, indices)
        array_id = _array_id(intent)

        is_new = False

        def decide(
            before: ArrayRecord | None, _: Mapping[JobId, JobState], now: Moment, __: FirstAgain
        ) -> ArrayChange | None:
            nonlocal is_new
            is_new = before is None
            if before is None:
                return arrays.submit_array(JobArray(array_id, str(spec), intent, now), by)
            if (before.array.indices, before.array.intent) != (str(spec), intent):
                raise KeyConflict(
                    f"idempotency_key {intent.idempotency_key!r} was used for another array",
                    field="idempotency_key",
                    array_id=array_id,
                )
            return None

        member = replace(intent, idempotency_key=None)
        submit = ChangeArray(array_id, decide, intent=member, depth=self._rules.depth)
        record = committed(self._store, submit)
        assert record is not None
        return record, is_new

    def get(self, array_id: str) -> ArrayRecord:
        record = self._store.array(JobId(array_id))
        if record is None:
            raise NotFound(f"there is no array {array_id!r:.80}", array_id=array_id)
        return record

    def failed_indices(self, record: ArrayRecord) -> Iterator[IndexRange]:
        if not record.progress.failed:
            return iter(())
        return ranges_in(self._store.failed_indices(record.array.array_id))

    def newest(self, limit: int = 50, addon_id: AddonId | None = None) -> list[ArrayRecord]:
        """The newest arrays. With an addon: its arrays among the newest `_MOST_SEARCHED` of all addons."""
        if addon_id is None:
            return self._store.arrays(limit)
        records = self._store.arrays(_MOST_SEARCHED)
        return [record for record in records if record.array.intent.addon_id == addon_id][:limit]

    def job_of(self, array_id: str, index: int) -> JobId:
        """The newest job of an index. NotFound: the index has no job yet, or its job was pruned."""
        record = self.get(array_id)
        turns = range(record.progress.turn, 0, -1)
        names = [member_id(array_id, index, turn) for turn in turns]
        stored = {job.job_id for job in self._store.jobs(names)}
        for name in names:
            if name in stored:
                return name
        raise NotFound(f"{self.why_no_job(record, index)}", array_id=array_id, index=index)

    def why_no_job(self, record: ArrayRecord, index: int) -> str:
        """Why there is no job of this index now."""
        array, progress = record.array, record.progress
        which = f"index {index} of array {array.array_id}"
        if index not in array.spec:
            return f"{which} is not in {array.indices}"
        if progress.stopped:
            return f"{which} has no job: the array was canceled"
        if array.spec.position(index) < progress.made:
            return f"{which} has no job any more: jobs that have ended are forgotten after a time"
        most = array.spec.at_once or WINDOW
        return (
            f"{which} waits: {len(progress.live)} of {most} at once, {progress.waiting(array.spec)} to come"
        )

    def cancel(self, array_id: str, by: str = "") -> ArrayRecord:
        """
        Start no further index, and cancel the jobs that have not ended. Queued jobs have ended when this
        returns.
        """
        record = self.get(array_id)

        def decide(
            before: ArrayRecord | None, _: Mapping[JobId, JobState], now: Moment, __: FirstAgain
        ) -> ArrayChange | None:
            return None if before is None else arrays.cancel_array(before, now, by)

        record = self._change(record.array.array_id, decide)
        for _ in range(_TRIES):
            living = [job for job in self._store.jobs(record.live_jobs()) if job.state not in ENDED]
            changes = [change for job in living if (change := self._cancel_change(job, by)) is not None]
            if all(committed(self._store, Apply(changes))):
                break
        return self.get(array_id)

    def retry(self, array_id: str, by: str = "") -> ArrayRecord:
        """Run the failed indices again. IllegalMove: none has failed, or the array was canceled."""
        record = self.get(array_id)

        def decide(before: ArrayRecord | None, *_: Any) -> ArrayChange | None:
            return None if before is None else arrays.retry_array(before, by)

        return self._change(record.array.array_id, decide, record.array.member_intent)

    def advance(self, array_ids: Iterable[JobId]) -> None:
        """Count the ended jobs of these arrays, and start their next indices."""
        for array_id in array_ids:
            record = self._store.array(array_id)
            if record is not None and record.progress.ended_at is None:
                self._change(array_id, arrays.advance, record.array.member_intent)

    def open_arrays(self) -> list[ArrayRecord]:
        return self._store.arrays(_MOST_OPEN, only_open=True)

    def behind(self, records: Sequence[ArrayRecord]) -> list[JobId]:
        """The arrays whose record misses the end of a job, or that have room for another index."""
        live = {name: record.array.array_id for record in records for name in record.live_jobs()}
        living = {job.job_id for job in self._store.jobs(list(live)) if job.state not in ENDED}
        late = {array_id for name, array_id in live.items() if name not in living}
        late |= {r.array.array_id for r in records if r.progress.room(r.array.spec)}
        return sorted(late)

    def _checked(self, intent: Intent, indices: ArraySpec | str) -> ArraySpec:
        problems: list[tuple[str, str]] = []
        spec = None
        try:
            spec = arrays.parse_array(str(indices))
        except ValueError as error:
            problems.append(("array", str(error)))
        if batch_of(intent) is not None:
            problems.append(
                ("tags", "cannot name a batch: an array is waited for and canceled as one itself")
            )
        if intent.after:
            problems.append(("after", "cannot be given with an array: submit the array when they have ended"))
        try:
            check(intent, self._store.now(), most_units=self._rules.capacity.most)
        except BadIntent as bad:
            problems += [(problem["field"], problem["message"]) for problem in bad.problems]
        if problems or spec is None:
            raise BadIntent.of(*problems)
        return spec

    def _cancel_change(self, job: Job, by: str) -> Change | None:
        try:
            return self._job_service.decide(Move.CANCEL, by, job)
        except Refused:  # the job ended meanwhile
            return None

    def _change(self, array_id: JobId, decide: ArrayDecision, intent: Intent | None = None) -> ArrayRecord:
        record = committed(self._store, ChangeArray(array_id, decide, intent=intent))
        if record is None:
            raise NotFound(f"there is no array {array_id}", array_id=array_id)
        return record


def _array_id(intent: Intent) -> JobId:
    """A new id; with an idempotency key an id made of the key, so that the same request finds its array."""
    if intent.idempotency_key is None:
        return JobId(uuid7())
    text = f"{intent.addon_id}\0{intent.idempotency_key}"
    return JobId(str(UUID(bytes=blake2b(text.encode(), digest_size=16).digest())))


class ArrayAdvancer:
    """
    Upkeep that advances arrays which fell behind. Without open arrays it costs one small query a minute.
    """

    def __init__(self, service: ArrayService) -> None:
        self._service = service

    def step(self, now: Moment) -> Moment:
        if records := self._service.open_arrays():
            self._service.advance(self._service.behind(records))
        return now + _AGAIN
