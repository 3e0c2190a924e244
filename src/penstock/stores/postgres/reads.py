"""The reads of the PostgreSQL store: jobs, dispatches, events, and what maintenance asks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, TypeVar

from penstock.core.jobs.admission import Ledger, windows
from penstock.core.jobs.job import Dispatch, Event, EventKind, Job
from penstock.core.jobs.load import Host
from penstock.core.jobs.round import AdmissionView
from penstock.core.jobs.states import IN_FLIGHT, SETTLED, DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment
from penstock.stores.api import Addon, Due, Overdue, Query
from penstock.stores.common.rows import audit, host_from, spent_from, statements, unpack
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
#: How many rows of each ready queue `look` reads at first.
LOOK: Final = 16
#: How many batches are searched at a time for certain kinds of events.
PIECE: Final = 100
_JOBS: Final = statements("postgres")["job_columns"]
_DISPATCHES: Final = statements("postgres")["dispatch_columns"]


class PostgresReads:
    def __init__(self, database: Database, classes: PostgresAdmissionClasses) -> None:
        self.database, self.classes = database, classes

    def now(self) -> Moment:
        return self.database.now()

    def look(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        now = self.database.now()

        def read(session: DatabaseSession) -> T:
            ledger = _read_ledger(session, host, now)
            heads = Heads(session.execute("heads", {"now": now, "most": LOOK}), LOOK)
            return view(PostgresAdmissionView(session, host, now, ledger, heads, classes=self.classes))

        return self.database.snapshot(read)

    def ledger(self, host: HostId) -> Ledger:
        now = self.database.now()
        return self.database.snapshot(lambda session: _read_ledger(session, host, now))

    # jobs and dispatches

    def job(self, job_id: JobId) -> Job | None:
        return next(iter(self.jobs([job_id])), None)

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        jobs = self.database.snapshot(lambda session: self._jobs(session, job_ids))
        return [jobs[job_id] for job_id in job_ids if job_id in jobs]

    def _jobs(self, session: DatabaseSession, job_ids: Sequence[JobId]) -> dict[JobId, Job]:
        rows = session.execute("jobs_by_id", {"ids": array(job_ids)})
        return {job.job_id: job for job in self.classes.jobs(session, rows)}

    def find(self, query: Query) -> list[Job]:
        where: list[str] = ["true"]
        values: dict[str, Any] = {"limit": query.limit}
        if query.states:
            where += ["j.state = ANY(%(states)s::text[])", *_by_index(frozenset(query.states))]
            values["states"] = array([str(state) for state in query.states])
        for name, condition in _CONDITIONS.items():
            if (value := getattr(query, name)) is not None:
                where.append(condition)
                values[name] = value
        if query.after:
            where.append("j.no < %(after)s" if query.newest_first else "j.no > %(after)s")
            values["after"] = query.after
        order = "DESC" if query.newest_first else "ASC"
        # Only fixed words are put together here; every value is bound.
        sql = f"{_JOBS} WHERE {' AND '.join(where)} ORDER BY j.no {order} LIMIT %(limit)s"

        def read(session: DatabaseSession) -> list[Job]:
            return self.classes.jobs(session, session.execute_sql(self.database.in_schema(sql), values))

        return self.database.snapshot(read)

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None:
        dispatches = self.database.snapshot(lambda session: self._dispatches(session, [dispatch_id]))
        return dispatches.get(dispatch_id)

    def _dispatches(
        self, session: DatabaseSession, dispatch_ids: Sequence[DispatchId]
    ) -> dict[DispatchId, Dispatch]:
        rows = session.execute("dispatches_by_id", {"ids": array(dispatch_ids)})
        return {dispatch.dispatch_id: dispatch for dispatch in self.classes.dispatches(session, rows)}

    def _dispatches_where(self, where: str, values: dict[str, Any]) -> list[Dispatch]:
        sql = self.database.in_schema(f"{_DISPATCHES} WHERE {where}")
        return self.database.snapshot(
            lambda session: self.classes.dispatches(session, session.execute_sql(sql, values))
        )

    def attempts(self, job_id: JobId) -> list[Dispatch]:
        where = "d.dispatch_id > %(from)s AND d.dispatch_id < %(to)s ORDER BY d.fence"
        return self._dispatches_where(where, {"from": f"{job_id}.", "to": f"{job_id}/"})

    def live(
        self, *, addon_id: AddonId | None = None, phases: Collection[DispatchPhase] = (), limit: int = 1_000
    ) -> list[Dispatch]:
        where = ["d.dispatch_id = ANY(ARRAY(SELECT dispatch_id FROM penstock.dispatch_in_flight))"]
        values: dict[str, Any] = {"limit": limit}
        if addon_id is not None:
            where.append("d.addon_id = %(addon_id)s")
            values["addon_id"] = addon_id
        if phases:
            where.append("d.phase = ANY(%(phases)s::text[])")
            values["phases"] = array([str(phase) for phase in phases])
        order = "ORDER BY d.admitted_at, d.dispatch_id LIMIT %(limit)s"
        return self._dispatches_where(f"{' AND '.join(where)} {order}", values)

    def checkpoint(self, job_id: JobId) -> str | None:
        rows = self.database.query("checkpoint", {"job_id": job_id})
        return str(rows[0][0]) if rows else None

    def addons(self) -> list[Addon]:
        tally, rows = self.database.snapshot(
            lambda session: session.execute_many(("tally", None), ("addons", None))
        )
        jobs: dict[str, dict[JobState, int]] = {}
        for addon_id, state, count in tally:
            jobs.setdefault(addon_id, {})[JobState(state)] = count
        known = {row[0]: row[1:] for row in rows}
        return [
            Addon(AddonId(name), weight, bool(paused), average, units, jobs.get(name, {}))
            for name in sorted(known.keys() | jobs.keys())
            for weight, paused, average, units, _ in [known.get(name, (100, 0, 0.0, 0, 0))]
        ]

    def hosts(self) -> list[Host]:
        return [host_from(row) for row in self.database.query("hosts")]

    # the trail

    def events(self, after: int, limit: int, job_id: JobId | None = None) -> list[Event]:
        """A reader numbers the events: those that were committed before this call are in the answer."""
        self._number()
        if job_id is None:
            return self._read_on("events", {"most": limit}, after, limit, lambda _: True)
        rows = self.database.query("events_of_job", {"job_id": job_id})
        events = [e for row in rows for e in unpack(*row) if e.job_id == job_id and e.n > after]
        return sorted(events, key=lambda event: event.n)[:limit]

    def events_of(self, kinds: Collection[EventKind], after: int, limit: int) -> list[Event]:
        self._number()
        values = {"kinds": array([str(kind) for kind in kinds]), "most": PIECE}
        return self._read_on("events_of", values, after, limit, lambda event: event.kind in kinds)

    def _read_on(
        self,
        name: str,
        values: dict[str, Any],
        after: int,
        limit: int,
        wanted: Callable[[Event], bool],
    ) -> list[Event]:
        """Batch by batch, until there are enough: pruned events leave gaps in the batches."""
        events: list[Event] = []
        read = after
        while len(events) < limit and (rows := self.database.query(name, values | {"after": read})):
            for before, text, read in rows:  # noqa: B007 - where the next query goes on
                events += [event for event in unpack(before, text) if event.seq > after and wanted(event)]
        return events[:limit]

    def newest(self) -> int:
        self._number()
        return int(self.database.query("newest")[0][0])

    def _number(self) -> None:
        while self.database.query("unnumbered")[0][0]:
            self.database.transact(_number)

    # for maintenance

    def overdue(self, limit: int) -> list[Overdue]:
        when = {"now": self.database.given_now(), "most": limit}
        return self.database.snapshot(lambda session: list(self._overdue(session, when)))[:limit]

    def _overdue(self, session: DatabaseSession, when: dict[str, Any]) -> Iterator[Overdue]:
        expired, to_stop, late = session.execute_many(
            ("expired", when), ("to_stop", when), ("past_deadline", when)
        )
        named = [dispatch_id for (dispatch_id,) in (*expired, *to_stop)]
        dispatches = self._dispatches(session, named) if named else {}
        jobs_named = [d.job_id for d in dispatches.values() if d.job_id is not None]
        jobs_named += [job_id for (job_id,) in late]
        jobs = self._jobs(session, jobs_named) if jobs_named else {}
        for due, rows in ((Due.EXPIRED, expired), (Due.STOP, to_stop)):
            for (dispatch_id,) in rows:
                dispatch = dispatches[dispatch_id]
                yield Overdue(due, None if dispatch.job_id is None else jobs[dispatch.job_id], dispatch)
        for (job_id,) in late:
            yield Overdue(Due.DEADLINE, jobs[job_id], None)

    def alarm(self) -> Moment | None:
        [(moment,)] = self.database.query("alarm", {"now": self.database.given_now()})
        return None if moment is None else int(moment)

    def trouble(self) -> str | None:
        return None  # the server reports it at the next write

    def audit(self) -> list[str]:
        def check(session: DatabaseSession) -> list[str]:
            return list(audit(session.execute, lambda no: self.classes.read(session, [no])[no]))

        return self.database.snapshot(check)


#: The conditions of a query by its fields.
_CONDITIONS: Final = {
    "addon_id": "j.addon_id = %(addon_id)s",
    "job_type": "j.class_no IN (SELECT no FROM penstock.admission_class WHERE job_type = %(job_type)s)",
    "tag": "j.tags::jsonb ? %(tag)s::text",
    "part": "position(%(part)s IN j.job_id) > 0",
}


def _by_index(states: frozenset[JobState]) -> list[str]:
    """The same condition again, in the form of the index that has such jobs and few others."""
    if states <= {JobState.QUEUED}:
        return ["j.queued IS NOT NULL"]
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
