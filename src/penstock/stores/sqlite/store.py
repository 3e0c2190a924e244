"""
Jobs in one SQLite file. Any process on the host may submit and read; the one that holds the dispatch lock dispatches.

Writes go through one thread that commits them in groups (`writer`); reads have connections of their own, so a long
list on a page does not make a submit wait.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeVar

import apsw

from penstock.core.errors import StoreFailed
from penstock.core.jobs.changes import Change, Renewal
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.job import Dispatch, Job
from penstock.core.jobs.load import Host
from penstock.core.jobs.ordering import AdmissionView, Aging, Ordering, RoundResult
from penstock.core.jobs.types import AddonId, HostId, JobId, Moment, Span
from penstock.stores.api import (
    Ahead,
    Clock,
    CompletedDispatch,
    Depth,
    Receipt,
    Ride,
    Standing,
    Tell,
    Terms,
    not_waited_for,
    say_nothing,
)
from penstock.stores.common.dispatches import uuid7
from penstock.stores.common.group_commit import Passage, Writer
from penstock.stores.sqlite import high_water
from penstock.stores.sqlite.connection import DispatchLock, WriteLock, connect, failures, migrate
from penstock.stores.sqlite.guard import FileGuard, Loss, refuse_behind, refuse_missing
from penstock.stores.sqlite.health import Presence, free_bytes, refuse_network_file_system
from penstock.stores.sqlite.high_water import HighWaterMark
from penstock.stores.sqlite.reads import SqliteReads
from penstock.stores.sqlite.socket_names import SocketNames
from penstock.stores.sqlite.submit_relay import Reply, SubmitRelayClient, SubmitRelayServer, SubmitRequest
from penstock.stores.sqlite.transaction import CommitCallbacks, Transaction
from penstock.stores.sqlite.wakeups import WakeupClient, WakeupServer, notify
from penstock.stores.sqlite.write_batch import Drafts, made

__all__ = ["SqliteStore"]

T = TypeVar("T")
#: With less room than this, some submits fail and others do not.
LEAST_FREE: Final = 1 << 20
#: Of jobs that were leased and not asked for yet.
MOST_KEPT: Final = 1_000


class SqliteStore(SqliteReads):
    shared = False

    def __init__(
        self,
        path: str | Path,
        clock: Clock,
        *,
        ordering: Ordering | None = None,
        new_id: Callable[[], str] = uuid7,
        accept_loss: bool = False,
    ) -> None:
        super().__init__(Path(path).absolute(), clock)
        self._ordering, self._new_id = ordering or Ordering(), new_id
        with failures(self._path), ExitStack() as opened:
            loss = self._open(opened, accept_loss)
            opened.pop_all()
        self._rings: list[Callable[[], None]] = []
        self._wakeups: WakeupServer | None = None
        self._wakeup_client: WakeupClient | None = None
        self._dispatch_lock: DispatchLock | None = None
        self._names = SocketNames(self._path)
        self._relay_client = SubmitRelayClient(self._names)
        self._relay: SubmitRelayServer | None = None
        self._relay_lock = Lock()
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._news = False
        #: Jobs that were leased and not asked for yet, which whoever runs them will do at once.
        self._just_started: Drafts = {}
        transaction = Transaction(
            self._con,
            self._write_lock,
            self._path,
            self._clock,
            self._ordering,
            guard=self._guard,
            new_id=self._new_id,
            ties=CommitCallbacks(self._written, self._committed),
        )
        self._writer = Writer(lambda: transaction, self._tell)
        if loss is not None:
            try:
                self._write(lambda tx: tx.accept_loss(loss))
            except BaseException:  # Ctrl-C included: what was opened is closed
                self.close()
                raise

    def _open(self, opened: ExitStack, accept_loss: bool) -> Loss | None:
        """The files, checked in an order in which a refusal leaves all of them as they are. The answer: what `accept_loss` has accepted."""
        path = self._path
        refuse_network_file_system(path)
        self._presence = opened.enter_context(closing(Presence(path)))
        known = high_water.read(path)  # before the file: a commit in between must not look like a loss
        loss = refuse_missing(path, known, accept_loss=accept_loss)
        self._con = opened.enter_context(closing(connect(path)))
        # A file that is refused keeps its `-wal`, which a close would empty into it and remove.
        self._con.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self._presence.examine(self._con)
        loss = refuse_behind(path, self._con, known, accept_loss=accept_loss) or loss
        migrate(self._con, path)
        self._con.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
        self._write_lock = opened.enter_context(closing(WriteLock(path)))
        self._mark = opened.enter_context(closing(HighWaterMark(path)))
        with self._write_lock:
            self._guard = FileGuard(path, self._con, self._mark, alone=self._presence.alone)
        return loss

    def now(self) -> Moment:
        return self._clock()

    # writes

    def submit(self, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        if self._relay is None:
            line = self._relay_client.line(len(intents))
            if line is not None:
                return self._submit_by_relay(line, intents, depth)
            if self._write_lock.contended:
                self._stand_in()
        return self.submit_soon(intents, depth).result()

    def _submit_by_relay(self, line: socket.socket, intents: Sequence[Intent], depth: Depth) -> list[Receipt]:
        request = SubmitRequest([JobId(self._new_id()) for _ in intents], list(intents), depth)
        receipts, sure = self._relay_client.deliver(request, line)
        if receipts is not None:
            return receipts
        return self._writer.soon(_submitting(request, sure=sure), brings=True).result()

    def submit_soon(self, intents: Sequence[Intent], depth: Depth) -> Future[list[Receipt]]:
        return self._writer.soon(lambda tx: tx.submit(intents, depth), brings=True)

    def claimed(self, dispatches: Sequence[Dispatch]) -> list[Job]:
        started = [self._just_started.pop((d.dispatch_id, d.admitted_at), None) for d in dispatches]
        known = [made(draft) for draft in started if draft is not None]
        if len(known) < len(dispatches):  # reserved before
            return self.jobs([d.job_id for d in dispatches if d.job_id is not None])
        return known

    def ride(self, board: Callable[[], Ride | None]) -> Callable[[], None]:
        def passage() -> Passage | None:
            ride = board()
            if ride is None:
                return None
            host, run_round, terms, landed = ride
            return Passage(lambda tx: tx.admit(host, run_round, terms), landed)

        return self._writer.ride(passage)

    def admit(
        self, host: HostId, run_round: Callable[[AdmissionView], RoundResult], terms: Terms
    ) -> list[Dispatch]:
        return self._write(lambda tx: tx.admit(host, run_round, terms))

    def apply(self, changes: Sequence[Change]) -> list[bool]:
        return self.apply_soon(changes).result()

    def apply_soon(self, changes: Sequence[Change]) -> Future[list[bool]]:
        return self._writer.soon(lambda tx: tx.apply(changes)) if changes else _nothing()

    def complete_soon(self, done: Sequence[CompletedDispatch]) -> Future[list[bool]]:
        return self._writer.soon(lambda tx: tx.complete(done)) if done else _nothing()

    def exchange_soon(
        self,
        done: Sequence[CompletedDispatch],
        host: HostId,
        run_round: Callable[[AdmissionView], RoundResult],
        terms: Terms,
        ahead: Ahead = not_waited_for,
    ) -> Future[tuple[list[bool], list[Dispatch]]]:
        def run(tx: Transaction) -> tuple[list[bool], list[Dispatch]]:
            answers, granted = tx.complete(done), tx.admit(host, run_round, terms)
            tx.tell_ahead(lambda: ahead(granted))
            return answers, granted

        return self._writer.soon(run)

    def renew(self, beats: Sequence[Renewal], tell: Tell = say_nothing) -> list[Standing | None]:
        return self.renew_soon(beats, tell).result()

    def renew_soon(self, beats: Sequence[Renewal], tell: Tell = say_nothing) -> Future[list[Standing | None]]:
        return self._writer.soon(lambda tx: tx.renew(beats, tell)) if beats else _nothing()

    def set_addon(
        self, addon_id: AddonId, *, weight: int | None = None, paused: bool | None = None, by: str = ""
    ) -> None:
        self._write(lambda tx: tx.set_addon(addon_id, weight, paused, by))

    def prune(self, before: Moment, limit: int) -> int:
        return self._write(lambda tx: tx.prune(before, limit))

    def reorder(self, aging: Aging, after: int, limit: int) -> int:
        return self._write(lambda tx: tx.reorder(aging, after, limit))

    def shift(self, by: Span) -> int:
        return self._write(lambda tx: tx.shift(by))

    def _write(self, run: Callable[[Transaction], T]) -> T:
        return self._writer.soon(run).result()

    def _written(self, started: Drafts) -> None:
        if len(self._just_started) > MOST_KEPT:  # nobody came for them
            self._just_started.clear()
        self._just_started.update(started)

    def _committed(self) -> None:
        self._news = True

    def _tell(self) -> None:
        """After a commit, and what rode along in it has been handed over: whoever is rung for it may find it done."""
        if not self._news:
            return
        self._news = False
        for heard in self._rings:
            heard()
        if self._wakeups is not None:
            self._wakeups.tell()
        elif notify(self._names.wakeups, self._sender) and self._relay is not None:
            self._stand_down()  # the dispatcher commits for all from now on, and starts what it commits

    # letters from other processes

    def _take(self, request: SubmitRequest, reply: Reply) -> None:
        try:
            # A failed commit is undone, whatever its outcome after a crash would be: the sender writes for itself, in its place.
            self._writer.put(_submitting(request), lambda receipts, _: reply(receipts), brings=True)
        except StoreFailed:  # it is closed
            reply(None)

    def _stand_in(self) -> None:
        """Several processes write, and nobody dispatches: one of them may as well commit for all."""
        with self._relay_lock, suppress(OSError):  # another one was quicker
            self._names.make()
            self._relay = self._relay or SubmitRelayServer(
                self._names.stand_in, self._take, self._writer.carry
            )

    def _stand_down(self) -> None:
        with self._relay_lock:
            relay, self._relay = self._relay, None
            self._write_lock.contended = False
        if relay is not None:
            relay.close()

    # hosts

    def register_host(self, host: Host) -> Host:
        known: Future[Host] = self._writer.soon(lambda tx: tx.register_host(host), probe=True)
        return known.result()

    def leave(self, host: HostId, instance: str) -> None:
        self._write(lambda tx: tx.leave(host, instance))

    def drain(self, host: HostId, draining: bool, by: str = "") -> bool:
        return self._write(lambda tx: tx.drain(host, draining, by))

    def trouble(self) -> str | None:
        free = free_bytes(self._path)
        if free < LEAST_FREE:
            return f"the disk of {self._path} has only {free // 1024} kB left: free some space"
        failure = self._writer.failure
        return None if failure is None else str(failure)

    # the dispatcher

    def acquire_dispatch(self, holder: str) -> None:
        self._dispatch_lock = DispatchLock(self._path, holder)
        self._wakeups = WakeupServer(self._names, self._heard)
        self._stand_down()
        with suppress(
            OSError
        ):  # one that stopped at this moment still has the name: others write for themselves
            self._relay = SubmitRelayServer(self._names.relay, self._take, self._writer.carry)

    def _heard(self) -> None:
        for heard in self._rings:
            heard()

    def release_dispatch(self) -> None:
        wakeups, self._wakeups = self._wakeups, None
        if wakeups is not None:
            wakeups.close()
            self._stand_down()
        lock, self._dispatch_lock = self._dispatch_lock, None
        if lock is not None:
            lock.close()

    def on_change(self, ring: Callable[[], None]) -> None:
        self._rings.append(ring)

    def listen(self) -> None:
        if self._wakeups is None:
            if self._wakeup_client is None:
                self._wakeup_client = WakeupClient(self._names, self._heard)
            self._wakeup_client.ask()

    def close(self) -> None:
        self._stand_down()
        self._writer.close()
        self._relay_client.close()
        self.release_dispatch()
        if self._wakeup_client is not None:
            self._wakeup_client.close()
        self._close_readers()
        self._con.close()
        self._presence.close()
        self._mark.close()
        self._write_lock.close()
        self._sender.close()


def _submitting(request: SubmitRequest, *, sure: bool = True) -> Callable[[Transaction], list[Receipt]]:
    names, intents, depth = request
    return lambda tx: tx.submit(intents, depth, names, sure=sure)


def _nothing() -> Future[list[Any]]:
    """Whoever asks for nothing is answered without a commit."""
    answer: Future[list[Any]] = Future()
    answer.set_result([])
    return answer
