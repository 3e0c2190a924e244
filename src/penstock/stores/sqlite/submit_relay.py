"""
Submits of many processes in the commits of one.

Eight processes that each commit for themselves pay for eight fsyncs, one behind the other. So whoever commits anyway takes letters: the
process that dispatches, or else the first that had to wait for the write lock (a stand-in). A letter is answered when it is on disk.

Nothing depends on it. A letter without an answer may have been written or not; its sender then writes for itself, and as the jobs had
their ids before they were sent, it finds them if they are there. Who is killed, on either side, loses nothing.

Both ends look who the other is: the file's mode keeps strangers from submitting, and a name in the abstract namespace does not.
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
from operator import attrgetter
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, current_thread
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import Constraint, JobId, RunWhen
from penstock.stores.api import Depth, Receipt, Rest
from penstock.stores.sqlite.socket_names import SocketNames

__all__ = ["Reply", "SubmitRelayClient", "SubmitRelayServer", "SubmitRequest"]

#: What is larger pays for its own commit easily.
MOST_JOBS: Final = 64
MOST_BYTES: Final = 60_000
#: So long is waited for an answer, and so long nobody is asked after one that did not come.
PATIENCE_SEC: Final = 2.0
SHY_SEC: Final = 10.0
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class SubmitRequest(NamedTuple):
    """A submit on its way. The ids are the sender's."""

    names: list[JobId]
    intents: list[Intent]
    depth: Depth


#: Receipts, durable; or None: not done, write for yourself and see why.
Reply: TypeAlias = Callable[[list[Receipt] | None], None]


# what travels

_Row: TypeAlias = tuple[
    str, str, int, int, int, str, int, float | int | None, str, tuple[str, ...], bool, int | None, int | None,
    int | None, int | None, int | None, str, str | None, tuple[int, ...], tuple[str, ...],
]  # fmt: skip
_said: Final = attrgetter(*Intent.__struct_fields__)
_STATES: Final = {str(state): state for state in JobState}
_encode: Final = msgspec.msgpack.encode
_letters: Final = msgspec.msgpack.Decoder(tuple[list[str], list[_Row], tuple[int | None, int | None]])
_answers: Final = msgspec.msgpack.Decoder(list[tuple[str, str, bool]] | None)


def _written(request: SubmitRequest) -> bytes:
    rows = [_said(intent) for intent in request.intents]
    return _encode((request.names, rows, (request.depth.total, request.depth.per_addon)))


class _Reader:
    """Most letters are calls of the function that the one before called, and differ by their payload alone."""

    def __init__(self) -> None:
        self._like: tuple[Any, ...] = ()
        self._last: Intent | None = None

    def read(self, text: bytes) -> SubmitRequest:
        names, rows, depth = _letters.decode(text)
        return SubmitRequest(
            [JobId(name) for name in names], [self._intent(row) for row in rows], Depth(*depth)
        )

    def _intent(self, row: _Row) -> Intent:
        like = (*row[:8], *row[9:])  # all but the payload
        if self._last is None or like != self._like:
            values: list[Any] = [*row]
            values[4], values[5] = Constraint(row[4]), RunWhen(row[5])
            self._like, self._last = like, Intent(*values)
        return replace(self._last, payload=row[8])


# the end that commits

_open_posts: weakref.WeakSet[SubmitRelayServer] = weakref.WeakSet()


class SubmitRelayServer:
    """
    OSError: somebody has this name already. Both are called from the post's own thread: `take` with each letter, `taken` when all that
    lay there has been taken. If there is something left to do for the thread then, another one serves from there on: to wake that one takes
    as long as it ever did, but nobody waits for it.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[SubmitRequest, Reply], None],
        taken: Callable[[], Sequence[Rest]] = list,
    ) -> None:
        self._take, self._taken, self._reader = take, taken, _Reader()
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
        self._guests: set[socket.socket] = set()
        self._heard_at: dict[int, socket.socket] = {}
        self._owed: set[socket.socket] = set()  # who waits for an answer
        self._closed = False
        #: Between an answer and the closing of what it goes to: the number may be another file's by then.
        self._lock = Lock()
        #: Threads that have served, and may again: True is the turn of one of them, False its end.
        self._turns: SimpleQueue[bool] = SimpleQueue()
        self._resting: list[Thread] = []
        self._served = Event()  # by the last of them
        self._hire()
        _open_posts.add(self)

    def _hire(self) -> None:
        self._thread = Thread(target=self._work, name="penstock-post", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No further letter; those in hand are still answered."""
        self._wake.send(b"0")
        # It may find out by itself that somebody else takes letters now.
        if current_thread() is not self._thread:
            self._served.wait()
            self._thread.join()
        with self._lock:
            self._shut(self._guests - self._owed)
            resting, self._resting = self._resting, []
        for thread in resting:
            self._turns.put(False)
            thread.join()

    def _shut(self, guests: set[socket.socket]) -> None:
        self._closed = True
        self._guests -= guests
        for each in (*guests, self._listener, self._wake, self._ended):
            each.close()

    def leave_to_parent(self) -> None:
        """A fork has these sockets too, and no thread that serves them: senders would wait at a door that nobody opens."""
        self._lock = Lock()  # whoever held it stayed in the parent
        self._shut(set(self._guests))

    def _work(self) -> None:
        while True:
            rest = self._serve()
            if not rest:
                self._watched.close()
                self._served.set()
                return
            self._hand_over()
            for each in rest:
                each()
            if not self._rests():
                return

    def _serve(self) -> Sequence[Rest]:
        """Until there is something else to do; nothing, when it is over."""
        over = False
        while not (over or self._closed):
            if rest := self._taken():
                return rest  # if it is over, the next one finds that as well
            for fd, _ in self._watched.poll():
                guest = self._heard_at.get(fd)
                if guest is not None:
                    if not self._hear(guest):
                        self._watched.unregister(fd)
                        del self._heard_at[fd]
                        self._part(guest)
                elif fd == self._ended.fileno():
                    over = True
                else:
                    self._welcome()
        return () if self._closed else self._taken()

    def _hand_over(self) -> None:
        with self._lock:
            next_one = self._resting.pop() if self._resting else None
        if next_one is None:
            self._hire()
        else:
            self._thread = next_one
            self._turns.put(True)

    def _rests(self) -> bool:
        """Until it is its turn again. Not, if that is not to be expected."""
        with self._lock:
            if self._closed or self._resting:
                return False
            self._resting.append(current_thread())
        return self._turns.get()

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):  # gone again, or we have no descriptors left
            guest, _ = self._listener.accept()
            with self._lock:
                self._guests.add(guest)
            if _is_ours(guest):
                self._watched.register(guest, select.EPOLLIN)
                self._heard_at[guest.fileno()] = guest
            else:
                self._part(guest)

    def _hear(self, guest: socket.socket) -> bool:
        try:
            text = guest.recv(MOST_BYTES)
            request = self._reader.read(text) if text else None
        except (OSError, ValueError):  # msgspec's errors are ValueErrors: a Penstock of another version
            return False
        if request is None:
            return False
        with self._lock:
            self._owed.add(guest)
        self._take(request, lambda receipts: self._answer(guest, receipts))
        return True

    def _answer(self, guest: socket.socket, receipts: list[Receipt] | None) -> None:
        text = _encode(None if receipts is None else [(r.job_id, r.state, r.created) for r in receipts])
        with self._lock:
            try:
                if self._closed:
                    guest.shutdown(socket.SHUT_RD)  # before it can send its next one here
                guest.send(text, _AT_ONCE)
            except OSError:
                pass  # it did not wait
            self._owed.discard(guest)
            if self._closed:
                self._guests.discard(guest)
                guest.close()

    def _part(self, guest: socket.socket) -> None:
        with self._lock:
            self._guests.discard(guest)
            guest.close()


def _after_fork() -> None:
    for relay in list(_open_posts):
        relay.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


# the end that sends


class SubmitRelayClient:
    """Used by many threads, each of which waits for its own answer: no thread stands between the sender and the disk."""

    def __init__(self, names: SocketNames) -> None:
        self._names = names
        self._idle: SimpleQueue[socket.socket] = SimpleQueue()
        self._shy_until = 0.0

    def line(self, jobs: int) -> socket.socket | None:
        """To who takes letters now, of so many jobs. It is for one letter."""
        if jobs > MOST_JOBS or time.monotonic() < self._shy_until:
            return None
        return self._line()

    def deliver(self, request: SubmitRequest, line: socket.socket) -> tuple[list[Receipt] | None, bool]:
        """The answer, if there was one; and whether it is certain that without one nothing was written."""
        text = _written(request)
        if len(text) > MOST_BYTES:
            self._idle.put(line)
            return None, True
        there: socket.socket | None = line
        while there is not None:
            try:
                there.send(text, socket.MSG_NOSIGNAL)
            except OSError:  # whoever was there has gone; perhaps somebody else is there now
                there.close()
                there = self._line()
            else:
                return self._hear(there)
        return None, True

    def _hear(self, line: socket.socket) -> tuple[list[Receipt] | None, bool]:
        try:
            told = line.recv(MOST_BYTES)
            answer = _answers.decode(told) if told else None
        except BlockingIOError:
            self._shy_until = time.monotonic() + SHY_SEC
            line.close()
            return None, False
        except (OSError, ValueError):
            line.close()
            return None, False
        except BaseException:  # Ctrl-C: the answer that still comes must not be taken for the next one's
            line.close()
            raise
        if not told:
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
        for name in (self._names.relay, self._names.stand_in):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                line.connect(name)
            except OSError:
                line.close()
                continue
            if _is_ours(line):
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


def _is_ours(end: socket.socket) -> bool:
    told: Any = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", told)
    return bool(uid == os.geteuid())
