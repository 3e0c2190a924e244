"""
Arrays: one submit that stands for many jobs, one for each index (SPEC TD-3).

Index 17 of array X is the job `X_17`. At most `at_once` jobs of an array exist that have not ended; the end
of one makes the next. So an array of 100,000 indices needs neither 100,000 rows at once nor a scan.

The row of an array is small: how many indices have become jobs, which of these have not ended, and how many
ended in each state. Other rows record, as bits in chunks (`IndexChunk`), which indices failed and which of
those wait for another run: an end writes only the chunk of its index. Jobs of indices may be pruned; the
array's result stays. The states of the jobs that have not ended are enough for every decision, so an end that
was missed is counted later.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import IllegalMove
from penstock.core.jobs.changes import Note, principal_data
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.states import ENDED, JobState
from penstock.core.jobs.types import SEPARATOR, JobId, Moment

MOST_INDICES: Final = 1_000_000
#: How many jobs of one array may exist at once before their end.
MOST_AT_ONCE: Final = 1_000
LARGEST_INDEX: Final = 999_999_999
MOST_RANGES: Final = 1_000
#: How many jobs of an array without `%n` exist at once before their end.
WINDOW: Final = 256
#: How many indices have their bits in one integer: both databases take 63.
CHUNK: Final = 60
_RANGE: Final = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_SPEC_WORDS: Final = "indices such as 1-1000, 0,5,7-9 or 1-1000%8, where 8 run at once"


class IndexRange(NamedTuple):
    """The indices from `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class ArraySpec(NamedTuple):
    """
    The indices of an array, in order and without overlap, and how many of them may run at once; None: as many
    as the scheduler starts.
    """

    ranges: tuple[IndexRange, ...]
    at_once: int | None = None

    def __str__(self) -> str:
        limit = "" if self.at_once is None else f"%{self.at_once}"
        return ",".join(map(str, self.ranges)) + limit

    @property
    def total(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    def slice(self, position: int, size: int) -> list[int]:
        """`size` indices from a position on, which counts from 0."""
        indices: list[int] = []
        for first, last in self.ranges:
            length = last - first + 1
            if position < length:
                indices += range(first + position, min(last, first + position + size - len(indices) - 1) + 1)
            position = max(0, position - length)
            if len(indices) >= size:
                break
        return indices

    def position(self, index: int) -> int:
        """How many indices come before this one."""
        return sum(max(0, min(last, index - 1) - first + 1) for first, last in self.ranges)

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and any(first <= index <= last for first, last in self.ranges)


@lru_cache(maxsize=256)
def parse_array(text: str) -> ArraySpec:
    """
    Parse the text of an array; ValueError says what is wrong. Cached: the end of each of its jobs needs it.
    """
    indices, percent, limit = text.strip().partition("%")
    at_once = None
    if percent:
        if not limit.isdecimal() or not 0 < int(limit[:10]) <= MOST_AT_ONCE:
            raise ValueError(f"must have a limit of 1..{MOST_AT_ONCE} behind %, not {limit!r:.40}")
        at_once = int(limit)
    words = indices.split(",")
    if len(words) > MOST_RANGES:
        raise ValueError(f"must have at most {MOST_RANGES} ranges")
    ranges = tuple(sorted(_range_of(word.strip()) for word in words))
    for before, after in pairwise(ranges):
        if after.first <= before.last:
            raise ValueError(f"has {before} and {after}, which overlap")
    spec = ArraySpec(tuple(_merged(ranges)), at_once)
    if spec.total > MOST_INDICES:
        raise ValueError(f"has {spec.total:,} indices; at most {MOST_INDICES:,} are allowed")
    return spec


def array_of(indices: Iterable[int], at_once: int | None = None) -> ArraySpec:
    """The array of these indices. ValueError, TypeError: as `parse_array` checks them."""
    if at_once is not None and (not isinstance(at_once, int) or not 0 < at_once <= MOST_AT_ONCE):
        raise ValueError(f"at_once must be 1..{MOST_AT_ONCE}, not {at_once!r:.40}")
    if isinstance(indices, range) and indices.step == 1 and indices:
        return parse_array(str(ArraySpec((IndexRange(indices[0], indices[-1]),), at_once)))
    numbers = sorted(map(_index_of, islice(indices, MOST_INDICES + 1)))  # it may have no end
    if len(numbers) > MOST_INDICES:
        raise ValueError(f"has more than {MOST_INDICES:,} indices")
    if not numbers:
        raise ValueError("an array needs at least one index")
    for before, after in pairwise(numbers):
        if before == after:
            raise ValueError(f"has index {after} twice")
    return parse_array(str(ArraySpec(ranges_of(numbers), at_once)))


def _index_of(given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise ValueError(f"must be whole numbers such as range(1, 1001), not {given!r:.40}") from None


def ranges_of(indices: Iterable[int]) -> tuple[IndexRange, ...]:
    return tuple(_merged(IndexRange(index, index) for index in sorted(indices)))


def _range_of(word: str) -> IndexRange:
    match = _RANGE.fullmatch(word)
    if match is None:
        raise ValueError(f"must be {_SPEC_WORDS}, not {word!r:.40}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"has the reversed range {word}: write {last}-{first}")
    if last > LARGEST_INDEX:
        raise ValueError(f"has index {last}; the largest is {LARGEST_INDEX}")
    return IndexRange(first, last)


def _merged(ranges: Iterable[IndexRange]) -> Iterator[IndexRange]:
    """The ranges in order, neighbors joined into one."""
    current: IndexRange | None = None
    for following in ranges:
        if current is not None and following.first <= current.last + 1:
            current = IndexRange(current.first, max(current.last, following.last))
            continue
        if current is not None:
            yield current
        current = following
    if current is not None:
        yield current


# which indices


class IndexChunk(NamedTuple):
    """A set of indices from `number * CHUNK` on, with a bit for each."""

    number: int
    bits: int

    @property
    def ranges(self) -> Iterator[IndexRange]:
        first, bits = self.number * CHUNK, self.bits
        while bits:
            zeros = (bits & -bits).bit_length() - 1
            first, bits = first + zeros, bits >> zeros
            ones = (~bits & (bits + 1)).bit_length() - 1
            yield IndexRange(first, first + ones - 1)
            first, bits = first + ones, bits >> ones


def chunks_of(indices: Iterable[int]) -> list[IndexChunk]:
    """The chunks of these indices, which must be different."""
    chunks = Counter[int]()
    for index in indices:
        chunks[index // CHUNK] += 1 << index % CHUNK
    return [IndexChunk(*chunk) for chunk in sorted(chunks.items())]


def ranges_in(chunks: Iterable[IndexChunk]) -> Iterator[IndexRange]:
    """The ranges in chunks, which come in order."""
    return _merged(each for chunk in chunks for each in chunk.ranges)


def indices_in(chunks: Iterable[IndexChunk]) -> list[int]:
    """The indices in chunks, which come in order."""
    return [index for chunk in chunks for first, last in chunk.ranges for index in range(first, last + 1)]


#: Reads indices that wait for another run, in order: from a chunk on, and at least a number of them if so
#: many exist.
FirstAgain: TypeAlias = Callable[[int, int], Sequence[int]]


def none_again(chunk: int, size: int) -> Sequence[int]:  # noqa: ARG001 - a `FirstAgain`
    """A `FirstAgain` for an array without indices that wait for another run."""
    return ()


# the jobs of an array


def member_id(array_id: str, index: int, turn: int = 1) -> JobId:
    """
    The id of the job of an index: `X_17`; after a retry of the array `X_17_2`, because the failed job stays.
    """
    again = f"{SEPARATOR}{turn}" if turn > 1 else ""
    return JobId(f"{array_id}{SEPARATOR}{index}{again}")


class LiveIndex(NamedTuple):
    """An index whose job has not ended. `number`: the index. `turn`: which run of it this is."""

    number: int
    turn: int


def live_index(job_id: str) -> LiveIndex:
    """The index and turn from which `member_id` made the id."""
    _, number, *turn = job_id.split(SEPARATOR)
    return LiveIndex(int(number), int(turn[0]) if turn else 1)


class JobArray(Struct, frozen=True):
    """An array as submitted. `intent`: of each job; its idempotency key is the key of the whole array."""

    array_id: JobId
    indices: str
    intent: Intent
    created_at: Moment

    @property
    def spec(self) -> ArraySpec:
        return parse_array(self.indices)

    @property
    def member_intent(self) -> Intent:
        return replace(self.intent, idempotency_key=None)

    @property
    def event_data(self) -> dict[str, Any]:
        """The data that each event of the array has."""
        return {"array_id": self.array_id, "addon_id": self.intent.addon_id}


class ArrayProgress(Struct, frozen=True):
    """
    How far an array is. `made`: how many indices have become jobs. `live`: the indices whose jobs have not
    ended. `again`: how many failed indices wait for another run, all of them in or after the chunk
    `again_from`; `failed` does not count them. `turn`: grows with each retry. `stopped`: the array was
    canceled, and makes no more jobs.
    """

    made: int = 0
    live: tuple[LiveIndex, ...] = ()
    done: int = 0
    failed: int = 0
    canceled: int = 0
    again: int = 0
    again_from: int = 0
    turn: int = 1
    stopped: bool = False
    ended_at: Moment | None = None

    @property
    def ended_count(self) -> int:
        """How many indices have ended."""
        return self.done + self.failed + self.canceled

    def waiting(self, spec: ArraySpec) -> int:
        """How many indices wait for a job: their first one, or the one of another run."""
        return 0 if self.stopped else spec.total - self.made + self.again

    def room(self, spec: ArraySpec) -> int:
        """How many jobs the array may make now."""
        return max(0, min((spec.at_once or WINDOW) - len(self.live), self.waiting(spec)))

    def outcome(self, spec: ArraySpec) -> JobState | None:
        """How the array ends; None: it has not ended."""
        if self.live or self.waiting(spec):
            return None
        if self.failed and not self.stopped:
            return JobState.FAILED
        return JobState.CANCELED if self.canceled or self.stopped else JobState.DONE

    def ended(self, ends: Mapping[LiveIndex, JobState]) -> tuple[ArrayProgress, list[int]]:
        """
        The progress after these ends, and the indices that failed. Ends of indices that are not live are
        ignored.
        """
        states = [ends[each] for each in self.live if each in ends]
        if not states:
            return self, []
        failed = [each.number for each in self.live if ends.get(each) is JobState.FAILED]
        done = states.count(JobState.DONE)
        progress = replace(
            self,
            live=tuple([each for each in self.live if each not in ends]),
            done=self.done + done,
            failed=self.failed + len(failed),
            canceled=self.canceled + len(states) - done - len(failed),
        )
        return progress, failed

    def retried(self) -> ArrayProgress:
        """The progress when every failed index waits for another run."""
        return replace(
            self, failed=0, again=self.again + self.failed, again_from=0, turn=self.turn + 1, ended_at=None
        )

    def stop(self, spec: ArraySpec) -> ArrayProgress:
        """The progress of a canceled array: indices that wait for a job count as canceled."""
        return replace(self, stopped=True, canceled=self.canceled + self.waiting(spec), again=0)

    def make(
        self, spec: ArraySpec, first_again: FirstAgain
    ) -> tuple[ArrayProgress, list[LiveIndex], list[int]]:
        """
        The progress after making jobs, the indices that become jobs, and those of them that had failed.
        Failed indices that wait for another run come first.
        """
        room = self.room(spec)
        if not room:
            return self, [], []
        size = min(room, self.again)
        repeated = list(first_again(self.again_from, size)[:size]) if size else []
        fresh = room - size
        indices = [LiveIndex(index, self.turn) for index in repeated]
        indices += [LiveIndex(index, 1) for index in spec.slice(self.made, fresh)]
        again_from = repeated[-1] // CHUNK if repeated else self.again_from
        progress = replace(
            self,
            made=self.made + fresh,
            again=self.again - size,
            again_from=again_from,
            live=(*self.live, *indices),
        )
        return progress, indices, repeated


# changes


class ArrayRecord(NamedTuple):
    """An array, and how far it is."""

    array: JobArray
    progress: ArrayProgress

    @property
    def state(self) -> JobState:
        """RUNNING until the last index has ended."""
        return self.progress.outcome(self.array.spec) or JobState.RUNNING

    def live_jobs(self) -> list[JobId]:
        return [member_id(self.array.array_id, *each) for each in self.progress.live]


class ArrayChange(NamedTuple):
    """
    A decision about an array: its record from now on, the jobs that it makes, and the events. `failed`:
    indices that have failed. `repeated`: indices that waited for another run and now have a job. `retried`:
    all failed indices wait for another run; `advance` then makes their jobs.
    """

    record: ArrayRecord
    jobs: Sequence[JobId]
    notes: Sequence[Note]
    failed: Sequence[int] = ()
    repeated: Sequence[int] = ()
    retried: bool = False

    @property
    def intents(self) -> list[Intent]:
        return [self.record.array.member_intent] * len(self.jobs)


def submit_array(array: JobArray, by: str = "") -> ArrayChange:
    data = {**array.event_data, "indices": array.indices, **principal_data(by)}
    return _go_on(array, ArrayProgress(), array.created_at, [Note(EventKind.ARRAY_SUBMITTED, data=data)])


def advance(
    record: ArrayRecord | None,
    states: Mapping[JobId, JobState],
    now: Moment,
    first_again: FirstAgain,
) -> ArrayChange | None:
    """
    Count ends and make the next jobs. `states`: of some or all jobs of live indices. None: nothing has
    changed, or there is no such array.
    """
    if record is None:
        return None
    ends = {live_index(job_id): state for job_id, state in states.items() if state in ENDED}
    progress, failed = record.progress.ended(ends)
    if progress is record.progress and not progress.room(record.array.spec):
        return None
    return _go_on(record.array, progress, now, [], failed=failed, first_again=first_again)


def cancel_array(record: ArrayRecord, now: Moment, by: str = "") -> ArrayChange | None:
    """
    Cancel the array: it makes no more jobs; the caller cancels the live ones. None: it is canceled or has
    ended.
    """
    if record.progress.stopped or record.progress.ended_at is not None:
        return None
    note = Note(EventKind.ARRAY_CANCELED, data={**record.array.event_data, **principal_data(by)})
    return _go_on(record.array, record.progress.stop(record.array.spec), now, [note])


def retry_array(record: ArrayRecord, by: str = "") -> ArrayChange:
    """Let the failed indices run again. IllegalMove: there are none, or the array was canceled."""
    array, progress = record.array, record.progress
    if progress.stopped:
        raise IllegalMove("a CANCELED array cannot be retried: submit it again", array_id=array.array_id)
    if not progress.failed:
        raise IllegalMove("no index of this array has failed", array_id=array.array_id)
    data = {**array.event_data, "failed": progress.failed, **principal_data(by)}
    notes = [Note(EventKind.ARRAY_RETRIED, data=data)]
    return ArrayChange(ArrayRecord(array, progress.retried()), [], notes, retried=True)


def _go_on(
    array: JobArray,
    progress: ArrayProgress,
    now: Moment,
    notes: list[Note],
    *,
    failed: Sequence[int] = (),
    first_again: FirstAgain = none_again,
) -> ArrayChange:
    spec = array.spec
    progress, made, repeated = progress.make(spec, first_again)
    outcome = progress.outcome(spec)
    if outcome is not None and progress.ended_at is None:
        progress = replace(progress, ended_at=now)
        counts = {"done": progress.done, "failed": progress.failed, "canceled": progress.canceled}
        notes.append(Note(EventKind.ARRAY_ENDED, str(outcome), {**array.event_data, **counts}))
    jobs = [member_id(array.array_id, *each) for each in made]
    return ArrayChange(ArrayRecord(array, progress), jobs, notes, failed, repeated)


#: Decides about an array (None: there is none) by the states of its live jobs. None: change nothing.
ArrayDecision: TypeAlias = Callable[
    [ArrayRecord | None, Mapping[JobId, JobState], Moment, FirstAgain], ArrayChange | None
]
