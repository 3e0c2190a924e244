"""
Groups: a batch or an array as one parent that other jobs can wait for (SPEC TD-3).

A batch is a named set of jobs with callbacks. Its members are the jobs with the tag `batch:NAME`, and that
tag is also its id: a job that waits for the batch names it in `after` like a job. The row of the batch counts
its members and their ends, in the transactions that end them. So its progress is known without reading the
members, and stays right when they are pruned. The rules of a batch are the same for every interface and every
store:

- A batch may be submitted *open*, and stays so until it is closed. An open batch does not end, so its
  `on_end` callback cannot run before all members are added.
- A batch ends when it is closed and all members have ended: FAILED if a member failed, else CANCELED if one
  was canceled, else DONE. A closed batch without members is DONE at once. A BLOCKED member has not ended.
- Members can be added until the batch ends: to a closed batch only while a member has not ended, for example
  by that member.
- The retry of a failed member reopens the batch. Jobs that waited for the batch and were released stay so.
- A name means one batch, until that batch is pruned. It is pruned like a job, and not while a job waits for it.

An array has such a row too, so that a job can wait for it; the array itself decides how it ends.

Callbacks are jobs that wait for the batch: `on_end` for `batch:NAME:done`, `on_failure` for
`batch:NAME:failed` with `if_unmet` `any`. The condition of `on_failure` holds as soon as the first member has
failed: `is_failing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import BadIntent, IllegalMove, KeyConflict, NotFound
from penstock.core.jobs.arrays import ArrayRecord
from penstock.core.jobs.changes import Note, principal_data
from penstock.core.jobs.dependencies import Dependency, IfUnmet, ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import (
    BATCH_NAME,
    BATCH_NAME_WORDS,
    BATCH_TAG,
    CALLBACK_TAG,
    AddonId,
    JobId,
    Moment,
)

#: The number of the first group: groups and jobs are parents and children in one table, so their numbers must
#: differ.
FIRST_GROUP: Final = 2**62
MOST_MEMBERS: Final = 10_000


class JobGroup(Struct, frozen=True):
    """
    The row of a batch or an array as a parent. `group_id`: `batch:NAME`, or the id of the array. `state`:
    None until it ends. `digest`: of the request that made the batch, to tell a repeated request from another
    batch of that name.
    """

    group_id: JobId
    addon_id: AddonId
    created_at: Moment
    is_open: bool = False
    total: int = 0
    done: int = 0
    failed: int = 0
    canceled: int = 0
    state: JobState | None = None
    ended_at: Moment | None = None
    digest: str = ""

    @property
    def live(self) -> int:
        """How many members have not ended."""
        return self.total - self.done - self.failed - self.canceled

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.canceled

    @property
    def is_batch(self) -> bool:
        return self.group_id.startswith(BATCH_TAG)

    @property
    def name(self) -> str:
        return self.group_id.removeprefix(BATCH_TAG)

    @property
    def is_failing(self) -> bool:
        """
        Whether a member has failed, so that jobs that wait for `:failed` with `if_unmet` `any` may start.
        """
        return self.state is None and self.failed > 0

    def outcome(self) -> JobState | None:
        """How the batch ends; None: it does not end yet."""
        if self.is_open or self.live:
            return None
        if self.failed:
            return JobState.FAILED
        return JobState.CANCELED if self.canceled else JobState.DONE


class GroupChange(NamedTuple):
    """A decision about a group: the group from now on, and the events."""

    group: JobGroup
    notes: Sequence[Note] = ()


# names


def batch_id(name: str) -> JobId:
    """The id of the batch of this name. ValueError: the name is not allowed."""
    if not isinstance(name, str) or not BATCH_NAME.fullmatch(name):
        raise ValueError(f"the name of a batch is {name!r:.80}; it {BATCH_NAME_WORDS}")
    return JobId(f"{BATCH_TAG}{name}")


def is_batch_id(word: str) -> bool:
    return word.startswith(BATCH_TAG)


def unknown_batch(group_id: str) -> NotFound:
    name = group_id.removeprefix(BATCH_TAG)
    return NotFound(
        f"there is no batch {name!r:.80}: submit it first, with `penstock batch submit` or `batch open`",
        field="tags",
        batch=name,
    )


def name_used(name: str) -> KeyConflict:
    return KeyConflict(
        f"there is a batch {name} already: give this one another name", field="name", batch=name
    )


# the jobs of a batch


def member(intent: Intent, name: str) -> Intent:
    return replace(intent, tags=(*intent.tags, f"{BATCH_TAG}{name}"))


def on_end(intent: Intent, name: str) -> Intent:
    """The callback that becomes ready when the batch has ended."""
    return _callback(intent, name, ParentCondition.DONE, IfUnmet.CANCEL)


def on_failure(intent: Intent, name: str) -> Intent:
    """The callback that becomes ready when the first member has failed; canceled if none fails."""
    return _callback(intent, name, ParentCondition.FAILED, IfUnmet.ANY)


def _callback(intent: Intent, name: str, condition: ParentCondition, if_unmet: IfUnmet) -> Intent:
    return replace(
        intent,
        tags=(*intent.tags, f"{CALLBACK_TAG}{name}"),
        after=(Dependency(batch_id(name), condition),),
        if_unmet=if_unmet,
    )


def check_members(batches: Mapping[JobId, JobGroup], added: Mapping[JobId, int]) -> None:
    """
    Refuse a submit that may not add members to its batches. `added`: how many it adds to each. NotFound,
    IllegalMove, BadIntent.
    """
    for group_id, count in sorted(added.items()):
        group = batches.get(group_id)
        if group is None:
            raise unknown_batch(group_id)
        if group.state is not None:
            raise IllegalMove(
                f"batch {group.name} has ended ({group.state}) and takes no more jobs: submit a batch of "
                "another name; `batch open` keeps one open until it is closed",
                field="tags",
                batch=group.name,
                state=str(group.state),
            )
        if group.total + count > MOST_MEMBERS:
            raise BadIntent.of(
                (
                    "tags",
                    f"would give batch {group.name} {group.total + count:,} jobs; it may have {MOST_MEMBERS:,}",
                )
            )


# changes


def submit_batch(group: JobGroup, by: str = "") -> GroupChange:
    """Submit a batch. `group`: without members, which the submit of the jobs adds."""
    data = {"batch": group.name, "addon_id": group.addon_id, "open": group.is_open, **principal_data(by)}
    return GroupChange(group, [Note(EventKind.BATCH_SUBMITTED, data=data)])


def add_members(group: JobGroup, count: int) -> JobGroup:
    return replace(group, total=group.total + count)


def close_batch(group: JobGroup, now: Moment, by: str = "") -> GroupChange | None:
    """No more than the members that it has, unless these add some. None: it was closed before."""
    if not group.is_open:
        return None
    data = {"batch": group.name, "addon_id": group.addon_id, **principal_data(by)}
    change = settle(replace(group, is_open=False), now)
    return GroupChange(change.group, [Note(EventKind.BATCH_CLOSED, data=data), *change.notes])


def end_members(group: JobGroup, ends: Mapping[JobState, int], now: Moment) -> GroupChange:
    """Count members that have ended, by state; the batch may end with them."""
    counted = replace(
        group,
        done=group.done + ends.get(JobState.DONE, 0),
        failed=group.failed + ends.get(JobState.FAILED, 0),
        canceled=group.canceled + ends.get(JobState.CANCELED, 0),
    )
    return settle(counted, now)


def retry_members(group: JobGroup, count: int) -> JobGroup:
    """Reopen a batch: failed members are queued again."""
    return replace(group, failed=max(0, group.failed - count), state=None, ended_at=None)


def settle(group: JobGroup, now: Moment) -> GroupChange:
    """End the batch if it is closed and all members have ended."""
    state = group.outcome()
    if state is None or group.state is not None:
        return GroupChange(group)
    counts = {"done": group.done, "failed": group.failed, "canceled": group.canceled}
    data = {"batch": group.name, "addon_id": group.addon_id, **counts}
    ended = replace(group, state=state, ended_at=now)
    return GroupChange(ended, [Note(EventKind.BATCH_ENDED, str(state), data)])


def group_of_array(record: ArrayRecord) -> JobGroup:
    """The row of an array as a parent."""
    array, progress = record.array, record.progress
    spec = array.spec
    ended_at = progress.ended_at
    return JobGroup(
        array.array_id,
        array.intent.addon_id,
        array.created_at,
        total=spec.total,
        done=progress.done,
        failed=progress.failed,
        canceled=progress.canceled,
        state=None if ended_at is None else progress.outcome(spec),
        ended_at=ended_at,
    )


def array_moves(before: ArrayRecord, after: ArrayRecord) -> bool:
    """
    Whether the array's row as a parent changes: the array has ended, was retried, or its first index has
    failed.
    """
    old, new = before.progress, after.progress
    return old.ended_at != new.ended_at or bool(old.failed) != bool(new.failed)
