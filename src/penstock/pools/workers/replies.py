"""
Who listens to the workers.

There is a thread for it, the watch. But waking a thread costs more than all the rest of a small call, and somebody is
often waiting anyway: a thread in `result()` or in a `submit` that found the queue full, or an event loop with calls
outstanding. So whoever waits may *lead*: it takes the pipes over from the watch, reads whatever comes and settles it
for everybody. Then a small call is one trip to the worker and back, with no thread in between.

- One reads at a time: whoever holds `_reading`.
- While somebody leads, and for a moment after (they mostly come back at once), the watch is muted and looks in now and
  then. If answers lie unread because the leader is busy with something else (a coroutine that blocks its loop), the
  watch reads them, and takes the lead away.
- Deaths of workers stay with the watch always.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps it in enums, which takes 20 us a call
import logging
import threading
import time
from _thread import get_ident
from collections.abc import Callable
from concurrent.futures._base import PENDING
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.pools.blocking import may_block, never_block_here, own_threads
from penstock.pools.future import Call
from penstock.pools.timers import clock
from penstock.pools.workers.poller import make_poller
from penstock.pools.workers.worker_process import WorkerProcess

if TYPE_CHECKING:
    from penstock.pools.loops import Mailbox

log = logging.getLogger("penstock")

#: How long the watch lets answers gather while every worker has plenty to do, instead of waking for each.
_GATHER: Final = 50e-6
#: How often the watch looks in while somebody leads; twice as long each time that it finds nothing, up to the second.
_LOOK: Final = 1e-3
_LOOK_SELDOM: Final = 20e-3
#: From so many answers on, whoever reads does not look for more.
_FEW: Final = 8
#: A loop that leads and has not read for so long is busy with something else.
_STUCK: Final = 5e-3
#: A leader that came back this soon will do so again: no need to wake the watch in between.
_SOON: Final = _LOOK


class Listener(Protocol):
    """What a watch tells its crew, always with no lock held."""

    def settle(self, worker: WorkerProcess, messages: list[tuple[Any, ...]]) -> None: ...
    def bury(self, worker: WorkerProcess) -> None:
        """Its process is dead, and it said all that it will say."""

    def push(self, worker: WorkerProcess) -> None:
        """There may be room now for what did not fit before."""

    def pipes_are_deep(self) -> bool: ...
    def more_may_come(self) -> bool:
        """Answers may have come meanwhile, and not so many that they had better gather."""

    def is_quiet(self) -> bool:
        """Nothing is in flight."""


class ReplyReader:
    def __init__(self, group: Listener, name: str) -> None:
        self._group = group
        self._name = name
        self._poller = make_poller()
        self._thread: threading.Thread | None = None
        self._reading = threading.Lock()
        self._wanted: bool = False  # the watch itself needs the pipes
        self._muted = False
        self._turns = 0  # how often somebody led
        self._left_at = 0.0
        self._led: Call[Any] | None = None  # for whose sake a thread leads
        self._leader = 0
        self._loop: Mailbox | None = None  # the event loop that leads
        self._loop_read_at = 0.0
        self._workers: dict[int, WorkerProcess] = {}
        self._full: dict[int, WorkerProcess] = {}
        self._deaths: dict[int, WorkerProcess] = {}
        self._to_spawn: list[WorkerProcess] = []
        self._closing = False
        self._led_out = False  # nobody may lead any more
        self.gone = threading.Event()

    # From any thread

    def start(self, worker: WorkerProcess) -> None:
        self._to_spawn.append(worker)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"penstock-{self._name}", daemon=True)
            self._thread.start()
        self._poller.wake()

    def wait_for_space(self, worker: WorkerProcess) -> None:
        """Its pipe is full; push again when it is not. (A worker that is not spawned yet is looked at then.)"""
        if worker.outlet in self._workers and worker.inlet not in self._full:
            self._full[worker.inlet] = worker
            self._poller.watch(worker.inlet, write=True)

    def has_room(self, worker: WorkerProcess) -> None:
        """Both with the gate's lock held, so that they come in the order of what they tell."""
        self._forget(self._full, worker.inlet)

    def close(self) -> None:
        """Leave when the last worker is gone."""
        self._closing = True
        if self._thread is None and not self.gone.is_set():
            self._poller.close()
            self._poller.close_pipes()
            self.gone.set()
        else:
            self._poller.wake()

    # Leading

    def nudge(self, call: Call[Any]) -> None:
        """Something happened to this call: if a thread leads for its sake, it should look."""
        if self._led is call and self._leader != get_ident():
            self._poller.nudge()

    def lead(self, call: Call[Any], timeout: float | None = None, *, for_space: bool = False) -> bool:
        """See `Crew.lead`."""
        if self._thread is None or not self._poller.can_mute or not may_block():
            return False
        if not self._reading.acquire(blocking=False):
            return False
        now = clock()
        soon = now - self._left_at < _SOON
        own_threads.yes = True  # what is read may call back into us, and must not wait here
        try:
            if self._led_out:
                return False
            self._led, self._leader = call, get_ident()
            self._turns += 1
            if not self._muted:
                self._take_over()
            remaining = timeout
            while call._state is PENDING and not (for_space and call.asleep is None):
                if self._wanted:
                    return False
                if timeout is not None:
                    remaining = now + timeout - clock()
                    if remaining <= 0:
                        break
                ready = self._poller.pipes(remaining)
                if ready:
                    self._read(ready)
            return True
        finally:
            own_threads.yes = False
            self._led = None
            self._left_at = clock()
            if not soon and self._loop is None and not self._group.is_quiet():
                self._give_back()
            self._reading.release()

    def attend(self, box: Mailbox) -> None:
        """On a loop's own thread: it is about to await a call. Let it lead, if nobody does."""
        self._turns += 1
        if self._loop is None and self._poller.can_mute and self._reading.acquire(blocking=False):
            try:
                if not self._led_out and box.add_reader(self._poller.fd, self._read_for_loop):
                    self._loop, self._loop_read_at = box, clock()
                    self._take_over()
            finally:
                self._reading.release()

    def _read_for_loop(self) -> None:
        if self._wanted or not self._reading.acquire(blocking=False):
            return
        self._loop_read_at = clock()
        try:
            self._read(self._poller.pipes())
        finally:
            self._reading.release()

    def _depose(self, then: Callable[[], object] | None = None) -> bool:
        """The loop that leads (if one does) stops to; True if it lives to do so, and to do `then`."""
        box, self._loop = self._loop, None
        return box is not None and box.remove_reader(self._poller.fd, lambda: self._loop is not box, then)

    def _take_over(self) -> None:
        if not self._muted:
            self._muted = True
            self._poller.mute()
            self._poller.wake()  # the watch should know that it has to look in

    def _give_back(self) -> None:
        if self._muted:
            self._muted = False
            self._poller.unmute()

    # Reading (whoever holds _reading)

    def _read(self, ready: list[tuple[int, int]]) -> None:
        """
        What is ready, and what has become so meanwhile: an answer that is taken along needs no wake-up of its own, and the
        code that settles it is still at hand. No more than a few, because a loop has other things to do and a thread that
        leads has a caller.

        Ctrl-C must not fall into the middle of this. In the main thread, whose business it is, it is only noted while
        answers are settled, and raised after.
        """
        noted: list[object] | None = None
        if get_ident() == _main and _signal.getsignal(_SIGINT) is _signal.default_int_handler:
            noted = []
            _signal.signal(_SIGINT, lambda *_: noted.append(_))
        try:
            few = _FEW
            while ready:
                for fd, _ in ready:
                    worker = self._workers.get(fd)
                    if worker is None:
                        self._serve(fd)
                    elif (messages := worker.receive()) is not None:
                        self._group.settle(worker, messages)
                    else:
                        self._hung_up(worker)
                few -= len(ready)
                if few <= 0 or not self._group.more_may_come():
                    break
                ready = self._poller.pipes()
        finally:
            if noted is not None:
                _signal.signal(_SIGINT, _signal.default_int_handler)
                if noted:
                    raise KeyboardInterrupt

    def _serve(self, fd: int) -> None:
        """Not an answer: a pipe that was full has room, or somebody nudged."""
        if fd in self._full:
            self._group.push(self._full[fd])
        else:
            self._poller.calm(fd)

    def _hung_up(self, worker: WorkerProcess) -> None:
        self._forget(self._workers, worker.outlet)
        if worker.pidfd is None:
            self._group.bury(worker)

    def _forget(self, table: dict[int, WorkerProcess], fd: int) -> None:
        if table.pop(fd, None) is not None:
            self._poller.forget(fd)

    # The thread

    def _run(self) -> None:
        never_block_here()
        seen, patience = -1, _LOOK
        while not (self._closing and not self._workers and not self._deaths and not self._to_spawn):
            try:
                self._turn(patience if self._muted else None)
                if self._muted:
                    patience = self._look_in(seen, patience)
                    seen = self._turns
            except Exception:  # without the watch no death of a worker would be noticed
                log.exception("the watch of %s stumbled", self._name)
        with self._reading:
            self._led_out = True
            self._poller.close()
            if not self._depose(then=self._poller.close_pipes):
                self._poller.close_pipes()
        self.gone.set()

    def _turn(self, patience: float | None) -> None:
        ready = self._poller.wait(patience)
        for fd in ready:
            dead = self._deaths.get(fd)
            if dead is not None:
                self._bury(dead)
        while self._to_spawn:
            self._spawn(self._to_spawn.pop())
        # A leader that gives the pipes back holds them a moment longer. To look again at once would take the interpreter
        # from it, which it needs to let go; so wait, and not so long that a death would go unnoticed.
        if ready and not self._muted and self._reading.acquire(timeout=_LOOK):
            try:
                if not self._muted:
                    self._read(self._poller.pipes())
            finally:
                self._reading.release()
            if self._group.pipes_are_deep():
                time.sleep(_GATHER)

    def _look_in(self, seen: int, patience: float) -> float:
        """Somebody leads, or did a moment ago. Returns when to look again."""
        if self._loop is not None and (earliest := self._loop_read_at + _STUCK - clock()) > 0:
            return max(earliest, _LOOK)  # before that it cannot be stuck
        if not self._reading.acquire(blocking=False):
            return _LOOK_SELDOM  # it waits for the pipes right now
        try:
            unread = self._poller.pipes()
            self._read(unread)
            if self._turns != seen and not unread:
                return _LOOK
            if unread or self._loop is None or self._group.is_quiet():
                self._depose()
                self._give_back()
            return min(2 * patience, _LOOK_SELDOM)
        finally:
            self._reading.release()

    def _spawn(self, worker: WorkerProcess) -> None:
        try:
            worker.spawn()
        except OSError as error:
            worker.last_words = (f"it could not be started: {error}", "")
            self._group.bury(worker)
            return
        self._workers[worker.outlet] = worker
        self._poller.watch(worker.outlet)
        self._group.push(worker)
        if worker.pidfd is not None:
            self._deaths[worker.pidfd] = worker
            self._poller.watch_death(worker.pidfd)
        if worker.ending is not None:
            worker.kill(worker.ending)

    def _bury(self, worker: WorkerProcess) -> None:
        self._wanted = True
        self._poller.nudge()
        with self._reading:
            self._wanted = False
            while messages := worker.receive():
                self._group.settle(worker, messages)
            self._forget(self._workers, worker.outlet)
            assert worker.pidfd is not None
            self._forget(self._deaths, worker.pidfd)
            self._group.bury(worker)


_main = threading.main_thread().ident
_SIGINT: Final = int(_signal.SIGINT)
