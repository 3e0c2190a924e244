"""
Admission on SQLite: the view that a round gets, and the writes of its result.

A round sees the ledger and one ready queue per admission class. A ready queue is an open cursor on the order
index: a round pulls the head, and the next job only after it started the one before, so SQLite reads no other
row. Jobs that were submitted in the same transaction are in these queues before they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from heapq import merge
from itertools import groupby, starmap
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import apsw
from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionClass, Ledger, windows
from penstock.core.jobs.changes import Note
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.ordering import QueuedJob
from penstock.core.jobs.round import Pick, Placement, ReadyQueue, RunningJob
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, Moment
from penstock.stores.api import Admit, Grant
from penstock.stores.common.rows import (
    ADMISSION_CLASS,
    Queued,
    job_from,
    new_dispatch,
    spent_from,
)
from penstock.stores.common.writes import NO_JOB, EventRow, denial_rows, start_dispatch, stop_limit
from penstock.stores.sqlite.connection import SQL
from penstock.stores.sqlite.transaction import (
    GrantedLease,
    SqliteAdmissionClasses,
    SqliteSession,
    SqliteTotals,
    Transaction,
    listed,
)

#: How many jobs whose start time has come enter their ready queues in one transaction.
STEPS: Final = 5_000


def ledger_from(
    session: SqliteSession, totals: SqliteTotals, host: HostId, now: Moment, *, spending: bool = True
) -> Ledger:
    units, running = totals.ledger.get(("host", host), (0, 0))
    counts = {key: n for key, (_, n) in totals.ledger.items() if n and key[0] != "host"}
    return Ledger(units, running, counts, totals.accounts, _spent(session, now) if spending else {})


def _spent(session: SqliteSession, now: Moment) -> dict[AddonId, dict[str, int]]:
    day, month = windows(now)
    return spent_from(session.execute("spent", {"day": day.name, "month": month.name}), day.name)


#: By class number and line.
NewLines: TypeAlias = Mapping[tuple[int, int], Sequence[Queued]]
NO_NEW_LINES: Final[NewLines] = MappingProxyType({})
_by_turn: Final = attrgetter("turn", "no")


class SqliteAdmissionView:
    """
    What a round sees of the file. `new`: ready jobs that are not written yet. `queue_is_empty`: no others
    exist.
    """

    def __init__(
        self,
        session: SqliteSession,
        host: HostId,
        now: Moment,
        classes: SqliteAdmissionClasses,
        ledger: Ledger,
        *,
        new: NewLines = NO_NEW_LINES,
        queue_is_empty: bool = False,
    ) -> None:
        self.now, self.ledger = now, ledger
        self._new, self._queue_is_empty = new, queue_is_empty
        self._session, self._host, self._classes = session, host, classes
        self._open: list[apsw.Cursor] = []

    def ready_queues(self) -> Iterator[ReadyQueue]:
        new = {key: sorted(jobs, key=_by_turn) for key, jobs in self._new.items()}
        at: tuple[int, int] | None = None if self._queue_is_empty else (0, 0)
        while at is not None and (at := self._session.one("next_line", at)) is not None:
            cursor = self._session.con.execute(SQL["in_line"], at)
            self._open.append(cursor)
            jobs: Iterator[QueuedJob] = starmap(Queued, cursor)
            yield self._line(at, merge(jobs, new.pop(at), key=_by_turn) if at in new else jobs)
        for key, only_new in new.items():
            yield self._line(key, iter(only_new))

    def _line(self, key: tuple[int, int], jobs: Iterator[QueuedJob]) -> ReadyQueue:
        class_no, line = key
        return ReadyQueue(self._classes.one(self._session, class_no), line == 2, jobs)

    def running(self) -> Sequence[RunningJob]:
        return [RunningJob(*row) for row in self._session.execute("running", {"host": self._host})]

    def start_timeouts(self, waiting: QueuedJob) -> int:
        (start,) = self._session.one("start_timeouts", {"no": waiting.no}) or (0,)
        return int(start)

    def close(self) -> None:
        """Close the cursors, before anything is written: an open cursor would walk over rows that move."""
        for cursor in self._open:
            cursor.close(True)


def admit(tx: Transaction, admit: Admit) -> list[Grant]:
    empty, new_jobs = tx.queue_is_empty, tx.new_jobs
    # Read first: usually no job is due, and an UPDATE that changes no row takes fifty times as long as this
    # SELECT.
    if not empty and (due := tx.execute("due_jobs", {"now": tx.now, "most": STEPS})):
        tx.con.executemany(SQL["step_into_line"], due)
    ledger = ledger_from(tx, tx.totals, admit.host, tx.now, spending=admit.spending)
    new = tx.new_lines() if new_jobs else NO_NEW_LINES
    view = SqliteAdmissionView(tx, admit.host, tx.now, tx.classes, ledger, new=new, queue_is_empty=empty)
    try:
        result = admit.run_round(view)
    finally:
        view.close()
    if new_jobs:
        tx.flush_jobs({pick.waiting.no for pick in result.picks})
    if result.denials:
        tx.con.executemany(SQL["deny_jobs"], denial_rows(result, tx.now, tx.add_note))
    if result.passed:
        tx.con.executemany(SQL["pass_jobs"], [(tx.now, queued.no) for queued in result.passed])
    grants: list[Grant] = []
    for _, alike in groupby(result.picks, attrgetter("admission_class", "offer")):
        grants += _start_alike(tx, list(alike), admit, new_jobs)
    if result.standalone_lease is not None:
        grants.append(Grant(_start_standalone_lease(tx, result.standalone_lease, admit)))
    if admit.preview is not None:
        tx.previews.append(partial(admit.preview, grants))
    return grants


def _start_alike(
    tx: Transaction, picks: Sequence[Pick], admit: Admit, new_jobs: Mapping[int, Intent]
) -> list[Grant]:
    """
    Write dispatches for picks of one admission class and placement. A leased job is returned with its
    dispatch, for its worker. `new_jobs`: jobs that are not in the `queue` table.
    """
    admission_class, leased = picks[0].admission_class, picks[0].offer is Placement.LEASE
    class_no, host, terms = tx.classes.number(tx, admission_class), admit.host, admit.terms
    queued = [pick.waiting.no for pick in picks if pick.waiting.no not in new_jobs]
    jobs = _jobs(tx, listed(queued), admission_class) if leased and queued else {}
    leases, kind = tx.totals.leases, (class_no, str(host))
    grants: list[Grant] = []
    rows: list[tuple[Any, ...]] = []
    plain: list[int] = []
    events: list[EventRow] = []
    for pick in picks:
        dispatch, start_events = start_dispatch(
            pick, stop_limit(pick, tx.now), admit, tx.now, tx.ordering.aging
        )
        events += start_events
        no, n = pick.waiting.no, events[-1][3]
        if leased:
            leases[dispatch.dispatch_id] = GrantedLease(no, n, dispatch.expires_at, kind)
            if no in new_jobs:
                jobs[no] = _new_job(dispatch, pick, new_jobs[no], tx.now)
        if leased and no not in new_jobs and dispatch.ends_at is None and dispatch.stop_at is None:
            plain.append(no)
        else:
            rows.append(_dispatch_row(dispatch, no, class_no, n, tx.batch))
        grants.append(Grant(dispatch, jobs.get(no)))
    tx.add_events(*events)
    if plain:
        lease = (class_no, host, tx.batch, tx.now, tx.now + terms.lease_for, terms.worker, listed(plain))
        tx.write("insert_leases", lease, len(plain))
    tx.insert("insert_dispatches", rows)
    if queued:
        tx.write("leave_queue", (listed(queued),), len(queued))
    tx.totals.hold(host, admission_class, len(picks))
    state = JobState.RUNNING if leased else JobState.DISPATCHING
    tx.totals.move(admission_class.addon_id, JobState.QUEUED, state, len(picks))
    return grants


def _jobs(tx: Transaction, nos: str, admission_class: AdmissionClass) -> dict[int, Job]:
    """The jobs that start, by number, as they are when they run, with their payloads."""
    rows = tx.execute("starting_jobs", (nos,))
    at = ADMISSION_CLASS + 1
    return {row[0]: job_from(row[:at], row[at:], admission_class) for row in rows}


def _new_job(dispatch: Dispatch, pick: Pick, intent: Intent, now: Moment) -> Job:
    """The job that starts in the transaction of its submit, as it is when it runs."""
    queued = pick.waiting
    if intent.labels:  # as they are stored
        intent = replace(intent, labels=pick.admission_class.labels)
    state, dispatch_id = JobState.RUNNING, dispatch.dispatch_id
    return Job(queued.no, queued.job_id, intent, state, now, now, None, dispatch.fence, dispatch_id)


def _dispatch_row(d: Dispatch, no: int, class_no: int, events: int, batch: int | None) -> tuple[Any, ...]:
    name = None if no > 0 else d.dispatch_id
    return (
        no, name, class_no, d.host, d.fence, d.phase, events, batch, d.admitted_at, d.started_at, d.expires_at, d.ends_at,
        d.stop_at, d.stop_for, d.worker,
    )  # fmt: skip


def _start_standalone_lease(tx: Transaction, admission_class: AdmissionClass, admit: Admit) -> Dispatch:
    host, dispatch_id = admit.host, DispatchId(f"{tx.new_id()}.0")
    dispatch = new_dispatch(
        dispatch_id, None, admission_class, Placement.LEASE, admit.terms, host=host, now=tx.now
    )
    class_no, (no,) = tx.classes.number(tx, admission_class), tx.one("next_standalone_lease")
    tx.insert("insert_dispatches", [_dispatch_row(dispatch, no, class_no, 0, None)])
    tx.totals.hold(host, admission_class, 1)
    tx.totals.account(admission_class.addon_id)  # the round has changed it
    tx.add_note(tx.now, Note(EventKind.ADMITTED), NO_JOB, dispatch_id)
    return dispatch
