"""
What is read from the file without changing it. Each read has one snapshot, on a connection that never writes.

A list of jobs is put together as SQL that goes by an index whatever the query filters by. Only fixed words are put
together; every value is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import apsw

from penstock.core.errors import StoreFailed
from penstock.core.jobs.admission import Ledger
from penstock.core.jobs.job import Dispatch, Event, EventKind, Job
from penstock.core.jobs.load import Host
from penstock.core.jobs.round import AdmissionView
from penstock.core.jobs.states import IN_FLIGHT, DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment
from penstock.stores.api import Addon, Clock, Due, Overdue, Query
from penstock.stores.common.rows import (
    ADMISSION_CLASS,
    audit,
    dispatch_from,
    host_from,
    job_from,
    listed,
    parts_of,
    unpack,
)
from penstock.stores.sqlite.admission import SqliteAdmissionView, ledger_from
from penstock.stores.sqlite.connection import connect, failures, one, query, statements
from penstock.stores.sqlite.guard import FileGuard, FileLost
from penstock.stores.sqlite.transaction import SqliteAdmissionClasses, SqliteTotals


def find_sql(query: Query) -> tuple[str, list[Any]]:
    """The SQL behind `job_columns`, and its values."""
    sql = statements()
    if not query.states:
        end, values = _filters(query, "j", "j.no")
        return f"{sql['all_jobs']} WHERE 1{end}", values
    # One ordered walk per state, each no longer than the page: only the jobs of the page are then read whole.
    walks: list[str] = []
    values = []
    for state in query.states:
        walk, number = _walk(state)
        end, more = _filters(query, "job", number)
        walks.append(f"SELECT * FROM ({sql[walk]}{end})")  # noqa: S608 - fixed words
        values += [str(state), *more]
    order = "DESC" if query.newest_first else "ASC"
    wanted = " UNION ALL ".join(walks)
    return f"{sql['all_jobs']} WHERE j.no IN ({wanted}) ORDER BY j.no {order} LIMIT ?", [*values, query.limit]


def _walk(state: JobState) -> tuple[str, str]:
    """A walk over the jobs of a state, and the column that it is ordered by: the number of the job."""
    if state is JobState.QUEUED:
        return "queued_jobs", "place.no"
    if state is JobState.DONE:
        return "completed_jobs", "place.job_no"
    return ("jobs_in_flight", "place.no") if state in IN_FLIGHT else ("settled_jobs", "job.no")


def _filters(query: Query, of: str, number: str) -> tuple[str, list[Any]]:
    where = ""
    values: list[Any] = []
    if query.addon_id is not None:
        where += f" AND {of}.addon_id = ?"
        values.append(query.addon_id)
    if query.job_type is not None:
        where += f" AND {of}.class_no IN (SELECT no FROM admission_class WHERE job_type = ?)"  # noqa: S608 - fixed words
        values.append(query.job_type)
    if query.tag is not None:
        tagged = "SELECT 1 FROM intent t, json_each(t.tags) tag WHERE tag.value = ?"
        where += f" AND EXISTS ({tagged} AND t.no = {of}.no)"
        values.append(query.tag)
    if query.part is not None:
        where += f" AND instr({of}.job_id, ?) > 0"
        values.append(query.part)
    # One bound each way: of two the index would use the first. Below zero are leases without a job.
    where += f" AND {number} > ?"
    values.append(0 if query.newest_first else query.after)
    if query.newest_first and query.after:
        where += f" AND {number} < ?"
        values.append(query.after)
    order = "DESC" if query.newest_first else "ASC"
    return f"{where} ORDER BY {number} {order} LIMIT ?", [*values, query.limit]


T = TypeVar("T")
_IDLE_READERS: Final = 8


class SqliteReads:
    _guard: FileGuard

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._classes, self._sql = SqliteAdmissionClasses(), statements()
        self._readers: SimpleQueue[apsw.Connection] = SimpleQueue()

    def _close_readers(self) -> None:
        while not self._readers.empty():
            self._readers.get().close()

    @contextmanager
    def _reading(self) -> Iterator[apsw.Connection]:
        """One snapshot. The connection is read-only, so this transaction cannot turn into a writer."""
        with failures(self._path):
            try:
                con = self._readers.get_nowait()
            except Empty:
                con = self._new_reader()
            con.execute("BEGIN DEFERRED")
            try:
                yield con
            finally:
                con.execute("ROLLBACK")
                if self._readers.qsize() < _IDLE_READERS:
                    self._readers.put(con)
                else:
                    con.close()

    def _new_reader(self) -> apsw.Connection:
        """A connection that opens the file by its name must find the file that is written to."""
        try:
            self._guard.check_main()
        except FileLost as lost:
            raise StoreFailed(f"{lost.what}: end every process that uses it", kind=lost.kind) from None
        return connect(self._path, readonly=True)

    def look(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        with self._reading() as con:
            now = self._clock()
            ledger = ledger_from(con, SqliteTotals(con).read(), host, now)
            admission_view = SqliteAdmissionView(con, host, now, self._classes, ledger)
            try:
                return view(admission_view)
            finally:
                admission_view.close()

    def ledger(self, host: HostId) -> Ledger:
        with self._reading() as con:
            return ledger_from(con, SqliteTotals(con).read(), host, self._clock())

    def job(self, job_id: JobId) -> Job | None:
        return next(iter(self.jobs([job_id])), None)

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        if not job_ids:
            return []
        with self._reading() as con:
            return self._jobs_by_id(con, job_ids)

    def _jobs_by_id(self, con: apsw.Connection, job_ids: Sequence[str]) -> list[Job]:
        return self._jobs(con, self._sql["jobs_by_id"], listed(job_ids))

    def _jobs(self, con: apsw.Connection, source: str, *values: Any) -> list[Job]:
        rows: list[Any] = con.execute(f"{self._sql['job_columns']} {source}", values).fetchall()
        return [
            job_from(
                row[: ADMISSION_CLASS + 1],
                row[ADMISSION_CLASS + 1 :],
                self._classes.admission_class(con, row[ADMISSION_CLASS]),
            )
            for row in rows
        ]

    def find(self, query: Query) -> list[Job]:
        sql, values = find_sql(query)
        with self._reading() as con:
            return self._jobs(con, sql, *values)

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None:
        with self._reading() as con:
            return next(self._named(con, dispatch_id), None)

    def attempts(self, job_id: JobId) -> list[Dispatch]:
        with self._reading() as con:
            tried = self._dispatches(con, "d.number = (SELECT no FROM job WHERE job_id = ?)", job_id)
            return sorted(tried, key=lambda dispatch: dispatch.fence)

    def live(
        self, *, addon_id: AddonId | None = None, phases: Collection[DispatchPhase] = (), limit: int = 1_000
    ) -> list[Dispatch]:
        where = "d.phase <> 'ended'"
        values: list[Any] = []
        if addon_id is not None:
            where += " AND d.addon_id = ?"
            values.append(addon_id)
        if phases:
            where += f" AND d.phase IN ({', '.join('?' * len(phases))})"
            values += phases
        with self._reading() as con:
            where = f"{where} ORDER BY d.admitted_at, d.dispatch_id LIMIT ?"
            return list(self._dispatches(con, where, *values, limit))

    def _named(self, con: apsw.Connection, dispatch_id: str) -> Iterator[Dispatch]:
        job_id, fence = parts_of(dispatch_id)
        if fence:
            where = "d.number = (SELECT no FROM job WHERE job_id = ?) AND d.fence = ?"
            return self._dispatches(con, where, job_id, fence)
        return self._dispatches(con, "d.standalone_lease = ?", dispatch_id)

    def _dispatches(self, con: apsw.Connection, where: str, *values: Any) -> Iterator[Dispatch]:
        rows: list[Any] = con.execute(f"{self._sql['dispatch_columns']} WHERE {where}", values).fetchall()
        for row in rows:
            yield dispatch_from(row, self._classes.admission_class(con, row[-1]))

    def checkpoint(self, job_id: JobId) -> str | None:
        with self._reading() as con:
            row = one(con, "checkpoint", {"job_id": job_id})
        return None if row is None else str(row[0])

    def events(self, after: int, limit: int, job_id: JobId | None = None) -> list[Event]:
        if job_id is None:
            return self._events("events", {"after": after}, limit, lambda event: event.seq > after)
        return self._events(
            "events_of_job",
            {"job_id": job_id},
            limit,
            lambda event: event.job_id == job_id and event.n > after,
        )

    def events_of(self, kinds: Collection[EventKind], after: int, limit: int) -> list[Event]:
        values = {"kinds": listed([*kinds]), "after": after}
        return self._events(
            "events_of", values, limit, lambda event: event.seq > after and event.kind in kinds
        )

    def _events(
        self, name: str, values: dict[str, Any], limit: int, wanted: Callable[[Event], bool]
    ) -> list[Event]:
        """Reads batch by batch, until there are enough."""
        with self._reading() as con, closing(con.execute(self._sql[name], values)) as batches:
            events = (event for before, text in batches for event in unpack(before, text))
            return list(islice(filter(wanted, events), limit))

    def newest(self) -> int:
        with self._reading() as con:
            (seq,) = one(con, "newest")
        return int(seq)

    def addons(self) -> list[Addon]:
        with self._reading() as con:
            jobs: dict[str, dict[JobState, int]] = {}
            for addon_id, state, count in query(con, "tally"):
                jobs.setdefault(addon_id, {})[JobState(state)] = count
            accounts = {row[0]: row[1:] for row in query(con, "addons")}
        return [
            Addon(AddonId(name), weight, bool(paused), average, units, jobs.get(name, {}))
            for name in sorted(accounts.keys() | jobs.keys())
            for weight, paused, average, units, _ in [accounts.get(name, (100, 0, 0.0, 0, 0))]
        ]

    # for the maintenance

    def overdue(self, limit: int) -> list[Overdue]:
        now = {"now": self._clock(), "most": limit}
        late: list[Overdue] = []
        with self._reading() as con:
            for due, name in ((Due.EXPIRED, "expired"), (Due.STOP, "to_stop")):
                for no, fence in list(query(con, name, now)):
                    dispatch = next(self._dispatches(con, "d.number = ? AND d.fence = ?", no, fence))
                    job = None if dispatch.job_id is None else self._jobs_by_id(con, [dispatch.job_id])[0]
                    late.append(Overdue(due, job, dispatch))
            past = [job_id for (job_id,) in query(con, "past_deadline", now)]
            late += [Overdue(Due.DEADLINE, job, None) for job in self._jobs_by_id(con, past)]
        return late[:limit]

    def alarm(self) -> Moment | None:
        with self._reading() as con:
            (moment,) = one(con, "alarm")
        return None if moment is None else int(moment)

    def audit(self) -> list[str]:
        with self._reading() as con:
            return list(audit(partial(query, con), partial(self._classes.admission_class, con)))

    def hosts(self) -> list[Host]:
        with self._reading() as con:
            return [host_from(row) for row in query(con, "hosts")]
