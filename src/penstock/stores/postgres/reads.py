"""What is asked of the database without changing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from penstock.core.jobs.admission import Ledger
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import Dispatch, Event, EventKind, Job
from penstock.core.jobs.load import Host
from penstock.core.jobs.ordering import AdmissionView
from penstock.core.jobs.states import IN_FLIGHT, SETTLED, DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment
from penstock.stores.api import Addon, Due, Overdue, Query
from penstock.stores.common.rows import (
    ADMISSION_CLASS,
    audit,
    dispatch_from,
    host_from,
    job_from,
    statements,
    unpack,
)
from penstock.stores.postgres.admission_view import Heads, PostgresAdmissionView, read_ledger_rows
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import array
from penstock.stores.postgres.write_batch import PostgresAdmissionClasses

T = TypeVar("T")
#: How much of each line is read at first by those who only look.
LOOK: Final = 16
#: Batches that are looked through at a time for certain kinds of events.
PIECE: Final = 100
_JOBS: Final = statements("postgres")["job_columns"]
_DISPATCHES: Final = statements("postgres")["dispatch_columns"]


class PostgresReads:
    def __init__(self, link: Database, demands: PostgresAdmissionClasses) -> None:
        self._link, self._demands = link, demands

    def now(self) -> Moment:
        return self._link.now()

    def look(self, host: HostId, view: Callable[[AdmissionView], T]) -> T:
        now = self._link.now()

        def seen(session: DatabaseSession) -> T:
            ledger = read_ledger_rows(session, host, now)
            heads = Heads(session.ask("heads", {"now": now, "most": LOOK}), LOOK)
            return view(PostgresAdmissionView(session, host, now, ledger, heads, demands=self._demands))

        return self._link.snapshot(seen)

    def ledger(self, host: HostId) -> Ledger:
        now = self._link.now()
        return self._link.snapshot(lambda session: read_ledger_rows(session, host, now))

    # jobs and dispatches

    def job(self, job_id: JobId) -> Job | None:
        return next(iter(self.jobs([job_id])), None)

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        found = self._link.snapshot(lambda session: self._jobs(session, job_ids))
        return [found[job_id] for job_id in job_ids if job_id in found]

    def _jobs(self, session: DatabaseSession, job_ids: Sequence[JobId]) -> dict[JobId, Job]:
        where = "WHERE j.job_id = ANY(%(ids)s::text[])"
        return {job.job_id: job for job in self._jobs_where(session, where, {"ids": array(job_ids)})}

    def _jobs_where(self, session: DatabaseSession, where: str, values: dict[str, Any]) -> list[Job]:
        rows = session.plain(self._link.in_schema(f"{_JOBS} {where}"), values)
        return self._jobs_from(rows, self._demands.of(session, {row[ADMISSION_CLASS] for row in rows}))

    def _jobs_from(self, rows: Sequence[Any], demands: Mapping[int, AdmissionClass]) -> list[Job]:
        return [
            job_from(row[: ADMISSION_CLASS + 1], row[ADMISSION_CLASS + 1 :], demands[row[ADMISSION_CLASS]])
            for row in rows
        ]

    def find(self, query: Query) -> list[Job]:
        where: list[str] = ["true"]
        values: dict[str, Any] = {"limit": query.limit}
        if query.states:
            where += ["j.state = ANY(%(states)s::text[])", *_by_index(frozenset(query.states))]
            values["states"] = array([str(state) for state in query.states])
        if query.addon_id is not None:
            where.append("j.addon_id = %(addon_id)s")
            values["addon_id"] = query.addon_id
        if query.job_type is not None:
            where.append(
                "j.class_no IN (SELECT no FROM penstock.admission_class WHERE job_type = %(job_type)s)"
            )
            values["job_type"] = query.job_type
        if query.tag is not None:
            where.append("j.tags::jsonb ? %(tag)s::text")
            values["tag"] = query.tag
        if query.part is not None:
            where.append("position(%(part)s IN j.job_id) > 0")
            values["part"] = query.part
        if query.after:
            where.append("j.no < %(after)s" if query.newest_first else "j.no > %(after)s")
            values["after"] = query.after
        order = "DESC" if query.newest_first else "ASC"
        # Only fixed words are put together here; every value is bound.
        sql = f"WHERE {' AND '.join(where)} ORDER BY j.no {order} LIMIT %(limit)s"
        return self._link.snapshot(lambda session: self._jobs_where(session, sql, values))

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None:
        found = self._link.snapshot(lambda session: self._dispatches(session, [dispatch_id]))
        return found.get(dispatch_id)

    def _dispatches(
        self, session: DatabaseSession, dispatch_ids: Sequence[DispatchId]
    ) -> dict[DispatchId, Dispatch]:
        where = "WHERE d.dispatch_id = ANY(%(ids)s::text[])"
        return {
            d.dispatch_id: d for d in self._dispatches_where(session, where, {"ids": array(dispatch_ids)})
        }

    def _dispatches_where(
        self, session: DatabaseSession, where: str, values: dict[str, Any]
    ) -> list[Dispatch]:
        rows = session.plain(self._link.in_schema(f"{_DISPATCHES} {where}"), values)
        demands = self._demands.of(session, {row[-1] for row in rows})
        return [dispatch_from(row, demands[row[-1]]) for row in rows]

    def attempts(self, job_id: JobId) -> list[Dispatch]:
        where = "WHERE d.dispatch_id > %(from)s AND d.dispatch_id < %(to)s ORDER BY d.fence"
        values = {"from": f"{job_id}.", "to": f"{job_id}/"}
        return self._link.snapshot(lambda session: self._dispatches_where(session, where, values))

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
        sql = f"WHERE {' AND '.join(where)} ORDER BY d.admitted_at, d.dispatch_id LIMIT %(limit)s"
        return self._link.snapshot(lambda session: self._dispatches_where(session, sql, values))

    def checkpoint(self, job_id: JobId) -> str | None:
        rows = self._link.glance("checkpoint", {"job_id": job_id})
        return str(rows[0][0]) if rows else None

    def addons(self) -> list[Addon]:
        tally, rows = self._link.snapshot(lambda session: session.together(("tally", None), ("addons", None)))
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
        return [host_from(row) for row in self._link.glance("hosts")]

    # the trail

    def events(self, after: int, limit: int, job_id: JobId | None = None) -> list[Event]:
        """Whoever reads numbers: what was committed before this call is in the answer."""
        self._number()
        if job_id is None:
            return self._read_on("events", {"most": limit}, after, limit, lambda _: True)
        rows = self._link.glance("events_of_job", {"job_id": job_id})
        told = [e for row in rows for e in unpack(*row) if e.job_id == job_id and e.n > after]
        return sorted(told, key=lambda event: event.n)[:limit]

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
        """Batch by batch, as far as it takes: what is forgotten left holes in them."""
        found: list[Event] = []
        read = after
        while len(found) < limit and (rows := self._link.glance(name, values | {"after": read})):
            for before, text, read in rows:  # noqa: B007 - where the next look goes on
                found += [event for event in unpack(before, text) if event.seq > after and wanted(event)]
        return found[:limit]

    def newest(self) -> int:
        self._number()
        return int(self._link.glance("newest")[0][0])

    def _number(self) -> None:
        while self._link.glance("unnumbered")[0][0]:
            self._link.transact(_number)

    # what the maintenance asks

    def overdue(self, limit: int) -> list[Overdue]:
        when = {"now": self._link.handed(), "most": limit}
        return self._link.snapshot(lambda session: list(self._overdue(session, when)))[:limit]

    def _overdue(self, session: DatabaseSession, when: dict[str, Any]) -> Iterator[Overdue]:
        expired, to_stop, late = session.together(
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
        [(moment,)] = self._link.glance("alarm", {"now": self._link.handed()})
        return None if moment is None else int(moment)

    def trouble(self) -> str | None:
        return None  # a server says so at the next write

    def audit(self) -> list[str]:
        def check(session: DatabaseSession) -> list[str]:
            return list(audit(session.ask, lambda no: self._demands.of(session, [no])[no]))

        return self._link.snapshot(check)


def _by_index(states: frozenset[JobState]) -> list[str]:
    """The same once more, in the words of the index that holds such jobs and few others."""
    if states <= {JobState.QUEUED}:
        return ["j.queued IS NOT NULL"]
    if states <= IN_FLIGHT:
        return ["j.no = ANY(ARRAY(SELECT job_no FROM penstock.dispatch_in_flight))"]
    if states <= SETTLED - {JobState.DONE}:
        return ["j.settled = ANY(%(states)s::text[]) AND j.settled <> 'DONE'"]
    return []


def _number(session: DatabaseSession) -> None:
    session.ask("lock_numbers")
    session.leave("number_events", None)
    session.leave("add_up_tally", None)
