"""
The reads that both SQL stores share: jobs, dispatches, events, due work for maintenance, and the audit. The
audit recomputes every total and checks every invariant (`db check` runs it, and the simulation after each
commit).

A statement returns the same columns in both dialects, so these reads use names of statements and columns
only. A store adds how it opens a snapshot, and the abstract methods of `SqlReads`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, islice
from typing import Any, Final, Generic, Protocol, TypeVar

from penstock.core.jobs.admission import AdmissionClass, keys_of
from penstock.core.jobs.arrays import ArrayRecord, IndexChunk
from penstock.core.jobs.dependencies import DependencyStatus, ParentCondition, StoredDependency
from penstock.core.jobs.groups import JobGroup
from penstock.core.jobs.job import Dispatch, Event, EventKind, Job
from penstock.core.jobs.learning import ObservedJob
from penstock.core.jobs.load import Host
from penstock.core.jobs.schedules import ScheduleRecord
from penstock.core.jobs.states import DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, JobId, Moment, dispatch_id_of
from penstock.stores.api import Addon, Due, JobResults, Learned, Overdue, WaitingWork
from penstock.stores.common.rows import (
    ADMISSION_CLASS,
    array_from,
    class_from,
    dispatch_from,
    event_rows,
    group_from,
    host_from,
    index_chunk,
    job_from,
    observed_from,
    schedule_from,
)

T = TypeVar("T")
#: The number of columns of `job_columns` and of `dispatch_columns`; a dialect may add columns after them.
JOB_WIDTH: Final = 38
DISPATCH_WIDTH: Final = 22
#: An addon without a row: weight, paused, average, units, moment.
_NEW_ADDON: Final = (100, 0, 0.0, 0, 0)


class SqlSession(Protocol):
    """A transaction or a snapshot that runs named statements."""

    def execute(self, name: str, values: Any = None) -> list[Any]: ...

    def execute_many(self, *calls: tuple[str, Any]) -> list[list[Any]]: ...

    def array(self, values: Sequence[Any]) -> Any:
        """A list as one bound value of a statement."""
        ...


S = TypeVar("S", bound=SqlSession)


def like_pattern(text: str) -> str:
    """A pattern of LIKE for values that contain the text, in which % and _ have no special meaning."""
    for wildcard in ("\\", "%", "_"):
        text = text.replace(wildcard, f"\\{wildcard}")
    return f"%{text}%"


class AdmissionClasses:
    """A cache of admission classes by number. They are few and never change, so a process reads each once."""

    def __init__(self) -> None:
        self._numbers: dict[AdmissionClass, int] = {}
        self._by_number: dict[int, AdmissionClass] = {}

    def read(self, session: SqlSession, numbers: Iterable[int]) -> Mapping[int, AdmissionClass]:
        if missing := set(numbers) - self._by_number.keys():
            for no, *row in session.execute("classes_by_no", {"nos": session.array(sorted(missing))}):
                admission_class = self._by_number[no] = class_from(row)
                self._numbers[admission_class] = no
        return self._by_number

    def jobs(self, session: SqlSession, rows: Sequence[Any]) -> list[Job]:
        """Jobs from rows of `job_columns`."""
        classes = self.read(session, {row[ADMISSION_CLASS] for row in rows})
        fixed = slice(ADMISSION_CLASS + 1, JOB_WIDTH)
        return [
            job_from(row[: ADMISSION_CLASS + 1], row[fixed], classes[row[ADMISSION_CLASS]]) for row in rows
        ]

    def dispatches(self, session: SqlSession, rows: Sequence[Any]) -> list[Dispatch]:
        """Dispatches from rows of `dispatch_columns`."""
        classes = self.read(session, {row[DISPATCH_WIDTH - 1] for row in rows})
        return [dispatch_from(row[:DISPATCH_WIDTH], classes[row[DISPATCH_WIDTH - 1]]) for row in rows]


def unpack_events(before: int, text: str, after: int = 0) -> Iterator[Event]:
    """The events of a batch that come after `after`. `before`: the number of the event before the batch."""
    for seq, row in enumerate(event_rows(text), before + 1):
        if row is not None and seq > after:
            yield _event(seq, row)


#: By their text: in Python 3.11 a call of the enumeration takes longer than the rest of an event.
_KINDS: Final = {str(kind): kind for kind in EventKind}
_STATES: Final = {str(state): state for state in JobState} | {None: None}


def _event(seq: int, row: Sequence[Any]) -> Event:
    at, kind, job_id, n, state, reason, attempt, data = row
    dispatch_id = attempt if job_id is None or attempt is None else dispatch_id_of(job_id, attempt)
    return Event(seq, at, _KINDS[kind], job_id, n, _STATES[state], reason, dispatch_id, data or {})


class SqlReads(ABC, Generic[S]):
    """
    The reads of a SQL store. `given_now`: the present moment for statements; None: the server uses its own.
    """

    def __init__(self, classes: AdmissionClasses, given_now: Callable[[], Moment | None]) -> None:
        self.classes, self._given_now = classes, given_now

    # what a dialect adds

    @abstractmethod
    def _snapshot(self, work: Callable[[S], T]) -> T:
        """Call `work` with a session in which all reads are as of one moment. It may be called twice."""

    @abstractmethod
    def _query(self, name: str, values: Any = None) -> list[Any]:
        """Run one statement by its name."""

    @abstractmethod
    def _batches(self, name: str, values: dict[str, Any]) -> Generator[tuple[int, str], None, None]:
        """The batches of the trail after the event `after`, one by one, as `unpack_events` takes them."""

    @abstractmethod
    def _dispatch_rows(self, session: S, dispatch_ids: Sequence[DispatchId]) -> Sequence[Any]:
        """Rows of `dispatch_columns`."""

    def _number_events(self) -> None:
        """Number the events that were committed. A store whose commits do that need not override this."""

    # jobs and dispatches

    def job(self, job_id: JobId) -> Job | None:
        return next(iter(self.jobs([job_id])), None)

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        if not job_ids:
            return []
        jobs = self._snapshot(lambda session: self._jobs(session, job_ids))
        return [jobs[job_id] for job_id in job_ids if job_id in jobs]

    def _jobs(self, session: S, job_ids: Sequence[JobId]) -> dict[JobId, Job]:
        rows = session.execute("jobs_by_id", {"ids": session.array(job_ids)})
        return {job.job_id: job for job in self.classes.jobs(session, rows)}

    def jobs_before(self, nos: Sequence[int], most: int) -> dict[int, int]:
        if not nos:
            return {}

        def read(session: S) -> dict[int, int]:
            return dict(session.execute("jobs_before", {"nos": session.array(nos), "most": most}))

        return self._snapshot(read)

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None:
        return self._snapshot(lambda session: self._dispatches(session, [dispatch_id])).get(dispatch_id)

    def dispatches(self, dispatch_ids: Sequence[DispatchId]) -> dict[DispatchId, Dispatch]:
        if not dispatch_ids:
            return {}
        return self._snapshot(lambda session: self._dispatches(session, dispatch_ids))

    def _dispatches(self, session: S, dispatch_ids: Sequence[DispatchId]) -> dict[DispatchId, Dispatch]:
        rows = self._dispatch_rows(session, dispatch_ids)
        return {each.dispatch_id: each for each in self.classes.dispatches(session, rows)}

    def job_results(self, job_ids: Sequence[JobId]) -> JobResults:
        def read(session: S) -> JobResults:
            rows = session.execute("job_results", {"ids": session.array(job_ids)})
            return {job_id: (JobState(state), result) for job_id, state, result in rows}

        return self._snapshot(read)

    def attempts(self, job_id: JobId) -> list[Dispatch]:
        def read(session: S) -> list[Dispatch]:
            return self.classes.dispatches(session, session.execute("attempts", {"job_id": job_id}))

        return self._snapshot(read)

    def live(
        self, *, addon_id: AddonId | None = None, phases: Collection[DispatchPhase] = (), limit: int = 1_000
    ) -> list[Dispatch]:
        def read(session: S) -> list[Dispatch]:
            phase_names = session.array([str(phase) for phase in phases or DispatchPhase])
            rows = session.execute("live", {"addon_id": addon_id, "phases": phase_names, "most": limit})
            return self.classes.dispatches(session, rows)

        return self._snapshot(read)

    def observed_jobs(self, job_ids: Sequence[JobId]) -> list[ObservedJob]:
        def read(session: S) -> list[ObservedJob]:
            rows = session.execute("observed_jobs", {"ids": session.array(job_ids)})
            classes = self.classes.read(session, {row[1] for row in rows})
            return [observed_from(row, classes[row[1]]) for row in rows]

        return self._snapshot(read) if job_ids else []

    def learned(self) -> Learned:
        rows = {name: (seq, data) for name, seq, data in self._query("learned")}
        upto, _ = rows.pop("", (0, ""))
        return Learned(upto, {name: data for name, (_, data) in rows.items()})

    def learned_upto(self) -> int:
        rows = self._query("learned_cursor")
        return int(rows[0][0]) if rows else 0

    def checkpoint(self, job_id: JobId) -> str | None:
        rows = self._query("checkpoint", {"job_id": job_id})
        return str(rows[0][0]) if rows else None

    def dependencies(self, job_id: JobId, limit: int = 1_000) -> list[StoredDependency]:
        rows = self._query("dependencies", {"job_id": job_id, "most": limit})
        return [
            StoredDependency(JobId(p), JobId(c), ParentCondition(condition), DependencyStatus(s))
            for p, c, condition, s in rows
        ]

    def addons(self) -> list[Addon]:
        tally, rows = self._snapshot(lambda session: session.execute_many(("tally", None), ("addons", None)))
        jobs: dict[str, dict[JobState, int]] = {}
        for addon_id, state, count in tally:
            jobs.setdefault(addon_id, {})[JobState(state)] = count
        accounts = {row[0]: row[1:] for row in rows}
        return [
            Addon(AddonId(name), weight, bool(paused), average, units, jobs.get(name, {}))
            for name in sorted(accounts.keys() | jobs.keys())
            for weight, paused, average, units, _ in [accounts.get(name, _NEW_ADDON)]
        ]

    def hosts(self) -> list[Host]:
        return [host_from(row) for row in self._query("hosts")]

    def schedules(self, due_by: Moment | None = None) -> list[ScheduleRecord]:
        if due_by is None:
            return [schedule_from(row) for row in self._query("schedules")]
        return [schedule_from(row) for row in self._query("due_schedules", {"due_by": due_by})]

    def schedule(self, name: str) -> ScheduleRecord | None:
        rows = self._query("schedule_by_name", {"name": name})
        return schedule_from(rows[0]) if rows else None

    def load_hours(self) -> dict[int, float]:
        return {int(hour): float(busy) for hour, busy in self._query("load_hours")}

    def array(self, array_id: JobId) -> ArrayRecord | None:
        rows = self._query("array_by_id", {"array_id": array_id})
        return array_from(rows[0]) if rows else None

    def failed_indices(self, array_id: JobId) -> list[IndexChunk]:
        return [index_chunk(row) for row in self._query("failed_indices", {"array_id": array_id})]

    def arrays(self, limit: int, *, only_open: bool = False) -> list[ArrayRecord]:
        rows = self._query("open_arrays" if only_open else "newest_arrays", {"most": limit})
        return [array_from(row) for row in rows]

    def group(self, group_id: JobId) -> JobGroup | None:
        rows = self._query("group_by_id", {"group_id": group_id})
        return group_from(rows[0][1:]) if rows else None

    def batches(self, limit: int, addon_id: AddonId | None = None) -> list[JobGroup]:
        rows = self._query("newest_batches", {"most": limit, "addon_id": addon_id})
        return [group_from(row[1:]) for row in rows]

    def waiting_by_labels(self) -> dict[tuple[str, ...], WaitingWork]:
        rows = self._query("waiting_by_labels")
        return {tuple(labels.split()): WaitingWork(int(jobs), int(units)) for labels, jobs, units in rows}

    def schedule_alarm(self) -> Moment | None:
        [(moment,)] = self._query("schedule_alarm")
        return None if moment is None else int(moment)

    # the trail

    def events(self, after: int, limit: int, job_id: JobId | None = None) -> list[Event]:
        if job_id is None:
            values = {"after": after, "most": limit}
            return self._events("events", values, limit)
        self._number_events()
        rows = self._query("events_of_job", {"job_id": job_id})
        events = [e for row in rows for e in unpack_events(*row) if e.job_id == job_id and e.n > after]
        return sorted(events, key=lambda event: event.n)[:limit]

    def events_of(self, kinds: Collection[EventKind], after: int, limit: int) -> list[Event]:
        values = {"after": after, "kinds": [str(kind) for kind in kinds]}
        return self._events("events_of", values, limit, lambda event: event.kind in kinds)

    def _events(
        self,
        name: str,
        values: dict[str, Any],
        limit: int,
        wanted: Callable[[Event], bool] | None = None,
    ) -> list[Event]:
        """Read batch by batch until there are `limit` events: pruned events leave gaps in the batches."""
        with closing(self._batches(name, values)) as batches:
            after = values["after"]
            events = chain.from_iterable(unpack_events(before, text, after) for before, text in batches)
            return list(islice(events if wanted is None else filter(wanted, events), limit))

    def newest(self) -> int:
        self._number_events()
        return int(self._query("newest")[0][0])

    # for maintenance

    def overdue(self, limit: int) -> list[Overdue]:
        values = {"now": self._given_now(), "most": limit}
        return self._snapshot(lambda session: list(self._overdue(session, values)))[:limit]

    def _overdue(self, session: S, values: dict[str, Any]) -> Iterator[Overdue]:
        expired, to_stop, late = session.execute_many(
            ("expired", values), ("to_stop", values), ("past_deadline", values)
        )
        dispatch_ids = [dispatch_id for (dispatch_id,) in (*expired, *to_stop)]
        dispatches = self._dispatches(session, dispatch_ids) if dispatch_ids else {}
        job_ids = [d.job_id for d in dispatches.values() if d.job_id is not None]
        job_ids += [job_id for (job_id,) in late]
        jobs = self._jobs(session, job_ids) if job_ids else {}
        for due, rows in ((Due.EXPIRED, expired), (Due.STOP, to_stop)):
            for (dispatch_id,) in rows:
                dispatch = dispatches[dispatch_id]
                yield Overdue(due, None if dispatch.job_id is None else jobs[dispatch.job_id], dispatch)
        for (job_id,) in late:
            yield Overdue(Due.DEADLINE, jobs[job_id], None)

    def alarm(self) -> Moment | None:
        [(moment,)] = self._query("alarm", {"now": self._given_now()})
        return None if moment is None else int(moment)

    def audit(self) -> list[str]:
        return self._snapshot(
            lambda session: [*_total_problems(session, self.classes), *_job_problems(session)]
        )


# the audit


def _total_problems(session: SqlSession, classes: AdmissionClasses) -> Iterator[str]:
    """Compare the ledger and the accounts with the sums over the live dispatches."""
    units: Counter[tuple[str, str]] = Counter()
    running: Counter[tuple[str, str]] = Counter()
    held: Counter[str] = Counter()
    rows = session.execute("audit_dispatches")
    for dispatch_id, host, cost, addon_id, class_no, phase, fence, job_id, state, job_fence in rows:
        held[addon_id] += cost
        for key in [("host", host), *keys_of(classes.read(session, [class_no])[class_no])]:
            units[key] += cost
            running[key] += 1
        expected = JobState.DISPATCHING if phase == DispatchPhase.RESERVED else JobState.RUNNING
        if job_id is not None and (state != expected or fence != job_fence):
            yield f"dispatch {dispatch_id} is {phase}, its job is {state} with fence {job_fence}"
    ledger = {(scope, name): (u, r) for scope, name, u, r in session.execute("ledger")}
    for key in ledger.keys() | units.keys():
        if ledger.get(key, (0, 0)) != (units[key], running[key]):
            yield f"ledger {key} says {ledger.get(key)}, its dispatches say {(units[key], running[key])}"
    for addon_id, _, _, _, account, _ in session.execute("addons"):
        if account != held[addon_id]:
            yield f"account {addon_id} holds {account}, its dispatches hold {held[addon_id]}"


def _job_problems(session: SqlSession) -> Iterator[str]:
    tally = {(addon_id, state): n for addon_id, state, n in session.execute("tally")}
    counted = {(addon_id, state): n for addon_id, state, n in session.execute("audit_tally")}
    if tally != counted:
        yield f"the tally says {tally}, the jobs are {counted}"
    for name, problem in (
        ("audit_in_flight", "is in flight without a live dispatch"),
        ("audit_dependencies", "waits for other parents than its dependencies say"),
        ("audit_groups", "counts other members than it has"),
        ("audit_trail", "has a gap in its events"),
        ("audit_fold", "is not in the state its last event tells"),
    ):
        for (job_id,) in session.execute(name):
            yield f"job {job_id} {problem}"
