"""
Changes that arrived together. All rows that they name are locked and read in one go (jobs, then their places, then the ledger),
judged one after the other on what was read, and written in one go. Completions have one statement for all of a transaction,
because nearly every job ends like this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

from penstock.core.jobs.admission import keys_of
from penstock.core.jobs.changes import Change
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import DispatchStep, EventKind, JobStep, Place
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.states import IN_FLIGHT, SETTLED, DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, EndReason, HostId, JobId, Moment
from penstock.stores.api import Complete, CompletedDispatch
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import Values, array, columns
from penstock.stores.postgres.write_batch import (
    NO_JOB,
    EventRow,
    Key,
    PostgresAdmissionClasses,
    PostgresWriteBatch,
    accounts_from,
    lock_ledger,
)


@dataclass(slots=True)
class _Job:
    """As its row has it, which is how it was when it last came into the queue or was settled; then put in its place, `wait` or `fly`."""

    no: int
    job_id: JobId
    addon_id: AddonId
    state: JobState
    fence: int
    events: int
    active: int
    crash: int
    unavailable: int
    error: int
    start: int
    spent: int
    spent_before: int
    ended_at: Moment | None
    denied: str
    denied_data: str | None
    denied_at: Moment | None
    passed_at: Moment | None
    run: _Dispatch | None = None
    place: Place | None = None
    moved: bool = False

    def __post_init__(self) -> None:
        self.state = JobState(self.state or JobState.QUEUED)

    def wait(self, events: int, *denied: Any) -> None:
        self.events = events
        self.denied, self.denied_data, self.denied_at, self.passed_at = denied

    def fly(self, run: _Dispatch) -> None:
        self.fence, self.events = run.fence, run.events
        self.denied, self.denied_data, self.denied_at, self.passed_at = "", None, None, None
        self.state = _WHILE[DispatchPhase(run.phase)]
        if run.phase != DispatchPhase.RESERVED:
            self.start = 0
        if run.ended_at is None:
            self.run = run
        else:
            self.ended_at = run.ended_at
            self.active += max(0, run.ended_at - (run.started_at or run.ended_at))
            self.crash = self.unavailable = self.error = 0

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
        if step.target is not JobState.QUEUED:
            self.place = None
        if step.fresh:
            self.active, self.spent_before = 0, self.spent
        if self.run is not None:
            self.run.moved, self.run.events = True, self.events

    @property
    def row(self) -> tuple[Any, ...]:
        flies = self.state in IN_FLIGHT
        counters = (self.crash, self.unavailable, self.error, self.start)
        return (
            self.no,
            self.state if self.state in SETTLED else None,
            self.fence - flies,
            self.events,
            self.ended_at,
            self.active,
            *counters,
            self.spent_before,
            self.denied,
            self.denied_data,
            self.denied_at,
            self.passed_at,
            self.state is JobState.QUEUED,
        )


#: The state of a job by the phase of its attempt. One that ended otherwise than done is in another place by then.
_WHILE: Final = {
    DispatchPhase.RESERVED: JobState.DISPATCHING,
    DispatchPhase.LEASED: JobState.RUNNING,
    DispatchPhase.ENDING: JobState.RUNNING,
    DispatchPhase.ENDED: JobState.DONE,
}


@dataclass(slots=True)
class _Dispatch:
    dispatch_id: DispatchId
    phase: str
    expires_at: Moment
    admission_class: int
    host: HostId
    started_at: Moment | None
    stop_at: Moment | None
    stop_for: str | None
    reason: str | None
    worker: str
    job_no: int | None
    fence: int
    events: int
    flight: int
    ended_at: Moment | None
    how: str | None = None
    result: str | None = None
    failure: str | None = None
    moved: bool = False
    hastened: bool = False

    def step(self, step: DispatchStep, now: Moment) -> int:
        """How long it was active, when this is its end."""
        self.moved, self.phase = True, step.target
        if step.target is DispatchPhase.LEASED and self.started_at is None:
            self.started_at = now
        if step.expires_at is not None:
            self.hastened |= step.expires_at < self.expires_at
            self.expires_at = step.expires_at
        if step.stop_at is not None:
            self.hastened |= self.stop_at is None or step.stop_at < self.stop_at
            self.stop_at = step.stop_at
        if step.stop_for is not None:
            self.stop_for = step.stop_for
        if step.reason is not None:
            self.reason = step.reason
        if step.worker is not None:
            self.worker = step.worker
        if step.target is not DispatchPhase.ENDED:
            return 0
        self.ended_at, self.how = now, step.end
        self.result, self.failure = step.result, step.error
        return 0 if self.started_at is None else max(0, now - self.started_at)

    @property
    def row(self) -> tuple[Any, ...]:
        times = (self.started_at, self.expires_at, self.stop_at)
        end = (self.ended_at, self.how, self.result, self.failure)
        return (
            self.dispatch_id,
            self.phase,
            *times,
            self.stop_for,
            self.reason,
            self.worker,
            *end,
            self.events,
        )


class Changes:
    """What several asked for, each on its own merits."""

    def __init__(self, demands: PostgresAdmissionClasses, batches: Sequence[Sequence[Change]]) -> None:
        self._demands, self._batches = demands, batches
        demands.make(
            {
                c.job.place.admission_class
                for batch in batches
                for c in batch
                if c.job is not None and c.job.place
            }
        )

    def __len__(self) -> int:
        return sum(change.dispatch is not None for batch in self._batches for change in batch)

    def calls(self) -> list[tuple[str, Values]]:
        changes = [change for batch in self._batches for change in batch]
        jobs = sorted({c.job.job_id for c in changes if c.job is not None})
        dispatches = sorted({c.dispatch.dispatch_id for c in changes if c.dispatch is not None})
        return [
            ("lock_jobs", {"ids": array(jobs)}),
            ("lock_queued", {"ids": array(jobs)}),
            ("lock_dispatches", {"ids": array(dispatches), "jobs": array(jobs)}),
        ]

    def judge(self, session: DatabaseSession, now: Moment, rows: Sequence[Sequence[Any]]) -> Judged:
        job_rows, queue_rows, dispatch_rows = rows
        jobs = [_Job(*row) for row in job_rows]
        dispatches = [_Dispatch(*row) for row in dispatch_rows]
        _put_in_place(jobs, queue_rows, dispatches)
        judged = Judged(
            now,
            {job.job_id: job for job in jobs},
            {dispatch.dispatch_id: dispatch for dispatch in dispatches},
            self._demands.of(session, {dispatch.admission_class for dispatch in dispatches}),
        )
        judged.answers = [[judged.apply(change) for change in batch] for batch in self._batches]
        return judged


def _put_in_place(jobs: Sequence[_Job], queue: Sequence[Sequence[Any]], runs: Sequence[_Dispatch]) -> None:
    unsettled = {job.no: job for job in jobs if job.ended_at is None}
    for no, *waits in queue:
        unsettled.pop(no).wait(*waits)
    for run in runs:
        job = None if run.job_no is None else unsettled.get(run.job_no)
        if job is not None and run.fence == job.fence + 1:
            job.fly(run)


class Applying:
    """Changes alone. Nothing is guessed here: whoever ends nothing locks no ledger row."""

    def __init__(self, link: Database, demands: PostgresAdmissionClasses, ordering: Ordering) -> None:
        self._link, self._demands, self._ordering = link, demands, ordering

    def run(self, session: DatabaseSession, changes: Changes) -> tuple[list[list[bool]], bool]:
        """The answers, and whether anything was written."""
        now, rows = self._link.opening(session, *changes.calls())
        judged = changes.judge(session, now, rows)
        if judged.ended:
            addons = array(sorted({admission_class.addon_id for _, admission_class in judged.ended}))
            _, accounts = session.together(lock_ledger(judged.keys), ("accounts", {"addons": addons}))
            judged.pages.accounts = accounts_from(accounts)
            for (_, admission_class), n in judged.ended.items():
                account = judged.pages.account(admission_class.addon_id)
                account.hold(-n * admission_class.cost_units, now, self._ordering.sharing)
        judged.leave(session, self._demands)
        return judged.answers, judged.pages.leave(session)


@dataclass(slots=True)
class Judged:
    """What changes come to, and what is to be written of it."""

    now: Moment
    jobs: dict[JobId, _Job] = field(default_factory=dict)
    dispatches: dict[DispatchId, _Dispatch] = field(default_factory=dict)
    demands: dict[int, AdmissionClass] = field(default_factory=dict)
    pages: PostgresWriteBatch = field(default_factory=PostgresWriteBatch)
    #: How many of a kind ended where. Only here do units go back, and a dispatch ends once.
    ended: Counter[tuple[HostId, AdmissionClass]] = field(default_factory=Counter)
    answers: list[list[bool]] = field(default_factory=list)

    @property
    def keys(self) -> set[Key]:
        """The ledger rows of what ended."""
        return {
            key for host, admission_class in self.ended for key in (("host", host), *keys_of(admission_class))
        }

    def apply(self, change: Change) -> bool:
        job_step, dispatch_step = change.job, change.dispatch
        job = None if job_step is None else self.jobs.get(job_step.job_id)
        dispatch = None if dispatch_step is None else self.dispatches.get(dispatch_step.dispatch_id)
        if not _is_as_seen(job, job_step) or not _stands(dispatch, dispatch_step, self.now):
            return False
        active = 0
        if dispatch is not None and dispatch_step is not None:
            active = dispatch.step(dispatch_step, self.now)
            if dispatch_step.target is DispatchPhase.ENDED:
                self.end(dispatch.host, self.demands[dispatch.admission_class], dispatch.flight)
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
        if job_step.target is not job_step.source and job_step.target in SETTLED - {JobState.BLOCKED}:
            self.pages.settled([job.no], self.now)
        job.step(job_step, len(change.notes), active, self.now)
        return True

    def end(self, host: HostId, admission_class: AdmissionClass, flight: int, n: int = 1) -> None:
        self.ended[host, admission_class] += n
        self.pages.landed[flight] += n

    def leave(self, session: DatabaseSession, demands: PostgresAdmissionClasses) -> None:
        moved = [job for job in self.jobs.values() if job.moved]
        if moved:
            session.leave("move_jobs", columns([job.row for job in moved]))
        if placed := [_place_row(job.no, job.place, demands, self.now) for job in moved if job.place]:
            session.leave("place_jobs", columns(placed))
        if dispatches := [dispatch.row for dispatch in self.dispatches.values() if dispatch.moved]:
            session.leave("move_dispatches", columns(dispatches))
        sooner = [(d.flight, d.expires_at, d.stop_at) for d in self.dispatches.values() if d.hastened]
        if sooner:
            session.leave("due_sooner", columns(sorted(sooner, key=itemgetter(0))))
        for (host, admission_class), n in self.ended.items():
            self.pages.hold(host, admission_class, -n)


def _is_as_seen(job: _Job | None, step: JobStep | None) -> bool:
    return step is None or (job is not None and job.state is step.source and job.fence == step.fence)


def _stands(dispatch: _Dispatch | None, step: DispatchStep | None, now: Moment) -> bool:
    if step is None:
        return True
    if dispatch is None or dispatch.phase != step.source or dispatch.reason != step.source_reason:
        return False
    return not (step.while_valid and dispatch.expires_at <= now)


def _place_row(no: int, place: Place, demands: PostgresAdmissionClasses, now: Moment) -> tuple[Any, ...]:
    line = (place.line(now), place.turn, place.ready_at, place.urgent_at, place.priority)
    times = (place.earliest_start_at, place.not_before, place.deadline_at)
    return (no, *line, demands.number(place.admission_class), *times)


class Completing:
    """Those who came together; perhaps nobody."""

    def __init__(
        self, link: Database, demands: PostgresAdmissionClasses, completions: Sequence[Complete]
    ) -> None:
        self._link, self._demands, self._completions = link, demands, completions
        #: Told twice counts once, and the first one is it.
        self._first: dict[str, CompletedDispatch] = {}
        for done in (done for completion in completions for done in completion.done):
            self._first.setdefault(done.dispatch_id, done)

    def __len__(self) -> int:
        return len(self._first)

    def calls(self) -> list[tuple[str, Values]]:
        rows = sorted(self._first.values())  # as everybody locks them
        if not rows:
            return []
        ids, results = columns(rows)
        return [("complete", {"now": self._link.handed(), "ids": ids, "results": results})]

    def judge(self, session: DatabaseSession, now: Moment, rows: Sequence[Sequence[Any]]) -> Judged:
        judged = Judged(now)
        found = list(map(_completed, rows[0])) if rows else []
        demands = self._demands.of(session, {one.admission_class for one in found})
        for (host, class_no, flight), n in Counter(map(_KIND, found)).items():
            admission_class = demands[class_no]
            judged.pages.moved(admission_class.addon_id, JobState.RUNNING, JobState.DONE, n)
            judged.end(host, admission_class, flight, n)
        if found:
            judged.pages.settled([one.no for one in found], found[0].at)
            judged.pages.note_many(lambda: _told(found, now))
        ended = {one.dispatch_id for one in found}
        for completion in self._completions:
            answers = []
            for done in completion.done:
                answers.append(done.dispatch_id in ended)
                ended.discard(done.dispatch_id)
            judged.answers.append(answers)
        return judged


class _Completed(NamedTuple):
    """A row of `complete`."""

    dispatch_id: DispatchId
    no: int
    events: int
    host: HostId
    admission_class: int
    flight: int
    at: Moment


#: From a whole row, in half the time.
_completed: Final[Callable[[Any], _Completed]] = partial(tuple.__new__, _Completed)
#: What most of them have in common.
_KIND: Final = attrgetter("host", "admission_class", "flight")


def _told(found: Sequence[_Completed], now: Moment) -> Iterator[EventRow]:
    why = str(EndReason.COMPLETED)
    for one in found:
        job_id, _, attempt = one.dispatch_id.rpartition(".")
        yield now, EventKind.DONE, JobId(job_id), one.events, JobState.DONE, why, attempt, None
