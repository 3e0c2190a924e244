"""
Reads from the file. Each read has one snapshot, on a connection that never writes.

`find_sql` composes the SQL for a list of jobs, which uses an index whatever the query filters by. It composes
only fixed words; every value is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from penstock.core.errors import StoreFailed
from penstock.core.jobs.admission import Ledger
from penstock.core.jobs.job import Job
from penstock.core.jobs.round import AdmissionView
from penstock.core.jobs.states import IN_FLIGHT, JobState
from penstock.core.jobs.types import DispatchId, HostId
from penstock.stores.api import MOST_SEARCHED, Clock, Query, among_newest
from penstock.stores.common.reads import SqlReads, like_pattern
from penstock.stores.sqlite.admission import SqliteAdmissionView, ledger_from
from penstock.stores.sqlite.connection import SQL, connect, failures
from penstock.stores.sqlite.guard import FileGuard, FileLost
from penstock.stores.sqlite.transaction import (
    SqliteAdmissionClasses,
    SqliteSession,
    SqliteTotals,
    dispatch_key,
    listed,
)


def find_sql(query: Query) -> tuple[str, list[Any]]:
    if not query.states:
        end, values = _filters(query, "j", "j.no")
        return f"{SQL['all_jobs']} WHERE 1{end}", values
    # One ordered walk per state, limited to a page, so that only the jobs of the page are read whole.
    walks: list[str] = []
    values = []
    for state in query.states:
        walk, number = _walk(state)
        end, more = _filters(query, "job", number)
        walks.append(f"SELECT * FROM ({SQL[walk]}{end})")  # noqa: S608 - fixed words
        values += [str(state), *more]
    order = "DESC" if query.newest_first else "ASC"
    wanted = " UNION ALL ".join(walks)
    return f"{SQL['all_jobs']} WHERE j.no IN ({wanted}) ORDER BY j.no {order} LIMIT ?", [*values, query.limit]


def _walk(state: JobState) -> tuple[str, str]:
    """The statement that walks over the jobs of a state, and its column with the job's number."""
    if state is JobState.QUEUED:
        return "queued_jobs", "place.no"
    if state is JobState.DONE:
        return "completed_jobs", "place.job_no"
    return ("jobs_in_flight", "place.no") if state in IN_FLIGHT else ("settled_jobs", "job.no")


#: `?job` stands for the table of the jobs.
_SEARCH: Final = r"""
 AND ?job.no > (SELECT max(no) FROM job) - ?
 AND (?job.class_no IN (SELECT no FROM admission_class WHERE job_type LIKE ? ESCAPE '\')
      OR EXISTS (SELECT 1 FROM intent t WHERE t.no = ?job.no AND (
            t.payload LIKE ? ESCAPE '\' OR EXISTS (SELECT 1 FROM json_each(t.tags) WHERE value LIKE ? ESCAPE '\')))
      OR EXISTS (SELECT 1 FROM ended_dispatch e WHERE e.job_no = ?job.no AND e.failure LIKE ? ESCAPE '\'))"""


def count_sql(query: Query) -> tuple[str, list[Any]]:
    end, values = _filters(among_newest(query), "j", "j.no")
    jobs = f"SELECT j.state FROM job_full j WHERE 1{end}"  # noqa: S608 - fixed words
    return f"SELECT state, count(*) FROM ({jobs}) GROUP BY state", values  # noqa: S608 - fixed words


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
    if query.since is not None:
        where += f" AND {of}.created_at >= ?"
        values.append(query.since)
    if query.before is not None:
        where += f" AND {of}.created_at < ?"
        values.append(query.before)
    if query.text is not None:
        where += _SEARCH.replace("?job", of)
        values += [MOST_SEARCHED, *[like_pattern(query.text)] * 4]
    # One bound in each direction: of two the index would use only the first. Numbers below 0 are leases
    # without a job.
    where += f" AND {number} > ?"
    values.append(0 if query.newest_first else query.after)
    if query.newest_first and query.after:
        where += f" AND {number} < ?"
        values.append(query.after)
    order = "DESC" if query.newest_first else "ASC"
    return f"{where} ORDER BY {number} {order} LIMIT ?", [*values, query.limit]


T = TypeVar("T")
_IDLE_READERS: Final = 8


class SqliteReads(SqlReads[SqliteSession]):
    classes: SqliteAdmissionClasses
    _guard: FileGuard

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(SqliteAdmissionClasses(), clock)
        self._path, self.now, self._failures = path, clock, failures(path)
        self._readers: SimpleQueue[SqliteSession] = SimpleQueue()

    def _close_readers(self) -> None:
        while not self._readers.empty():
            self._readers.get().con.close()

    @contextmanager
    def _reading(self) -> Iterator[SqliteSession]:
        """A snapshot on a read-only connection."""
        try:
            session = self._idle_reader() or self._new_reader()
            session.con.execute("BEGIN DEFERRED")
            try:
                yield session
            finally:
                session.con.execute("ROLLBACK")
                if self._readers.qsize() < _IDLE_READERS:
                    self._readers.put(session)
                else:
                    session.con.close()
        except Exception as error:
            self._failures.__exit__(None, error, None)
            raise

    def _idle_reader(self) -> SqliteSession | None:
        try:
            return self._readers.get_nowait()
        except Empty:
            return None

    def _new_reader(self) -> SqliteSession:
        """
        A new connection, after a check that the file's name still leads to the file that this process writes.
        """
        try:
            self._guard.check_main()
        except FileLost as lost:
            raise StoreFailed(f"{lost.what}: end every process that uses it", kind=lost.kind) from None
        return SqliteSession(connect(self._path, readonly=True))

    def _snapshot(self, work: Callable[[SqliteSession], T]) -> T:
        with self._reading() as session:
            return work(session)

    def _query(self, name: str, values: Any = None) -> list[Any]:
        with self._reading() as session:
            return session.execute(name, values)

    def _batches(self, name: str, values: dict[str, Any]) -> Generator[tuple[int, str], None, None]:
        if "kinds" in values:
            values["kinds"] = listed(values["kinds"])
        with self._reading() as session, closing(session.con.execute(SQL[name], values)) as batches:
            rows: Any = batches
            yield from rows

    def _dispatch_rows(self, session: SqliteSession, dispatch_ids: Sequence[DispatchId]) -> list[Any]:
        return [
            row for each in dispatch_ids for row in session.execute("dispatches_by_id", dispatch_key(each))
        ]

    def read_view(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        with self._reading() as session:
            now = self.now()
            ledger = ledger_from(session, SqliteTotals(session).read(), host, now)
            admission_view = SqliteAdmissionView(session, host, now, self.classes, ledger)
            try:
                return view(admission_view)
            finally:
                admission_view.close()

    def ledger(self, host: HostId) -> Ledger:
        with self._reading() as session:
            return ledger_from(session, SqliteTotals(session).read(), host, self.now())

    def find(self, query: Query) -> list[Job]:
        sql, values = find_sql(query)
        with self._reading() as session:
            return self.classes.jobs(session, session.con.execute(sql, values).fetchall())

    def count(self, query: Query) -> dict[JobState, int]:
        sql, values = count_sql(query)
        with self._reading() as session:
            return {JobState(state): n for state, n in session.con.execute(sql, values)}
