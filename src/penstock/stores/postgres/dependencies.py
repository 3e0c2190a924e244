"""The rows of dependencies: `common/dependencies.py` decides what they mean."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from penstock.core.jobs.changes import Change, Note
from penstock.core.jobs.dependencies import DependencyStatus
from penstock.core.jobs.groups import JobGroup
from penstock.core.jobs.job import Job
from penstock.core.jobs.ordering import Aging, order_key
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId, Moment
from penstock.stores.common.dependencies import MOST_RESOLVED, OpenDependency, StateMove, resolve
from penstock.stores.common.reads import JOB_WIDTH
from penstock.stores.common.rows import changed_group_values, group_from
from penstock.stores.common.writes import EventJob
from penstock.stores.postgres.admission_view import UNKNOWN_HEAD, NewHead, PostgresAdmissionClasses
from penstock.stores.postgres.changes import Children, Effects, calls_of_children
from penstock.stores.postgres.database import DatabaseSession
from penstock.stores.postgres.pipeline import Values, array, columns

_WIDTH: Final = len(OpenDependency._fields)


class PostgresDependencyRows:
    """
    The rows of one transaction for `resolve`. `effects`: of this transaction, not written yet; `defer` writes
    the dependencies after them. A child is locked like a job that changes: its row, then its row in the
    queue. A waiting child has no dispatch.
    """

    def __init__(
        self,
        session: DatabaseSession,
        effects: Effects,
        classes: PostgresAdmissionClasses,
        aging: Aging,
        *,
        parents_locked: bool = False,
    ) -> None:
        self._session, self._effects, self._classes, self._aging = session, effects, classes, aging
        self._parents_locked = parents_locked
        #: Locked, as they were before this transaction.
        self._groups: dict[int, JobGroup] = {}
        #: The rows of children in the queue, by number: what `children` returns behind an `OpenDependency`.
        self._queued: dict[int, Sequence[Any]] = {}
        self._deferred: list[tuple[str, Values]] = []
        #: The children that were released into a ready queue.
        self.released: list[NewHead] = []

    @property
    def now(self) -> Moment:
        return self._effects.now

    def children(self, ends: Sequence[StateMove], limit: int) -> list[OpenDependency]:
        read, self._effects.children = self._effects.children, None
        if read is None:
            _, *answers = self._session.flush(*calls_of_children(ends, limit))
            read = Children(*answers)
        self._groups |= {no: group_from(row) for no, *row in read.groups}
        parents = {end.no for end in ends}
        dependencies: list[OpenDependency] = []
        for row in read.rows:
            dependency = OpenDependency(*row[:_WIDTH])
            # A parent whose completion was refused has not ended.
            if dependency.parent_no in parents and self._is_queued(dependency.child_id):
                dependencies.append(dependency)
                self._queued[dependency.child_no] = row[_WIDTH:]
        return dependencies

    def _is_queued(self, child_id: JobId) -> bool:
        """A child that ends in this transaction still has its row in the database's queue."""
        changed = self._effects.jobs
        return child_id not in changed or changed[child_id].state is JobState.QUEUED

    def parents(self, children: Sequence[int]) -> list[OpenDependency]:
        values = {"children": array(children)}
        rows = self._session.execute("parents", values)
        if rows and not self._parents_locked:
            # The end of a parent would not find this child, which is not in the queue yet: lock the parents.
            *_, rows = self._session.execute_many(*_locks({row[1] for row in rows}), ("parents", values))
        dependencies = map(OpenDependency._make, rows)
        changed = self._effects.jobs
        return [
            d._replace(parent_state=changed[d.parent_id].state) if d.parent_id in changed else d
            for d in dependencies
        ]

    def end(self, child: OpenDependency, decide: Callable[[Job], Change]) -> None:
        effects = self._effects
        if child.child_id not in effects.jobs:
            [row] = self._session.execute("jobs_by_id", {"ids": array([child.child_id])})
            [job] = self._classes.jobs(self._session, [row])
            effects.jobs[job.job_id], effects.events[job.job_id] = job, row[JOB_WIDTH]
        if not effects.apply(decide(effects.jobs[child.child_id])):
            raise AssertionError(f"{child.child_id}: a queued child could not be ended")

    def settle(self, pairs: Sequence[tuple[int, int]], status: DependencyStatus) -> None:
        self._deferred.append(("settle_dependencies", [str(status), *columns(list(pairs))]))

    def void(self, children: Sequence[int]) -> None:
        self._deferred.append(("void_dependencies", [array(children)]))

    def wait(self, unmet: Sequence[tuple[int, int]]) -> None:
        self._deferred.append(("wait_for_parents", columns(list(unmet))))

    def release(self, ready: Sequence[tuple[OpenDependency, Note]]) -> None:
        nos = array([child.child_no for child, _ in ready])
        values = {"nos": nos, "now": self.now, "per_point": self._aging.per_point}
        self._deferred.append(("release_children", values))
        for child, note in ready:
            n = self._effects.events.get(child.child_id, child.events) + 1
            job = EventJob(child.child_no, child.child_id, n, JobState.QUEUED)
            self._effects.writes.note(self.now, note, job)
            self._enter(child, n)

    def _enter(self, child: OpenDependency, events: int) -> None:
        """Note the place of a released child, as `release_children` sets it."""
        queued = self._queued.get(child.child_no)
        if queued is None or child.child_id in self._effects.jobs:  # the transaction changes its row
            self.released.append(UNKNOWN_HEAD)
            return
        class_no, ready_at, urgent_at, priority, fence, expected_sec, passed_at, denied, *more = queued
        if ready_at <= self.now:
            key = class_no, 2 if urgent_at is not None and urgent_at <= self.now else 1
            turn = order_key(priority, self.now, self._aging)
            job = (child.child_no, child.child_id, priority, turn, fence, expected_sec, passed_at, denied)
            self.released.append(NewHead(key, turn, (*key, *job, events, *more)))

    def memberships(self, members: Sequence[int]) -> list[OpenDependency]:
        rows = self._session.execute("memberships", {"members": array(members)})
        return list(map(OpenDependency._make, rows))

    def groups(self, nos: Sequence[int]) -> dict[int, JobGroup]:
        """
        The batches, locked after the jobs and dispatches that end: the order in which a submit locks them.
        """
        if unread := [no for no in nos if no not in self._groups]:
            rows = self._session.execute("groups_by_no", {"nos": array(unread)})
            self._groups |= {no: group_from(row) for no, *row in rows}
        return {no: self._groups[no] for no in nos}

    def set_groups(self, groups: Mapping[int, JobGroup], notes: Sequence[Note]) -> None:
        for _, group in sorted(groups.items()):
            self._deferred.append(("set_group", changed_group_values(group)))
        for note in notes:
            self._effects.writes.note(self.now, note)

    def postpone(self, ends: Sequence[StateMove]) -> None:
        rows = [(end.no, str(end.state), end.after) for end in ends]
        self._deferred.append(("postpone_ends", columns(rows)))

    def defer(self) -> None:
        for name, values in self._deferred:
            self._session.defer(name, values)


def _locks(parents: Collection[JobId]) -> list[tuple[str, Values]]:
    jobs = array(sorted(parents))
    return [
        ("lock_jobs", {"ids": jobs}),
        ("lock_queued", {"ids": jobs}),
        ("lock_dispatches", {"ids": array([]), "jobs": jobs}),
        ("lock_groups", {"ids": jobs}),
    ]


def lock_parents(parents: Collection[JobId]) -> list[tuple[str, Values]]:
    """
    The calls before a submit of children or of members of batches: they lock the parents and groups, so that
    none of these can end. The last two return the groups and the jobs that exist.
    """
    return [*_locks(parents), ("known_jobs", {"ids": array(sorted(parents))})]


def resolve_moves(
    session: DatabaseSession,
    effects: Effects,
    classes: PostgresAdmissionClasses,
    aging: Aging,
    new: Sequence[int] = (),
) -> PostgresDependencyRows:
    """
    Resolve dependencies after the moves in `effects` and for `new` jobs with parents. The caller defers both.
    """
    rows = PostgresDependencyRows(session, effects, classes, aging, parents_locked=bool(new))
    moves = [move for move in effects.moves if move.no in effects.with_dependencies]
    if moves or new:
        resolve(rows, moves, new)
    return rows


def depend(
    session: DatabaseSession,
    dependencies: Sequence[tuple[Any, ...]],
    effects: Effects,
    classes: PostgresAdmissionClasses,
    aging: Aging,
) -> None:
    """
    Make new jobs wait for their parents, and batches for new members. `dependencies`: rows of
    `new_dependencies`.
    """
    session.defer("insert_dependencies", columns(list(dependencies)))
    ids = sorted({child for _, child, *_ in dependencies})
    [known] = session.flush(("known_jobs", {"ids": array(ids)}))
    new = [no for no, _ in known]
    rows = resolve_moves(session, effects, classes, aging, new)
    effects.defer(session, classes)
    rows.defer()


def resolve_pending(
    session: DatabaseSession, effects: Effects, classes: PostgresAdmissionClasses, aging: Aging
) -> int:
    """Resolve ends that earlier transactions postponed. Returns how many remain."""
    rows = PostgresDependencyRows(session, effects, classes, aging)
    taken = session.execute("take_pending_ends", {"most": MOST_RESOLVED})
    if ends := [StateMove(no, job_id, JobState(state), after) for no, job_id, state, after in taken]:
        resolve(rows, ends)
        effects.defer(session, classes)
        rows.defer()
        effects.writes.defer(session)
    [[(left,)]] = session.flush(("pending_ends", None))
    return int(left)
