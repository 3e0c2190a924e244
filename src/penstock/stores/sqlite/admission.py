"""
Admission on SQLite: what a round sees, and how what it starts is written.

A round sees the ledger and one lazy line per admission class. A line is an open cursor on the order index: a round pulls
the head of each and goes further only behind what it starts, so the database never reads a row that was not weighed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, starmap
from operator import attrgetter
from typing import Any, Final, cast

import apsw

from penstock.core.jobs.admission import Ledger, windows
from penstock.core.jobs.changes import Note
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.ordering import QueuedJob, ready_at
from penstock.core.jobs.round import (
    Pick,
    Placement,
    ReadyQueue,
    RoundResult,
    RunningJob,
    running_data,
    stop_moment,
)
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import DispatchId, HostId, Moment
from penstock.stores.api import Admit, Grant, Terms
from penstock.stores.common.rows import (
    ADMISSION_CLASS,
    Queued,
    encode,
    job_from,
    listed,
    new_dispatch,
    spent_from,
)
from penstock.stores.sqlite.connection import one, query, statements
from penstock.stores.sqlite.transaction import (
    NO_JOB,
    EventJob,
    GrantedLease,
    SqliteAdmissionClasses,
    SqliteTotals,
    Transaction,
)

#: How many jobs whose time has come step into line in one transaction.
STEPS: Final = 5_000
#: As they are written: a word costs the encoder half of what the enumeration's member does.
_DISPATCHING, _RUNNING = str(EventKind.DISPATCHING), str(EventKind.RUNNING)
_IS_DISPATCHING, _IS_RUNNING = str(JobState.DISPATCHING), str(JobState.RUNNING)


def ledger_from(con: apsw.Connection, totals: SqliteTotals, host: HostId, now: Moment) -> Ledger:
    day, month = windows(now)
    spent = spent_from(query(con, "spent", {"day": day.name, "month": month.name}), day.name)
    units, running = totals.ledger.get(("host", host), (0, 0))
    counts = {key: n for key, (_, n) in totals.ledger.items() if n and key[0] != "host"}
    return Ledger(units, running, counts, totals.accounts, spent)


class SqliteAdmissionView:
    def __init__(
        self, con: apsw.Connection, host: HostId, now: Moment, classes: SqliteAdmissionClasses, ledger: Ledger
    ) -> None:
        self.now, self.ledger = now, ledger
        self._con, self._host, self._classes = con, host, classes
        self._open: list[apsw.Cursor] = []

    def lines(self) -> Iterator[ReadyQueue]:
        class_no = line = 0
        while row := one(self._con, "next_line", {"class_no": class_no, "line": line}):
            class_no, line = row
            cursor = self._con.execute(statements()["in_line"], {"class_no": class_no, "line": line})
            self._open.append(cursor)
            jobs: Iterator[QueuedJob] = starmap(Queued, cursor)
            yield ReadyQueue(self._classes.admission_class(self._con, class_no), line == 2, jobs)

    def running(self) -> Sequence[RunningJob]:
        return [RunningJob(*row) for row in query(self._con, "running", {"host": self._host})]

    def close(self) -> None:
        """Before anything is written: an open cursor would walk over rows that move."""
        for cursor in self._open:
            cursor.close(True)


def admit(tx: Transaction, admit: Admit) -> list[Grant]:
    tx.flush_jobs()
    # Read first: an UPDATE that changes nothing costs fifty times what this does, and nearly always nothing is due.
    due = list(query(tx.con, "due_jobs", {"now": tx.now, "most": STEPS}))
    if due:
        tx.con.executemany(statements()["step_into_line"], due)
    ledger = ledger_from(tx.con, tx.totals, admit.host, tx.now)
    view = SqliteAdmissionView(tx.con, admit.host, tx.now, tx.classes, ledger)
    try:
        result = admit.run_round(view)
    finally:
        view.close()
    _deny(tx, result)
    grants = _start(tx, result.picks, admit.host, admit.terms)
    if result.standalone_lease is not None:
        grants.append(Grant(_start_standalone_lease(tx, result.standalone_lease, admit.host, admit.terms)))
    if admit.preview is not None:
        tx.previews.append(partial(admit.preview, grants))
    return grants


def _deny(tx: Transaction, result: RoundResult) -> None:
    rows = []
    for denial in result.denials:
        queued, code, data = cast("Queued", denial.waiting), denial.reason.code, denial.as_json()
        n = queued.events + 1
        job = EventJob(queued.no, queued.job_id, n, JobState.QUEUED)
        tx.add_note(tx.now, Note(EventKind.DENIED, code, data), job)
        rows.append((code, encode(data) or "{}", tx.now, n, queued.no))
    if rows:
        tx.con.executemany(statements()["deny_jobs"], rows)
    if result.passed:
        tx.con.executemany(statements()["pass_jobs"], [(tx.now, queued.no) for queued in result.passed])


def _start(tx: Transaction, picks: Sequence[Pick], host: HostId, terms: Terms) -> list[Grant]:
    """What a round has picked becomes dispatches, in its order. A leased job runs from now on, and its worker gets the job."""
    grants: list[Grant] = []
    for _, alike in groupby(picks, attrgetter("admission_class", "offer")):
        grants += _start_alike(tx, list(alike), host, terms)
    return grants


def _start_alike(tx: Transaction, picks: Sequence[Pick], host: HostId, terms: Terms) -> list[Grant]:
    """Picks of one admission class and placement."""
    admission_class, offer = picks[0].admission_class, picks[0].offer
    class_no, leased = tx.classes.number(tx.con, admission_class), offer is Placement.LEASE
    nos = listed([pick.waiting.no for pick in picks])
    jobs = _jobs(tx, nos, admission_class) if leased else {}
    leases, kind = tx.totals.leases, (class_no, str(host))
    grants: list[Grant] = []
    rows: list[tuple[Any, ...]] = []
    plain: list[int] = []
    events: list[tuple[Any, ...]] = []
    for pick in picks:
        queued = cast("Queued", pick.waiting)
        job_id, n, attempt = queued.job_id, queued.events + 1, str(queued.fence + 1)
        dispatch = new_dispatch(
            DispatchId(f"{job_id}.{attempt}"),
            queued,
            admission_class,
            offer,
            terms,
            host=host,
            now=tx.now,
            ends_at=pick.ends_at,
            limits=stop_moment(queued.max_runtime_sec, queued.max_active_sec, queued.active, tx.now),
        )
        events.append((tx.now, _DISPATCHING, job_id, n, _IS_DISPATCHING, "admitted", attempt, None))
        if leased:
            n += 1
            waited = tx.now - ready_at(queued.turn, queued.priority, tx.ordering.aging)
            data = running_data(terms.worker, waited)
            events.append((tx.now, _RUNNING, job_id, n, _IS_RUNNING, "", attempt, data))
            leases[dispatch.dispatch_id] = GrantedLease(queued.no, n, dispatch.expires_at, kind)
        if leased and dispatch.ends_at is None and dispatch.stop_at is None:
            plain.append(queued.no)
        else:
            rows.append(_dispatch_row(dispatch, queued.no, class_no, n, tx.batch))
        grants.append(Grant(dispatch, jobs.get(queued.no)))
    tx.add_events(*events)
    if plain:
        lease = (class_no, host, tx.batch, tx.now, tx.now + terms.lease_for, terms.worker, listed(plain))
        tx.write("insert_leases", lease, len(plain))
    tx.insert("insert_dispatches", rows)
    tx.write("leave_queue", (nos,), len(picks))
    tx.totals.hold(host, admission_class, len(picks))
    state = JobState.RUNNING if leased else JobState.DISPATCHING
    tx.totals.move(admission_class.addon_id, JobState.QUEUED, state, len(picks))
    return grants


def _jobs(tx: Transaction, nos: str, admission_class: AdmissionClass) -> dict[int, Job]:
    """Jobs that start, as they are when they run. They may be large, so no other job is read like this."""
    rows: list[Any] = tx.con.execute(statements()["starting_jobs"], (nos,)).fetchall()
    at = ADMISSION_CLASS + 1
    return {row[0]: job_from(row[:at], row[at:], admission_class) for row in rows}


def _dispatch_row(d: Dispatch, no: int, class_no: int, events: int, batch: int | None) -> tuple[Any, ...]:
    name = None if no > 0 else d.dispatch_id
    return (
        no, name, class_no, d.host, d.fence, d.phase, events, batch, d.admitted_at, d.started_at, d.expires_at, d.ends_at,
        d.stop_at, d.stop_for, d.worker,
    )  # fmt: skip


def _start_standalone_lease(
    tx: Transaction, admission_class: AdmissionClass, host: HostId, terms: Terms
) -> Dispatch:
    dispatch_id = DispatchId(f"{tx.new_id()}.0")
    dispatch = new_dispatch(dispatch_id, None, admission_class, Placement.LEASE, terms, host=host, now=tx.now)
    class_no, (no,) = tx.classes.number(tx.con, admission_class), one(tx.con, "next_standalone_lease")
    tx.insert("insert_dispatches", [_dispatch_row(dispatch, no, class_no, 0, None)])
    tx.totals.hold(host, admission_class, 1)
    tx.totals.account(admission_class.addon_id)  # the round has changed it
    tx.add_note(tx.now, Note(EventKind.ADMITTED), NO_JOB, dispatch_id)
    return dispatch
