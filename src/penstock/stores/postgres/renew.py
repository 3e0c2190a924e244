"""
The writer of heartbeats. Heartbeats that arrive together lock and read their dispatches in one go, are judged
one after the other, and are written in one go. The row of a job is locked and written only if its heartbeat
reports something about the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from penstock.core.jobs.admission import windows
from penstock.core.jobs.changes import Note, Renewal
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.spending import Standing
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, EndReason, JobId, Moment, Money
from penstock.stores.api import NotesFor, Renew
from penstock.stores.common.group_commit import GroupCommit
from penstock.stores.postgres.changes import NO_JOB, PostgresWriteBatch
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import array, columns


class RenewBatcher(GroupCommit):
    """
    `wait_for_rounds` returns when the changes and completions that were handed in before are written: a
    heartbeat behind the end of its dispatch must see that end. `on_commit`: as in `RoundBatcher`.
    """

    def __init__(
        self, database: Database, wait_for_rounds: Callable[[], object], on_commit: Callable[[bool], None]
    ) -> None:
        self._database, self._wait_for_rounds, self._on_commit = database, wait_for_rounds, on_commit
        super().__init__(self._write_all)  # type: ignore[arg-type]  # nothing but `Renew` comes to it

    def _write_all(self, operations: list[Renew]) -> list[list[Standing | None]]:
        self._wait_for_rounds()
        standings, has_events = self._database.transact(lambda session: self._renew(session, operations))
        self._on_commit(has_events)
        return standings

    def _renew(
        self, session: DatabaseSession, operations: Sequence[Renew]
    ) -> tuple[list[list[Standing | None]], bool]:
        renewals = [renewal for operation in operations for renewal in operation.renewals]
        reporting = sorted({renewal.dispatch_id for renewal in renewals if _reports(renewal)})
        ids = {"ids": array(sorted({renewal.dispatch_id for renewal in renewals}))}
        locks = [("lock_jobs_of", {"ids": array(reporting)})] if reporting else []
        now, answers = self._database.lock(session, *locks, ("dispatches_for_beats", ids))
        batch = _Heartbeats(now, {row[0]: _Renewed(*row) for row in answers[-1]})
        renewed = [[batch.renew(renewal) for renewal in operation.renewals] for operation in operations]
        batch.spend(session)
        standings = [
            [None if standing is None else batch.note(standing, operation.notes_for) for standing in row]
            for operation, row in zip(operations, renewed, strict=True)
        ]
        batch.defer(session)
        return standings, batch.writes.defer(session)


def _reports(renewal: Renewal) -> bool:
    return renewal.progress is not None or renewal.spent is not None or renewal.checkpoint is not None


@dataclass(slots=True)
class _Renewed:
    """A row of `dispatches_for_beats`: a dispatch, and what a heartbeat may change of its job."""

    dispatch_id: DispatchId
    phase: str
    expires_at: Moment
    reason: str | None
    addon_id: AddonId
    spent: int
    progress: float | None
    fence: int
    no: int | None
    job_id: JobId | None
    job_spent: int
    spent_before: int
    events: int
    flight: int
    job_progress: float | None
    cost_limit: int | None
    pid: int | None
    renewed: bool = False
    hastened: bool = False
    job_changes: bool = False


class _Heartbeats:
    def __init__(self, now: Moment, dispatches: dict[DispatchId, _Renewed]) -> None:
        self._now, self._dispatches = now, dispatches
        self._checkpoints: dict[int, tuple[Any, ...]] = {}
        self._spent: Counter[tuple[str, str]] = Counter()
        self._addon_spent: dict[tuple[str, str], Money] = {}
        self.writes = PostgresWriteBatch()

    def renew(self, renewal: Renewal) -> Standing | None:
        dispatch = self._dispatches.get(renewal.dispatch_id)
        if (
            dispatch is None
            or dispatch.phase not in (DispatchPhase.LEASED, DispatchPhase.ENDING)
            or dispatch.expires_at <= self._now
        ):
            return None
        dispatch.renewed = True
        if dispatch.phase == DispatchPhase.LEASED:
            dispatch.hastened |= renewal.expires_at < dispatch.expires_at
            dispatch.expires_at = renewal.expires_at
        more = max(0, (renewal.spent or 0) - dispatch.spent)
        dispatch.spent += more
        if renewal.progress is not None:
            dispatch.progress = renewal.progress
        if renewal.pid is not None:
            dispatch.pid = renewal.pid
        before = 0 if dispatch.no is None else dispatch.job_spent - dispatch.spent_before
        if dispatch.no is not None and (
            more or renewal.progress is not None or renewal.checkpoint is not None
        ):
            self._report(dispatch, dispatch.no, renewal, more)
        for window in windows(self._now) if more else ():
            self._spent[dispatch.addon_id, window.name] += more
        return Standing(
            renewal.dispatch_id,
            dispatch.job_id,
            dispatch.addon_id,
            DispatchPhase(dispatch.phase),
            None if dispatch.reason is None else EndReason(dispatch.reason),
            dispatch.expires_at,
            before,
            before + more,
            dispatch.cost_limit,
        )

    def _report(self, dispatch: _Renewed, no: int, renewal: Renewal, more: Money) -> None:
        dispatch.job_changes = True
        dispatch.job_spent += more
        if renewal.progress is not None:
            dispatch.job_progress = renewal.progress
        if renewal.checkpoint is not None:
            self._checkpoints[no] = (no, self._now, dispatch.fence, renewal.checkpoint)
            self._note(dispatch, Note(EventKind.CHECKPOINT))

    def _note(self, dispatch: _Renewed, note: Note) -> None:
        subject = NO_JOB
        if note.of_job and dispatch.no is not None:
            dispatch.job_changes, dispatch.events = True, dispatch.events + 1
            subject = (dispatch.no, dispatch.job_id, dispatch.events, JobState.RUNNING)
        self.writes.note(self._now, note, subject, dispatch.dispatch_id)

    def spend(self, session: DatabaseSession) -> None:
        """Add to the budgets, in one order for all transactions, so that none waits in a circle."""
        if self._spent:
            rows = [(*key, more) for key, more in sorted(self._spent.items())]
            for addon_id, period, spent in session.execute("spend", columns(rows)):
                self._addon_spent[addon_id, period] = spent - self._spent[addon_id, period]

    def note(self, standing: Standing, notes_for: NotesFor) -> Standing:
        """
        Write what `notes_for` makes of the standing, with what its addon has spent by then: the amounts of
        one transaction count one after the other.
        """
        if more := standing.spent - standing.spent_before:
            spent: dict[str, Money] = {}
            for window in windows(self._now):
                self._addon_spent[standing.addon_id, window.name] += more
                spent[window.kind] = self._addon_spent[standing.addon_id, window.name]
            standing = replace(standing, addon_spent=spent)
        for note in notes_for(standing):
            self._note(self._dispatches[standing.dispatch_id], note)
        return standing

    def defer(self, session: DatabaseSession) -> None:
        renewed = [dispatch for dispatch in self._dispatches.values() if dispatch.renewed]
        if renewed:
            rows = [(d.dispatch_id, d.expires_at, d.progress, d.spent, d.events, d.pid) for d in renewed]
            session.defer("renew", columns(rows))
        if sooner := [(d.flight, d.expires_at, None) for d in renewed if d.hastened]:
            session.defer("due_sooner", columns(sorted(sooner)))
        if jobs := [(d.no, d.job_progress, d.job_spent) for d in renewed if d.job_changes]:
            session.defer("beat_jobs", columns(jobs))
        if self._checkpoints:
            session.defer("set_checkpoints", columns(list(self._checkpoints.values())))
