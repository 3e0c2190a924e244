"""
The reply reader: decides which thread reads the replies of the worker processes.

There is a reader thread. But waking a thread costs more than the rest of a small call, and often another
thread waits anyway: in `result()`, in a `submit` on a full queue, or an event loop with calls in flight. Such
a thread may take the pipes over from the reader thread; it then reads and settles all replies, for all
callers (the leader/follower pattern). Then a small call is one round trip to the worker, without another
thread.

- One thread reads at a time: the one that holds `reading`.
- While another thread reads, and for a moment after (it mostly comes back at once), the reader thread is
  muted and checks from time to time. If replies stay unread because the loop that took over is blocked by a
  coroutine, the reader thread reads them and takes the pipes back.
- Deaths of workers are always handled by the reader thread.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps it in enums, which takes 20 us a call
import logging
import threading
import time
from _thread import get_ident
from typing import TYPE_CHECKING, Any, Final

from penstock.pools.context import may_block, never_block_here, thread_state
from penstock.pools.future import Call
from penstock.pools.timers import clock
from penstock.pools.workers.poller import Poller, make_poller
from penstock.pools.workers.worker_process import WorkerProcess

if TYPE_CHECKING:
    from penstock.pools.event_loops import LoopNotifier
    from penstock.pools.workers.processes import ProcessWorkers

log = logging.getLogger("penstock")

#: Seconds for which the reader thread lets replies gather while every worker has enough calls.
_GATHER: Final = 50e-6
#: Seconds between two checks of the muted reader thread; doubled after each check without a result, up to the
#: second value.
_LOOK: Final = 1e-3
_LOOK_SELDOM: Final = 20e-3
#: The most replies that a reading thread reads in one go.
_FEW: Final = 8
#: Seconds without reading after which a loop that took over counts as blocked.
_STUCK: Final = 5e-3
#: Seconds within which a caller that came back is expected again, so the reader thread is not woken in
#: between.
_SOON: Final = _LOOK


class ReplyReader:
    def __init__(self, group: ProcessWorkers, name: str, poller: Poller | None = None) -> None:
        self._group = group
        self._name = name
        self.poller = poller or make_poller()
        self._thread: threading.Thread | None = None
        self.reading = threading.Lock()
        self._thread_wants_pipes: bool = False  # the reader thread needs the pipes
        self.muted = False
        self._takeovers = 0  # how often another thread took over
        self._released_at = 0.0
        self._reading_for: Call[Any] | None = None  # the call that the reading thread waits for
        self._reader_thread = 0
        self._loop: LoopNotifier | None = None  # the event loop that took over
        self._watching: set[LoopNotifier] = set()  # loops that watch the pipes; a busy one stops later
        self._loop_read_at = 0.0
        self.workers: dict[int, WorkerProcess] = {}
        self._full: dict[int, WorkerProcess] = {}
        self._deaths: dict[int, WorkerProcess] = {}
        self._to_spawn: list[WorkerProcess] = []
        self._closing = False
        self._closed = False  # no thread may take over any more

    # From any thread

    def start(self, worker: WorkerProcess) -> None:
        self._to_spawn.append(worker)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"penstock-{self._name}", daemon=True)
            self._thread.start()
        self.poller.wake()

    def wait_for_space(self, worker: WorkerProcess) -> None:
        """
        Push the rest to this worker when its full pipe has room. A worker that is not spawned yet gets it
        then.
        """
        if worker.outlet in self.workers and worker.inlet not in self._full:
            self._full[worker.inlet] = worker
            self.poller.watch(worker.inlet, write=True)

    def stop_waiting_for_space(self, worker: WorkerProcess) -> None:
        """
        Stop watching the pipe for room. Called, like `wait_for_space`, with the call queue's lock held, which
        keeps the order of the two.
        """
        self._forget(self._full, worker.inlet)

    def close(self) -> None:
        """Let the thread end when the last worker is gone."""
        self._closing = True
        if self._thread is None and not self._group.gone.is_set():
            self.poller.close()
            self.poller.close_pipes()
            self._group.gone.set()
        else:
            self.poller.wake()

    # Reading in place of the reader thread

    def wake(self, call: Call[Any]) -> None:
        """Wake the thread that reads while it waits for this call, because the call changed."""
        if self._reading_for is call and self._reader_thread != get_ident():
            self.poller.wake_reader()

    def read_while_waiting(
        self, call: Call[Any], timeout: float | None = None, *, for_space: bool = False
    ) -> bool:
        """
        Read replies instead of sleeping until the call is settled (`for_space`: until it has its place).
        Called without the lock. True: the call is settled or the time is over. False: this thread may not
        read and must sleep.
        """
        if self._thread is None or not self.poller.can_mute or not may_block():
            return False
        if not self.reading.acquire(blocking=False):
            return False
        now = clock()
        soon = now - self._released_at < _SOON
        # Callbacks of settled calls may submit again, and must not wait here.
        thread_state.never_blocks = True
        try:
            if self._closed:
                return False
            self._reading_for, self._reader_thread = call, get_ident()
            self._takeovers += 1
            if not self.muted:
                self._take_over()
            remaining = timeout
            while not call.done() and not (for_space and call.asleep is None):
                if self._thread_wants_pipes:
                    return False
                if timeout is not None:
                    remaining = now + timeout - clock()
                    if remaining <= 0:
                        break
                ready = self.poller.ready_pipes(remaining)
                if ready:
                    self.read(ready)
            return True
        finally:
            thread_state.never_blocks = False
            self._reading_for = None
            self._released_at = clock()
            if not soon and self._loop is None and not self._group.nothing_in_flight():
                self._give_back()
            self.reading.release()

    def read_on_loop(self, notifier: LoopNotifier) -> None:
        """
        Let the event loop of this thread read, if no other thread does; called before it awaits a call.
        """
        self._takeovers += 1
        if self._loop is None and self.poller.can_mute and self.reading.acquire(blocking=False):
            try:
                if not self._closed and notifier.add_reader(self.poller.fd, self._read_for_loop):
                    self._watching.add(notifier)
                    self._loop, self._loop_read_at = notifier, clock()
                    self._take_over()
            finally:
                self.reading.release()

    def _read_for_loop(self) -> None:
        if self._thread_wants_pipes or not self.reading.acquire(blocking=False):
            return
        self._loop_read_at = clock()
        try:
            if not self._closed:
                self.read(self.poller.ready_pipes())
        finally:
            self.reading.release()

    def _detach_loop(self) -> None:
        """Let the loop that took over, if there is one, stop reading at its next turn."""
        loop, self._loop = self._loop, None
        if loop is None:
            return

        def stopped() -> None:
            if self._loop is not loop:
                self._watching.discard(loop)
                self._close_pipes()

        if not loop.remove_reader(self.poller.fd, lambda: self._loop is not loop, stopped):
            stopped()

    def _close_pipes(self) -> None:
        """Close the pipes after `close`, when no loop watches them: later their numbers may belong to other files."""
        if self._closed and not self._watching:
            self.poller.close_pipes()

    def _take_over(self) -> None:
        if not self.muted:
            self.muted = True
            self.poller.mute()
            self.poller.wake()  # so that the reader thread begins its regular checks

    def _give_back(self) -> None:
        if self.muted:
            self.muted = False
            self.poller.unmute()

    # Reading (in the thread that holds `reading`)

    def read(self, ready: list[tuple[int, int]]) -> None:
        """
        Settle the ready replies, and a few that arrive meanwhile: they then need no wake-up of their own. Not
        more, because an event loop has other tasks and a waiting thread has a caller.

        Ctrl-C must not interrupt this: the main thread only notes it, and raises it afterwards.
        """
        noted: list[object] | None = None
        if get_ident() == _main and _signal.getsignal(_SIGINT) is _signal.default_int_handler:
            noted = []
            _signal.signal(_SIGINT, lambda *_: noted.append(_))
        try:
            few = _FEW
            while ready:
                for fd, _ in ready:
                    worker = self.workers.get(fd)
                    if worker is None:
                        self._handle_other(fd)
                    elif (messages := worker.receive()) is not None:
                        self._group.settle(worker, messages)
                    else:
                        self._pipe_closed(worker)
                few -= len(ready)
                if few <= 0 or not self._group.more_may_come():
                    break
                ready = self.poller.ready_pipes()
        finally:
            if noted is not None:
                _signal.signal(_SIGINT, _signal.default_int_handler)
                if noted:
                    raise KeyboardInterrupt

    def _handle_other(self, fd: int) -> None:
        """Handle a descriptor without a reply: a full pipe has room again, or `wake_reader` was called."""
        if fd in self._full:
            self._group.push(self._full[fd])
        else:
            self.poller.clear_wakeup(fd)

    def _pipe_closed(self, worker: WorkerProcess) -> None:
        self._forget(self.workers, worker.outlet)
        if worker.pidfd is None:
            self._group.on_death(worker)

    def _forget(self, table: dict[int, WorkerProcess], fd: int) -> None:
        if table.pop(fd, None) is not None:
            self.poller.forget(fd)

    # The thread

    def _run(self) -> None:
        never_block_here()
        seen, interval = -1, _LOOK
        while not (self._closing and not self.workers and not self._deaths and not self._to_spawn):
            try:
                self._wait_once(interval if self.muted else None)
                if self.muted:
                    interval = self._check_pipes(seen, interval)
                    seen = self._takeovers
            except Exception:  # without this thread no death of a worker would be noticed
                log.exception("the reader thread of %s failed", self._name)
        with self.reading:
            self._closed = True
            self.poller.close()
            self._detach_loop()
            self._close_pipes()
        self._group.gone.set()

    def _wait_once(self, timeout: float | None) -> None:
        ready = self.poller.wait(timeout)
        for fd in ready:
            dead = self._deaths.get(fd)
            if dead is not None:
                self._worker_died(dead)
        while self._to_spawn:
            self._spawn(self._to_spawn.pop())
        # A thread that gives the pipes back needs the interpreter for a moment, so do not check again at
        # once; but do not wait so long that a death goes unnoticed.
        if ready and not self.muted and self.reading.acquire(timeout=_LOOK):
            try:
                if not self.muted:
                    self.read(self.poller.ready_pipes())
            finally:
                self.reading.release()
            if self._group.pipes_are_deep():
                time.sleep(_GATHER)

    def _check_pipes(self, seen: int, interval: float) -> float:
        """
        A check of the muted reader thread: read replies that the other thread left unread, and take the pipes
        back if it is gone. Returns the seconds until the next check.
        """
        if self._loop is not None and (earliest := self._loop_read_at + _STUCK - clock()) > 0:
            return max(earliest, _LOOK)  # it cannot be stuck before that
        if not self.reading.acquire(blocking=False):
            return _LOOK_SELDOM  # the other thread waits for the pipes right now
        try:
            unread = self.poller.ready_pipes()
            self.read(unread)
            if self._takeovers != seen and not unread:
                return _LOOK
            if unread or self._loop is None or self._group.nothing_in_flight():
                self._detach_loop()
                self._give_back()
            return min(2 * interval, _LOOK_SELDOM)
        finally:
            self.reading.release()

    def _spawn(self, worker: WorkerProcess) -> None:
        try:
            worker.spawn()
        except OSError as error:
            worker.failure = (f"it could not be started: {error}", "")
            self._group.on_death(worker)
            return
        self.workers[worker.outlet] = worker
        self.poller.watch(worker.outlet)
        self._group.push(worker)
        if worker.pidfd is not None:
            self._deaths[worker.pidfd] = worker
            self.poller.watch_death(worker.pidfd)
        if worker.kill_reason is not None:
            worker.kill(worker.kill_reason)

    def _worker_died(self, worker: WorkerProcess) -> None:
        self._thread_wants_pipes = True
        self.poller.wake_reader()
        with self.reading:
            self._thread_wants_pipes = False
            while messages := worker.receive():
                self._group.settle(worker, messages)
            self._forget(self.workers, worker.outlet)
            assert worker.pidfd is not None
            self._forget(self._deaths, worker.pidfd)
            self._group.on_death(worker)


_main = threading.main_thread().ident
_SIGINT: Final = int(_signal.SIGINT)
