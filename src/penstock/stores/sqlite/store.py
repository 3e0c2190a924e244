"""
The SQLite store: jobs in one file. Any process of the host may submit and read; the process with the dispatch
lock dispatches.

Operations that arrive together share a transaction (`common/group_commit.py`). Reads have connections of
their own, so a long list on a page does not make a submit wait.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, Final, TypeVar

import apsw
import msgspec

from penstock.core.errors import OutcomeUnknown, StoreFailed
from penstock.core.jobs.admission import Ledger
from penstock.core.jobs.job import Job
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import AdmissionView
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import DispatchId, HostId, JobId
from penstock.stores.api import (
    Admit,
    Apply,
    ChangeArray,
    ChangeBatch,
    ChangeSchedule,
    Clock,
    Complete,
    Operation,
    Query,
    RecordLoad,
    Relay,
    Renew,
    ResolveDependencies,
    Submit,
    SubmitBatch,
    committed,
)
from penstock.stores.common.array_changes import advance_arrays
from penstock.stores.common.group_commit import BatchUnknown, GroupCommit, answered
from penstock.stores.common.reads import SqlReads
from penstock.stores.common.rows import uuid7
from penstock.stores.sqlite.admission import SqliteAdmissionView, admit, ledger_from
from penstock.stores.sqlite.changes import apply, complete, renew, submit
from penstock.stores.sqlite.connection import (
    SQL,
    DispatchLock,
    Presence,
    connect,
    failures,
    free_bytes,
    migrate,
    refuse_network_file_system,
)
from penstock.stores.sqlite.dependencies import resolve_moves, resolve_pending
from penstock.stores.sqlite.groups import SqliteArrayRows
from penstock.stores.sqlite.guard import (
    FileGuard,
    FileLost,
    Loss,
    read_mark,
    refuse_behind,
    refuse_missing,
    refuse_overwritten,
)
from penstock.stores.sqlite.maintenance import AcceptLoss, change_record, maintain
from penstock.stores.sqlite.open_files import MainFile, refuse_inherited
from penstock.stores.sqlite.queries import count_sql, find_sql
from penstock.stores.sqlite.submit_relay import NamedSubmit, SubmitRelayClient, SubmitRelayServer
from penstock.stores.sqlite.transaction import (
    SqliteAdmissionClasses,
    SqliteSession,
    SqliteTotals,
    Transaction,
    WriteLock,
    dispatch_key,
    listed,
)
from penstock.stores.sqlite.wakeups import SocketNames, WakeupClient, WakeupServer, notify

T = TypeVar("T")
#: With less free space than this, submits begin to fail.
LEAST_FREE: Final = 1 << 20
#: The most connections that are kept open for further reads.
_IDLE_READERS: Final = 8


class SqliteStore(SqlReads[SqliteSession]):
    shared = False
    classes: SqliteAdmissionClasses

    def __init__(
        self,
        path: str | Path,
        clock: Clock,
        *,
        ordering: Ordering | None = None,
        new_id: Callable[[], str] = uuid7,
        accept_loss: bool = False,
    ) -> None:
        super().__init__(SqliteAdmissionClasses(), clock)
        self._path, self.now = Path(path).absolute(), clock
        self._failures = failures(self._path)
        #: Idle connections for reads.
        self._readers: SimpleQueue[SqliteSession] = SimpleQueue()
        self._ordering, self._new_id = ordering or Ordering(), new_id
        with self._failures, ExitStack() as opened:
            loss = self._open(opened, accept_loss)
            opened.pop_all()
        self._listeners: list[Callable[[], None]] = []
        self._wakeups: WakeupServer | None = None
        self._wakeup_client: WakeupClient | None = None
        self._dispatch_lock: DispatchLock | None = None
        self._names = SocketNames(self._path)
        self._relay_client = SubmitRelayClient(self._names)
        self._relay: SubmitRelayServer | None = None
        self._relay_lock = Lock()
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._has_events = False
        self._transaction = Transaction(
            self._con,
            self._write_lock,
            self._path,
            clock,
            self._ordering,
            guard=self._guard,
            new_id=self._new_id,
        )
        self._writer = GroupCommit(self._write, self._announce)
        _open_stores.add(self)
        if loss is not None:
            try:
                committed(self, AcceptLoss(loss))
            except BaseException:  # Ctrl-C included: the files must be closed
                self.close()
                raise

    def _open(self, opened: ExitStack, accept_loss: bool) -> Loss | None:
        """
        Check and open the files, in an order in which a refusal changes none of them. Returns the loss that
        `accept_loss` accepted.
        """
        path = self._path
        refuse_network_file_system(path)
        refuse_inherited(path)
        self._presence = opened.enter_context(closing(Presence(path)))
        known = read_mark(path)  # before the file: a commit in between must not look like a loss
        loss = refuse_missing(path, known, accept_loss=accept_loss)
        loss = refuse_overwritten(path, known, accept_loss=accept_loss) or loss
        self._con = opened.enter_context(closing(connect(path)))
        self._main_file = opened.enter_context(closing(MainFile(path)))
        # A refused file must keep its `-wal`: by default a close writes it into the file and removes it.
        self._con.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self._presence.examine(self._con)
        loss = refuse_behind(path, self._con, known, accept_loss=accept_loss) or loss
        self._write_lock = opened.enter_context(closing(WriteLock(path)))
        migrate(self._con, path, self._write_lock)
        self._con.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
        with self._write_lock:
            self._guard = opened.enter_context(
                closing(FileGuard(path, self._con, alone=self._presence.alone))
            )
        return loss

    # writes

    def commit(self, *operations: Operation[Any], wait: bool = False) -> list[Future[Any]]:
        """
        Write the operations in one transaction. A thread that waits for a single submit sends it to the
        process that commits for others, if there is one.
        """
        submit = operations[0]
        # A submit of another process has its ids already. Sent on with others it would become a second job.
        if wait and len(operations) == 1 and type(submit) is Submit and self._relay is None:
            line = self._relay_client.line(len(submit.intents))
            if line is not None:
                return self._submit_by_relay(line, submit)
            if self._write_lock.contended:
                self._stand_in()
        return self._writer.commit(operations, wait=wait)

    def _submit_by_relay(self, line: socket.socket, submit: Submit) -> list[Future[Any]]:
        named = NamedSubmit(submit.intents, submit.depth, [JobId(self._new_id()) for _ in submit.intents])
        receipts, sure = self._relay_client.deliver(named, line)
        if receipts is not None:
            return [answered(receipts)]
        return self._writer.commit([msgspec.structs.replace(named, sure=sure)])

    def _write(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        answers: list[Any] = []
        try:
            with self._transaction as transaction:
                for operation in operations:
                    answers.append(_write(transaction, operation))  # noqa: PERF401 - those before a failure count
        except OutcomeUnknown as unknown:
            raise BatchUnknown(unknown, answers) from unknown
        self._has_events |= bool(transaction.events)
        return answers

    def _announce(self) -> None:
        """
        Notify listeners and other processes of events. Called after the answers, which need not wait for it.
        """
        if not self._has_events:
            return
        self._has_events = False
        self._notify_listeners()
        if self._wakeups is not None:
            if self._wakeups.clients:
                self._wakeups.notify_clients()
        elif self._names.in_use and notify(self._names.wakeups, self._sender) and self._relay is not None:
            self._stand_down()  # from now on the dispatcher commits for all, and starts what it commits

    # submits of other processes

    def _commit_relayed(self, submits: Sequence[Submit], *, stays: bool) -> None:  # noqa: ARG002 - of the protocol
        self._writer.commit(submits, wait=True)

    def _stand_in(self) -> None:
        """Commit for all processes from now on: several of them write, and none dispatches."""
        with self._relay_lock, suppress(OSError):  # another process was quicker
            self._names.make()
            self._relay = self._relay or SubmitRelayServer(self._names.stand_in, self._commit_relayed)

    def _stand_down(self) -> None:
        with self._relay_lock:
            relay, self._relay = self._relay, None
            self._write_lock.contended = False
        if relay is not None:
            relay.close()

    def trouble(self) -> str | None:
        free = free_bytes(self._path)
        if free < LEAST_FREE:
            return f"the disk of {self._path} has only {free // 1024} kB left: free some space"
        failure = self._writer.failure
        return None if failure is None else str(failure)

    # reads: each has one snapshot, on a connection that never writes

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

    # the dispatcher

    def acquire_dispatch(self, holder: str, relay: Relay | None = None) -> None:
        self._dispatch_lock = DispatchLock(self._path, holder, self._main_file)
        self._wakeups = WakeupServer(self._names, self._notify_listeners)
        self._stand_down()
        # A dispatcher that is stopping may still have the name: then other processes write for themselves.
        with suppress(OSError):
            self._relay = SubmitRelayServer(self._names.relay, relay or self._commit_relayed)

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def release_dispatch(self) -> None:
        wakeups, self._wakeups = self._wakeups, None
        if wakeups is not None:
            wakeups.close()
            self._stand_down()
        lock, self._dispatch_lock = self._dispatch_lock, None
        if lock is not None:
            lock.close()

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def listen(self) -> None:
        if self._wakeups is None:
            if self._wakeup_client is None:
                self._wakeup_client = WakeupClient(self._names, self._notify_listeners)
            self._wakeup_client.ask()

    def close(self) -> None:
        _open_stores.discard(self)
        self._stand_down()
        self._writer.close()
        self._relay_client.close()
        self.release_dispatch()
        if self._wakeup_client is not None:
            self._wakeup_client.close()
        self._close_readers()
        self._con.close()
        self._main_file.close()
        self._presence.close()
        self._guard.close()
        self._write_lock.close()
        self._sender.close()

    def leave_to_parent(self) -> None:
        """
        In a forked process: close what would outlive the parent, locks and names of sockets. The connections
        stay open and unused: SQLite must not close a connection of another process.
        """
        for lock in (self._presence, self._guard, self._write_lock):
            lock.close()
        for part in (self._dispatch_lock, self._wakeups):
            if part is not None:
                part.leave_to_parent()


_open_stores: Final[weakref.WeakSet[SqliteStore]] = weakref.WeakSet()
#: In a forked process: the stores of its parent.
_stores_of_parent: Final[list[SqliteStore]] = []


def _after_fork() -> None:
    for store in list(_open_stores):
        store.leave_to_parent()
        _stores_of_parent.append(store)
    _open_stores.clear()


os.register_at_fork(after_in_child=_after_fork)


def _write(tx: Transaction, operation: Operation[Any]) -> Any:
    match operation:
        case NamedSubmit(intents, depth, job_ids, sure):
            return submit(tx, intents, depth, job_ids, sure=sure)
        case Submit(intents, depth):
            return submit(tx, intents, depth)
        case Admit():
            return admit(tx, operation)
        case Complete() | Apply():
            return _write_ends(tx, operation)
        case ResolveDependencies():
            return resolve_pending(tx, apply)
        case Renew():
            return renew(tx, operation)
        case ChangeSchedule() | RecordLoad() | ChangeArray() | SubmitBatch() | ChangeBatch():
            return change_record(tx, operation)
    return maintain(tx, operation)


def _write_ends(tx: Transaction, operation: Complete | Apply) -> list[bool]:
    """Write changes, then resolve the dependencies and arrays of the jobs that they ended."""
    if isinstance(operation, Complete):
        answers = complete(tx, operation.done)
    else:
        answers = [apply(tx, change) for change in operation.changes]
    if tx.moves:
        advance_arrays(SqliteArrayRows(tx), resolve_moves(tx, apply))
    return answers
