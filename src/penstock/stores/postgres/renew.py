"""
Heartbeats that arrived together. The runs are locked and read in one go, judged one after the other on what was read, and written in one go;
the rows of their jobs only where a beat tells something of the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from penstock.core.jobs.changes import Note, Renewal
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.spending import windows
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, EndReason, JobId, Moment, Money
from penstock.stores.api import NotesFor, Renew, Standing
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import array, columns
from penstock.stores.postgres.write_batch import NO_JOB, PostgresWriteBatch, Told


@dataclass(slots=True)
class _Run:
    """A dispatch, and what a heartbeat may change of its job."""

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
    told: bool = False  # its job's row changes too


class Renewing:
    def __init__(self, link: Database) -> None:
        self._link = link

    def run(
        self, session: DatabaseSession, batches: Sequence[Renew]
    ) -> tuple[list[list[Standing | None]], bool]:
        beats = [beat for batch in batches for beat in batch.renewals]
        telling = sorted({beat.dispatch_id for beat in beats if _tells(beat)})
        ids = {"ids": array(sorted({beat.dispatch_id for beat in beats}))}
        locks = [("lock_jobs_of", {"ids": array(telling)})] if telling else []
        now, answers = self._link.opening(session, *locks, ("dispatches_for_beats", ids))
        beating = _Beating(now, {row[0]: _Run(*row) for row in answers[-1]})
        renewed = [[beating.renew(beat) for beat in batch.renewals] for batch in batches]
        beating.spend(session)
        standings = [
            [
                beating.told(beat, standing, batch.notes_for)
                for beat, standing in zip(batch.renewals, row, strict=True)
            ]
            for batch, row in zip(batches, renewed, strict=True)
        ]
        beating.leave(session)
        return standings, beating.pages.leave(session)


def _tells(beat: Renewal) -> bool:
    return beat.progress is not None or beat.spent is not None or beat.checkpoint is not None


class _Beating:
    def __init__(self, now: Moment, runs: dict[DispatchId, _Run]) -> None:
        self._now, self._runs = now, runs
        self._checkpoints: dict[int, tuple[Any, ...]] = {}
        self._spent: Counter[tuple[str, str]] = Counter()
        self._before: dict[tuple[str, str], Money] = {}
        self.pages = PostgresWriteBatch()

    def renew(self, beat: Renewal) -> Standing | None:
        run = self._runs.get(beat.dispatch_id)
        if (
            run is None
            or run.phase not in (DispatchPhase.LEASED, DispatchPhase.ENDING)
            or run.expires_at <= self._now
        ):
            return None
        run.renewed = True
        if run.phase == DispatchPhase.LEASED:
            run.hastened |= beat.expires_at < run.expires_at
            run.expires_at = beat.expires_at
        more = max(0, (beat.spent or 0) - run.spent)
        run.spent += more
        if beat.progress is not None:
            run.progress = beat.progress
        if beat.pid is not None:
            run.pid = beat.pid
        before = 0 if run.no is None else run.job_spent - run.spent_before
        if run.no is not None and (more or beat.progress is not None or beat.checkpoint is not None):
            self._tell(run, run.no, beat, more)
        for window in windows(self._now) if more else ():
            self._spent[run.addon_id, window.name] += more
        return Standing(
            beat.dispatch_id,
            run.job_id,
            run.addon_id,
            DispatchPhase(run.phase),
            None if run.reason is None else EndReason(run.reason),
            run.expires_at,
            before,
            before + more,
            run.cost_limit,
        )

    def _tell(self, run: _Run, no: int, beat: Renewal, more: int) -> None:
        run.told = True
        run.job_spent += more
        if beat.progress is not None:
            run.job_progress = beat.progress
        if beat.checkpoint is not None:
            run.events += 1
            self._checkpoints[no] = (no, self._now, run.fence, beat.checkpoint)
            told = (no, run.job_id, run.events, JobState.RUNNING)
            self.pages.note(self._now, Note(EventKind.CHECKPOINT), told, beat.dispatch_id)

    def spend(self, session: DatabaseSession) -> None:
        if self._spent:  # in one order for all, so that nobody waits in a circle
            rows = [(*key, more) for key, more in sorted(self._spent.items())]
            for addon_id, period, spent in session.ask("spend", columns(rows)):
                self._before[addon_id, period] = spent - self._spent[addon_id, period]

    def told(self, beat: Renewal, standing: Standing | None, notes_for: NotesFor) -> Standing | None:
        """With what its addon has spent by then: the amounts of one transaction count one after the other."""
        if standing is None:
            return None
        more = standing.spent - standing.spent_before
        if more:
            spent: dict[str, Money] = {}
            for window in windows(self._now):
                self._before[standing.addon_id, window.name] += more
                spent[window.kind] = self._before[standing.addon_id, window.name]
            standing = replace(standing, addon_spent=spent)
        run = self._runs[beat.dispatch_id]
        for note in notes_for(standing):
            whose: Told = NO_JOB
            if note.of_job and run.no is not None:
                run.told, run.events = True, run.events + 1
                whose = (run.no, run.job_id, run.events, JobState.RUNNING)
            self.pages.note(self._now, note, whose, beat.dispatch_id)
        return standing

    def leave(self, session: DatabaseSession) -> None:
        renewed = [run for run in self._runs.values() if run.renewed]
        if renewed:
            rows = [
                (run.dispatch_id, run.expires_at, run.progress, run.spent, run.events, run.pid)
                for run in renewed
            ]
            session.leave("renew", columns(rows))
        if sooner := [(run.flight, run.expires_at, None) for run in renewed if run.hastened]:
            session.leave("due_sooner", columns(sorted(sooner)))
        if told := [run for run in renewed if run.told]:
            jobs = [(run.no, run.job_progress, run.job_spent) for run in told]
            session.leave("beat_jobs", columns(jobs))
        if self._checkpoints:
            session.leave("set_checkpoints", columns(list(self._checkpoints.values())))
