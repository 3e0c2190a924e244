"""
The process workers of one pool: who gets the next call, and what happens when one of them dies.

The thread that submits writes straight into a worker's socket. One thread (the watch) reads from all of them, hands
out what their answers make room for, and notices deaths: a pidfd becomes readable the moment a process ends, whoever
else still holds copies of its descriptors. Settled calls are handed to their callers only after the next ones are on
their way.
"""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.errors import NotPicklable, PenstockError, WorkerCrashedError
from penstock.core.queue import ENDING, IN_FLIGHT
from penstock.local import segments, wire
from penstock.local.call import Call
from penstock.local.crash import CrashPolicy
from penstock.local.gate import Gate, never_block_here
from penstock.local.poller import make_poller
from penstock.local.process import Condition, WorkerProcess
from penstock.local.remote import unpack_error
from penstock.local.timers import Timer, call_at, clock

if TYPE_CHECKING:
    from penstock.local.options import WorkerOptions


class Function(NamedTuple):
    """A function that a worker is told of once."""

    number: int
    blob: bytes
    needs_main: bool


class Packed:
    """Arguments that do not fit into a message as they are."""

    __slots__ = ("data", "needs_main", "parcel")

    def __init__(self, data: bytes | None, parcel: segments.Parcel | None, needs_main: bool) -> None:
        self.data = data
        self.parcel = parcel
        self.needs_main = needs_main


_crews: weakref.WeakSet[ProcessCrew] = weakref.WeakSet()


class ProcessCrew:
    kind = "process"

    def __init__(self, gate: Gate, options: WorkerOptions) -> None:
        self._gate = gate
        self._options = options
        self._setup = options.pack_setup()
        self.workers = [WorkerProcess(place) for place in range(options.workers)]
        self._room = -(-gate.queue.limits.max_in_flight // options.workers)
        self._functions: dict[Any, Function | None] = {}
        self._number = count(1)
        self._arena = segments.Arena()
        self._packing = threading.Lock()
        self._poller = make_poller()
        self._to_spawn: list[WorkerProcess] = []
        self._to_push: set[WorkerProcess] = set()
        self._by_fd: dict[int, WorkerProcess] = {}
        self._idle_timer: Timer | None = None
        self._trim_timer: Timer | None = None
        self._watch: threading.Thread | None = None
        self._closing = False
        self.crashes = 0  # in a row
        self.halted: WorkerCrashedError | None = None
        self.last_crash: str | None = None
        self.gone = threading.Event()  # all processes are ended and the watch is over
        _crews.add(self)

    # Handing out (with the gate's lock held)

    def pump(self, now: float) -> None:
        queue = self._gate.queue
        if not queue.pending or queue.in_flight >= queue.limit:
            return
        herald, room = self._gate.herald, self._room
        touched: set[WorkerProcess] = set()
        while queue.pending:
            worker = self._choose(room)
            call = queue.take(now) if worker is not None else None
            if worker is None or call is None:
                break
            self._hand(worker, call)
            touched.add(worker)
            if herald:
                self._gate._note(herald.dispatch, call)
        for worker in touched:
            self._write(worker)

    def _choose(self, room: int) -> WorkerProcess | None:
        """The least loaded one; a cold one is started rather than a busy one loaded further."""
        best = cold = None
        least, limit = room, self._options.max_calls
        for worker in self.workers:
            if worker.condition is Condition.LIVE:
                load = len(worker.calls)
                if load < least and (limit is None or worker.handed < limit):
                    if load == 0:
                        return worker
                    best, least = worker, load
            elif cold is None and worker.condition is Condition.COLD:
                cold = worker
        if cold is not None:
            self._start(cold)
            return cold
        return best

    def _start(self, worker: WorkerProcess) -> None:
        worker.open()
        worker.outbox.append((wire.SETUP, *self._setup))
        self._gate.totals.spawned += 1
        self._to_spawn.append(worker)
        if self._watch is None:
            self._watch = threading.Thread(
                target=self._keep_watch, name=f"penstock-{self._gate.name}", daemon=True
            )
            self._watch.start()
        self._poller.wake()

    def _hand(self, worker: WorkerProcess, call: Call[Any]) -> None:
        dispatch, body, function = call.dispatch, call.body, call.function
        call.home = worker
        worker.calls[dispatch] = call
        worker.handed += 1
        self._gate.totals.dispatched += 1
        if type(function) is Function:
            number = function.number
            if number not in worker.known:
                worker.known.add(number)
                self._send_main(worker, function.needs_main)
                worker.outbox.append((wire.DEFINE, number, function.blob))
            function = number
        if type(body) is tuple:
            extra = call.extra and self._extra(call, None)
            if call.attempt > 1 and extra is None:
                extra = self._extra(call, None)
            worker.outbox.append((dispatch, function, body, extra))
        else:
            self._send_main(worker, body.needs_main)
            self._hand_packed(worker, call, function, body)

    def _hand_packed(self, worker: WorkerProcess, call: Call[Any], function: Any, body: Packed) -> None:
        ref = None
        if body.parcel is not None:
            ref = tuple(body.parcel.ref)
            worker.lent[body.parcel.ref.segment] = body.parcel
        plain = ref is None and call.extra is None and call.attempt == 1
        worker.outbox.append((call.dispatch, function, body.data, None if plain else self._extra(call, ref)))

    @staticmethod
    def _extra(call: Call[Any], ref: Any) -> Any:
        about, trace = call.extra or (None, None)
        key, deadline = about or (None, None)
        return (call.attempt, key, deadline), trace, ref

    @staticmethod
    def _send_main(worker: WorkerProcess, needed: bool) -> None:
        if needed and not worker.main_sent:
            worker.main_sent = True
            main = wire.main_module()
            if main is not None:
                worker.outbox.append((wire.MAIN, *main))

    def _write(self, worker: WorkerProcess) -> None:
        if not worker.flush():
            self._to_push.add(worker)
            self._poller.wake()

    # Preparing (with the lock released)

    def describe(
        self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Name the function; returns what must be done to make the payload, or None if that was nothing."""
        function = fn if type(fn) is str else self._function(fn)
        call.function = function if function is not None else 0
        if function is not None and not kwargs and wire.all_plain(args):
            call.body = args
            return None
        return lambda: self._pack(call, fn if function is None else None, args, kwargs)

    def _function(self, fn: Any) -> Function | None:
        """None: it must travel with each call, because it is not importable or carries state."""
        try:
            return self._functions[fn]
        except KeyError:
            pass
        except TypeError:
            return None
        if not wire.by_reference(fn):
            return None
        blob = pickle.dumps(fn, 5)
        known = self._functions[fn] = Function(next(self._number), blob, b"__main__" in blob)
        return known

    def _pack(self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data, buffers = wire.pack_arguments(fn, args, kwargs)
        needs_main = b"__main__" in data
        if needs_main and not wire.main_can_be_imported() and wire.cloudpickle is None:
            raise NotPicklable(
                f"{fn or call.fn!r} lives in a __main__ that a worker cannot import{wire.advice()}"
            )
        parcel = None
        kept: bytes | None = data
        if segments.AVAILABLE and (buffers or len(data) >= wire.LARGE):
            kept = data if len(data) < wire.LARGE else None
            with self._packing:
                parcel = self._arena.pack([*buffers] if kept is not None else [data, *buffers])
            if self._trim_timer is None:
                self._trim_timer = call_at(clock() + self._options.trim_after, self._trim)
        call.body = Packed(kept, parcel, needs_main)

    def _trim(self) -> None:
        """Give back shared memory that nothing has used for a while."""
        with self._packing:
            self._trim_timer = None
            closed = self._arena.trim()
        with self._gate.lock:
            for worker in self.workers:
                if worker.condition is Condition.LIVE and closed:
                    worker.outbox.extend((wire.DROP, serial) for serial in closed)
                    self._write(worker)

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
        able = sum(worker.condition in (Condition.LIVE, Condition.COLD) for worker in self.workers)
        self._gate.queue.offer_slots(able * self._room, now)

    # The watch

    def _keep_watch(self) -> None:
        never_block_here()
        poller = self._poller
        while not (self._closing and not self._by_fd and not self._to_spawn):
            for fd in poller.wait():
                worker = self._by_fd.get(fd)
                if worker is None:
                    continue
                if fd == worker.pidfd:
                    self._bury(worker)
                else:
                    self._listen(worker)
            self._spawn_waiting()
            self._push_waiting()
        with self._gate.lock:
            poller.close()
            self._arena.trim()
        self.gone.set()

    def _spawn_waiting(self) -> None:
        while self._to_spawn:
            worker = self._to_spawn.pop()
            try:
                worker.spawn()
            except OSError as error:
                worker.last_words = (f"it could not be started: {error}", "")
                self._bury(worker)
                continue
            self._by_fd[worker.sock.fileno()] = worker
            self._poller.watch(worker.sock.fileno())
            if worker.pidfd is not None:
                self._by_fd[worker.pidfd] = worker
                self._poller.watch(worker.pidfd)
            if worker.ending is not None:
                worker.kill(worker.ending)

    def _push_waiting(self) -> None:
        with self._gate.lock:
            waiting, self._to_push = self._to_push, set()
            for worker in waiting:
                if worker.process is not None and worker.sock.fileno() in self._by_fd:
                    self._poller.watch(worker.sock.fileno(), write=not worker.push())

    def _listen(self, worker: WorkerProcess) -> None:
        messages = worker.receive()
        if messages is None:
            if worker.pidfd is None:
                self._bury(worker)
            else:
                self._forget(worker.sock.fileno())  # its pidfd tells the rest
            return
        if worker.outbuf:
            with self._gate.lock:
                self._to_push.add(worker)
        self._settle(worker, messages)

    def _settle(self, worker: WorkerProcess, messages: Iterable[tuple[Any, ...]]) -> None:
        gate, now = self._gate, clock()
        queue, totals = gate.queue, gate.totals
        outcomes: list[tuple[Call[Any], int, Any]] = []
        with gate.lock:
            calls = worker.calls
            for message in messages:
                dispatch = message[0]
                call = calls.pop(dispatch, None)
                if call is None:
                    self._hear(worker, message)
                    continue
                worker.settled += 1
                counts = queue.settle(call, dispatch, now)
                kind = message[1]
                if kind == wire.SKIPPED:
                    continue
                if kind is not wire.ERROR:
                    self.crashes = 0
                if counts:
                    call.ran_for = message[3]
                    if kind == wire.ERROR:
                        totals.failed += 1
                    else:
                        totals.succeeded += 1
                    outcomes.append((call, kind, message[2]))
                elif kind == wire.SHARED:
                    worker.outbox.append((wire.FREE, message[2][1][2]))
                if gate.herald:
                    gate._note(())
            if not calls:
                self._fell_idle(worker, now)
            self.pump(now)
            wake = gate.collect_granted()
        gate.report(self._unpack(worker, outcomes), wake)

    def _hear(self, worker: WorkerProcess, message: tuple[Any, ...]) -> None:
        match message:
            case (wire.FREE, segment):
                worker.lent.pop(segment, None)
            case (wire.FATAL, reason, trace):
                worker.last_words = (reason, trace)

    @staticmethod
    def _unpack(
        worker: WorkerProcess, outcomes: list[tuple[Call[Any], int, Any]]
    ) -> Iterator[tuple[Call[Any], Any, BaseException | None]]:
        for call, kind, value in outcomes:
            if kind == wire.PLAIN:
                yield call, value, None
                continue
            try:
                if kind == wire.PICKLED:
                    yield call, pickle.loads(value), None
                elif kind == wire.SHARED:
                    yield call, segments.load(value[0], value[1], worker.borrower), None
                else:
                    yield call, None, unpack_error(value)
            except Exception as error:  # noqa: BLE001  # the result's own code runs here
                yield call, None, NotPicklable(f"the result cannot be rebuilt here: {error!r}")

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
            self._idle_timer, now, soonest = None, clock(), None
            for worker in self.workers:
                if worker.condition is Condition.LIVE and not worker.calls:
                    if now - worker.idle_since >= idle_stop:
                        self._retire(worker, "it was idle")
                    else:
                        soonest = min(soonest or worker.idle_since, worker.idle_since)
            if soonest is not None:
                self._idle_timer = call_at(soonest + idle_stop, self._stop_idle)

    def _retire(self, worker: WorkerProcess, why: str) -> None:
        """Let it go in peace. Its place is cold again when it has gone."""
        worker.ending = why
        worker.condition = Condition.LEAVING
        worker.outbox.append((wire.EXIT,))
        self._write(worker)
        self._offer(clock())

    # Deaths (on the watch)

    def _forget(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self._poller.forget(fd)

    def _bury(self, worker: WorkerProcess) -> None:
        """Its process is dead. What it managed to say still counts; then its calls go where they belong."""
        while messages := worker.receive():
            self._settle(worker, messages)
        self._forget(worker.sock.fileno())
        if worker.pidfd is not None:
            self._forget(worker.pidfd)
        now = clock()
        gate = self._gate
        with gate.lock:
            cause = worker.reap() if worker.process is not None else (worker.last_words or ("", ""))[0]
            lost = list(worker.calls.values())
            begun = worker.calls.get(worker.running)
            worker.calls = {}
            planned = worker.ending is not None
            failed = (
                self._lose(worker, lost, begun, now)
                if planned
                else self._crash(worker, lost, begun, cause, now)
            )
            worker.close()
            self._offer(now)
            self.pump(now)
            wake = gate.collect_granted()
        gate.report(((call, None, error) for call, error in failed), wake)
        if self.halted is not None and not planned:
            self._halt(self.halted)

    def _lose(
        self, worker: WorkerProcess, lost: list[Call[Any]], begun: Call[Any] | None, now: float
    ) -> list[tuple[Call[Any], PenstockError]]:
        """We ended it. Whoever else was on it goes back to the front of the queue, whatever the crash policy."""
        if worker.condition is not Condition.STOPPED:
            worker.condition = Condition.COLD
        self._requeue(lost, (), now)
        return []

    def _crash(
        self, worker: WorkerProcess, lost: list[Call[Any]], begun: Call[Any] | None, cause: str, now: float
    ) -> list[tuple[Call[Any], PenstockError]]:
        gate, options = self._gate, self._options
        gate.totals.crashed += 1
        self.crashes += 1
        self.last_crash = f"worker {worker.place}: {cause}"
        failed: list[tuple[Call[Any], PenstockError]] = []

        def crashed(call: Call[Any], why: str) -> WorkerCrashedError:
            gate.totals.failed += 1
            words = f"worker {worker.place} died while it ran this call: {cause}{why}"
            error = WorkerCrashedError(
                words, worker=worker.place, attempt=call.attempt, cause=cause, started=True
            )
            if worker.last_words is not None and worker.last_words[1]:
                error.add_note(worker.last_words[1])
            return error

        fail = options.crash_policy is not CrashPolicy.RESTART_REQUEUE
        if fail and begun is not None and gate.queue.settle(begun, begun.dispatch, now):
            failed.append((begun, crashed(begun, "")))
        rest = [call for call in lost if call.stage is IN_FLIGHT or call.stage is ENDING]
        for call in self._requeue(rest, [begun] if begun is not None and not fail else [], now):
            failed.append((call, crashed(call, f"; it has now crashed {call.crashes} workers")))
        if options.crash_policy is CrashPolicy.FAIL_TASK or self.crashes > options.crash_max_retries:
            words = f"{gate.name} is halted after {self.crashes} crash{'es' * (self.crashes > 1)} in a row; the last: {cause}"
            self.halted = WorkerCrashedError(
                f"{words}; call restart() when the reason is gone",
                worker=worker.place, attempt=0, cause=cause, started=False,
            )  # fmt: skip
            if worker.last_words is not None and worker.last_words[1]:
                self.halted.add_note(worker.last_words[1])
            return failed
        worker.condition = Condition.RESTING
        delay = min(options.restart_delay * 2 ** (self.crashes - 1), options.restart_delay_max)
        call_at(now + delay, self._rested, worker)
        return failed

    def _requeue(
        self, calls: list[Call[Any]], blame: list[Call[Any]] | tuple[()], now: float
    ) -> list[Call[Any]]:
        gate = self._gate
        back = [call for call in calls if call.stage is IN_FLIGHT]
        exhausted = gate.queue.lose(calls, now, blame=blame)
        for call in back:
            if call not in exhausted:
                gate.totals.requeued += 1
                gate._note(gate.herald.requeue, call)
        return exhausted

    def _rested(self, worker: WorkerProcess) -> None:
        def back(now: float) -> None:
            if worker.condition is Condition.RESTING:
                worker.condition = Condition.COLD
                self._offer(now)
                if self._options.eager and not self._closing:
                    self._start(worker)
                    self._write(worker)

        if not self._closing:
            self._gate.change(back)

    def _halt(self, why: WorkerCrashedError) -> None:
        def error(call: Call[Any]) -> WorkerCrashedError:
            return WorkerCrashedError(
                str(why),
                worker=why.worker,
                attempt=call.attempt,
                cause=why.cause,
                started=call.stage is ENDING,
            )

        self._gate.fail_all(why, error, dispose=False)
        self.stop()

    def census(self) -> dict[str, int]:
        """How many workers are how (with the gate's lock held)."""
        if self.halted is not None:
            return {"halted": len(self.workers)}
        names = {Condition.LIVE: "running", Condition.LEAVING: "restarting", Condition.RESTING: "restarting"}
        return dict(Counter(names.get(worker.condition, "stopped") for worker in self.workers))

    # Stopping and starting

    def start(self) -> None:
        """Start whatever is not running, now."""
        with self._gate.lock:
            for worker in self.workers:
                if worker.condition is Condition.COLD:
                    self._start(worker)
                    self._write(worker)

    def stop(self) -> None:
        """End all processes. What ran goes back to the queue, and nothing starts until `resume`."""
        with self._gate.lock:
            for worker in self.workers:
                was = worker.condition
                if was in (Condition.LIVE, Condition.LEAVING):
                    worker.kill("the workers were stopped")
                worker.condition = Condition.STOPPED
            self._offer(clock())

    def resume(self) -> None:
        def again(now: float) -> None:
            self.crashes, self.halted = 0, None
            for worker in self.workers:
                if worker.condition is Condition.STOPPED:
                    worker.condition = Condition.COLD if worker.process is None else Condition.LEAVING
            self._offer(now)
            if self._options.eager:
                for worker in self.workers:
                    if worker.condition is Condition.COLD:
                        self._start(worker)
                        self._write(worker)

        self._gate.change(again)

    def close(self, *, kill: bool) -> None:
        """Nothing starts any more. In peace, idle workers leave and the others when they are done; or all die now."""
        with self._gate.lock:
            if self._watch is None:
                self._closing = True
                self.gone.set()
                return
            for worker in self.workers:
                if kill and worker.condition in (Condition.LIVE, Condition.LEAVING):
                    worker.kill("the pool was closed")
                elif worker.condition is Condition.LIVE:
                    self._retire(worker, "the pool was closed")
                worker.condition = Condition.STOPPED
            self._closing = True
        self._poller.wake()

    def abandon(self) -> None:
        """In a forked child: these workers are not ours. Close our copies, so that the parent's death is noticed."""
        for worker in self.workers:
            if worker.process is not None:
                for fd in (worker.sock.fileno(), worker.lifeline, worker.pidfd):
                    if fd is not None:
                        os.close(fd)


def _abandon_all() -> None:
    for crew in list(_crews):
        crew.abandon()
        crew._gate.lock = threading.Lock()
        crew._gate.refusal = PenstockError(
            f"{crew._gate.name} belongs to the process that was forked; make a pool of your own in the child"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
