"""
What one transaction changes, collected and then written at once (`PostgresWriteBatch`, `Effects`); the
changes and completions that arrived together; and the writer of heartbeats.

The transaction locks all rows that the changes name (jobs, then their queue rows, then their dispatches),
reads them, applies one change after the other to these values, and writes the result at once. The ledger rows
are locked last, and only if a dispatch may end (`rounds.py`).

One statement writes all completions of a transaction, because most jobs end by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.core.jobs.admission import Account, AdmissionClass, keys_of
from penstock.core.jobs.changes import Change, Note, Renewal
from penstock.core.jobs.job import Dispatch, DispatchStep, EventKind, Job, JobStep
from penstock.core.jobs.ordering import Place
from penstock.core.jobs.spending import RenewedDispatch
from penstock.core.jobs.states import IN_FLIGHT, SETTLED, DispatchPhase, JobState
from penstock.core.jobs.types import (
    SEPARATOR,
    AddonId,
    DispatchId,
    EndReason,
    HostId,
    JobId,
    Moment,
    dispatch_parts,
)
from penstock.stores.api import Complete, CompletedDispatch, Renew
from penstock.stores.common.array_changes import array_of_member
from penstock.stores.common.dependencies import MOST_RESOLVED, StateMove, move_of
from penstock.stores.common.group_commit import GroupCommit
from penstock.stores.common.reads import DISPATCH_WIDTH, JOB_WIDTH
from penstock.stores.common.rows import pack_events
from penstock.stores.common.writes import NO_JOB, EventJob, EventRow, Heartbeats, event_row
from penstock.stores.postgres.admission_view import PostgresAdmissionClasses
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import Values, array, columns

#: A ledger row: scope and name.
Key: TypeAlias = tuple[str, str]
#: The dispatches that ended, counted by host and class.
Ended: TypeAlias = Counter[tuple[HostId, AdmissionClass]]


def lock_ledger(keys: Iterable[Key]) -> tuple[str, Sequence[bytes]]:
    ordered = sorted(set(keys))
    return "lock_ledger", [array([scope for scope, _ in ordered]), array([name for _, name in ordered])]


class PostgresWriteBatch:
    """Rows of a transaction other than jobs and dispatches: events, job counts, ledger and accounts."""

    def __init__(self) -> None:
        #: Events, or functions that make many.
        self._events: list[EventRow | Callable[[], Iterable[EventRow]]] = []
        self._mentioned: set[int] = set()
        self.tally: Counter[tuple[str, str]] = Counter()
        self.accounts: dict[AddonId, Account] = {}
        self._changed: set[AddonId] = set()
        self._units: Counter[tuple[HostId, AdmissionClass]] = Counter()
        #: How many dispatches of a flight ended.
        self.ended_by_flight: Counter[int] = Counter()
        #: Jobs that have ended, for retention.
        self._settled: list[int] = []
        self._settled_at: Moment = 0

    def note(
        self, at: Moment, note: Note, job: EventJob = NO_JOB, dispatch_id: DispatchId | None = None
    ) -> None:
        if job.no is not None:
            self._mentioned.add(job.no)
        self._events.append(event_row(at, note, job, dispatch_id))

    def note_many(self, make_events: Callable[[], Iterable[EventRow]]) -> None:
        """
        Add events of jobs whose dispatch row names the batch of the event, so that they need no mention.
        `make_events` is called when the earlier statements have been sent, while the server works on them.
        """
        self._events.append(make_events)

    def count_move(self, addon_id: AddonId, source: JobState, target: JobState, n: int = 1) -> None:
        if source is not target:
            self.tally[addon_id, source] -= n
            self.tally[addon_id, target] += n

    def settled(self, nos: Iterable[int], at: Moment) -> None:
        """Add jobs that have ended. `at` is the same for all jobs of a transaction."""
        self._settled += nos
        self._settled_at = at

    def use_units(self, host: HostId, admission_class: AdmissionClass, dispatches: int) -> None:
        """
        Count more dispatches of this class; a negative number: ended ones. The ledger rows must be locked.
        """
        self._units[host, admission_class] += dispatches

    def account(self, addon_id: AddonId) -> Account:
        """The account of the addon, for a caller that changes it: the batch writes it."""
        self._changed.add(addon_id)
        return self.accounts.setdefault(addon_id, Account())

    def defer(self, session: DatabaseSession) -> bool:
        """Defer everything to the session, which writes it with the COMMIT. True: there are events."""
        ledger = self._ledger()
        changed = self._changed | {AddonId(name) for scope, name, *_ in ledger if scope == "addon"}
        accounts = [(addon_id, self.accounts[addon_id]) for addon_id in sorted(changed)]
        of_accounts = [(name, a.weight, int(a.paused), a.average, a.units, a.at) for name, a in accounts]
        counts = [(*key, n) for key, n in self.tally.items() if n]
        has_events = bool(self._events)
        session.has_events |= has_events
        if self._units or accounts or counts or has_events:
            number = session.batch
            written = [*columns(ledger, 4), *columns(of_accounts, 6), *columns(counts, 3)]
            if not (self.ended_by_flight or self._settled or self._mentioned):
                session.defer("write_start", lambda: [*written, number, *self._packed_events()])
                return has_events
            flights = columns(sorted(self.ended_by_flight.items()), 2)
            settled = [number, self._settled_at, array(self._settled)]
            ended_rows = [*settled, number, array(sorted(self._mentioned))]
            session.defer(
                "write_batch", lambda: [*written, *flights, number, *self._packed_events(), *ended_rows]
            )
        return has_events

    def _packed_events(self) -> tuple[int, bytes]:
        """
        The number of the events, and their text. The batch drops its events here, because the functions that
        make them refer to it: such a cycle leaves everything that a round read to the garbage collector,
        which took an eighth of a worker's time for it.
        """
        parts, self._events = self._events, []
        events: list[EventRow] = []
        for part in parts:
            events += part() if callable(part) else (part,)
        return len(events), pack_events(events)

    def _ledger(self) -> list[tuple[str, str, int, int]]:
        """
        The ledger rows that change. A row that gets back as many units as it gives is left out; under load
        most rows are. Its account stays right too, because it depends only on the units in use and the
        moments of changes. Each row that is not written helps readers: during a long transaction of another
        program the server removes no old version of a row, and readers step over all of them.
        """
        rows: dict[Key, list[int]] = {}
        for (host, admission_class), n in self._units.items():
            for key in (("host", host), *keys_of(admission_class)):
                row = rows.setdefault(key, [0, 0])
                row[0] += n * admission_class.cost_units
                row[1] += n
        return [
            (scope, name, units, running)
            for (scope, name), (units, running) in rows.items()
            if units or running
        ]


class Children(NamedTuple):
    """Rows of `lock_groups_of` and `children`, which are locked."""

    groups: Sequence[Any]
    rows: Sequence[Any]


def calls_of_children(
    ends: Sequence[StateMove] = (), limit: int = MOST_RESOLVED, dispatches: bytes = b"{}"
) -> list[tuple[str, Values]]:
    """
    The calls that lock and read the children of parents that end, and the batches of which these are members:
    the answers of the last two make `Children`. `dispatches`: ids of dispatches that complete.
    """
    nos, after = array([end.no for end in ends]), array([end.after for end in ends])
    values = {"nos": nos, "after": after, "ids": dispatches, "most": limit}
    return [("lock_children", values), ("lock_groups_of", values), ("children", values)]


@dataclass(slots=True)
class Effects:
    """
    What the operations of a transaction change. `jobs`, `dispatches`: the locked ones, with the changes so
    far.
    """

    now: Moment
    jobs: dict[JobId, Job] = field(default_factory=dict)
    dispatches: dict[DispatchId, Dispatch] = field(default_factory=dict)
    #: How many events each job has.
    events: dict[JobId, int] = field(default_factory=dict)
    #: The number of the flight in which each dispatch started.
    flights: dict[DispatchId, int] = field(default_factory=dict)
    #: The jobs that changed, with the dispatch that each had before.
    moved_jobs: dict[JobId, DispatchId | None] = field(default_factory=dict)
    moved_dispatches: set[DispatchId] = field(default_factory=set)
    #: Dispatches that end or stop sooner than their flight says.
    hastened: set[DispatchId] = field(default_factory=set)
    places: dict[JobId, Place] = field(default_factory=dict)
    #: Only this count returns units, and a dispatch ends once.
    ended: Ended = field(default_factory=Counter)
    writes: PostgresWriteBatch = field(default_factory=PostgresWriteBatch)
    #: One list of answers for each operation.
    answers: list[list[bool]] = field(default_factory=list)
    #: Ends and retries of jobs, and the numbers of the jobs that have dependents.
    moves: list[StateMove] = field(default_factory=list)
    with_dependencies: set[int] = field(default_factory=set)
    #: The children of completed jobs; None: not read yet.
    children: Children | None = None

    @property
    def keys(self) -> set[Key]:
        """The ledger rows of the dispatches that ended."""
        return {
            key for host, admission_class in self.ended for key in (("host", host), *keys_of(admission_class))
        }

    @property
    def moved_numbers(self) -> set[int]:
        return {self.jobs[job_id].no for job_id in self.moved_jobs}

    def apply(self, change: Change) -> bool:
        step, ending = change.job, change.dispatch
        if step is not None and not step.applies_to(self.jobs.get(step.job_id)):
            return False
        if ending is not None and not ending.applies_to(self.dispatches.get(ending.dispatch_id), self.now):
            return False
        active = 0 if ending is None else self._move_dispatch(ending).active
        dispatch_id = None if ending is None else ending.dispatch_id
        if step is None:
            for note in change.notes:
                self.writes.note(change.at, note, dispatch_id=dispatch_id)
            return True
        job = self._move_job(step, active)
        for note in change.notes:
            self.events[job.job_id] += 1
            event_job = EventJob(job.no, job.job_id, self.events[job.job_id], job.state)
            self.writes.note(change.at, note, event_job, dispatch_id)
        return True

    def _move_dispatch(self, step: DispatchStep) -> Dispatch:
        before = self.dispatches[step.dispatch_id]
        after = self.dispatches[step.dispatch_id] = step.apply(before, self.now)
        self.moved_dispatches.add(step.dispatch_id)
        stops_sooner = after.stop_at is not None and (
            before.stop_at is None or after.stop_at < before.stop_at
        )
        if after.expires_at < before.expires_at or stops_sooner:
            self.hastened.add(step.dispatch_id)
        if step.target is DispatchPhase.ENDED:
            self.end(after.host, after.admission_class, self.flights[step.dispatch_id])
        return after

    def _move_job(self, step: JobStep, active: int) -> Job:
        before = self.jobs[step.job_id]
        job = self.jobs[step.job_id] = step.apply(before, active, self.now)
        self.moved_jobs.setdefault(job.job_id, before.dispatch_id)
        if step.place is not None:
            self.places[job.job_id] = step.place
        elif job.state is not JobState.QUEUED:
            self.places.pop(job.job_id, None)
        self.writes.count_move(job.intent.addon_id, step.source, step.target)
        if step.target is not step.source and step.target in SETTLED - {JobState.BLOCKED}:
            self.writes.settled([job.no], self.now)
        if (move := move_of(job.no, job.job_id, step.source, step.target)) is not None:
            self.moves.append(move)
        return job

    def end(self, host: HostId, admission_class: AdmissionClass, flight: int, n: int = 1) -> None:
        self.ended[host, admission_class] += n
        self.writes.ended_by_flight[flight] += n

    def defer(self, session: DatabaseSession, classes: PostgresAdmissionClasses) -> None:
        """Defer the rows of jobs and dispatches to the session, and their units to `writes`."""
        if self.moved_jobs:
            session.defer("move_jobs", columns([self._job_row(job_id) for job_id in self.moved_jobs]))
        if self.places:
            placed = [self._place_row(job_id, place, classes) for job_id, place in self.places.items()]
            session.defer("place_jobs", columns(placed))
        if self.moved_dispatches:
            moved = [self.dispatches[dispatch_id] for dispatch_id in sorted(self.moved_dispatches)]
            session.defer("move_dispatches", columns([_dispatch_row(dispatch) for dispatch in moved]))
        if self.hastened:
            sooner = [(self.flights[d], self.dispatches[d]) for d in self.hastened]
            rows = [(flight, dispatch.expires_at, dispatch.stop_at) for flight, dispatch in sooner]
            session.defer("due_sooner", columns(sorted(rows, key=itemgetter(0))))
        for (host, admission_class), n in self.ended.items():
            self.writes.use_units(host, admission_class, -n)

    def _job_row(self, job_id: JobId) -> tuple[Any, ...]:
        job = self.jobs[job_id]
        counters = job.counters
        return (
            job.no,
            job.state if job.state in SETTLED else None,
            job.fence - (job.state in IN_FLIGHT),
            self.events[job_id],
            job.ended_at,
            job.active,
            *(counters.crash, counters.unavailable, counters.error, counters.start),
            job.spent_before,
            *(job.denied, job.denied_data, job.denied_at, job.passed_at),
            job.state is JobState.QUEUED,
            self.moved_jobs[job_id],
        )

    def _place_row(self, job_id: JobId, place: Place, classes: PostgresAdmissionClasses) -> tuple[Any, ...]:
        order = (place.line(self.now), place.turn, place.ready_at, place.urgent_at, place.priority)
        times = (place.earliest_start_at, place.not_before, place.deadline_at)
        return (self.jobs[job_id].no, *order, classes.number(place.admission_class), *times)


def _dispatch_row(dispatch: Dispatch) -> tuple[Any, ...]:
    return (
        dispatch.dispatch_id,
        dispatch.phase,
        *(dispatch.started_at, dispatch.expires_at, dispatch.stop_at),
        *(dispatch.stop_for, dispatch.reason, dispatch.worker),
        *(dispatch.ended_at, dispatch.end, dispatch.result, dispatch.error),
    )


class Changes:
    """The changes of several operations. Each change applies or not on its own."""

    def __init__(self, classes: PostgresAdmissionClasses, operations: Sequence[Sequence[Change]]) -> None:
        self._classes, self._operations = classes, operations
        self._changes = [change for changes in operations for change in changes]
        places = [change.job.place for change in self._changes if change.job is not None]
        classes.make({place.admission_class for place in places if place is not None})

    def __len__(self) -> int:
        """How many dispatches may end."""
        return sum(change.dispatch is not None for change in self._changes)

    def calls(self) -> list[tuple[str, Values]]:
        jobs = {"ids": array(sorted({c.job.job_id for c in self._changes if c.job is not None}))}
        dispatches = sorted({c.dispatch.dispatch_id for c in self._changes if c.dispatch is not None})
        ids = {"ids": array(dispatches)}
        return [
            ("lock_jobs", jobs),
            ("lock_queued", jobs),
            ("lock_dispatches", ids | {"jobs": jobs["ids"]}),
            ("jobs_by_id", jobs),
            ("dispatches_by_id", ids),
            ("jobs_with_dependencies", jobs),
        ]

    def calls_behind_locks(self) -> list[tuple[str, Values]]:
        return []

    def arrays(self) -> set[JobId]:
        """The arrays of jobs that may end."""
        ids = (change.job.job_id for change in self._changes if change.job is not None)
        return {array_id for job_id in ids if (array_id := array_of_member(job_id)) is not None}

    def judge(self, session: DatabaseSession, now: Moment, rows: Sequence[Sequence[Any]]) -> Effects:
        *_, job_rows, dispatch_rows, related = rows
        jobs = self._classes.jobs(session, job_rows)
        dispatches = self._classes.dispatches(session, dispatch_rows)
        effects = Effects(
            now,
            {job.job_id: job for job in jobs},
            {dispatch.dispatch_id: dispatch for dispatch in dispatches},
            {job.job_id: row[JOB_WIDTH] for job, row in zip(jobs, job_rows, strict=True)},
            {d.dispatch_id: row[DISPATCH_WIDTH] for d, row in zip(dispatches, dispatch_rows, strict=True)},
        )
        effects.answers = [[effects.apply(change) for change in changes] for changes in self._operations]
        effects.with_dependencies = {no for (no,) in related}
        return effects


class Completions:
    """
    The completions of several operations, perhaps of none. `expect_children`: lock and read the children of
    the jobs in the round trip of the completions. Without it, they cost a round trip of their own if a
    dependency exists, and nothing otherwise.
    """

    def __init__(
        self,
        database: Database,
        classes: PostgresAdmissionClasses,
        operations: Sequence[Complete],
        *,
        expect_children: bool,
    ) -> None:
        self._expect_children = expect_children
        self._database, self._classes, self._operations = database, classes, operations
        #: If a completion is reported twice, the first report wins.
        self._first: dict[str, CompletedDispatch] = {}
        for done in (done for operation in operations for done in operation.done):
            self._first.setdefault(done.dispatch_id, done)

    def __len__(self) -> int:
        return len(self._first)

    def calls(self) -> list[tuple[str, Values]]:
        rows = sorted(self._first.values())  # the order in which every transaction locks dispatches
        if not rows:
            return []
        ids, results = columns(rows)
        return [("complete", {"now": self._database.given_now(), "ids": ids, "results": results})]

    def calls_behind_locks(self) -> list[tuple[str, Values]]:
        """The calls behind the locks of the ledger: every transaction locks children after it."""
        return self._calls_of_children() if self._first and self._expect_children else []

    def _calls_of_children(self) -> list[tuple[str, Values]]:
        return calls_of_children(dispatches=array(sorted(self._first)))

    def arrays(self) -> set[JobId]:
        """The arrays of the completed jobs."""
        jobs = (dispatch_parts(dispatch_id)[0] for dispatch_id in self._first if SEPARATOR in dispatch_id)
        return {array_id for job_id in jobs if (array_id := array_of_member(job_id)) is not None}

    def judge(self, session: DatabaseSession, now: Moment, rows: Sequence[Sequence[Any]]) -> Effects:
        effects = Effects(now)
        completed = list(map(_completed, rows[0])) if rows else []
        if rows and session.has_dependencies:
            *_, groups, children = (
                rows if self._expect_children else session.flush(*self._calls_of_children())
            )
            effects.children = Children(groups, children)
            effects.with_dependencies = {parent for parent, *_ in children}
        effects.moves = [
            StateMove(one.no, JobId(dispatch_parts(one.dispatch_id)[0]), JobState.DONE)
            for one in completed
            if one.no in effects.with_dependencies or SEPARATOR in one.dispatch_id
        ]
        classes = self._classes.read(session, {one.class_no for one in completed})
        for (host, class_no, flight), n in Counter(map(_KIND, completed)).items():
            admission_class = classes[class_no]
            effects.writes.count_move(admission_class.addon_id, JobState.RUNNING, JobState.DONE, n)
            effects.end(host, admission_class, flight, n)
        if completed:
            effects.writes.settled([one.no for one in completed], completed[0].at)
            effects.writes.note_many(lambda: _done_events(completed, now))
        ended = {one.dispatch_id for one in completed}
        for operation in self._operations:
            answers = []
            for done in operation.done:
                answers.append(done.dispatch_id in ended)
                ended.discard(done.dispatch_id)
            effects.answers.append(answers)
        return effects


#: The ends with which a transaction of `RoundBatcher` begins.
Ends: TypeAlias = Changes | Completions


class _Completed(NamedTuple):
    """A row of `complete`."""

    dispatch_id: DispatchId
    no: int
    events: int
    host: HostId
    class_no: int
    flight: int
    at: Moment


#: Makes a `_Completed` of a whole row in half the time.
_completed: Final[Callable[[Any], _Completed]] = partial(tuple.__new__, _Completed)
_KIND: Final = attrgetter("host", "class_no", "flight")


def _done_events(completed: Sequence[_Completed], now: Moment) -> Iterator[EventRow]:
    reason = str(EndReason.COMPLETED)
    for one in completed:
        job_id, _, attempt = one.dispatch_id.rpartition(".")
        yield now, EventKind.DONE, JobId(job_id), one.events, JobState.DONE, reason, attempt, None


class RenewBatcher(GroupCommit):
    """
    The writer of heartbeats: it locks, reads and writes the dispatches of all heartbeats that arrived
    together. `wait_for_rounds` returns when earlier changes and completions are written: a heartbeat after
    the end of its dispatch must see that end. `on_commit`: as in `RoundBatcher`.
    """

    def __init__(
        self, database: Database, wait_for_rounds: Callable[[], object], on_commit: Callable[[bool], None]
    ) -> None:
        self._database, self._wait_for_rounds, self._on_commit = database, wait_for_rounds, on_commit
        super().__init__(self._write_all)  # type: ignore[arg-type]  # nothing but `Renew` comes to it

    def _write_all(self, operations: list[Renew]) -> list[list[RenewedDispatch | None]]:
        self._wait_for_rounds()
        renewed, has_events = self._database.transact(lambda session: self._renew(session, operations))
        self._on_commit(has_events)
        return renewed

    def _renew(
        self, session: DatabaseSession, operations: Sequence[Renew]
    ) -> tuple[list[list[RenewedDispatch | None]], bool]:
        renewals = [renewal for operation in operations for renewal in operation.renewals]
        reporting = sorted({renewal.dispatch_id for renewal in renewals if _reports(renewal)})
        ids = {"ids": array(sorted({renewal.dispatch_id for renewal in renewals}))}
        locks = [("lock_jobs_of", {"ids": array(reporting)})] if reporting else []
        now, [*_, rows] = self._database.lock(session, *locks, ("dispatches_for_beats", ids))
        writes = PostgresWriteBatch()
        heartbeats = Heartbeats(now, rows, writes.note)
        answers = heartbeats.renew_all(operations, lambda rows: session.execute("spend", columns(rows)))
        if renewed := heartbeats.renewed:
            beats = [(d.dispatch_id, d.expires_at, d.progress, d.spent, d.events, d.pid) for d in renewed]
            session.defer("renew", columns(beats))
        if sooner := [(d.place, d.expires_at, None) for d in renewed if d.hastened]:
            session.defer("due_sooner", columns(sorted(sooner)))
        if jobs := [(d.no, d.job_progress, d.job_spent) for d in renewed if d.job_changes]:
            session.defer("beat_jobs", columns(jobs))
        if heartbeats.checkpoints:
            session.defer("set_checkpoints", columns(list(heartbeats.checkpoints.values())))
        return answers, writes.defer(session)


def _reports(renewal: Renewal) -> bool:
    """Whether the heartbeat may change the row of its job, so that the row must be locked."""
    return renewal.progress is not None or renewal.spent is not None or renewal.checkpoint is not None
