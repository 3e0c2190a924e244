"""
Changes and heartbeats that arrived together. Everything they name is locked and read in one go (jobs, then dispatches, then the
ledger), judged here one after the other on what was read, and written in one go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.core.books import keys_of
from penstock.core.changes import Beat, Change, DispatchStep, JobStep, Note
from penstock.core.demand import Demand
from penstock.core.job import Kind, Place
from penstock.core.landing import End, Phase
from penstock.core.order import Ordering
from penstock.core.spend import windows
from penstock.core.states import SETTLED, State
from penstock.core.words import AddonId, DispatchId, HostId, JobId, Moment, Money
from penstock.stores.postgres_link import Link, Session
from penstock.stores.postgres_pages import NO_JOB, Demands, Key, Pages, Told, accounts_from, lock_ledger
from penstock.stores.postgres_wire import Values, array, columns
from penstock.stores.protocol import Standing, Tell

__all__ = ["Applying", "Beats", "Changes", "Judged", "Renewing"]


@dataclass(slots=True)
class _Job:
    no: int
    job_id: JobId
    state: State
    fence: int
    events: int
    addon_id: AddonId
    active: int
    crash: int
    unavailable: int
    error: int
    start: int
    spent: int
    spent_before: int
    ended_at: Moment | None
    place: Place | None = None
    moved: bool = False

    def __post_init__(self) -> None:
        self.state = State(self.state)

    def step(self, step: JobStep, notes: int, active: int, now: Moment) -> None:
        self.moved = True
        self.events += notes
        self.active += active
        if step.counters is not None:
            c = step.counters
            self.crash, self.unavailable, self.error, self.start = c.crash, c.unavailable, c.error, c.start
        if step.place is not None:
            self.place = step.place
        if step.target is not self.state or step.place is not None:
            self.state = step.target
            self.ended_at = now if step.target in SETTLED else None
        if step.target is not State.QUEUED:
            self.place = None
        if step.fresh:
            self.active, self.spent_before = 0, self.spent

    @property
    def row(self) -> tuple[Any, ...]:
        counters = (self.crash, self.unavailable, self.error, self.start)
        return (
            self.no,
            self.state,
            self.events,
            self.ended_at,
            self.active,
            *counters,
            self.spent_before,
        )


@dataclass(slots=True)
class _Dispatch:
    dispatch_id: DispatchId
    phase: str
    expires_at: Moment
    demand: int
    host: HostId
    started_at: Moment | None
    stop_at: Moment | None
    stop_for: str | None
    reason: str | None
    worker: str
    ended_at: Moment | None = None
    how: str | None = None
    result: str | None = None
    failure: str | None = None
    moved: bool = False

    def step(self, step: DispatchStep, now: Moment) -> int:
        """How long it was active, when this is its end."""
        self.moved, self.phase = True, step.target
        if step.target is Phase.LEASED and self.started_at is None:
            self.started_at = now
        if step.expires_at is not None:
            self.expires_at = step.expires_at
        if step.stop_at is not None:
            self.stop_at = step.stop_at
        if step.stop_for is not None:
            self.stop_for = step.stop_for
        if self.reason is None:
            self.reason = step.reason
        if step.worker is not None:
            self.worker = step.worker
        if step.target is not Phase.ENDED:
            return 0
        self.ended_at, self.how = now, step.end
        self.result, self.failure = step.result, step.error
        return 0 if self.started_at is None else max(0, now - self.started_at)

    @property
    def row(self) -> tuple[Any, ...]:
        times = (self.started_at, self.expires_at, self.stop_at)
        end = (self.ended_at, self.how, self.result, self.failure)
        return (self.dispatch_id, self.phase, *times, self.stop_for, self.reason, self.worker, *end)


class Changes:
    """What several asked for, each on its own merits."""

    def __init__(self, demands: Demands, batches: Sequence[Sequence[Change]]) -> None:
        self._demands, self._batches = demands, batches
        demands.make(
            {c.job.place.demand for batch in batches for c in batch if c.job is not None and c.job.place}
        )

    def __len__(self) -> int:
        return sum(change.dispatch is not None for batch in self._batches for change in batch)

    def calls(self) -> list[tuple[str, Values]]:
        changes = [change for batch in self._batches for change in batch]
        jobs = sorted({c.job.job_id for c in changes if c.job is not None})
        dispatches = sorted({c.dispatch.dispatch_id for c in changes if c.dispatch is not None})
        return [("lock_jobs", {"ids": array(jobs)}), ("lock_dispatches", {"ids": array(dispatches)})]

    def judge(self, session: Session, now: Moment, rows: Sequence[Sequence[Any]]) -> Judged:
        job_rows, dispatch_rows = rows
        judged = Judged(
            now,
            {row[1]: _Job(*row) for row in job_rows},
            {row[0]: _Dispatch(*row) for row in dispatch_rows},
            self._demands.of(session, {row[3] for row in dispatch_rows}),
        )
        judged.answers = [[judged.apply(change) for change in batch] for batch in self._batches]
        return judged


class Applying:
    """Changes alone. Nothing is guessed here: whoever ends nothing locks no ledger row."""

    def __init__(self, link: Link, demands: Demands, ordering: Ordering) -> None:
        self._link, self._demands, self._ordering = link, demands, ordering

    def run(self, session: Session, changes: Changes) -> tuple[list[list[bool]], bool]:
        """The answers, and whether anything was written."""
        now, rows = self._link.opening(session, *changes.calls())
        judged = changes.judge(session, now, rows)
        if judged.ended:
            addons = array(sorted({demand.addon_id for _, demand in judged.ended}))
            _, accounts = session.together(lock_ledger(judged.keys), ("accounts", {"addons": addons}))
            judged.pages.accounts = accounts_from(accounts)
            for (_, demand), n in judged.ended.items():
                account = judged.pages.account(demand.addon_id)
                account.hold(-n * demand.cost_units, now, self._ordering.sharing)
        judged.leave(session, self._demands)
        return judged.answers, judged.pages.leave(session)


@dataclass(slots=True)
class Judged:
    """What changes come to, and what is to be written of it."""

    now: Moment
    jobs: dict[JobId, _Job] = field(default_factory=dict)
    dispatches: dict[DispatchId, _Dispatch] = field(default_factory=dict)
    demands: dict[int, Demand] = field(default_factory=dict)
    pages: Pages = field(default_factory=Pages)
    #: How many of a kind ended where. Only here do units go back, and a dispatch ends once.
    ended: Counter[tuple[HostId, Demand]] = field(default_factory=Counter)
    answers: list[list[bool]] = field(default_factory=list)

    @property
    def keys(self) -> set[Key]:
        """The ledger rows of what ended."""
        return {key for host, demand in self.ended for key in (("host", host), *keys_of(demand))}

    def apply(self, change: Change) -> bool:
        job_step, dispatch_step = change.job, change.dispatch
        job = None if job_step is None else self.jobs.get(job_step.job_id)
        dispatch = None if dispatch_step is None else self.dispatches.get(dispatch_step.dispatch_id)
        if not _is_as_seen(job, job_step) or not _stands(dispatch, dispatch_step, self.now):
            return False
        active = 0
        if dispatch is not None and dispatch_step is not None:
            active = dispatch.step(dispatch_step, self.now)
            if dispatch_step.target is Phase.ENDED:
                self.ended[dispatch.host, self.demands[dispatch.demand]] += 1
        dispatch_id = None if dispatch_step is None else dispatch_step.dispatch_id
        if job is None or job_step is None:
            for note in change.notes:
                self.pages.note(change.at, note, NO_JOB, dispatch_id)
            return True
        for i, note in enumerate(change.notes, start=1):
            self.pages.note(
                change.at, note, (job.no, job.job_id, job.events + i, job_step.target), dispatch_id
            )
        self.pages.moved(job.addon_id, job_step.source, job_step.target)
        job.step(job_step, len(change.notes), active, self.now)
        return True

    def leave(self, session: Session, demands: Demands) -> None:
        moved = [job for job in self.jobs.values() if job.moved]
        # Placed first: a job that is moved to QUEUED needs its line.
        if placed := [_place_row(job.no, job.place, demands, self.now) for job in moved if job.place]:
            session.leave("place_jobs", columns(placed))
        if moved:
            session.leave("move_jobs", columns([job.row for job in moved]))
        if dispatches := [dispatch.row for dispatch in self.dispatches.values() if dispatch.moved]:
            session.leave("move_dispatches", columns(dispatches))
        for (host, demand), n in self.ended.items():
            self.pages.hold(host, demand, -n)


def _is_as_seen(job: _Job | None, step: JobStep | None) -> bool:
    return step is None or (job is not None and job.state is step.source and job.fence == step.fence)


def _stands(dispatch: _Dispatch | None, step: DispatchStep | None, now: Moment) -> bool:
    if step is None:
        return True
    if dispatch is None or dispatch.phase != step.source:
        return False
    return not (step.while_valid and dispatch.expires_at <= now)


def _place_row(no: int, place: Place, demands: Demands, now: Moment) -> tuple[Any, ...]:
    line = (place.line(now), place.turn, place.ready_at, place.urgent_at, place.priority)
    times = (place.earliest_start_at, place.not_before, place.deadline_at)
    return (no, *line, demands.number(place.demand), *times)


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
    state: State
    job_progress: float | None
    cost_limit: int | None
    renewed: bool = False
    told: bool = False  # its job's row changes too


class Beats(NamedTuple):
    """What one caller asked for."""

    beats: Sequence[Beat]
    tell: Tell


class Renewing:
    def __init__(self, link: Link) -> None:
        self._link = link

    def run(self, session: Session, batches: Sequence[Beats]) -> tuple[list[list[Standing | None]], bool]:
        beats = [beat for batch in batches for beat in batch.beats]
        telling = sorted({beat.dispatch_id for beat in beats if _tells(beat)})
        ids = {"ids": array(sorted({beat.dispatch_id for beat in beats}))}
        locks = [("lock_jobs_of", {"ids": array(telling)})] if telling else []
        now, answers = self._link.opening(session, *locks, ("dispatches_for_beats", ids))
        beating = _Beating(now, {row[0]: _Run(*row) for row in answers[-1]})
        renewed = [[beating.renew(beat) for beat in batch.beats] for batch in batches]
        beating.spend(session)
        standings = [
            [
                beating.told(beat, standing, batch.tell)
                for beat, standing in zip(batch.beats, row, strict=True)
            ]
            for batch, row in zip(batches, renewed, strict=True)
        ]
        beating.leave(session)
        return standings, beating.pages.leave(session)


def _tells(beat: Beat) -> bool:
    return beat.progress is not None or beat.spent is not None or beat.checkpoint is not None


class _Beating:
    def __init__(self, now: Moment, runs: dict[DispatchId, _Run]) -> None:
        self._now, self._runs = now, runs
        self._checkpoints: dict[int, tuple[Any, ...]] = {}
        self._spent: Counter[tuple[str, str]] = Counter()
        self._before: dict[tuple[str, str], Money] = {}
        self.pages = Pages()

    def renew(self, beat: Beat) -> Standing | None:
        run = self._runs.get(beat.dispatch_id)
        if run is None or run.phase not in (Phase.LEASED, Phase.ENDING) or run.expires_at <= self._now:
            return None
        run.renewed = True
        if run.phase == Phase.LEASED:
            run.expires_at = beat.expires_at
        more = max(0, (beat.spent or 0) - run.spent)
        run.spent += more
        if beat.progress is not None:
            run.progress = beat.progress
        before = 0 if run.no is None else run.job_spent - run.spent_before
        if run.no is not None and (more or beat.progress is not None or beat.checkpoint is not None):
            self._tell(run, run.no, beat, more)
        for window in windows(self._now) if more else ():
            self._spent[run.addon_id, window.name] += more
        return Standing(
            run.job_id,
            run.addon_id,
            Phase(run.phase),
            None if run.reason is None else End(run.reason),
            run.expires_at,
            before,
            before + more,
            run.cost_limit,
        )

    def _tell(self, run: _Run, no: int, beat: Beat, more: int) -> None:
        run.told = True
        run.job_spent += more
        if beat.progress is not None:
            run.job_progress = beat.progress
        if beat.checkpoint is not None:
            run.events += 1
            self._checkpoints[no] = (no, self._now, run.fence, beat.checkpoint)
            told = (no, run.job_id, run.events, State(run.state))
            self.pages.note(self._now, Note(Kind.CHECKPOINT), told, beat.dispatch_id)

    def spend(self, session: Session) -> None:
        if self._spent:  # in one order for all, so that nobody waits in a circle
            rows = [(*key, more) for key, more in sorted(self._spent.items())]
            for addon_id, period, spent in session.ask("spend", columns(rows)):
                self._before[addon_id, period] = spent - self._spent[addon_id, period]

    def told(self, beat: Beat, standing: Standing | None, tell: Tell) -> Standing | None:
        """With what its addon has spent by then: the amounts of one transaction count one after the other."""
        if standing is None:
            return None
        more = standing.spent - standing.spent_before
        if more:
            spent: dict[str, Money] = {}
            for window in windows(self._now):
                self._before[standing.addon_id, window.name] += more
                spent[window.kind] = self._before[standing.addon_id, window.name]
            standing = standing._replace(addon_spent=spent)
        run = self._runs[beat.dispatch_id]
        for note in tell(standing):
            whose: Told = NO_JOB
            if note.of_job and run.no is not None:
                run.told, run.events = True, run.events + 1
                whose = (run.no, run.job_id, run.events, State(run.state))
            self.pages.note(self._now, note, whose, beat.dispatch_id)
        return standing

    def leave(self, session: Session) -> None:
        renewed = [run for run in self._runs.values() if run.renewed]
        if renewed:
            rows = [(run.dispatch_id, run.expires_at, run.progress, run.spent) for run in renewed]
            session.leave("renew", columns(rows))
        if told := [run for run in renewed if run.told]:
            jobs = [(run.no, run.job_progress, run.job_spent, run.events) for run in told]
            session.leave("beat_jobs", columns(jobs))
        if self._checkpoints:
            session.leave("set_checkpoints", columns(list(self._checkpoints.values())))
