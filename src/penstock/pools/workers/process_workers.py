"""
The process workers of one pool: who gets the next call, and how it reaches the worker and comes back.

The thread that submits writes straight into a worker's pipe; there is no thread in between. What a worker may hold
beyond the call that it runs is bounded (`max_in_flight` over all workers), and a well filled pipe is topped up in
batches. Settled calls are handed to their callers only after the next ones are on their way.
"""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any, Final

from penstock.pools.call_queue import CallQueue
from penstock.pools.child import protocol, shared_memory
from penstock.pools.child.packing import Packed, PackedFunction, Packer
from penstock.pools.child.protocol import ERROR, PLAIN, SHARED
from penstock.pools.child.remote_errors import cannot_be_rebuilt, unpack_error
from penstock.pools.future import Call
from penstock.pools.timers import Timer, call_at, clock
from penstock.pools.workers.base import COLD, LIVE
from penstock.pools.workers.replies import ReplyReader
from penstock.pools.workers.supervision import SupervisedWorkers
from penstock.pools.workers.worker_process import WorkerProcess

if TYPE_CHECKING:
    from penstock.pools.options import WorkerOptions


#: A worker that may hold more calls than this answers in heaps, which had better grow before somebody looks at them.
_DEEP: Final = 16


class ProcessWorkers(SupervisedWorkers[WorkerProcess]):
    kind = "process"

    def __init__(self, call_queue: CallQueue, options: WorkerOptions) -> None:
        super().__init__(call_queue, options, [WorkerProcess(place) for place in range(options.workers)])
        self._setup = options.pack_setup()
        self._packer = Packer()
        self._watch = ReplyReader(self, call_queue.name)
        self._enough = self._room * 3 // 4  # a pipe with more than this in it can wait for its next batch
        self._trim_timer: Timer | None = None
        self.describe = self._packer.describe
        self.lead = self._watch.lead
        self.attend = self._watch.attend
        self.nudge = self._watch.nudge
        self.gone = self._watch.gone

    # Handing out (with the gate's lock held)

    def pump(self, now: float) -> None:
        """In runs: after a batch of answers one worker has room for many, and to choose it anew for each costs a tenth."""
        queue = self._call_queue.queue
        touched = []
        while queue.pending and queue.in_flight < queue.limit:
            worker, share = self._choose()
            if worker is None:
                break
            self._hand_run(worker, share, now)
            if worker not in touched:
                touched.append(worker)
        if touched and self._options.max_calls is not None:
            self._offer(now)
        for worker in touched:
            if len(worker.calls) - worker.unsent <= self._enough and not worker.flush():
                self._watch.wait_for_space(worker)

    def _choose(self) -> tuple[WorkerProcess | None, int]:
        """
        The least loaded one, and how many calls it may get before another one is; a cold one is started rather than a
        busy one loaded further.
        """
        best = cold = None
        least, limit = self._room, self._options.max_calls
        next_least = least
        for worker in self.workers:
            condition = worker.condition
            if condition is LIVE:
                load = len(worker.calls)
                if load < least and (limit is None or worker.handed < limit):
                    if load == 0:
                        return worker, 1
                    best, least, next_least = worker, load, least
                elif load < next_least:
                    next_least = load
            elif cold is None and condition is COLD:
                cold = worker
        if cold is not None:
            self._open(cold)
            return cold, 1
        share = max(1, next_least - least)
        return best, share if best is None or limit is None else min(share, limit - best.handed)

    def _hand_run(self, worker: WorkerProcess, share: int, now: float) -> None:
        call_queue = self._call_queue
        take, calls, known = call_queue.queue.take, worker.calls, worker.known
        handed: list[Call[Any]] = []
        call: Call[Any] | None = None
        try:
            while share and (call := take(now)) is not None:
                share -= 1
                dispatch, body, function = call.dispatch, call.body, call.function
                call.home = worker
                calls[dispatch] = call
                plain = call.attempt == 1 and not call.guarded and call.extra is None
                if plain and type(body) is tuple and function in known:
                    worker.outbox.append((dispatch, function.number, body, None))
                else:
                    self._hand_fully(worker, call, plain)
                handed.append(call)
        except BaseException:  # Ctrl-C in the submitting thread: no call may be lost between two hands
            if call is not None and call not in handed[-1:]:
                worker.calls.pop(call.dispatch, None)
                worker.outbox = [message for message in worker.outbox if message[0] != call.dispatch]
                call_queue.queue.lose([call], now)
            raise
        finally:
            if handed:
                count = len(handed)
                worker.handed += count
                worker.unsent += count
                call_queue.totals.dispatched += count
                call_queue.hook_dispatcher.note_run(call_queue.hook_dispatcher.dispatch, handed)

    def _open(self, worker: WorkerProcess) -> None:
        worker.open()
        worker.outbox.append((protocol.SETUP, *self._setup))
        self._call_queue.totals.spawned += 1
        self._watch.start(worker)

    def _hand_fully(self, worker: WorkerProcess, call: Call[Any], plain: bool) -> None:
        """With whatever has to be said before it, and beside it."""
        body, function = call.body, call.function
        if type(function) is PackedFunction:
            if function not in worker.known:
                worker.known.add(function)
                self._send_main(worker, function.needs_main)
                worker.outbox.append((protocol.DEFINE, function.number, function.blob))
            function = function.number
        ref = None
        if type(body) is Packed:
            self._send_main(worker, body.needs_main)
            if body.parcel is not None:
                ref = tuple(body.parcel.ref)
                worker.lent[body.parcel.ref.segment] = body.parcel
                self._trim_later()
            body = body.data
        plain = plain and ref is None
        worker.outbox.append((call.dispatch, function, body, None if plain else self._extra(call, ref)))

    @staticmethod
    def _extra(call: Call[Any], ref: Any) -> Any:
        """(attempt, key, deadline), the caller's trace, and where the buffers are."""
        key = call.key if protocol.is_plain(call.key) else protocol.try_dump(call.key)
        return (call.attempt, key, call.deadline), call.extra, ref

    @staticmethod
    def _send_main(worker: WorkerProcess, needed: bool) -> None:
        if needed and not worker.main_sent:
            worker.main_sent = True
            main = protocol.main_module()
            if main is not None:
                worker.outbox.append((protocol.MAIN, *main))

    def _write(self, worker: WorkerProcess) -> None:
        if not worker.flush():
            self._watch.wait_for_space(worker)

    def push(self, worker: WorkerProcess) -> None:
        with (
            self._call_queue.lock
        ):  # or somebody could fill the pipe between our look at it and what we make of it
            if worker.push():
                self._watch.has_room(worker)
            else:
                self._watch.wait_for_space(worker)

    def is_quiet(self) -> bool:
        return self._call_queue.queue.in_flight == 0

    def pipes_are_deep(self) -> bool:
        return self._room > _DEEP and all(len(worker.calls) > self._enough for worker in self.workers)

    def more_may_come(self) -> bool:
        return self._call_queue.queue.in_flight > 0 and (self._room <= _DEEP or not self.pipes_are_deep())

    def tell_canceled(self, call: Call[Any], now: float) -> None:
        worker = call.home
        worker.outbox.append((protocol.CANCEL, call.dispatch))
        worker.ring_cancel()
        self._write(worker)
        self._give_grace(worker, call.dispatch, now)

    # Settling

    def settle(self, worker: WorkerProcess, messages: list[tuple[Any, ...]]) -> None:
        call_queue = self._call_queue
        queue, totals, hook_dispatcher = call_queue.queue, call_queue.totals, call_queue.hook_dispatcher
        outcomes: list[tuple[Call[Any], int, Any]] = []
        settled = failed = 0
        with call_queue.lock:
            now = clock()
            calls = worker.calls
            for message in messages:
                call = calls.pop(message[0], None)
                if call is None:
                    self._hear(worker, message)
                    continue
                dispatch, kind, value, ran_for = message
                if kind == SHARED and not worker.can_reach(dispatch, value[1]):
                    calls[dispatch] = call  # what becomes of it is decided when the worker is buried
                    continue
                settled += 1
                if not queue.settle(call, dispatch, now):
                    if kind == SHARED:
                        worker.outbox.append((protocol.FREE, value[1][2]))
                    continue
                call.ran_for = ran_for
                if kind == ERROR:
                    failed += 1
                outcomes.append((call, kind, value))
            worker.settled += settled
            totals.failed += failed
            if len(outcomes) > failed:
                totals.succeeded += len(outcomes) - failed
                self.crashes = 0
            if not calls and self._minds_idleness:
                self._fell_idle(worker, now)
            if queue.pending:
                self.pump(now)
            if worker.unsent and len(calls) - worker.unsent <= self._enough:
                self._write(worker)
            wake = call_queue.collect_granted() if queue.granted else ()
            if hook_dispatcher.state is not None:
                hook_dispatcher.news.append((hook_dispatcher.state, queue.state()))
        for rouse in wake:
            rouse()
        self._deliver(worker, outcomes)

    def _deliver(self, worker: WorkerProcess, outcomes: list[tuple[Call[Any], int, Any]]) -> None:
        """With the lock released: the next calls are on their way, so now there is time for these callers."""
        call_queue, hook_dispatcher = self._call_queue, self._call_queue.hook_dispatcher
        settled = []
        for call, kind, value in outcomes:
            error = None
            if kind != PLAIN:
                value, error = self._unpack(worker, kind, value)  # noqa: PLW2901  # its travelling form is done with
            if call.guarded:
                call_queue._unguard(call)
            call._settle(value, error)
            settled.append(call)
        if settled:
            hook_dispatcher.note_run(hook_dispatcher.settle, settled)
        if hook_dispatcher.news:
            hook_dispatcher.tell()
        if call_queue._when_idle:
            call_queue._tell_idle()

    def _hear(self, worker: WorkerProcess, message: tuple[Any, ...]) -> None:
        match message:
            case (protocol.FREE, segment):
                worker.lent.pop(segment, None)
            case (protocol.FATAL, reason, trace):
                worker.last_words = (reason, trace)

    @staticmethod
    def _unpack(worker: WorkerProcess, kind: int, value: Any) -> tuple[Any, BaseException | None]:
        try:
            if kind == protocol.PICKLED:
                return pickle.loads(value), None
            if kind == protocol.SHARED:
                return shared_memory.load(value[0], value[1], worker.borrower), None
            return None, unpack_error(value)
        except Exception as error:  # noqa: BLE001  # the result's own code runs here
            return None, cannot_be_rebuilt(error)

    # Coming and going (with the gate's lock held)

    def _start(self, worker: WorkerProcess) -> None:
        self._open(worker)
        self._write(worker)

    def _dismiss(self, worker: WorkerProcess) -> None:
        worker.outbox.append((protocol.EXIT,))
        self._write(worker)

    def _clear_away(self, worker: WorkerProcess) -> None:
        self._watch.has_room(worker)
        worker.close()

    def _wind_up(self) -> None:
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        self._watch.close()

    # Without the lock

    def bury(self, worker: WorkerProcess) -> None:
        super().bury(worker)
        if self._closing:
            self._packer.trim()  # what this worker had borrowed

    def close(self, *, kill: bool) -> None:
        super().close(kill=kill)
        self._packer.trim()

    def abandon(self) -> None:
        """Close our copies, so that the parent's death is noticed."""
        for worker in self.workers:
            if worker.opened:
                for fd in (worker.inlet, worker.outlet, worker.lifeline, worker.pidfd):
                    if fd is not None:
                        os.close(fd)
                worker.opened = False
        super().abandon()

    # Shared memory

    def _trim_later(self) -> None:
        if self._trim_timer is None:
            self._trim_timer = call_at(clock() + self._options.trim_after, self._trim)

    def _trim(self) -> None:
        """Give back shared memory that nothing uses: what comes back later is trimmed later."""
        closed = self._packer.trim()
        with self._call_queue.lock:
            self._trim_timer = None
            for worker in self.workers:
                if worker.condition is LIVE and closed:
                    worker.outbox.extend((protocol.DROP, serial) for serial in closed)
                    self._write(worker)
            if any(worker.lent for worker in self.workers) and not self._closing:
                self._trim_later()
