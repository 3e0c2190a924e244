"""
Jobs in one SQLite file. Any process on the host may submit and read; the one that holds the dispatch lock dispatches.

Writes go through one thread that commits them in groups (`writer`); reads have connections of their own, so a long
list on a page does not make a submit wait.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, Final, TypeVar

import apsw

from penstock.core.books import Books
from penstock.core.changes import Beat, Change
from penstock.core.hosts import Host
from penstock.core.intent import Intent
from penstock.core.job import Dispatch, Event, Job, Kind
from penstock.core.landing import Phase
from penstock.core.order import Aging, Floor, Ordering, Verdict
from penstock.core.refusals import StoreFailed
from penstock.core.states import State
from penstock.core.words import AddonId, DispatchId, HostId, JobId, Moment, Span
from penstock.stores.audit import audit
from penstock.stores.bell import Bell, Ear, address_of, ring
from penstock.stores.ids import uuid7
from penstock.stores.post import Courier, Letter, Post, Reply, post_names
from penstock.stores.protocol import (
    Addon,
    Clock,
    Depth,
    Done,
    Due,
    Overdue,
    Query,
    Receipt,
    Ride,
    Standing,
    Tell,
    Terms,
    say_nothing,
)
from penstock.stores.rows import DEMAND, dispatch_from, event_from, host_from, job_from, listed
from penstock.stores.sqlite_care import Presence, WalGuard, refuse_network_file_system
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
from penstock.stores.sqlite_find import found, marks
from penstock.stores.sqlite_floor import Accounts, Demands, TableFloor, read_books
from penstock.stores.sqlite_tx import Transaction
from penstock.stores.writer import Passage, Writer

__all__ = ["SqliteStore"]

T = TypeVar("T")
_IDLE_READERS: Final = 8


class SqliteStore:
    shared = False

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
        with failures(self._path), ExitStack() as opened:
            refuse_network_file_system(self._path)
            self._presence = opened.enter_context(closing(Presence(self._path)))
            self._con = opened.enter_context(closing(connect(self._path)))
            self._presence.examine(self._con)
            migrate(self._con, self._path)
            self._write_lock = WriteLock(self._path)
            opened.pop_all()
        self._wal = WalGuard(self._path, self._con)
        self._written, self._read = Demands(), Demands()
        self._readers: SimpleQueue[apsw.Connection] = SimpleQueue()
        self._rings: list[Callable[[], None]] = []
        self._bell: Bell | None = None
        self._ear: Ear | None = None
        self._dispatch_lock: DispatchLock | None = None
        self._posts, self._address = post_names(self._path), address_of(self._path)
        self._courier = Courier(self._posts)
        self._post: Post | None = None
        self._post_lock = Lock()
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._news = False
        #: Of the last commit that began what it brought. A rider asks for it at once, and has the one before run already.
        self._just_started: dict[DispatchId | None, Job] = {}
        self._writer = Writer(self._begin, self._tell)

    def now(self) -> Moment:
        return self._clock()

    # writes

    def submit(self, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        if self._post is None:
            line = self._courier.line(len(intents))
            if line is not None:
                return self._submit_by_post(line, intents, depth)
            if self._write_lock.contended:
                self._stand_in()
        return self.submit_soon(intents, depth).result()

    def _submit_by_post(self, line: socket.socket, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        letter = Letter([JobId(self._new_id()) for _ in intents], list(intents), depth)
        receipts, sure = self._courier.deliver(letter, line)
        if receipts is not None:
            return receipts
        return self._writer.soon(_submitting(letter, sure=sure), brings=True).result()

    def submit_soon(self, intents: Sequence[Intent], depth: Depth) -> Future[list[Receipt]]:
        return self._writer.soon(lambda tx: tx.submit(intents, depth), brings=True)

    def claimed(self, dispatches: Sequence[Dispatch]) -> list[Job]:
        started = self._just_started
        if all(d.dispatch_id in started for d in dispatches):
            return [started[d.dispatch_id] for d in dispatches]
        return self.jobs([d.job_id for d in dispatches if d.job_id is not None])

    def ride(self, board: Callable[[], Ride | None]) -> Callable[[], None]:
        def passage() -> Passage | None:
            ride = board()
            if ride is None:
                return None
            host, weigh, terms, landed = ride
            return Passage(lambda tx: tx.admit(host, weigh, terms), landed)

        return self._writer.ride(passage)

    def admit(self, host: HostId, weigh: Callable[[Floor], Verdict], terms: Terms) -> list[Dispatch]:
        return self._write(lambda tx: tx.admit(host, weigh, terms))

    def apply(self, changes: Sequence[Change]) -> list[bool]:
        return self.apply_soon(changes).result()

    def apply_soon(self, changes: Sequence[Change]) -> Future[list[bool]]:
        return self._writer.soon(lambda tx: tx.apply(changes)) if changes else _nothing()

    def complete_soon(self, done: Sequence[Done]) -> Future[list[bool]]:
        return self._writer.soon(lambda tx: tx.complete(done)) if done else _nothing()

    def exchange_soon(
        self, done: Sequence[Done], host: HostId, weigh: Callable[[Floor], Verdict], terms: Terms
    ) -> Future[tuple[list[bool], list[Dispatch]]]:
        return self._writer.soon(lambda tx: (tx.complete(done), tx.admit(host, weigh, terms)))

    def renew(self, beats: Sequence[Beat], tell: Tell = say_nothing) -> list[Standing | None]:
        return self.renew_soon(beats, tell).result()

    def renew_soon(self, beats: Sequence[Beat], tell: Tell = say_nothing) -> Future[list[Standing | None]]:
        return self._writer.soon(lambda tx: tx.renew(beats, tell)) if beats else _nothing()

    def set_addon(self, addon_id: AddonId, *, weight: int | None = None, paused: bool | None = None) -> None:
        self._write(lambda tx: tx.set_addon(addon_id, weight, paused))

    def prune(self, before: Moment, limit: int) -> int:
        return self._write(lambda tx: tx.prune(before, limit))

    def reorder(self, aging: Aging, after: int, limit: int) -> int:
        return self._write(lambda tx: tx.reorder(aging, after, limit))

    def shift(self, by: Span) -> int:
        return self._write(lambda tx: tx.shift(by))

    def _write(self, run: Callable[[Transaction], T]) -> T:
        return self._writer.soon(run).result()

    @contextmanager
    def _begin(self) -> Iterator[Transaction]:
        with failures(self._path), self._transaction() as transaction:
            yield transaction

    def _transaction(self) -> Transaction:
        return Transaction(
            self._con,
            self._write_lock,
            self._clock,
            self._ordering,
            self._written,
            wal=self._wal,
            new_id=self._new_id,
            committed=self._committed,
        )

    def _committed(self, started: list[Job]) -> None:
        self._news = True
        if started:
            self._just_started = {job.dispatch_id: job for job in started}

    def _tell(self) -> None:
        """After a commit, and what rode along in it has been handed over: whoever is rung for it may find it done."""
        if not self._news:
            return
        self._news = False
        for heard in self._rings:
            heard()
        if self._bell is not None:
            self._bell.tell()
        elif ring(self._address, self._sender) and self._post is not None:
            self._stand_down()  # the dispatcher commits for all from now on, and starts what it commits

    # letters from other processes

    def _take(self, letter: Letter, reply: Reply) -> None:
        try:
            self._writer.put(_submitting(letter), lambda receipts, _: reply(receipts), brings=True)
        except StoreFailed:  # it is closed
            reply(None)

    def _stand_in(self) -> None:
        """Several processes write, and nobody dispatches: one of them may as well commit for all."""
        with self._post_lock, suppress(OSError):  # another one was quicker
            self._post = self._post or Post(self._posts[1], self._take, self._writer.carry)

    def _stand_down(self) -> None:
        with self._post_lock:
            post, self._post = self._post, None
            self._write_lock.contended = False
        if post is not None:
            post.close()

    # hosts

    def greet(self, host: Host) -> Host:
        return self._write(lambda tx: tx.greet(host))

    def leave(self, host: HostId, instance: str) -> None:
        self._write(lambda tx: tx.leave(host, instance))

    def drain(self, host: HostId, draining: bool) -> bool:
        return self._write(lambda tx: tx.drain(host, draining))

    def hosts(self) -> list[Host]:
        with self._reading() as con:
            return [host_from(row) for row in query(con, "hosts")]

    # the dispatcher

    def hold_dispatch(self, holder: str) -> None:
        self._dispatch_lock = DispatchLock(self._path, holder)
        self._bell = Bell(self._path, self._heard)
        self._stand_down()
        with suppress(
            OSError
        ):  # one that stopped at this moment still has the name: others write for themselves
            self._post = Post(self._posts[0], self._take, self._writer.carry)

    def _heard(self) -> None:
        for heard in self._rings:
            heard()

    def release_dispatch(self) -> None:
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()
            self._stand_down()
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
        self._stand_down()
        self._writer.close()
        self._courier.close()
        self.release_dispatch()
        if self._ear is not None:
            self._ear.close()
        while not self._readers.empty():
            self._readers.get().close()
        self._con.close()
        self._presence.close()
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
            books.spent = dict(books.spent)
            for addon_id, *_ in list(query(con, "addons")):
                accounts.get(addon_id)
        return books

    def job(self, job_id: JobId) -> Job | None:
        return next(iter(self.jobs([job_id])), None)

    def jobs(self, job_ids: Sequence[JobId]) -> list[Job]:
        if not job_ids:
            return []
        with self._reading() as con:
            return self._asked(con, job_ids)

    def _asked(self, con: apsw.Connection, job_ids: Sequence[str]) -> list[Job]:
        return self._jobs(con, self._sql["asked_jobs"], listed(job_ids))

    def _jobs(self, con: apsw.Connection, source: str, *values: Any) -> list[Job]:
        rows: list[Any] = con.execute(f"{self._sql['job_columns']} {source}", values).fetchall()
        return [
            job_from(row[: DEMAND + 1], row[DEMAND + 1 :], self._read.demand(con, row[DEMAND]))
            for row in rows
        ]

    def find(self, query: Query) -> list[Job]:
        sql, values = found(query)
        with self._reading() as con:
            return self._jobs(con, sql, *values)

    def dispatch(self, dispatch_id: DispatchId) -> Dispatch | None:
        with self._reading() as con:
            return next(self._dispatches(con, "d.dispatch_id = ?", dispatch_id), None)

    def attempts(self, job_id: JobId) -> list[Dispatch]:
        with self._reading() as con:
            tried = self._dispatches(
                con, "d.dispatch_id > ? AND d.dispatch_id < ?", f"{job_id}.", f"{job_id}/"
            )
            return sorted(tried, key=lambda dispatch: dispatch.fence)

    def live(
        self, *, addon_id: AddonId | None = None, phases: Collection[Phase] = (), limit: int = 1_000
    ) -> list[Dispatch]:
        where = "d.phase <> 'ended'"
        values: list[Any] = []
        if addon_id is not None:
            where += " AND d.addon_id = ?"
            values.append(addon_id)
        if phases:
            where += f" AND d.phase IN ({marks(phases)})"
            values += phases
        with self._reading() as con:
            where = f"{where} ORDER BY d.admitted_at, d.dispatch_id LIMIT ?"
            return list(self._dispatches(con, where, *values, limit))

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

    def events_of(self, kinds: Collection[Kind], after: int, limit: int) -> list[Event]:
        values = {"kinds": listed([*kinds]), "after": after, "most": limit}
        with self._reading() as con:
            return [event_from(row) for row in query(con, "events_of", values)]

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
        late: list[Overdue] = []
        with self._reading() as con:
            for due, name in ((Due.EXPIRED, "expired"), (Due.STOP, "to_stop")):
                for (dispatch_id,) in list(query(con, name, now)):
                    dispatch = next(self._dispatches(con, "d.dispatch_id = ?", dispatch_id))
                    job = None if dispatch.job_id is None else self._asked(con, [dispatch.job_id])[0]
                    late.append(Overdue(due, job, dispatch))
            past = [job_id for (job_id,) in query(con, "past_deadline", now)]
            late += [Overdue(Due.DEADLINE, job, None) for job in self._asked(con, past)]
        return late[:limit]

    def alarm(self) -> Moment | None:
        with self._reading() as con:
            (moment,) = one(con, "alarm")
        return None if moment is None else int(moment)

    def audit(self) -> list[str]:
        with self._reading() as con:
            ask, demand_of = partial(query, con), partial(self._read.demand, con)
            return list(audit(ask, demand_of))


def _submitting(letter: Letter, *, sure: bool = True) -> Callable[[Transaction], list[Receipt]]:
    names, intents, depth = letter
    return lambda tx: tx.submit(intents, depth, names, sure=sure)


def _nothing() -> Future[list[Any]]:
    """Whoever asks for nothing is answered without a commit."""
    answer: Future[list[Any]] = Future()
    answer.set_result([])
    return answer
