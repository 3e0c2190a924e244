"""
Dependencies resolved in the transaction that ends their parents: the one hook that each store calls
for every end of a job, and for a job that begins to wait for its parents (a new one, or one that is retried).

A store reads and writes rows (`DependencyRows`); what they mean is decided here, alike for all stores. Children
that end because of a parent have children of their own, so the work goes level by level, never by recursion.

The work of one transaction is bounded, because a writer must not stall: `MOST_RESOLVED` children that are
released, or a tenth of it that are ended, or some 160 levels. What is beyond that stays as a row of
`pending_end` in the same transaction, and `ResolveDependencies` goes on from there; maintenance commits it at once.

The cost of a release is that of the dependencies on the jobs that ended. A child counts the parents that it
waits for, so no end looks at the child's other parents.

A batch is a child of its members and a parent of what waits for it (`core/jobs/groups.py`): the end of a member is
counted in the row of the batch, and the end of the last one ends the batch, in the same transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from penstock.core.jobs.changes import Change, Note, miss_dependency
from penstock.core.jobs.dependencies import DependencyStatus, Fate, IfUnmet, ParentCondition, fate
from penstock.core.jobs.groups import FIRST_GROUP, JobGroup, end_members, retry_members
from penstock.core.jobs.job import EventKind, Job
from penstock.core.jobs.states import ENDED, JobState
from penstock.core.jobs.types import JobId, Moment

#: Children of one transaction. Releasing so many took SQLite 0.2 s on two busy cores, with the commit (one run).
MOST_RESOLVED: Final = 10_000
#: A child that ends is read and written as a whole, and a level needs statements of its own (on PostgreSQL
#: round trips), so they count for more.
END_COST: Final = 10
LEVEL_COST: Final = 50


class EndedJob(NamedTuple):
    """`after`: the number of the last child that was resolved."""

    no: int
    job_id: JobId
    state: JobState
    after: int = 0


class OpenDependency(NamedTuple):
    """
    A dependency that is not met, of a child that is queued, or of a batch on its member. `unmet`, `events`: of the
    child, as stored.
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
    """The rows of one transaction."""

    @property
    def now(self) -> Moment: ...

    def children(self, ends: Sequence[EndedJob], limit: int) -> Sequence[OpenDependency]:
        """The first queued children of these jobs, behind `after` of each; the parent is as its end says."""
        ...

    def parents(self, children: Sequence[int]) -> Sequence[OpenDependency]:
        """The dependencies that these children have to meet; the parents as they are in this transaction."""
        ...

    def end(self, child: OpenDependency, decide: Callable[[Job], Change]) -> None:
        """Apply a change that ends the child."""
        ...

    def settle(self, pairs: Sequence[tuple[int, int]], status: DependencyStatus) -> None:
        """Set the status of dependencies, each a pair of parent and child."""
        ...

    def void(self, children: Sequence[int]) -> None:
        """Make the open dependencies of these children void: they no longer matter."""
        ...

    def wait(self, unmet: Sequence[tuple[int, int]]) -> None:
        """Set how many parents each child waits for (child, number), so that no ready queue has it."""
        ...

    def release(self, ready: Sequence[tuple[OpenDependency, Note]]) -> None:
        """Put children whose last parent has ended into their ready queues, each with its event."""
        ...

    def memberships(self, members: Sequence[int]) -> Sequence[OpenDependency]:
        """The dependencies of batches on these members, which had ended, as if they were open."""
        ...

    def groups(self, nos: Sequence[int]) -> Mapping[int, JobGroup]:
        """These groups, by number, locked."""
        ...

    def set_groups(self, groups: Mapping[int, JobGroup], notes: Sequence[Note]) -> None:
        """Write groups as they are from now on, with events that belong to no job."""
        ...

    def postpone(self, ends: Sequence[EndedJob]) -> None:
        """Keep ends whose children are not all resolved yet, for `ResolveDependencies`."""
        ...


def moved(no: int, job_id: JobId, source: JobState, target: JobState) -> EndedJob | None:
    """The move of a job that may change its dependencies; None: it changes none. A job that is retried is no longer ended."""
    if source is target or not (target in ENDED or source in ENDED):
        return None
    return EndedJob(no, job_id, target)


def group_move(no: int, before: JobGroup, after: JobGroup) -> EndedJob | None:
    """The change of a group that its children must know: it has ended, or its first member has failed."""
    if after.state is not None and before.state is None:
        return EndedJob(no, after.group_id, after.state)
    if after.is_failing and not before.is_failing:
        return EndedJob(no, after.group_id, JobState.RUNNING)
    return None


def resolve(
    rows: DependencyRows, moves: Sequence[EndedJob], new: Sequence[int] = (), *, most: int | None = None
) -> None:
    """
    `moves`: as `moved` makes them, and groups that have ended, or of which the first member has failed (RUNNING).
    `new`: the numbers of new jobs that have parents.
    """
    resolution = _Resolution(rows, MOST_RESOLVED if most is None else most)
    retried = [move.no for move in moves if move.state is JobState.QUEUED]
    if retried:
        resolution.reopen_groups(retried)
    resolution.run([move for move in moves if move.state in ENDED], [*new, *retried])
    resolution.write()
    if failing := [move for move in moves if move.state is JobState.RUNNING]:
        resolve_failing(rows, failing, most)


def resolve_failing(rows: DependencyRows, groups: Sequence[EndedJob], most: int | None = None) -> None:
    """The first member of these groups has failed, which is enough for some of their children."""
    resolution = _Resolution(rows, MOST_RESOLVED if most is None else most)
    for group in groups:
        resolution.release_early(group.no, group.job_id)
    resolution.write()


@dataclass(slots=True)
class _Child:
    row: OpenDependency
    unmet: int
    met: dict[int, JobId] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    ended: bool = False

    def is_settled(self, parent_no: int) -> bool:
        """Whether the end of this parent changes nothing any more."""
        one_is_enough = self.row.if_unmet == IfUnmet.ANY and bool(self.met)
        return self.ended or one_is_enough or parent_no in self.met or parent_no in self.dropped


class _Resolution:
    def __init__(self, rows: DependencyRows, most: int) -> None:
        self._rows, self._budget = rows, most
        self._children: dict[int, _Child] = {}
        #: The open dependencies of children that begin to wait, by parent: a store may not find them yet.
        self._awaited: dict[int, list[OpenDependency]] = {}
        #: Children whose open dependencies no longer matter.
        self._void: list[int] = []
        self._next: list[EndedJob] = []
        self._postponed: list[EndedJob] = []
        #: Groups as they are from now on, by number.
        self._groups: dict[int, JobGroup] = {}
        self._group_notes: list[Note] = []
        #: Members that ended in this level, by group; and all that ended or were retried, as pairs of dependencies.
        self._members: dict[int, dict[int, JobState]] = {}
        self._ended_members: list[tuple[int, int]] = []
        self._retried_members: list[tuple[int, int]] = []

    def reopen_groups(self, retried: Sequence[int]) -> None:
        """Members that had failed are queued again."""
        rows = self._rows.memberships(sorted(set(retried)))
        counts = Counter(row.child_no for row in rows)
        self._read_groups(counts)
        for no, count in counts.items():
            self._groups[no] = retry_members(self._groups[no], count)
        for row in rows:
            self._retried_members.append((row.parent_no, row.child_no))
            self._awaited.setdefault(row.parent_no, []).append(row)

    def run(self, ended: Sequence[EndedJob], waiting: Sequence[int]) -> None:
        """`ended`: jobs whose children may become ready or end. `waiting`: jobs that begin to wait for their parents."""
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

    def _resolve_level(self, level: Sequence[EndedJob]) -> list[EndedJob]:
        """Resolve ends in the order of their numbers. Returns those that are left when the budget is spent."""
        by_no = {end.no: at for at, end in enumerate(level)}
        for (parent_no, child_no), row in sorted(self._children_of(level).items()):
            at = by_no[parent_no]
            if self._budget <= 0:
                return [level[at]._replace(after=child_no - 1), *level[at + 1 :]]
            self._budget -= 1
            self._judge(row._replace(parent_id=level[at].job_id), level[at].state)
        return []

    def _children_of(self, level: Sequence[EndedJob]) -> dict[tuple[int, int], OpenDependency]:
        stored = self._rows.children(level, max(1, self._budget) + 1)
        found = {(row.parent_no, row.child_no): row for row in stored}
        for end in level:
            for row in self._awaited.get(end.no, ()):  # a store may know them already
                if row.child_no > end.after:
                    found[row.parent_no, row.child_no] = row
        return found

    # groups

    def _read_groups(self, nos: Mapping[int, object]) -> None:
        if unread := sorted(nos.keys() - self._groups.keys()):
            self._groups |= self._rows.groups(unread)

    def _count_members(self) -> None:
        """Count the members that this level ended, and end the groups that are over."""
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
                self._next.append(EndedJob(no, group.group_id, group.state))
            elif group.is_failing and not before.is_failing:
                self.release_early(no, group.group_id)

    def release_early(self, no: int, group_id: JobId) -> None:
        """
        The first member has failed: release the children for which that is enough. Beyond the budget they wait for the
        end of the group.
        """
        failing = EndedJob(no, group_id, JobState.FAILED)
        for row in self._children_of([failing]).values():
            if row.condition == ParentCondition.FAILED and row.if_unmet == IfUnmet.ANY:
                self._budget -= 1
                self._judge(row._replace(parent_id=group_id), JobState.FAILED)

    # children

    def _judge(self, row: OpenDependency, parent: JobState) -> None:
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
                    job, row.parent_id, parent, condition, fate=child_fate, now=self._rows.now
                ),
            )
            state = JobState.FAILED if child_fate is Fate.FAIL else JobState.CANCELED
            self._next.append(EndedJob(row.child_no, row.child_id, state))
            if state is JobState.CANCELED:
                self._void.append(row.child_no)

    def write(self) -> None:
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
        # A child that never waited is in its ready queue already.
        if ready := [child for child in waiting if not child.unmet and child.row.unmet]:
            rows.release([(child.row, _ready(child)) for child in ready])
        if self._postponed:
            rows.postpone(self._postponed)


def _ready(child: _Child) -> Note:
    *_, parent = child.met.values()
    return Note(EventKind.READY, data={"parent": str(parent)})
