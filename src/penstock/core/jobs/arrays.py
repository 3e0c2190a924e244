"""
Arrays: one job that stands for many, one for each index (SPEC TD-3).

The array is a job of its own, which never starts: it is QUEUED until all its indices have ended, and then
ends as they did. So everything that takes a job takes an array: cancel, retry, wait, explain, `--after`.
Index 17 of array X is the job `X_17`, made when a place becomes free: at most `at_once` jobs of an array
exist before their end. The transaction that ends one makes the next, so an array of 100,000 costs neither
100,000 rows at once nor a scan.

What the array remembers is small: how many indices were made, which of them live, how many ended in which
way, and which failed or were canceled. Jobs of indices may be pruned; the array's result stays.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId

MOST_INDICES: Final = 1_000_000
LARGEST_INDEX: Final = 999_999_999
MOST_RANGES: Final = 1_000
#: How many jobs of an array without `%n` exist at once before their end.
WINDOW: Final = 256
#: Between the id of an array and an index.
SEPARATOR: Final = "_"
_RANGE: Final = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_SPEC_WORDS: Final = "indices such as 1-1000, 0,5,7-9 or 1-1000%8, where 8 run at once"


class IndexRange(NamedTuple):
    """Both ends belong to it."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class ArraySpec(NamedTuple):
    """Which indices, in order and without overlap, and how many at once; None: as many as there is room for."""

    ranges: tuple[IndexRange, ...]
    at_once: int | None = None

    def __str__(self) -> str:
        limit = "" if self.at_once is None else f"%{self.at_once}"
        return ",".join(map(str, self.ranges)) + limit

    @property
    def total(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    def index_at(self, position: int) -> int:
        """The index at a position, counted from 0."""
        ends = list(accumulate(last - first + 1 for first, last in self.ranges))
        at = bisect_right(ends, position)
        before = ends[at - 1] if at else 0
        return self.ranges[at].first + position - before

    def position_of(self, index: int) -> int | None:
        before = 0
        for first, last in self.ranges:
            if first <= index <= last:
                return before + index - first
            before += last - first + 1
        return None


def parse_array(text: str) -> ArraySpec:
    """ValueError says what is wrong with the text."""
    indices, percent, limit = text.strip().partition("%")
    at_once = None
    if percent:
        if not limit.isdecimal() or not 0 < int(limit[:10]) <= MOST_INDICES:
            raise ValueError(f"the limit behind % must be 1..{MOST_INDICES}, not {limit!r:.40}")
        at_once = int(limit)
    words = indices.split(",")
    if len(words) > MOST_RANGES:
        raise ValueError(f"must have at most {MOST_RANGES} ranges")
    ranges = tuple(sorted(_range_of(word.strip()) for word in words))
    for before, after in pairwise(ranges):
        if after.first <= before.last:
            raise ValueError(f"{before} and {after} overlap")
    spec = ArraySpec(tuple(_merged(ranges)), at_once)
    if spec.total > MOST_INDICES:
        raise ValueError(f"has {spec.total:,} indices; at most {MOST_INDICES:,} are allowed")
    return spec


def array_of(indices: Iterable[int], at_once: int | None = None) -> ArraySpec:
    """The array of these indices, as the text would give it. ValueError, TypeError."""
    if at_once is not None and not 0 < at_once <= MOST_INDICES:
        raise ValueError(f"at_once must be 1..{MOST_INDICES}, not {at_once}")
    if isinstance(indices, range) and indices.step == 1 and indices:
        return parse_array(str(ArraySpec((IndexRange(indices[0], indices[-1]),), at_once)))
    values = ranges_of(indices)
    if not values:
        raise ValueError("an array needs at least one index")
    return parse_array(str(ArraySpec(values, at_once)))


def ranges_of(indices: Iterable[int]) -> tuple[IndexRange, ...]:
    return tuple(_merged(IndexRange(index, index) for index in sorted(indices)))


def ranges_text(indices: Iterable[int]) -> str:
    """`3,7-9`; empty for none."""
    return ",".join(map(str, ranges_of(indices)))


def _range_of(word: str) -> IndexRange:
    match = _RANGE.fullmatch(word)
    if match is None:
        raise ValueError(f"must be {_SPEC_WORDS}, not {word!r:.40}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"the range {word} is reversed: write {last}-{first}")
    if last > LARGEST_INDEX:
        raise ValueError(f"an index must be at most {LARGEST_INDEX}, not {last}")
    return IndexRange(first, last)


def _merged(ranges: Iterable[IndexRange]) -> Iterator[IndexRange]:
    """Neighbors as one range."""
    held: IndexRange | None = None
    for each in ranges:
        if held is not None and each.first <= held.last + 1:
            held = IndexRange(held.first, max(held.last, each.last))
            continue
        if held is not None:
            yield held
        held = each
    if held is not None:
        yield held


# the jobs of an array


def member_id(array_id: JobId, index: int) -> JobId:
    return JobId(f"{array_id}{SEPARATOR}{index}")


def member_of(job_id: str) -> tuple[JobId, int] | None:
    """The array and the index of a job that belongs to one."""
    array_id, separator, index = job_id.rpartition(SEPARATOR)
    if not separator or not index.isdecimal():
        return None
    return JobId(array_id), int(index)


class ArrayProgress(Struct, frozen=True, gc=False):
    """
    How far an array is. `made`: how many of its indices have become jobs. `live`: those that have not ended.
    `again`: how many failed indices wait for another run. `stopped`: it was canceled, and makes no more jobs.
    """

    made: int = 0
    live: tuple[int, ...] = ()
    done: int = 0
    failed: int = 0
    canceled: int = 0
    again: int = 0
    stopped: bool = False

    def waiting(self, spec: ArraySpec) -> int:
        """How many indices have no job yet, or no new one."""
        return 0 if self.stopped else spec.total - self.made + self.again

    def room(self, spec: ArraySpec) -> int:
        """How many jobs may be made now."""
        return max(0, min((spec.at_once or WINDOW) - len(self.live), self.waiting(spec)))

    def outcome(self, spec: ArraySpec) -> JobState | None:
        """How the array ends; None: it has not ended."""
        if self.live or self.waiting(spec):
            return None
        if self.failed:
            return JobState.FAILED
        return JobState.CANCELED if self.canceled or self.stopped else JobState.DONE

    def ended(self, index: int, state: JobState) -> ArrayProgress:
        """A job of the array ended. One that is not known to live changes nothing."""
        if index not in self.live:
            return self
        live = tuple(each for each in self.live if each != index)
        match state:
            case JobState.DONE:
                return replace(self, live=live, done=self.done + 1)
            case JobState.FAILED:
                return replace(self, live=live, failed=self.failed + 1)
            case _:
                return replace(self, live=live, canceled=self.canceled + 1)

    def revived(self, index: int) -> ArrayProgress:
        """A failed index was retried by itself: it lives again, above the limit if it must."""
        return replace(self, live=(*self.live, index), failed=self.failed - 1)

    def retried(self) -> ArrayProgress:
        """Every failed index waits for another run."""
        return replace(self, failed=0, again=self.again + self.failed)

    def canceled_whole(self, spec: ArraySpec) -> ArrayProgress:
        """No more jobs are made. What was never made, or waits for another run, counts as canceled."""
        return replace(self, stopped=True, canceled=self.canceled + self.waiting(spec), again=0)

    def make(self, spec: ArraySpec, again: Sequence[int]) -> tuple[ArrayProgress, list[int]]:
        """
        The next indices that become jobs: those that wait for another run first. `again`: the first of these,
        at least as many as there is room for.
        """
        room = self.room(spec)
        indices = list(again[: min(room, self.again)])
        fresh = room - len(indices)
        indices += [spec.index_at(position) for position in range(self.made, self.made + fresh)]
        progress = replace(
            self,
            made=self.made + fresh,
            again=self.again - (room - fresh),
            live=(*self.live, *indices),
        )
        return progress, indices
