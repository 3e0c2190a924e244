"""
Thread workers, behind the same gate as process workers.

A thread that ends a call takes the next one itself, under the lock that it holds anyway; the hand-off queue is only for
threads that sleep. A thread cannot be ended from outside: a cancelled call that does not look at
`current_call().cancelled` keeps its slot until it returns, so that the pool never runs more than it was told to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from penstock.core.queue import IN_FLIGHT
from penstock.local.call import Call
from penstock.local.context import here
from penstock.local.gate import Gate, never_block_here
from penstock.local.timers import clock

if TYPE_CHECKING:
    from penstock.local.options import WorkerOptions


class ThreadWorker:
    __slots__ = ("place", "settled", "thread")

    def __init__(self, place: int) -> None:
        self.place = place
        self.settled = 0
        self.thread: threading.Thread | None = None


class ThreadCrew:
    kind = "thread"

    def __init__(self, gate: Gate, options: WorkerOptions) -> None:
        self._gate = gate
        self._options = options
        self._inbox: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._waiting = 0  # calls in the inbox
        self._idle = 0  # threads that wait for it
        self._object: Any = None
        self._building = threading.Lock()
        self._closing = self.stopped = False
        self.workers = [ThreadWorker(place) for place in range(options.workers)]
        self._handed: dict[int, Call[Any]] = {}
        self.gone = threading.Event()
        self.halted = self.last_crash = None
        self.crashes = 0

    # With the gate's lock held

    def pump(self, now: float) -> None:
        queue = self._gate.queue
        while queue.pending and (call := queue.take(now)) is not None:
            self._note_handed(call)
            self._waiting += 1
            self._inbox.put(call)
        if self._waiting > self._idle:
            self._start_more()

    def _note_handed(self, call: Call[Any]) -> None:
        self._handed[call.dispatch] = call
        self._gate.totals.dispatched += 1
        if self._gate.herald.dispatch:
            self._gate.herald.news.append((self._gate.herald.dispatch, (call,)))

    def _start_more(self) -> None:
        missing = self._waiting - self._idle
        for worker in self.workers:
            if missing > 0 and worker.thread is None:
                missing -= 1
                self._start(worker)

    def _start(self, worker: ThreadWorker) -> None:
        name = f"penstock-{self._gate.name}-{worker.place}"
        worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
        self._idle += 1
        self._gate.totals.spawned += 1
        worker.thread.start()

    def tell_canceled(self, call: Call[Any], now: float) -> None:
        """The function sees it through `current_call()`; there is nobody else to tell."""

    def in_flight(self) -> Iterator[Call[Any]]:
        return iter(list(self._handed.values()))

    def nudge(self, call: Call[Any]) -> None:
        """Nobody leads here."""

    def lead(self, call: Call[Any], timeout: float | None = None, *, for_room: bool = False) -> bool:  # noqa: ARG002  # as above
        return False

    def attend(self, box: object) -> None:
        """Nor here."""

    # With the lock released

    def describe(
        self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        call.body = (fn, args, kwargs)
        return None

    def _work(self, worker: ThreadWorker) -> None:
        never_block_here()
        try:
            if self._options.initializer is not None:
                self._options.initializer(*self._options.initargs)
            while (call := self._inbox.get()) is not None:
                with self._gate.lock:
                    self._waiting -= 1
                    self._idle -= 1
                while call is not None:
                    call = self._run(worker, call)
        finally:
            with self._gate.lock:
                worker.thread = None
                last = self._closing and all(other.thread is None for other in self.workers)
            if last:
                self.gone.set()

    def _run(self, worker: ThreadWorker, call: Call[Any]) -> Call[Any] | None:
        """Run it, settle it, and take the next one; None if there is none, and then this thread is idle."""
        dispatch = call.dispatch
        call.home = worker
        result: Any = None
        error: BaseException | None = None
        started = clock()
        if call.stage is IN_FLIGHT:
            here.make = call._context
            try:
                result = self._invoke(call)
            except BaseException as raised:  # noqa: BLE001  # whatever it is, it is the caller's to see
                error = raised
            here.make = None
        gate, ended = self._gate, clock()
        queue = gate.queue
        with gate.lock:
            now = clock()
            del self._handed[dispatch]
            worker.settled += 1
            counts = queue.settle(call, dispatch, now)
            if counts:
                if error is None:
                    gate.totals.succeeded += 1
                else:
                    gate.totals.failed += 1
            following = queue.take(now)
            if following is None:
                self._idle += 1
            else:
                self._note_handed(following)
            wake = gate.collect_granted() if queue.granted else ()
            if gate.herald.state:
                gate.note_state()
        call.ran_for = ended - started
        for rouse in wake:
            rouse()
        if counts:
            if call.guarded:
                gate._unguard(call)
            call._settle(result, error)
            if gate.herald.settle:
                gate.herald.news.append((gate.herald.settle, (call,)))
        if gate.herald.news or gate._when_idle:
            gate.after()
        return following

    def _invoke(self, call: Call[Any]) -> Any:
        fn, args, kwargs = call.body
        if type(fn) is str:
            fn = getattr(self._target(), fn)
        if call.extra is not None:
            from penstock.local.otel import run_traced  # noqa: PLC0415  # only where the caller traces

            return run_traced(call.extra, fn, args, kwargs)
        return fn(*args, **kwargs)

    def _target(self) -> Any:
        """The threads of a pool share the object that they work on; it is made by whoever needs it first."""
        with self._building:
            if self._object is None:
                assert self._options.target is not None
                self._object = self._options.target(*self._options.args)
            return self._object

    def loads(self) -> tuple[int, ...]:
        """How many calls each worker has (with the gate's lock held)."""
        return tuple(sum(call.home is worker for call in self._handed.values()) for worker in self.workers)

    def census(self) -> dict[str, int]:
        """How many workers are how (with the gate's lock held)."""
        alive = 0 if self.stopped else sum(worker.thread is not None for worker in self.workers)
        counts = {"running": alive, "stopped": len(self.workers) - alive}
        return {name: number for name, number in counts.items() if number}

    # Stopping and starting

    def start(self) -> None:
        with self._gate.lock:
            for worker in self.workers:
                if worker.thread is None:
                    self._start(worker)

    def stop(self) -> None:
        """What runs cannot be taken back; nothing else starts until `resume`."""
        with self._gate.lock:
            self.stopped = True
            self._gate.queue.offer_slots(0, clock())

    def resume(self) -> None:
        def again(now: float) -> None:
            self.stopped = False
            self._gate.queue.offer_slots(self._gate.queue.limits.max_in_flight, now)

        self._gate.change(again)

    def close(self, *, kill: bool) -> None:  # noqa: ARG002  # a thread cannot be killed
        with self._gate.lock:
            self._closing = True
            alive = sum(worker.thread is not None for worker in self.workers)
            if not alive:
                self.gone.set()
            for _ in range(alive):
                self._inbox.put(None)
