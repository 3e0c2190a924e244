"""
The submit relay: one process commits the submits of many.

Eight processes that each commit for themselves need eight fsyncs, one after the other. So a process that
commits anyway takes submits of others: the dispatcher, or else the first process that had to wait for the
write lock (the stand-in). It answers a submit when the submit is on disk.

The relay only saves time. A submit without an answer may be written or not. Its sender then writes it itself,
and finds the jobs that exist already, because it has chosen their ids. A kill of either process loses
nothing.

Both ends check the other's user: the mode of the database file keeps other users from submitting, but any
user may bind or connect to a name in the abstract namespace.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, get_ident
from typing import Any, Final, TypeAlias

import msgspec

from penstock.core.errors import StoreFailed
from penstock.core.jobs.dependencies import Dependency, IfUnmet
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import Constraint, JobId, RunWhen
from penstock.stores.api import Depth, Receipt, Relay, Submit
from penstock.stores.common.group_commit import failed
from penstock.stores.sqlite.wakeups import SocketNames

#: A larger submit is worth a commit of its own.
MOST_JOBS: Final = 64
MOST_BYTES: Final = 60_000
#: How long a sender waits for an answer, and how long it writes for itself if no answer came.
PATIENCE_SEC: Final = 2.0
AVOID_SEC: Final = 10.0
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class NamedSubmit(Submit, frozen=True):
    """
    A submit whose sender chose the ids of the jobs. `sure`: False if another process may have written them.
    """

    job_ids: Sequence[JobId] = ()
    sure: bool = True


# what travels

_Row: TypeAlias = tuple[
    str, str, int, int, int, str, int, float | int | None, str, tuple[str, ...], bool, int | None, int | None,
    int | None, int | None, int | None, str, str | None, tuple[int, ...], tuple[str, ...],
    bool, tuple[Dependency, ...], IfUnmet,
]  # fmt: skip
_fields: Final = attrgetter(*Intent.__struct_fields__)
_STATES: Final = {str(state): state for state in JobState}
_encode: Final = msgspec.msgpack.encode
_requests: Final = msgspec.msgpack.Decoder(tuple[list[str], list[_Row], tuple[int | None, int | None]])
_answers: Final = msgspec.msgpack.Decoder(list[tuple[str, str, bool]] | None)


def _encoded(submit: NamedSubmit) -> bytes:
    rows = [_fields(intent) for intent in submit.intents]
    return _encode((submit.job_ids, rows, (submit.depth.total, submit.depth.per_addon)))


def _decoded(text: bytes, on_answer: Callable[[Future[Any]], None]) -> NamedSubmit:
    job_ids, rows, depth = _requests.decode(text)
    intents = [Intent(*row[:4], Constraint(row[4]), RunWhen(row[5]), *row[6:]) for row in rows]  # type: ignore[arg-type]  # a row of JSON
    return NamedSubmit(intents, Depth(*depth), [JobId(job_id) for job_id in job_ids], on_answer=on_answer)


# the end that commits

_open_servers: weakref.WeakSet[SubmitRelayServer] = weakref.WeakSet()


class SubmitRelayServer:
    """
    The end that takes submits and commits them. OSError: another process has this name already.

    A thread of the server calls `relay` with all submits that have arrived. The relay commits them, and may
    return a job for this thread to run; meanwhile the other thread takes submits, and runs no job
    (`stays=False`), so that no submit waits for a job function.
    """

    def __init__(self, name: str, relay: Relay) -> None:
        self._relay = relay
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(name)
        except OSError:
            self._listener.close()
            raise
        self._listener.listen(128)
        self._wake, self._ended = socket.socketpair()
        self._watched = select.epoll()
        for each in (self._listener, self._ended):
            self._watched.register(each, select.EPOLLIN)
        self._senders: set[socket.socket] = set()
        self._sender_at: dict[int, socket.socket] = {}
        self._unanswered: set[socket.socket] = set()
        self._closed = False
        #: Held to answer and to close a socket: a closed socket's number may soon belong to another file.
        self._lock = Lock()
        #: Held by the thread that takes submits; the id of that thread; the id of a thread that runs a job,
        #: or 0.
        self._turn, self._server, self._runs_job = Lock(), 0, 0
        self._over = Event()
        self._threads = [
            Thread(target=self._run_thread, name="penstock-relay", daemon=True) for _ in range(2)
        ]
        for thread in self._threads:
            thread.start()
        _open_servers.add(self)

    def close(self) -> None:
        """Take no further submits, but answer those taken before. A job that runs goes on."""
        self._wake.send(b"0")
        # A server thread itself may call this, after its commit found a dispatcher: it must not wait for
        # itself.
        if get_ident() != self._server:
            self._over.wait()
            for thread in self._threads:
                if thread.ident not in {get_ident(), self._runs_job}:
                    thread.join()
        with self._lock:
            self._shut(self._senders - self._unanswered)

    def _shut(self, senders: set[socket.socket]) -> None:
        self._closed = True
        self._senders -= senders
        for each in (*senders, self._listener, self._wake, self._ended):
            each.close()

    def leave_to_parent(self) -> None:
        """
        Close the sockets in a forked process: it has no thread that serves them, so senders would wait in
        vain.
        """
        self._lock = Lock()  # the thread that held it stayed in the parent
        self._shut(set(self._senders))

    def _run_thread(self) -> None:
        while True:
            with self._turn:
                self._server = get_ident()
                run_job = self._serve()
                self._server = 0
                if run_job is None:
                    return
                self._runs_job = get_ident()
            run_job()
            self._runs_job = 0

    def _serve(self) -> Callable[[], None] | None:
        """Take submits until the relay returns a job to run. None: the server was closed."""
        going = not self._over.is_set()
        while going and not self._closed:
            submits: list[tuple[socket.socket, NamedSubmit]] = []
            for fd, _ in self._watched.poll():
                sender = self._sender_at.get(fd)
                if sender is not None:
                    submit = self._read(sender)
                    if submit is not None:
                        submits.append((sender, submit))
                    else:
                        self._watched.unregister(fd)
                        del self._sender_at[fd]
                        self._remove(sender)
                elif fd == self._ended.fileno():
                    going = False
                else:
                    self._accept()
            if submits and (run_job := self._commit(submits)) is not None:
                return run_job
        self._watched.close()
        self._over.set()
        return None

    def _commit(self, submits: list[tuple[socket.socket, NamedSubmit]]) -> Callable[[], None] | None:
        with self._lock:
            self._unanswered.update(sender for sender, _ in submits)
        try:
            return self._relay([submit for _, submit in submits], stays=not self._runs_job)
        except StoreFailed as closed:
            for sender, _ in submits:
                self._answer(sender, failed(closed))
            return None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the sender has gone, or this process has no descriptors left
            sender, _ = self._listener.accept()
            with self._lock:
                self._senders.add(sender)
            if _has_same_user(sender):
                self._watched.register(sender, select.EPOLLIN)
                self._sender_at[sender.fileno()] = sender
            else:
                self._remove(sender)

    def _read(self, sender: socket.socket) -> NamedSubmit | None:
        """The next submit of this sender. None: the sender has gone, or its message is of another version."""
        try:
            text = sender.recv(MOST_BYTES)
            return _decoded(text, on_answer=partial(self._answer, sender)) if text else None
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return None

    def _answer(self, sender: socket.socket, answer: Future[list[Receipt]]) -> None:
        """
        Send the receipts, which are durable. If the commit failed, send None: it was undone, so the sender
        may write for itself, and gets the error.
        """
        receipts = (
            None
            if answer.exception() is not None
            else [(r.job_id, r.state, r.created) for r in answer.result()]
        )
        text = _encode(receipts)
        with self._lock:
            try:
                if self._closed:
                    sender.shutdown(socket.SHUT_RD)  # before it can send its next one here
                sender.send(text, _AT_ONCE)
            except OSError:
                pass  # the sender did not wait
            self._unanswered.discard(sender)
            if self._closed:
                self._senders.discard(sender)
                sender.close()

    def _remove(self, sender: socket.socket) -> None:
        with self._lock:
            self._senders.discard(sender)
            sender.close()


def _after_fork() -> None:
    for relay in list(_open_servers):
        relay.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


# the end that sends


class SubmitRelayClient:
    """
    The end that sends submits, for many threads. Each thread waits for its own answer, so no thread wakes
    another.
    """

    def __init__(self, names: SocketNames) -> None:
        self._names = names
        self._idle: SimpleQueue[socket.socket] = SimpleQueue()
        self._avoid_until = 0.0

    def line(self, jobs: int) -> socket.socket | None:
        """
        A connection to the process that takes submits, for a submit of `jobs` jobs. None: write for yourself.
        """
        if jobs > MOST_JOBS or time.monotonic() < self._avoid_until:
            return None
        return self._line()

    def deliver(self, submit: NamedSubmit, line: socket.socket) -> tuple[list[Receipt] | None, bool]:
        """The receipts; or None, and whether it is certain that nothing was written."""
        text = _encoded(submit)
        if len(text) > MOST_BYTES:
            self._idle.put(line)
            return None, True
        connection: socket.socket | None = line
        while connection is not None:
            try:
                connection.send(text, socket.MSG_NOSIGNAL)
            except OSError:  # that process has gone; another one may take submits now
                connection.close()
                connection = self._line()
            else:
                return self._receive(connection)
        return None, True

    def _receive(self, line: socket.socket) -> tuple[list[Receipt] | None, bool]:
        try:
            message = line.recv(MOST_BYTES)
            answer = _answers.decode(message) if message else None
        except BlockingIOError:
            self._avoid_until = time.monotonic() + AVOID_SEC
            line.close()
            return None, False
        except (OSError, ValueError):
            line.close()
            return None, False
        except BaseException:  # Ctrl-C: the next submit must not get this answer, which may still come
            line.close()
            raise
        if not message:
            line.close()
            return None, False
        self._idle.put(line)
        if answer is None:
            return None, True
        return [Receipt(JobId(name), _STATES[state], created) for name, state, created in answer], True

    def _line(self) -> socket.socket | None:
        try:
            return self._idle.get_nowait()
        except Empty:
            return self._connected()

    def _connected(self) -> socket.socket | None:
        if not self._names.in_use:
            return None
        for name in (self._names.relay, self._names.stand_in):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                line.connect(name)
            except OSError:
                line.close()
                continue
            if _has_same_user(line):
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(PATIENCE_SEC))
                line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(PATIENCE_SEC))
                return line
            line.close()
        return None

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().close()


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))


def _has_same_user(end: socket.socket) -> bool:
    credentials: Any = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())
