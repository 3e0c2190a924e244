"""
Resolves dependencies in the transaction that ends a parent. Every store calls `resolve` for each job that
ends, and for each job that begins to wait for its parents (a new one, or one that is retried).

A store reads and writes rows (`DependencyRows`); this module decides what they mean, for all stores alike.
Children that end because of a parent have children of their own, so the work goes level by level, never by
recursion.

The work of one transaction is bounded, because a writer must not stall: `MOST_RESOLVED` children that are
released, or a tenth as many that are ended, or about 160 levels. The same transaction keeps the rest as rows
of `pending_end`; maintenance continues with it at once by the operation `ResolveDependencies`.

A release reads only the dependencies on the jobs that ended: a child counts the parents that it waits for, so
its other parents need not be read.

A batch is a child of its members and a parent of the jobs that wait for it (`core/jobs/groups.py`): the end
of a member is counted in the row of the batch, and the end of the last one ends the batch, in the same
transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from penstock.core.jobs.changes import Change, Note, miss_dependency
from penstock.core.jobs.dependencies import DependencyStatus, Fate, IfUnmet, ParentCondition, fate
from penstock.core.jobs.groups import FIRST_GROUP, JobGroup, end_members, is_batch_id, retry_members
from penstock.core.jobs.job import EventKind, Job
from penstock.core.jobs.states import ENDED, JobState
from penstock.core.jobs.types import JobId, Moment

#: The children that one transaction may release. To release so many took SQLite 0.2 s on two busy cores, with
#: the commit (one run).
MOST_RESOLVED: Final = 10_000
#: The costs of a child that ends and of a level, where a release costs 1: a child that ends is read and
#: written as a whole, and a level needs statements of its own (on PostgreSQL round trips).
END_COST: Final = 10
LEVEL_COST: Final = 50


class StateMove(NamedTuple):
    """
    A job or group whose new state changes dependencies: it has ended, is queued again (a retry), or is a
    group whose first member has failed (RUNNING). `after`: the number of the last child that was resolved.
    """

    no: int
    job_id: JobId
    state: JobState
    after: int = 0


class OpenDependency(NamedTuple):
    """
    A dependency that is not met: of a queued child on its parent, or of a batch on its member. `unmet` and
    `events` are the child's, as stored.
    """

    parent_no: int
    parent_id: JobId
    parent_state: str
    child_no: int
    child_id: JobId
    condition: str
    if_unmet: str
    unmet: int
    events: int


class DependencyRows(Protocol):
    """The dependencies of a store, read and written in one transaction."""

    @property
    def now(self) -> Moment: ...

    def children(self, ends: Sequence[StateMove], limit: int) -> Sequence[OpenDependency]:
        """
        The first queued children of these parents, after the `after` of each. `parent_state` is that of the
        move.
        """
        ...

    def parents(self, children: Sequence[int]) -> Sequence[OpenDependency]:
        """The open dependencies of these children, with the states of the parents in this transaction."""
        ...

    def end(self, child: OpenDependency, decide: Callable[[Job], Change]) -> None:
        """Apply a change that ends the child."""
        ...

    def settle(self, pairs: Sequence[tuple[int, int]], status: DependencyStatus) -> None:
        """Set the status of dependencies, each a pair of parent and child."""
        ...

    def void(self, children: Sequence[int]) -> None:
        """Set the open dependencies of these children to VOID: they no longer matter."""
        ...

    def wait(self, unmet: Sequence[tuple[int, int]]) -> None:
        """Set how many parents each child waits for (child, number), and take it out of its ready queue."""
        ...

    def release(self, ready: Sequence[tuple[OpenDependency, Note]]) -> None:
        """Put children whose last parent has ended into their ready queues, each with its event."""
        ...

    def memberships(self, members: Sequence[int]) -> Sequence[OpenDependency]:
        """The dependencies of batches on these members, which had ended and are queued again."""
        ...

    def groups(self, nos: Sequence[int]) -> Mapping[int, JobGroup]:
        """Lock these groups and return them by number."""
        ...

    def set_groups(self, groups: Mapping[int, JobGroup], notes: Sequence[Note]) -> None:
        """Write changed groups, and events that belong to no job."""
        ...

    def postpone(self, ends: Sequence[StateMove]) -> None:
        """Store moves whose children are not all resolved yet, for `ResolveDependencies`."""
        ...


def move_of(no: int, job_id: JobId, source: JobState, target: JobState) -> StateMove | None:
    """
    The change of a job's state, if it may change dependencies: the job has ended, or is retried after it had
    ended.
    """
    if source is target or not (target in ENDED or source in ENDED):
        return None
    return StateMove(no, job_id, target)


def group_move(no: int, before: JobGroup, after: JobGroup) -> StateMove | None:
    """
    The change of a group, if it may change dependencies: the group has ended, or its first member has failed.
    """
    if after.state is not None and before.state is None:
        return StateMove(no, after.group_id, after.state)
    if after.is_failing and not before.is_failing:
        return StateMove(no, after.group_id, JobState.RUNNING)
    return None


def resolve(
    rows: DependencyRows, moves: Sequence[StateMove], new: Sequence[int] = (), *, most: int | None = None
) -> None:
    """
    Resolve the dependencies that these moves change. `moves`: as `move_of` and `group_move` make them. `new`:
    the numbers of new jobs that have parents.
    """
    resolution = _Resolution(rows, MOST_RESOLVED if most is None else most)
    retried = [move.no for move in moves if move.state is JobState.QUEUED]
    if retried:
        resolution.reopen_groups(retried)
    resolution.run([move for move in moves if move.state in ENDED], [*new, *retried])
    resolution.write()
    if failing := [move for move in moves if move.state is JobState.RUNNING]:
        resolve_failing(rows, failing, most)


def resolve_failing(rows: DependencyRows, groups: Sequence[StateMove], most: int | None = None) -> None:
    """Release the children of groups whose first member has failed, as far as that is enough for them."""
    resolution = _Resolution(rows, MOST_RESOLVED if most is None else most)
    for group in groups:
        resolution.release_early(group.no, group.job_id)
    resolution.write()


@dataclass(slots=True)
class _Child:
    """
    A child of this transaction: the parents that it still waits for, and those whose end has been judged.
    """

    row: OpenDependency
    unmet: int
    met: dict[int, JobId] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    ended: bool = False

    def is_settled(self, parent_no: int) -> bool:
        """Whether the end of this parent changes nothing for the child."""
        one_is_enough = self.row.if_unmet == IfUnmet.ANY and bool(self.met)
        return self.ended or one_is_enough or parent_no in self.met or parent_no in self.dropped


class _Resolution:
    """
    The moves of one transaction, resolved level by level within a budget. `write` writes what was collected.
    """

    def __init__(self, rows: DependencyRows, most: int) -> None:
        self._rows, self._budget = rows, most
        self._children: dict[int, _Child] = {}
        #: The open dependencies of children that begin to wait, by parent: the store's rows may not have them
        #: yet.
        self._awaited: dict[int, list[OpenDependency]] = {}
        #: Children whose open dependencies no longer matter.
        self._void: list[int] = []
        self._next: list[StateMove] = []
        self._postponed: list[StateMove] = []
        #: Groups as they are from now on, by number.
        self._groups: dict[int, JobGroup] = {}
        self._group_notes: list[Note] = []
        #: Members that ended in this level, by group; and all that ended or were retried, as pairs of
        #: dependencies.
        self._members: dict[int, dict[int, JobState]] = {}
        self._ended_members: list[tuple[int, int]] = []
        self._retried_members: list[tuple[int, int]] = []

    def reopen_groups(self, retried: Sequence[int]) -> None:
        """Count members that had failed and are queued again as live members of their groups."""
        rows = self._rows.memberships(sorted(set(retried)))
        counts = Counter(row.child_no for row in rows)
        self._read_groups(counts)
        for no, count in counts.items():
            self._groups[no] = retry_members(self._groups[no], count)
        for row in rows:
            self._retried_members.append((row.parent_no, row.child_no))
            self._awaited.setdefault(row.parent_no, []).append(row)

    def run(self, ended: Sequence[StateMove], waiting: Sequence[int]) -> None:
        """
        Resolve level by level. `ended`: jobs whose children may become ready or end. `waiting`: jobs that
        begin to wait for their parents.
        """
        if waiting:
            self._judge_parents(waiting)
        self._next += ended
        self._void += [end.no for end in ended if end.state is JobState.CANCELED]
        while self._next and self._budget > 0:
            level, self._next = sorted({end.no: end for end in self._next}.values()), []
            self._budget -= LEVEL_COST
            self._postponed += self._resolve_level(level)
            self._count_members()
        self._postponed += self._next

    def _judge_parents(self, waiting: Sequence[int]) -> None:
        dependencies = self._rows.parents(sorted(set(waiting)))
        for dependency in dependencies:
            child = self._children.setdefault(dependency.child_no, _Child(dependency, 0))
            child.unmet += 1
            self._awaited.setdefault(dependency.parent_no, []).append(dependency)
        for dependency in dependencies:
            self._judge(dependency, JobState(dependency.parent_state))

    def _resolve_level(self, level: Sequence[StateMove]) -> list[StateMove]:
        """Resolve ends in the order of their numbers. Return those that remain when the budget is spent."""
        positions = {end.no: position for position, end in enumerate(level)}
        for (parent_no, child_no), row in sorted(self._children_of(level).items()):
            position = positions[parent_no]
            end = level[position]
            if self._budget <= 0:
                return [end._replace(after=child_no - 1), *level[position + 1 :]]
            self._budget -= 1
            self._judge(row._replace(parent_id=end.job_id), end.state)
        return []

    def _children_of(self, level: Sequence[StateMove]) -> dict[tuple[int, int], OpenDependency]:
        stored = self._rows.children(level, max(1, self._budget) + 1)
        rows = {(row.parent_no, row.child_no): row for row in stored}
        for end in level:
            for row in self._awaited.get(end.no, ()):
                if row.child_no > end.after:
                    rows[row.parent_no, row.child_no] = row
        return rows

    # groups

    def _read_groups(self, nos: Mapping[int, object]) -> None:
        if unread := sorted(nos.keys() - self._groups.keys()):
            self._groups |= self._rows.groups(unread)

    def _count_members(self) -> None:
        """Count the members that ended in this level, and end the groups whose last member ended."""
        members, self._members = self._members, {}
        if not members:
            return
        self._read_groups(members)
        for no, ends in sorted(members.items()):
            before = self._groups[no]
            group, notes = end_members(before, Counter(ends.values()), self._rows.now)
            self._groups[no] = group
            self._group_notes += notes
            self._ended_members += [(member, no) for member in ends]
            if group.state is not None:
                self._next.append(StateMove(no, group.group_id, group.state))
            elif group.is_failing and not before.is_failing:
                self.release_early(no, group.group_id)

    def release_early(self, no: int, group_id: JobId) -> None:
        """
        Release the children for which the first failed member of the group is enough. Children beyond the
        budget wait for the end of the group.
        """
        failing = StateMove(no, group_id, JobState.FAILED)
        for row in self._children_of([failing]).values():
            if row.condition == ParentCondition.FAILED and row.if_unmet == IfUnmet.ANY:
                self._budget -= 1
                self._judge(row._replace(parent_id=group_id), JobState.FAILED)

    # children

    def _judge(self, row: OpenDependency, parent: JobState) -> None:
        """
        Decide what the parent's state means for one child: it has a parent less to wait for, is ready, or
        ends.
        """
        if row.child_no >= FIRST_GROUP:
            self._members.setdefault(row.child_no, {})[row.parent_no] = parent
            return
        child = self._children.setdefault(row.child_no, _Child(row, row.unmet))
        if child.is_settled(row.parent_no):
            return
        condition = ParentCondition(row.condition)
        child_fate = fate(condition, parent, IfUnmet(row.if_unmet))
        if child_fate is Fate.MEET:
            child.unmet -= 1
            child.met[row.parent_no] = row.parent_id
            if row.if_unmet == IfUnmet.ANY:
                child.unmet = 0
                self._void.append(row.child_no)
        elif child_fate is Fate.DROP and child.unmet > 1:
            child.unmet -= 1
            child.dropped.add(row.parent_no)
        elif child_fate is not Fate.WAIT:
            self._budget -= END_COST
            child.ended = True
            self._rows.end(
                row,
                lambda job: miss_dependency(
                    job,
                    row.parent_id,
                    parent,
                    condition,
                    fate=child_fate,
                    now=self._rows.now,
                    is_array=row.parent_no >= FIRST_GROUP and not is_batch_id(row.parent_id),
                ),
            )
            state = JobState.FAILED if child_fate is Fate.FAIL else JobState.CANCELED
            self._next.append(StateMove(row.child_no, row.child_id, state))
            if state is JobState.CANCELED:
                self._void.append(row.child_no)

    def write(self) -> None:
        """Write the collected statuses, groups, counts and releases, each kind by one call of the store."""
        waiting = [child for _, child in sorted(self._children.items()) if not child.ended]
        rows = self._rows
        if self._retried_members:
            rows.settle(sorted(self._retried_members), DependencyStatus.OPEN)
        if self._ended_members:
            rows.settle(sorted(self._ended_members), DependencyStatus.MET)
        if self._groups:
            rows.set_groups(self._groups, self._group_notes)
        if met := [(parent, child.row.child_no) for child in waiting for parent in child.met]:
            rows.settle(sorted(met), DependencyStatus.MET)
        if dropped := [(parent, child.row.child_no) for child in waiting for parent in child.dropped]:
            rows.settle(sorted(dropped), DependencyStatus.VOID)
        if self._void:
            rows.void(sorted(set(self._void)))
        if unmet := [(c.row.child_no, c.unmet) for c in waiting if c.unmet and c.unmet != c.row.unmet]:
            rows.wait(unmet)
        # A new child all of whose parents had ended before is in its ready queue already.
        if ready := [child for child in waiting if not child.unmet and child.row.unmet]:
            rows.release([(child.row, _ready(child)) for child in ready])
        if self._postponed:
            rows.postpone(self._postponed)


def _ready(child: _Child) -> Note:
    *_, parent = child.met.values()
    return Note(EventKind.READY, data={"parent": str(parent)})
