"""The reads of PostgreSQL that differ from SQLite's: the round's view, lists, and the numbering of events."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar

from penstock.core.jobs.admission import Ledger, windows
from penstock.core.jobs.job import Job
from penstock.core.jobs.round import AdmissionView
from penstock.core.jobs.states import IN_FLIGHT, SETTLED, JobState
from penstock.core.jobs.types import DispatchId, HostId, Moment
from penstock.core.text import ascii_lower
from penstock.stores.api import MOST_SEARCHED, Query, among_newest
from penstock.stores.common.reads import SqlReads, like_pattern
from penstock.stores.common.rows import spent_from, statements
from penstock.stores.postgres.admission_view import (
    Heads,
    PostgresAdmissionClasses,
    PostgresAdmissionView,
    accounts_from,
    add_rows,
)
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import array

T = TypeVar("T")
#: How many rows of each ready queue `read_view` reads at first.
LOOK: Final = 16
#: How many batches of events one statement reads.
PIECE: Final = 100
_JOBS: Final = statements("postgres")["job_columns"]


class PostgresReads(SqlReads[DatabaseSession]):
    def __init__(self, database: Database, classes: PostgresAdmissionClasses) -> None:
        super().__init__(classes, database.given_now)
        self.database, self.now = database, database.now

    def _snapshot(self, work: Callable[[DatabaseSession], T]) -> T:
        return self.database.snapshot(work)

    def _query(self, name: str, values: Any = None) -> list[Any]:
        return self.database.query(name, values)

    def _batches(self, name: str, values: dict[str, Any]) -> Generator[tuple[int, str], None, None]:
        """
        Batches of events. Readers number the events, so all that were committed before this call are
        included.
        """
        self._number()
        values = {"most": PIECE} | values | {"kinds": array(values.get("kinds", ()))}
        while rows := self._query(name, values):
            for before, text, until in rows:
                yield before, text
                values["after"] = until

    def _dispatch_rows(self, session: DatabaseSession, dispatch_ids: Sequence[DispatchId]) -> list[Any]:
        return session.execute("dispatches_by_id", {"ids": array(dispatch_ids)})

    def _number(self) -> None:
        while self.database.query("unnumbered")[0][0]:
            self.database.transact(_number)

    def read_view(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        now = self.database.now()

        def read(session: DatabaseSession) -> T:
            ledger = _read_ledger(session, host, now)
            heads = Heads(session.execute("heads", {"most": LOOK}), LOOK)
            return view(PostgresAdmissionView(session, host, now, ledger, heads, classes=self.classes))

        return self.database.snapshot(read)

    def ledger(self, host: HostId) -> Ledger:
        now = self.database.now()
        return self.database.snapshot(lambda session: _read_ledger(session, host, now))

    def find(self, query: Query) -> list[Job]:
        where, values = _where(query)
        sql = self.database.in_schema(f"{_JOBS} {where}")

        def read(session: DatabaseSession) -> list[Job]:
            return self.classes.jobs(session, session.execute_sql(sql, values))

        return self.database.snapshot(read)

    def count(self, query: Query) -> dict[JobState, int]:
        where, values = _where(among_newest(query))
        jobs = f"SELECT j.state FROM penstock.job_full j {where}"  # noqa: S608 - fixed words
        sql = self.database.in_schema(f"SELECT state, count(*) FROM ({jobs}) found GROUP BY state")  # noqa: S608 - fixed words

        def read(session: DatabaseSession) -> dict[JobState, int]:
            return {JobState(state): n for state, n in session.execute_sql(sql, values)}

        return self.database.snapshot(read)

    def trouble(self) -> str | None:
        return None  # the server reports it at the next write


#: The conditions of a query by its fields.
_CONDITIONS: Final = {
    "addon_id": "j.addon_id = %(addon_id)s",
    "job_type": "j.class_no IN (SELECT no FROM penstock.admission_class WHERE job_type = %(job_type)s)",
    "tag": "j.tags::jsonb ? %(tag)s::text",
    "part": "position(%(part)s IN j.job_id) > 0",
    "since": "j.created_at >= %(since)s",
    "before": "j.created_at < %(before)s",
    "text": """j.no > (SELECT max(no) FROM penstock.job) - %(most)s
        AND (j.class_no IN (SELECT no FROM penstock.admission_class WHERE lower(job_type COLLATE "C") LIKE %(text)s)
             OR lower(j.payload COLLATE "C") LIKE %(text)s
             OR EXISTS (SELECT 1 FROM jsonb_array_elements_text(j.tags::jsonb) tag WHERE lower(tag COLLATE "C") LIKE %(text)s)
             OR EXISTS (SELECT 1 FROM penstock.dispatch d WHERE d.dispatch_id > j.job_id || '.' AND d.dispatch_id < j.job_id || '/'
                        AND lower(d.failure COLLATE "C") LIKE %(text)s))""",
}


def _where(query: Query) -> tuple[str, dict[str, Any]]:
    """The condition, order and limit of a query. Only fixed words are composed; every value is bound."""
    where: list[str] = ["true"]
    values: dict[str, Any] = {"limit": query.limit}
    if query.states:
        where += ["j.state = ANY(%(states)s::text[])", *_by_index(frozenset(query.states))]
        values["states"] = array([str(state) for state in query.states])
    for name, condition in _CONDITIONS.items():
        if (value := getattr(query, name)) is not None:
            where.append(condition)
            values[name] = value
    if query.text is not None:
        values |= {"text": like_pattern(ascii_lower(query.text)), "most": MOST_SEARCHED}
    if query.after:
        where.append("j.no < %(after)s" if query.newest_first else "j.no > %(after)s")
        values["after"] = query.after
    order = "DESC" if query.newest_first else "ASC"
    return f"WHERE {' AND '.join(where)} ORDER BY j.no {order} LIMIT %(limit)s", values


def _by_index(states: frozenset[JobState]) -> list[str]:
    """The same condition again, in the form of an index that has such jobs and few others."""
    if states <= {JobState.QUEUED}:
        return ["j.no IN (SELECT no FROM penstock.queue)"]
    if states <= IN_FLIGHT:
        return ["j.no = ANY(ARRAY(SELECT job_no FROM penstock.dispatch_in_flight))"]
    if states <= SETTLED - {JobState.DONE}:
        return ["j.settled = ANY(%(states)s::text[]) AND j.settled <> 'DONE'"]
    return []


def _number(session: DatabaseSession) -> None:
    session.execute("lock_numbers")
    session.defer("number_events", None)
    session.defer("add_up_tally", None)


def _read_ledger(session: DatabaseSession, host: HostId, now: Moment) -> Ledger:
    day, month = windows(now)
    rows, accounts, spent = session.execute_many(
        ("ledger", None), ("addons", None), ("spent", {"day": day.name, "month": month.name})
    )
    ledger = Ledger(accounts=accounts_from(accounts), spent=spent_from(spent, day.name))
    add_rows(ledger, rows, host)
    return ledger
