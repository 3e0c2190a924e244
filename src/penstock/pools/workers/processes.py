"""
The worker processes of one pool: chooses the worker of each call, sends the call, and receives the result.

The submitting thread itself writes into a worker's pipe. How many calls a worker may have beyond the running
one is bounded (`max_in_flight` over all workers), and a well filled pipe is refilled in batches. The next
calls are sent before callers get their outcomes.
"""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any, Final

from penstock.pools.call_queue import CallQueue, Outcome
from penstock.pools.child import protocol
from penstock.pools.child.protocol import ERROR, PICKLED, PLAIN, SHARED, unpack_outcome
from penstock.pools.future import Call
from penstock.pools.timers import Timer, call_at, clock
from penstock.pools.workers.base import COLD, LIVE
from penstock.pools.workers.replies import ReplyReader
from penstock.pools.workers.supervision import SupervisedWorkers
from penstock.pools.workers.worker_process import Packed, PackedFunction, Packer, WorkerProcess

if TYPE_CHECKING:
    from penstock.pools.options import WorkerOptions


#: A worker that may have more calls than this replies in batches, so reading may wait until they have grown.
_DEEP: Final = 16
#: Seconds after which unused shared memory is released.
_TRIM_AFTER: Final = 30.0


class ProcessWorkers(SupervisedWorkers[WorkerProcess]):
    kind = "process"

    def __init__(self, call_queue: CallQueue, options: WorkerOptions) -> None:
        super().__init__(call_queue, options, [WorkerProcess(number) for number in range(options.workers)])
        self._setup = options.pack_setup()
        self.packer = Packer()
        self.reader: ReplyReader = ReplyReader(self, call_queue.name)
        # A pipe with more calls than this can wait for its next batch.
        self._enough = self._calls_per_worker * 3 // 4
        self._trim_timer: Timer | None = None
        self.pack_call = self.packer.pack_call

    # Assigning calls (with the call queue's lock held)

    def dispatch_pending(self, now: float) -> None:
        """
        Give pending calls to workers, in batches: choosing a worker for each call costs a tenth more.
        """
        queue = self._call_queue.queue
        touched = []
        while queue.pending and queue.in_flight < queue.limit:
            worker, quota = self._choose_worker()
            if worker is None:
                break
            self._assign_many(worker, quota, now)
            if worker not in touched:
                touched.append(worker)
        if touched and self._options.max_calls is not None:
            self._update_slots(now)
        try:
            for worker in touched:
                if len(worker.calls) - worker.unsent <= self._enough and not worker.flush():
                    self.reader.wait_for_space(worker)
        except BaseException:  # Ctrl-C in one `flush`: the other workers must still get their calls
            for worker in touched:
                if worker.outbox and not worker.flush():
                    self.reader.wait_for_space(worker)
            raise

    def _choose_worker(self) -> tuple[WorkerProcess | None, int]:
        """
        The least loaded worker, and how many calls it may get before another one is less loaded. A cold
        worker is preferred to a busy one.
        """
        best = cold = None
        least, limit = self._calls_per_worker, self._options.max_calls
        next_least = least
        for worker in self.workers:
            condition = worker.condition
            if condition is LIVE:
                load = len(worker.calls)
                if load < least and (limit is None or worker.assigned < limit):
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
        quota = max(1, next_least - least)
        return best, quota if best is None or limit is None else min(quota, limit - best.assigned)

    def _assign_many(self, worker: WorkerProcess, quota: int, now: float) -> None:
        call_queue = self._call_queue
        take, calls, functions_sent = call_queue.queue.take, worker.calls, worker.functions_sent
        assigned: list[Call[Any]] = []
        call: Call[Any] | None = None
        try:
            while quota and (call := take(now)) is not None:
                quota -= 1
                dispatch, body, function = call.dispatch, call.body, call.function
                call.worker = worker
                calls[dispatch] = call
                plain = call.attempt == 1 and not call.guarded and call.extra is None
                if plain and type(body) is tuple and function in functions_sent:
                    worker.outbox.append((dispatch, function.number, body, None))
                else:
                    self._assign_one(worker, call, plain)
                assigned.append(call)
        except BaseException:  # Ctrl-C in the submitting thread: no call may be lost between queue and worker
            if call is not None and call not in assigned[-1:]:
                worker.calls.pop(call.dispatch, None)
                worker.outbox = [message for message in worker.outbox if message[0] != call.dispatch]
                call_queue.queue.requeue_lost([call], now)
            raise
        finally:
            if assigned:
                count = len(assigned)
                worker.assigned += count
                worker.unsent += count
                call_queue.totals.dispatched += count
                call_queue.hooks.record_all(call_queue.hooks.dispatch, assigned)

    def _open(self, worker: WorkerProcess) -> None:
        worker.open()
        worker.outbox.append((protocol.SETUP, *self._setup))
        self._call_queue.totals.spawned += 1
        self.reader.start(worker)

    def _assign_one(self, worker: WorkerProcess, call: Call[Any], plain: bool) -> None:
        """Assign any call: send the messages that must precede it, and its extra data."""
        body, function = call.body, call.function
        if type(function) is PackedFunction:
            if function not in worker.functions_sent:
                worker.functions_sent.add(function)
                self._send_main(worker, function.needs_main)
                worker.outbox.append((protocol.DEFINE, function.number, function.blob))
            function = function.number
        ref = None
        if type(body) is Packed:
            self._send_main(worker, body.needs_main)
            if body.filled is not None:
                ref = tuple(body.filled.ref)
                worker.lent[body.filled.ref.segment] = body.filled
                self._trim_later()
            body = body.data
        extra = None
        if not plain or ref is not None:
            extra = (call.attempt, protocol.pack_key(call.key), call.deadline), call.extra, ref
        worker.outbox.append((call.dispatch, function, body, extra))

    @staticmethod
    def _send_main(worker: WorkerProcess, needed: bool) -> None:
        if needed and not worker.main_sent:
            worker.main_sent = True
            main = protocol.main_module()
            if main is not None:
                worker.outbox.append((protocol.MAIN, *main))

    def _write(self, worker: WorkerProcess) -> None:
        if not worker.flush():
            self.reader.wait_for_space(worker)

    def push(self, worker: WorkerProcess) -> None:
        with self._call_queue.lock:  # so that no other thread fills the pipe between the two lines
            if worker.push():
                self.reader.stop_waiting_for_space(worker)
            else:
                self.reader.wait_for_space(worker)

    def nothing_in_flight(self) -> bool:
        return self._call_queue.queue.in_flight == 0

    def pipes_are_deep(self) -> bool:
        return self._calls_per_worker > _DEEP and all(
            len(worker.calls) > self._enough for worker in self.workers
        )

    def more_may_come(self) -> bool:
        """Whether more replies may have arrived, but not so many that it pays to let them gather."""
        return self._call_queue.queue.in_flight > 0 and not self.pipes_are_deep()

    def stop_call(self, call: Call[Any], now: float) -> None:
        worker = call.worker
        worker.outbox.append((protocol.CANCEL, call.dispatch))
        worker.signal_cancel()
        self._write(worker)
        self._start_grace(worker, call.dispatch, now)

    # Settling

    def settle(self, worker: WorkerProcess, messages: list[tuple[Any, ...]]) -> None:
        call_queue = self._call_queue
        queue, totals = call_queue.queue, call_queue.totals
        outcomes: list[Outcome] = []
        packed: list[tuple[int, int]] = []  # the places of those that must be unpacked, and their kinds
        settled = failed = 0
        with call_queue.lock:
            now = clock()
            calls = worker.calls
            for message in messages:
                call = calls.pop(message[0], None)
                if call is None:
                    self._handle_control(worker, message)
                    continue
                dispatch, kind, value, ran_for = message
                if kind == SHARED and not worker.can_reach(dispatch, value[1]):
                    calls[dispatch] = call  # decided when the death of the worker is handled
                    continue
                settled += 1
                if not queue.settle(call, dispatch, now):
                    if kind == SHARED:
                        worker.outbox.append((protocol.FREE, value[1][2]))
                    continue
                call.ran_for = ran_for
                if kind != PLAIN:
                    failed += kind == ERROR
                    packed.append((len(outcomes), kind))
                outcomes.append((call, value, None))
            worker.settled += settled
            totals.failed += failed
            if len(outcomes) > failed:
                totals.succeeded += len(outcomes) - failed
                self.crashes = 0
            if not calls and self._checks_idle:
                self._on_idle(worker, now)
            if queue.pending:
                self.dispatch_pending(now)
            if worker.unsent and len(calls) - worker.unsent <= self._enough:
                self._write(worker)
            wake = call_queue.end_change()
        # The next calls are sent, so now deliver these outcomes.
        for place, kind in packed:
            call, value, _ = outcomes[place]
            load = pickle.loads if kind == PICKLED else worker.load_shared
            outcomes[place] = call, *unpack_outcome(kind, value, load)
        call_queue.deliver(outcomes, wake)

    def _handle_control(self, worker: WorkerProcess, message: tuple[Any, ...]) -> None:
        match message:
            case (protocol.FREE, segment):
                worker.lent.pop(segment, None)
            case (protocol.FATAL, reason, trace):
                worker.failure = (reason, trace)

    # Starting and ending workers (with the call queue's lock held)

    def _start(self, worker: WorkerProcess) -> None:
        self._open(worker)
        self._write(worker)

    def _send_exit(self, worker: WorkerProcess) -> None:
        worker.outbox.append((protocol.EXIT,))
        self._write(worker)

    def _release(self, worker: WorkerProcess) -> None:
        self.reader.stop_waiting_for_space(worker)
        worker.close()

    def _close_when_empty(self) -> None:
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        self.reader.close()

    # Without the lock

    def on_death(self, worker: WorkerProcess) -> None:
        super().on_death(worker)
        if self._closing:
            self.packer.trim()  # what this worker had mapped

    def close(self, *, kill: bool) -> None:
        super().close(kill=kill)
        self.packer.trim()

    def abandon(self) -> None:
        """Close our copies of the descriptors, so that the workers notice the parent's death."""
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
            self._trim_timer = call_at(clock() + _TRIM_AFTER, self.trim)

    def trim(self) -> None:
        """Release shared memory that is not in use; segments that come back later are released later."""
        closed = self.packer.trim()
        with self._call_queue.lock:
            self._trim_timer = None
            for worker in self.workers:
                if worker.condition is LIVE and closed:
                    worker.outbox.extend((protocol.DROP, serial) for serial in closed)
                    self._write(worker)
            if any(worker.lent for worker in self.workers) and not self._closing:
                self._trim_later()
