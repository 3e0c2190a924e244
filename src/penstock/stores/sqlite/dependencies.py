"""The rows of dependencies: `common/dependencies.py` decides what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.core.jobs.changes import Change, Note
from penstock.core.jobs.dependencies import DependencyStatus
from penstock.core.jobs.groups import JobGroup
from penstock.core.jobs.job import Job
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import JobId, Moment
from penstock.stores.common.dependencies import MOST_RESOLVED, OpenDependency, StateMove, resolve
from penstock.stores.common.rows import changed_group_values, group_from
from penstock.stores.common.writes import NO_JOB, EventJob
from penstock.stores.sqlite.transaction import Transaction, listed


class SqliteDependencyRows:
    """
    The rows of one transaction for `resolve`. `apply`: the function of `changes.py` that writes a change.
    """

    def __init__(self, tx: Transaction, apply: Callable[[Transaction, Change], bool]) -> None:
        self._tx, self._apply = tx, apply

    @property
    def now(self) -> Moment:
        return self._tx.now

    def children(self, ends: Sequence[StateMove], limit: int) -> list[OpenDependency]:
        rows: list[OpenDependency] = []
        for end in ends:
            values = {"parent": end.no, "after": end.after, "most": limit - len(rows)}
            rows += map(OpenDependency._make, self._tx.execute("children", values))
            if len(rows) >= limit:
                break
        return rows

    def parents(self, children: Sequence[int]) -> list[OpenDependency]:
        rows = self._tx.execute("parents", {"children": listed(children)})
        return list(map(OpenDependency._make, rows))

    def end(self, child: OpenDependency, decide: Callable[[Job], Change]) -> None:
        rows = self._tx.execute("jobs_by_id", {"ids": listed([child.child_id])})
        [job] = self._tx.classes.jobs(self._tx, rows)
        if not self._apply(self._tx, decide(job)):
            raise AssertionError(f"{child.child_id}: a queued child could not be ended")

    def settle(self, pairs: Sequence[tuple[int, int]], status: DependencyStatus) -> None:
        self._tx.write("settle_dependencies", (status, listed(pairs)), len(pairs))

    def void(self, children: Sequence[int]) -> None:
        self._tx.execute("void_dependencies", (listed(children),))

    def wait(self, unmet: Sequence[tuple[int, int]]) -> None:
        self._tx.write("wait_for_parents", (listed(unmet),), len(unmet))

    def release(self, ready: Sequence[tuple[OpenDependency, Note]]) -> None:
        tx = self._tx
        nos = {"nos": listed([child.child_no for child, _ in ready])}
        tx.execute("release_children", nos | {"now": tx.now, "per_point": tx.ordering.aging.per_point})
        tx.execute("release_jobs", nos)
        for child, note in ready:
            tx.add_note(
                tx.now, note, EventJob(child.child_no, child.child_id, child.events + 1, JobState.QUEUED)
            )

    def memberships(self, members: Sequence[int]) -> list[OpenDependency]:
        rows = self._tx.execute("memberships", {"members": listed(members)})
        return list(map(OpenDependency._make, rows))

    def groups(self, nos: Sequence[int]) -> dict[int, JobGroup]:
        return {no: group_from(row) for no, *row in self._tx.execute("groups_by_no", {"nos": listed(nos)})}

    def set_groups(self, groups: Mapping[int, JobGroup], notes: Sequence[Note]) -> None:
        for group in groups.values():
            self._tx.execute("set_group", changed_group_values(group))
        for note in notes:
            self._tx.add_note(self._tx.now, note, NO_JOB)

    def postpone(self, ends: Sequence[StateMove]) -> None:
        self._tx.execute("postpone_ends", (listed([(end.no, end.state, end.after) for end in ends]),))


def resolve_moves(tx: Transaction, apply: Callable[[Transaction, Change], bool]) -> list[StateMove]:
    """
    Resolve the dependencies on jobs that an operation ended. Returns its moves, with those of children, which
    are resolved already.
    """
    moves, tx.moves = tx.moves, []
    # A retried member reopens its batch, even if no dependency exists.
    if moves and (tx.has_dependencies or any(move.state is JobState.QUEUED for move in moves)):
        resolve(SqliteDependencyRows(tx, apply), moves)
        moves, tx.moves = [*moves, *tx.moves], []
    return moves


def depend(
    tx: Transaction,
    dependencies: Sequence[tuple[JobId, JobId, str, str]],
    apply: Callable[[Transaction, Change], bool],
) -> None:
    """
    Make new jobs wait for their parents, and batches for their new members. `dependencies`: rows of
    `new_dependencies`.
    """
    tx.flush_jobs()
    tx.write("insert_dependencies", (listed(dependencies),), len(dependencies))
    tx.has_dependencies = True
    ids = {"ids": listed(list(dict.fromkeys(child for _, child, *_ in dependencies)))}
    resolve(SqliteDependencyRows(tx, apply), [], [no for no, _ in tx.execute("known_jobs", ids)])
    tx.moves = []


def resolve_pending(tx: Transaction, apply: Callable[[Transaction, Change], bool]) -> int:
    """Resolve ends that earlier transactions postponed. Returns how many remain."""
    tx.flush_jobs()
    rows = tx.execute("take_pending_ends", {"most": MOST_RESOLVED})
    ends = [StateMove(no, job_id, JobState(state), after) for no, job_id, state, after in rows]
    if ends:
        tx.has_dependencies = True
        resolve(SqliteDependencyRows(tx, apply), ends)
        tx.moves = []
    return int(tx.one("pending_ends")[0])
