"""
Jobs in one SQLite file. Any process on the host may submit and read; the one that holds the dispatch lock dispatches.

Writes go through one thread that commits them in groups (`writer`); reads have connections of their own, so a long
list on a page does not make a submit wait.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import apsw

from penstock.core.books import Books
from penstock.core.changes import Beat, Change
from penstock.core.intent import Intent
from penstock.core.job import Dispatch, Event, Job
from penstock.core.landing import Phase
from penstock.core.order import Floor, Ordering, Verdict
from penstock.core.states import State
from penstock.core.words import AddonId, DispatchId, HostId, JobId, Moment, Span
from penstock.stores.audit import audit
from penstock.stores.bell import Bell, Ear, ring
from penstock.stores.ids import uuid7
from penstock.stores.protocol import Addon, Clock, Depth, Due, Overdue, Query, Receipt, Standing, Terms
from penstock.stores.rows import dispatch_from, event_from, job_from
from penstock.stores.sqlite_file import (
    DispatchLock,
    WriteLock,
    connect,
    failures,
    migrate,
    one,
    query,
    statements,
)
from penstock.stores.sqlite_floor import Accounts, Demands, TableFloor, read_books
from penstock.stores.sqlite_tx import Transaction
from penstock.stores.writer import Writer

__all__ = ["SqliteStore"]

T = TypeVar("T")
_IDLE_READERS: Final = 8


class SqliteStore:
    def __init__(
        self,
        path: str | Path,
        clock: Clock,
        *,
        ordering: Ordering | None = None,
        new_id: Callable[[], str] = uuid7,
    ) -> None:
        self._path = Path(path).absolute()
        self._clock, self._ordering, self._new_id = clock, ordering or Ordering(), new_id
        self._sql = statements()
        self._con = connect(self._path)
        migrate(self._con, self._path)
        self._write_lock = WriteLock(self._path)
        self._written, self._read = Demands(), Demands()
        self._readers: SimpleQueue[apsw.Connection] = SimpleQueue()
        self._rings: list[Callable[[], None]] = []
        self._bell: Bell | None = None
        self._ear: Ear | None = None
        self._dispatch_lock: DispatchLock | None = None
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._writer = Writer(self._begin)

    def now(self) -> Moment:
        return self._clock()

    # writes

    def submit(self, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        return self._write(lambda tx: tx.submit(intents, depth))

    def submit_soon(self, intents: Sequence[Intent], depth: Depth) -> Future[list[Receipt]]:
        answer: Future[list[Receipt]] = Future()

        def written(done: Future[list[Receipt]]) -> None:
            try:
                with failures(self._path):
                    answer.set_result(done.result())
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the answer
                answer.set_exception(error)

        self._writer.soon(lambda tx: tx.submit(intents, depth)).add_done_callback(written)
        return answer

    def admit(self, host: HostId, weigh: Callable[[Floor], Verdict], terms: Terms) -> list[Dispatch]:
        return self._write(lambda tx: tx.admit(host, weigh, terms))

    def apply(self, changes: Sequence[Change]) -> list[bool]:
        return self._write(lambda tx: tx.apply(changes)) if changes else []

    def renew(self, beats: Sequence[Beat]) -> list[Standing | None]:
        return self._write(lambda tx: tx.renew(beats)) if beats else []

    def set_addon(self, addon_id: AddonId, *, weight: int | None = None, paused: bool | None = None) -> None:
        self._write(lambda tx: tx.set_addon(addon_id, weight, paused))

    def prune(self, before: Moment, limit: int) -> int:
        return self._write(lambda tx: tx.prune(before, limit))

    def shift(self, by: Span) -> int:
        return self._write(lambda tx: tx.shift(by))

    def _write(self, run: Callable[[Transaction], T]) -> T:
        with failures(self._path):
            return self._writer.write(run)

    def _begin(self) -> Transaction:
        return Transaction(
            self._con,
            self._write_lock,
            self._clock,
            self._ordering,
            self._written,
            new_id=self._new_id,
            committed=self._committed,
        )

    def _committed(self) -> None:
        for heard in self._rings:
            heard()
        if self._bell is not None:
            self._bell.tell()
        else:
            ring(self._path, self._sender)

    # the dispatcher

    def hold_dispatch(self, holder: str) -> None:
        self._dispatch_lock = DispatchLock(self._path, holder)
        self._bell = Bell(self._path, self._heard)

    def _heard(self) -> None:
        for heard in self._rings:
            heard()

    def release_dispatch(self) -> None:
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()
        lock, self._dispatch_lock = self._dispatch_lock, None
        if lock is not None:
            lock.close()

    def on_change(self, ring: Callable[[], None]) -> None:
        self._rings.append(ring)

    def listen(self) -> None:
        if self._bell is None:
            if self._ear is None:
                self._ear = Ear(self._path, self._heard)
            self._ear.ask()

    def close(self) -> None:
        self._writer.close()
        self.release_dispatch()
        if self._ear is not None:
            self._ear.close()
        while not self._readers.empty():
            self._readers.get().close()
        self._con.close()
        self._write_lock.close()
        self._sender.close()

    # reads

    @contextmanager
    def _reading(self) -> Iterator[apsw.Connection]:
        """One snapshot. The connection is read-only, so this transaction cannot turn into a writer."""
        with failures(self._path):
            try:
                con = self._readers.get_nowait()
            except Empty:
                con = connect(self._path, readonly=True)
            con.execute("BEGIN DEFERRED")
            try:
                yield con
            finally:
                con.execute("ROLLBACK")
                if self._readers.qsize() < _IDLE_READERS:
                    self._readers.put(con)
                else:
                    con.close()

    def look(self, host: HostId, view: Callable[[Floor], T]) -> T:
        with self._reading() as con:
            floor = TableFloor(con, host, self._clock(), self._read, Accounts(con))
            try:
                return view(floor)
            finally:
                floor.close()

    def books(self, host: HostId) -> Books:
        with self._reading() as con:
            accounts = Accounts(con)
            books = read_books(con, host, self._clock(), accounts)
            for addon_id, *_ in list(query(con, "addons")):
                accounts.get(addon_id)
        return books

    def job(self, job_id: JobId) -> Job | None:
        return next(iter(self.jobs([job_id])), None)

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        with self._reading() as con:
            return [job for job_id in job_ids for job in self._jobs(con, "WHERE j.job_id = ?", job_id)]

    def _jobs(self, con: apsw.Connection, where: str, *values: Any) -> Iterator[Job]:
        rows: list[Any] = con.execute(f"{self._sql['job_columns']} {where}", values).fetchall()
        for row in rows:
            yield job_from(row, one(con, "intent_of", (row[0],)), self._read.demand(con, row[-1]))

    def find(self, query: Query) -> list[Job]:
        where: list[str] = ["1"]
        values: list[Any] = []
        if query.states:
            where.append(f"j.state IN ({', '.join('?' * len(query.states))})")
            values += [str(state) for state in query.states]
        if query.addon_id is not None:
            where.append("j.addon_id = ?")
            values.append(query.addon_id)
        if query.job_type is not None:
            where.append("j.demand IN (SELECT no FROM demand WHERE job_type = ?)")
            values.append(query.job_type)
        if query.tag is not None:
            where.append(
                "EXISTS (SELECT 1 FROM intent i, json_each(i.tags) t WHERE i.no = j.no AND t.value = ?)"
            )
            values.append(query.tag)
        if query.part is not None:
            where.append("instr(j.job_id, ?) > 0")
            values.append(query.part)
        if query.after:
            where.append("j.no < ?" if query.newest_first else "j.no > ?")
            values.append(query.after)
        order = "DESC" if query.newest_first else "ASC"
        # Only fixed words are put together here; every value is bound.
        sql = f"WHERE {' AND '.join(where)} ORDER BY j.no {order} LIMIT ?"
        with self._reading() as con:
            return list(self._jobs(con, sql, *values, query.limit))

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None:
        with self._reading() as con:
            return next(self._dispatches(con, "d.dispatch_id = ?", dispatch_id), None)

    def attempts(self, job_id: JobId) -> list[Dispatch]:
        with self._reading() as con:
            found = self._dispatches(
                con, "d.dispatch_id > ? AND d.dispatch_id < ?", f"{job_id}.", f"{job_id}/"
            )
            return sorted(found, key=lambda dispatch: dispatch.fence)

    def live(
        self, *, addon_id: AddonId | None = None, phases: Collection[Phase] = (), limit: int = 1_000
    ) -> list[Dispatch]:
        with self._reading() as con:
            found = self._dispatches(con, "d.phase <> 'ended'")
            wanted = [
                d
                for d in found
                if (addon_id is None or d.addon_id == addon_id) and (not phases or d.phase in phases)
            ]
        return sorted(wanted, key=lambda d: (d.admitted_at, d.dispatch_id))[:limit]

    def _dispatches(self, con: apsw.Connection, where: str, *values: Any) -> Iterator[Dispatch]:
        rows: list[Any] = con.execute(f"{self._sql['dispatch_columns']} WHERE {where}", values).fetchall()
        for row in rows:
            yield dispatch_from(row, self._read.demand(con, row[-1]))

    def checkpoint(self, job_id: JobId) -> str | None:
        with self._reading() as con:
            row = one(con, "checkpoint", {"job_id": job_id})
        return None if row is None else str(row[0])

    def events(self, after: int, limit: int, job_id: JobId | None = None) -> list[Event]:
        name = "events" if job_id is None else "events_of_job"
        values = {"after": after, "most": limit} | ({} if job_id is None else {"job_id": job_id})
        with self._reading() as con:
            return [event_from(row) for row in query(con, name, values)]

    def newest(self) -> int:
        with self._reading() as con:
            (seq,) = one(con, "newest")
        return int(seq)

    def addons(self) -> list[Addon]:
        with self._reading() as con:
            jobs: dict[str, dict[State, int]] = {}
            for addon_id, state, count in query(con, "tally"):
                jobs.setdefault(addon_id, {})[State(state)] = count
            known = {row[0]: row[1:] for row in query(con, "addons")}
        return [
            Addon(AddonId(name), weight, bool(paused), average, units, jobs.get(name, {}))
            for name in sorted(known.keys() | jobs.keys())
            for weight, paused, average, units, _ in [known.get(name, (100, 0, 0.0, 0, 0))]
        ]

    # what the keeper asks

    def overdue(self, limit: int) -> list[Overdue]:
        now = {"now": self._clock(), "most": limit}
        found: list[Overdue] = []
        with self._reading() as con:
            for due, name in ((Due.EXPIRED, "expired"), (Due.STOP, "to_stop")):
                for (dispatch_id,) in list(query(con, name, now)):
                    dispatch = next(self._dispatches(con, "d.dispatch_id = ?", dispatch_id))
                    job = (
                        None
                        if dispatch.job_id is None
                        else next(self._jobs(con, "WHERE j.job_id = ?", dispatch.job_id))
                    )
                    found.append(Overdue(due, job, dispatch))
            for (job_id,) in list(query(con, "past_deadline", now)):
                found.append(Overdue(Due.DEADLINE, next(self._jobs(con, "WHERE j.job_id = ?", job_id)), None))
        return found[:limit]

    def alarm(self) -> Moment | None:
        with self._reading() as con:
            (moment,) = one(con, "alarm")
        return None if moment is None else int(moment)

    def audit(self) -> list[str]:
        with self._reading() as con:
            ask, demand_of = partial(query, con), partial(self._read.demand, con)
            return list(audit(ask, demand_of))
