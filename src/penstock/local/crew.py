"""
The process workers of one pool: who gets the next call, and what happens when one of them dies.

The thread that submits writes straight into a worker's pipe; there is no thread in between. What a worker may hold
beyond the call that it runs is bounded (`max_in_flight` over all workers), and a well filled pipe is topped up in
batches. Settled calls are handed to their callers only after the next ones are on their way.
"""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.core.errors import NotPicklable, PenstockError, WorkerCrashedError
from penstock.core.queue import ENDING, IN_FLIGHT
from penstock.local import segments, wire
from penstock.local.call import Call
from penstock.local.crash import CrashPolicy
from penstock.local.gate import Gate
from penstock.local.packing import Function, Packed, Packer
from penstock.local.process import COLD, LIVE, Condition, WorkerProcess
from penstock.local.remote import unpack_error
from penstock.local.timers import Timer, call_at, clock
from penstock.local.watch import Watch

if TYPE_CHECKING:
    from penstock.local.options import WorkerOptions

_crews: weakref.WeakSet[ProcessCrew] = weakref.WeakSet()

Failed = list[tuple[Call[Any], PenstockError]]


class ProcessCrew:
    kind = "process"

    def __init__(self, gate: Gate, options: WorkerOptions) -> None:
        self._gate = gate
        self._options = options
        self._setup = options.pack_setup()
        self._packer = Packer()
        self._watch = Watch(self, gate.name)
        self.workers = [WorkerProcess(place) for place in range(options.workers)]
        self._room = -(-gate.queue.limits.max_in_flight // options.workers)
        self._enough = self._room * 3 // 4  # a pipe with more than this in it can wait for its next batch
        self._idle_timer: Timer | None = None
        self._trim_timer: Timer | None = None
        self._minds_idleness = not (options.max_calls is options.max_memory is options.idle_stop is None)
        self._closing = False
        self.crashes = 0  # in a row
        self.halted: WorkerCrashedError | None = None
        self.last_crash: str | None = None
        self.describe = self._packer.describe
        self.lead = self._watch.lead
        self.attend = self._watch.attend
        self.nudge = self._watch.nudge
        self.gone = self._watch.gone
        _crews.add(self)

    # Handing out (with the gate's lock held)

    def pump(self, now: float) -> None:
        queue = self._gate.queue
        if not queue.pending or queue.in_flight >= queue.limit:
            return
        herald, room = self._gate.herald, self._room
        touched = []
        while queue.pending and queue.in_flight < queue.limit:
            worker = self._choose(room)
            if worker is None:
                break
            call = queue.take(now)
            if call is None:
                break
            try:
                self._hand(worker, call)
            except (
                BaseException
            ):  # Ctrl-C in the submitting thread: the call must not be lost between two hands
                if call.dispatch not in worker.calls:
                    queue.lose([call], now)
                raise
            if herald.dispatch is not None:
                herald.news.append((herald.dispatch, call))
            if worker not in touched:
                touched.append(worker)
        if touched and self._options.max_calls is not None:
            self._offer(now)
        for worker in touched:
            if len(worker.calls) - worker.unsent <= self._enough and not worker.flush():
                self._watch.wait_for_room(worker)

    def _choose(self, room: int) -> WorkerProcess | None:
        """The least loaded one; a cold one is started rather than a busy one loaded further."""
        best = cold = None
        least, limit = room, self._options.max_calls
        for worker in self.workers:
            condition = worker.condition
            if condition is LIVE:
                load = len(worker.calls)
                if load < least and (limit is None or worker.handed < limit):
                    if load == 0:
                        return worker
                    best, least = worker, load
            elif cold is None and condition is COLD:
                cold = worker
        if cold is not None:
            self._start(cold)
            return cold
        return best

    def _start(self, worker: WorkerProcess) -> None:
        worker.open()
        worker.outbox.append((wire.SETUP, *self._setup))
        self._gate.totals.spawned += 1
        self._watch.start(worker)

    def _hand(self, worker: WorkerProcess, call: Call[Any]) -> None:
        dispatch, body, function = call.dispatch, call.body, call.function
        call.home = worker
        worker.calls[dispatch] = call
        worker.handed += 1
        worker.unsent += 1
        self._gate.totals.dispatched += 1
        if type(function) is Function:
            number = function.number
            if number not in worker.known:
                worker.known.add(number)
                self._send_main(worker, function.needs_main)
                worker.outbox.append((wire.DEFINE, number, function.blob))
            function = number
        ref = None
        if type(body) is Packed:
            self._send_main(worker, body.needs_main)
            if body.parcel is not None:
                ref = tuple(body.parcel.ref)
                worker.lent[body.parcel.ref.segment] = body.parcel
                self._trim_later()
            body = body.data
        plain = ref is None and call.attempt == 1 and not call.guarded and call.extra is None
        worker.outbox.append((dispatch, function, body, None if plain else self._extra(call, ref)))

    @staticmethod
    def _extra(call: Call[Any], ref: Any) -> Any:
        """(attempt, key, deadline), the caller's trace, and where the buffers are."""
        key = call.key if wire.is_plain(call.key) else wire.try_dump(call.key)
        return (call.attempt, key, call.deadline), call.extra, ref

    @staticmethod
    def _send_main(worker: WorkerProcess, needed: bool) -> None:
        if needed and not worker.main_sent:
            worker.main_sent = True
            main = wire.main_module()
            if main is not None:
                worker.outbox.append((wire.MAIN, *main))

    def _write(self, worker: WorkerProcess) -> None:
        if not worker.flush():
            self._watch.wait_for_room(worker)

    def push(self, worker: WorkerProcess) -> None:
        with self._gate.lock:  # or somebody could fill the pipe between our look at it and what we make of it
            if worker.push():
                self._watch.has_room(worker)
            else:
                self._watch.wait_for_room(worker)

    def is_quiet(self) -> bool:
        return self._gate.queue.in_flight == 0

    def pipes_are_deep(self) -> bool:
        return self._room > 16 and all(len(worker.calls) > self._enough for worker in self.workers)

    # Ending calls (with the gate's lock held)

    def tell_canceled(self, call: Call[Any], now: float) -> None:
        worker = call.home
        worker.outbox.append((wire.CANCEL, call.dispatch))
        worker.ring_cancel()
        self._write(worker)
        call_at(now + self._options.grace, self._grace_over, worker, call.dispatch)

    def _grace_over(self, worker: WorkerProcess, dispatch: int) -> None:
        """A call that was asked to stop has not: end its worker. If it has not begun yet, its neighbours come first."""
        with self._gate.lock:
            if dispatch not in worker.calls:
                return
            if worker.running == dispatch:
                self._gate.totals.terminated += 1
                worker.kill("a canceled call did not stop in time")
                self._offer(clock())
                return
        call_at(clock() + self._options.grace, self._grace_over, worker, dispatch)

    def in_flight(self) -> Iterator[Call[Any]]:
        return (call for worker in self.workers for call in list(worker.calls.values()))

    def _offer(self, now: float) -> None:
        """Tell the queue how many calls the workers could hold; those that rest or leave hold none."""
        self._gate.queue.offer_slots(sum(map(self._slots, self.workers)), now)

    def _slots(self, worker: WorkerProcess) -> int:
        limit = self._options.max_calls
        if worker.condition is Condition.COLD:
            return self._room if limit is None else min(self._room, limit)
        if worker.condition is not Condition.LIVE:
            return 0
        return self._room if limit is None else min(self._room, len(worker.calls) + limit - worker.handed)

    # Settling

    def settle(self, worker: WorkerProcess, messages: list[tuple[Any, ...]]) -> None:
        gate = self._gate
        queue, totals = gate.queue, gate.totals
        outcomes: list[tuple[Call[Any], int, Any]] = []
        settled = failed = 0
        with gate.lock:
            now = clock()
            calls = worker.calls
            for message in messages:
                call = calls.pop(message[0], None)
                if call is None:
                    self._hear(worker, message)
                    continue
                dispatch, kind, value, ran_for = message
                settled += 1
                if not queue.settle(call, dispatch, now):
                    if kind == wire.SHARED:
                        worker.outbox.append((wire.FREE, value[1][2]))
                    continue
                call.ran_for = ran_for
                if kind == wire.ERROR:
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
            wake = gate.collect_granted() if queue.granted else ()
            gate.note_state()
        for rouse in wake:
            rouse()
        self._deliver(worker, outcomes)

    def _deliver(self, worker: WorkerProcess, outcomes: list[tuple[Call[Any], int, Any]]) -> None:
        """With the lock released: the next calls are on their way, so now there is time for these callers."""
        gate, herald = self._gate, self._gate.herald
        for call, kind, value in outcomes:
            error = None
            if kind != wire.PLAIN:
                value, error = self._unpack(worker, kind, value)  # noqa: PLW2901  # its travelling form is done with
            if call.guarded:
                gate._unguard(call)
            call._settle(value, error)
            if herald.settle is not None:
                herald.news.append((herald.settle, call))
        if herald.news or gate._when_idle:
            gate.after()

    def _hear(self, worker: WorkerProcess, message: tuple[Any, ...]) -> None:
        match message:
            case (wire.FREE, segment):
                worker.lent.pop(segment, None)
            case (wire.FATAL, reason, trace):
                worker.last_words = (reason, trace)

    @staticmethod
    def _unpack(worker: WorkerProcess, kind: int, value: Any) -> tuple[Any, BaseException | None]:
        try:
            if kind == wire.PICKLED:
                return pickle.loads(value), None
            if kind == wire.SHARED:
                return segments.load(value[0], value[1], worker.borrower), None
            return None, unpack_error(value)
        except Exception as error:  # noqa: BLE001  # the result's own code runs here
            return None, NotPicklable(f"the result cannot be rebuilt in the caller's process: {error!r}")

    # Letting go of idle, used up and swollen workers (with the gate's lock held)

    def _fell_idle(self, worker: WorkerProcess, now: float) -> None:
        options = self._options
        worker.idle_since = now
        if worker.condition is not Condition.LIVE:
            return
        if options.max_calls is not None and worker.handed >= options.max_calls:
            self._retire(worker, "it had made its calls")
        elif options.max_memory is not None and now - worker.looked_at > 0.05:
            worker.looked_at = now
            if (worker.memory() or 0) > options.max_memory:
                self._retire(worker, "it had grown too large")
        if options.idle_stop is not None and self._idle_timer is None:
            self._idle_timer = call_at(now + options.idle_stop, self._stop_idle)

    def _stop_idle(self) -> None:
        idle_stop = self._options.idle_stop
        assert idle_stop is not None
        with self._gate.lock:
            self._idle_timer, now = None, clock()
            idle = [w for w in self.workers if w.condition is Condition.LIVE and not w.calls]
            for worker in idle:
                if now - worker.idle_since >= idle_stop:
                    self._retire(worker, "it was idle")
            since = [w.idle_since for w in idle if w.condition is Condition.LIVE]
            if since:
                self._idle_timer = call_at(min(since) + idle_stop, self._stop_idle)

    def _retire(self, worker: WorkerProcess, why: str) -> None:
        """Let it go in peace. Its place is cold again when it has gone."""
        worker.ending = why
        worker.condition = Condition.LEAVING
        worker.outbox.append((wire.EXIT,))
        self._write(worker)
        self._offer(clock())

    def _trim_later(self) -> None:
        if self._trim_timer is None:
            self._trim_timer = call_at(clock() + self._options.trim_after, self._trim)

    def _trim(self) -> None:
        """Give back shared memory that nothing uses: what comes back later is trimmed later."""
        closed = self._packer.trim()
        with self._gate.lock:
            self._trim_timer = None
            for worker in self.workers:
                if worker.condition is Condition.LIVE and closed:
                    worker.outbox.extend((wire.DROP, serial) for serial in closed)
                    self._write(worker)
            if any(worker.lent for worker in self.workers) and not self._closing:
                self._trim_later()

    # Deaths

    def bury(self, worker: WorkerProcess) -> None:
        """Its process is dead and has said all that it will say: its calls go where they belong."""
        gate = self._gate
        with gate.lock:
            now = clock()
            cause = worker.reap()
            lost = list(worker.calls.values())
            begun = worker.calls.get(worker.running)
            worker.calls = {}
            planned = worker.ending is not None
            if worker.condition is not Condition.STOPPED:
                worker.condition = Condition.COLD if planned else Condition.RESTING
            self._offer(now)  # first: what it held is no room for others until somebody can run it
            if planned:
                # Whoever else was on it goes back to the front of the queue, whatever the crash policy.
                failed: Failed = []
                self._requeue(lost, [], now)
            else:
                failed = self._crash(worker, lost, begun, cause, now)
            self._watch.has_room(worker)
            worker.close()
            self._offer(now)
            if self.halted is None:
                self.pump(now)
            wake = gate.collect_granted()
            gate.note_state()
        if self._closing:
            self._packer.trim()  # what this worker had borrowed
        gate.report(((call, None, error) for call, error in failed), wake)
        if self.halted is not None and not planned:
            self._halt(self.halted)

    def _crash(
        self, worker: WorkerProcess, lost: list[Call[Any]], begun: Call[Any] | None, cause: str, now: float
    ) -> Failed:
        gate, options = self._gate, self._options
        gate.totals.crashed += 1
        self.crashes += 1
        self.last_crash = f"worker {worker.place}: {cause}"
        failed: Failed = []
        fail = options.crash_policy is not CrashPolicy.RESTART_REQUEUE
        if fail and begun is not None and gate.queue.settle(begun, begun.dispatch, now):
            failed.append((begun, worker.crashed(begun, cause)))
        rest = [call for call in lost if call.stage is IN_FLIGHT or call.stage is ENDING]
        for call in self._requeue(rest, [begun] if begun is not None and not fail else [], now):
            failed.append((call, worker.crashed(call, f"{cause}; it has now crashed {call.crashes} workers")))
        gate.totals.failed += len(failed)
        if options.crash_policy is CrashPolicy.FAIL_TASK or self.crashes > options.crash_max_retries:
            times = f"{self.crashes} crash{'es' * (self.crashes > 1)} in a row"
            words = f"{gate.name} is halted after {times}; call restart() when the reason is gone. The last: {cause}"
            self.halted = worker.crashed(None, cause, words)
            worker.condition = Condition.STOPPED
        else:
            delay = min(options.restart_delay * 2 ** (self.crashes - 1), options.restart_delay_max)
            call_at(now + delay, self._rested, worker)
        return failed

    def _requeue(self, calls: list[Call[Any]], blame: list[Call[Any]], now: float) -> list[Call[Any]]:
        gate = self._gate
        back = [call for call in calls if call.stage is IN_FLIGHT]
        exhausted = gate.queue.lose(calls, now, blame=blame)
        for call in back:
            if call not in exhausted:
                gate.totals.requeued += 1
                gate.herald.note(gate.herald.requeue, call)
        return exhausted

    def _rested(self, worker: WorkerProcess) -> None:
        def back(now: float) -> None:
            if worker.condition is Condition.RESTING:
                worker.condition = Condition.COLD
                self._offer(now)
                self._start_eagerly()

        if not self._closing:
            self._gate.change(back)

    def _halt(self, why: WorkerCrashedError) -> None:
        def error(call: Call[Any]) -> WorkerCrashedError:
            again = WorkerCrashedError(str(why), **{**why.data, "attempt": call.attempt})
            again.__notes__ = getattr(why, "__notes__", [])
            return again

        self._gate.fail_all(why, error, dispose=False)
        self.stop()

    # Starting and stopping

    def start(self) -> None:
        with self._gate.lock:
            for worker in self.workers:
                if worker.condition is Condition.COLD:
                    self._start(worker)
                    self._write(worker)

    def _start_eagerly(self) -> None:
        if self._options.eager:
            for worker in self.workers:
                if worker.condition is Condition.COLD:
                    self._start(worker)
                    self._write(worker)

    def stop(self) -> None:
        """End all processes. What ran goes back to the queue, and nothing starts until `resume`."""
        with self._gate.lock:
            for worker in self.workers:
                if worker.condition in (Condition.LIVE, Condition.LEAVING):
                    worker.kill("the workers were stopped")
                worker.condition = Condition.STOPPED
            self._offer(clock())

    def resume(self) -> None:
        def again(now: float) -> None:
            self.crashes, self.halted = 0, None
            for worker in self.workers:
                if worker.condition is Condition.STOPPED:
                    worker.condition = Condition.LEAVING if worker.opened else Condition.COLD
            self._offer(now)
            self._start_eagerly()

        self._gate.change(again)

    def close(self, *, kill: bool) -> None:
        """Nothing starts any more. In peace, each worker leaves when it has nothing to do; or all die now."""
        with self._gate.lock:
            if self._closing and not kill:
                return
            self._closing = True
            for worker in self.workers:
                if kill and worker.opened:
                    worker.kill("the pool was closed")
                elif worker.condition is Condition.LIVE:
                    self._retire(worker, "the pool was closed")
                worker.condition = Condition.STOPPED
            self._offer(clock())
            for timer in (self._idle_timer, self._trim_timer):
                if timer is not None:
                    timer.cancel()
            if not self.gone.is_set():
                self._watch.close()
        self._packer.trim()

    def loads(self) -> tuple[int, ...]:
        """How many calls each worker has (with the gate's lock held)."""
        return tuple(len(worker.calls) for worker in self.workers)

    def census(self) -> dict[str, int]:
        """How many workers are how (with the gate's lock held)."""
        if self.halted is not None:
            return {"halted": len(self.workers)}
        names = {Condition.LIVE: "running", Condition.LEAVING: "restarting", Condition.RESTING: "restarting"}
        return dict(Counter(names.get(worker.condition, "stopped") for worker in self.workers))

    def abandon(self) -> None:
        """In a forked child: these workers are not ours. Close our copies, so that the parent's death is noticed."""
        for worker in self.workers:
            if worker.opened:
                for fd in (worker.inlet, worker.outlet, worker.lifeline, worker.pidfd):
                    if fd is not None:
                        os.close(fd)
                worker.opened = False
        self._gate.lock = threading.Lock()
        why = (
            f"{self._gate.name} belongs to the process that was forked; make a pool of your own in the child"
        )
        self._gate.refusal = PenstockError(why)
        self.gone.set()


def _abandon_all() -> None:
    for crew in list(_crews):
        crew.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
