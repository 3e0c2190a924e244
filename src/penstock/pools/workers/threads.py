"""Thread workers, behind the same gate as process workers.

A thread that ends a call takes the next one itself; only a thread that finds nothing sleeps, each on a bell of its own,
and the last to fall asleep is the first to be woken.

Waking a thread takes longer than a brief call, and under one interpreter lock brief calls gain nothing from a second
thread. So once calls have been brief for a while a *lookout* is called up, and while it is on duty

- no further thread is woken as long as one is at work, and of two that are at work one leaves;
- the one at work settles in batches: it goes on with the next call and leaves what it has done in a list, until the
  inbox is empty or a fraction of a millisecond is over. To settle them one by one is what most of the time went to, on
  two free cores above all, where each one could meet a caller at the gate's lock and put one of the two to sleep.

If a call turns out to be long, the lookout settles what was done before it and wakes others for what is behind it. So
neither is delayed by more than a millisecond or two.

A thread cannot be ended from outside: a cancelled call that does not look at `current_call().cancelled` keeps its slot
until it returns, so that the pool never runs more than it was told to.

Somebody who looks in now and then, where to watch all the time costs too much.

Brief calls are quickest if one thread runs many of them and settles them together; that is safe only if somebody notices
when one of them turns out to be long. The lookout is that somebody: a thread that sleeps a millisecond at a time while it
is on duty, and for good while it is not.
"""

#: A call that ran for no longer than this is brief: to wake another thread for it takes longer than to wait for it.
from __future__ import annotations

import logging
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.calls.ticket import IN_FLIGHT
from penstock.core.errors import WorkerCrashedError
from penstock.core.text import error_line
from penstock.pools.blocking import never_block_here
from penstock.pools.call_queue import CallQueue
from penstock.pools.context import CallContext, here
from penstock.pools.forks import end_copy, watch_forks
from penstock.pools.future import Call
from penstock.pools.timers import clock
from penstock.pools.workers.base import Unled

if TYPE_CHECKING:
    from penstock.pools.options import WorkerOptions

_BRIEF: Final = 50e-6
#: After so many of them in a row, the next ones are expected to be brief, too.
_FOR_A_WHILE: Final = 32
#: How long brief calls may gather before they are settled together.
_GATHER: Final = 200e-6


class _Keyed(NamedTuple):
    """The arguments of the few calls that have keywords; those of the others are a plain tuple."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


#: A call that has ended: itself, which attempt it was, its result, its error, and how long it ran.
_Done = tuple[Call[Any], int, Any, BaseException | None, float]


class ThreadWorker:
    __slots__ = ("began", "busy", "place", "running", "settled", "thread", "wakeup")

    def __init__(self, place: int) -> None:
        self.place = place
        self.settled = 0
        self.thread: threading.Thread | None = None
        self.wakeup = allocate_lock()  # released to wake its thread
        self.wakeup.acquire()
        self.running: Call[Any] | None = None
        self.busy = False  # is neither asleep nor about to be
        self.began = 0.0  # when it began its latest call

    def context(self) -> CallContext | None:
        return None if self.running is None else self.running._context()


class ThreadWorkers(Unled):
    kind = "thread"
    mortal = False  # nothing ends a thread but its function

    def __init__(self, call_queue: CallQueue, options: WorkerOptions) -> None:
        self._call_queue = call_queue
        self._options = options
        self._calls: dict[int, Call[Any]] = {}  # what was handed out and is not settled, by dispatch
        self._inbox: deque[Call[Any]] = deque()  # what of it is in no thread's hands; taken without the lock
        self._done: deque[_Done] = deque()  # what of it has ended
        self._asleep: list[ThreadWorker] = []
        self._watchdog = StallWatchdog(f"penstock-{call_queue.name}-lookout", self._look)
        self._seen = 0  # how many calls had ended when it looked last
        self._coming = 0  # threads that were woken or started for the inbox, and have not looked into it yet
        self._alive = 0
        self._brief = 0  # brief calls in a row
        self._object: Any = None
        self._building = threading.Lock()
        self._closing = self.stopped = self._is_copy = False
        self.workers = [ThreadWorker(place) for place in range(options.workers)]
        self._at_work = self.workers[0]  # the one that took a call last
        self.gone = threading.Event()
        self.halted: WorkerCrashedError | None = None
        self.last_crash: str | None = None
        self.crashes = 0
        watch_forks(self)

    # With the gate's lock held

    def pump(self, now: float) -> None:
        self._hand_out(now)
        if len(self._inbox) > self._coming and not (self._watchdog.on_duty and self._in_good_hands(now)):
            self._rouse()

    def _in_good_hands(self, now: float) -> bool:
        """Whether somebody comes for the inbox: one who began its last call a while ago may not."""
        worker = self._at_work
        return (worker.busy and now - worker.began < LOOK) or self._coming > 0

    def _hand_out(self, now: float) -> None:
        call_queue = self._call_queue
        queue, hook_dispatcher = call_queue.queue, call_queue.hook_dispatcher
        taken: list[Call[Any]] = []
        while queue.pending and (call := queue.take(now)) is not None:
            self._calls[call.dispatch] = call
            self._inbox.append(call)
            taken.append(call)
        if taken:
            call_queue.totals.dispatched += len(taken)
            hook_dispatcher.note_run(hook_dispatcher.dispatch, taken)

    def _rouse(self) -> None:
        """One thread for each call that nobody comes for."""
        while len(self._inbox) > self._coming:
            if self._asleep:
                self._wake(self._asleep.pop())
            elif self._alive < len(self.workers):
                self._start(next(worker for worker in self.workers if worker.thread is None))
            else:
                return

    def _wake(self, worker: ThreadWorker) -> None:
        self._coming += 1
        worker.wakeup.release()

    def _start(self, worker: ThreadWorker) -> None:
        name = f"penstock-{self._call_queue.name}-{worker.place}"
        thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
        thread.start()
        worker.thread = thread
        self._coming += 1
        self._alive += 1
        self._call_queue.totals.spawned += 1

    def tell_canceled(self, call: Call[Any], now: float) -> None:
        """The function sees it through `current_call()`; there is nobody else to tell."""

    def in_flight(self) -> Iterator[Call[Any]]:
        return iter([*self._calls.values()])

    # With the lock released

    def describe(
        self,
        call: Call[Any],
        fn: Any,  # noqa: ARG002  # the call knows it
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[[], None] | None:
        call.body = _Keyed(args, kwargs) if kwargs else args
        return None

    def _work(self, worker: ThreadWorker) -> None:
        never_block_here()
        here.make = worker.context
        try:
            ready = self._set_up(worker)
            with self._call_queue.lock:
                self._coming -= 1
            while ready and (call := self._next(worker)) is not None:
                self._run(worker, call)
        finally:
            with self._call_queue.lock:
                worker.thread = None
                self._alive -= 1
                last = self._closing and not self._alive
            if last:
                self.gone.set()

    def _set_up(self, worker: ThreadWorker) -> bool:
        """Without this no call can run here: if it fails, so do all calls, until somebody restarts the pool."""
        try:
            if self._options.initializer is not None:
                self._options.initializer(*self._options.initargs)
        except BaseException as raised:  # noqa: BLE001  # whatever it is, the callers must hear of it
            self._halt(worker, raised)
            return False
        return True

    def _halt(self, worker: ThreadWorker, raised: BaseException) -> None:
        call_queue = self._call_queue
        cause = f"its initializer raised {error_line(raised)}"
        words = f"{call_queue.name} is halted; call restart() when the reason is gone. Worker {worker.place}: {cause}"
        why = WorkerCrashedError(words, worker=worker.place, attempt=0, cause=cause, started=False)
        why.__cause__ = raised
        with call_queue.lock:
            call_queue.totals.crashed += 1
            self.halted, self.last_crash = why, f"worker {worker.place}: {cause}"
        call_queue.fail_all(why, lambda call: why.copy(attempt=call.attempt), dispose=False)
        with call_queue.lock:
            now = clock()
            while (call := self._take()) is not None:  # nobody will come for these, and they have their slots
                del self._calls[call.dispatch]
                call_queue.queue.settle(call, call.dispatch, now)
        call_queue.after()

    def _next(self, worker: ThreadWorker) -> Call[Any] | None:
        """Sleep until there is something to do; None if there never will be."""
        came = 0
        while True:
            with self._call_queue.lock:
                self._coming -= came
                call = None if self._is_spare(worker, clock()) else self._take()
                if call is not None:
                    return call
                if self._closing:
                    return None
                worker.busy = False
                self._asleep.append(worker)
            worker.wakeup.acquire()
            came = 1

    def _is_spare(self, worker: ThreadWorker, now: float) -> bool:
        """With the lock held: another one can do it all, and this one would only be in its way."""
        other = self._at_work
        return self._watchdog.on_duty and other is not worker and other.busy and now - other.began < LOOK

    def _look(self) -> bool:
        """For the lookout: as long as calls come to an end all is well, and if there are none it can go."""
        ended = sum(worker.settled for worker in self.workers)
        if ended != self._seen:
            self._seen = ended
            return True
        if not self._inbox and not self._done:
            return False
        self._settle(None)
        with self._call_queue.lock:
            self._brief = 0
            self._rouse()
        return True

    def _take(self) -> Call[Any] | None:
        try:
            return self._inbox.popleft()
        except IndexError:
            return None

    def _run(self, worker: ThreadWorker, call: Call[Any]) -> None:
        """
        Run this call and those behind it, until there are none.

        What is done is put down before the lookout is looked for (see there), so none of it is left lying.
        """
        inbox, done, watchdog = self._inbox, self._done, self._watchdog
        following: Call[Any] | None = call
        oldest = worker.began = began = clock()
        worker.busy = True
        self._at_work = worker
        while following is not None:
            call, following = following, None
            dispatch = call.dispatch
            result: Any = None
            error: BaseException | None = None
            if call.stage is IN_FLIGHT:
                worker.running = call
                try:
                    fn: Any = call.fn
                    if type(call.body) is tuple and type(fn) is not str and call.extra is None:
                        result = fn(*call.body)
                    else:
                        result = self._invoke(call)
                except BaseException as raised:  # noqa: BLE001  # whatever it is, it is the caller's to see
                    error = raised
                if self._is_copy:
                    end_copy(error)
                worker.running = None
            ended = clock()
            worker.settled += 1
            done.append((call, dispatch, result, error, ended - began))
            worker.began = began = ended
            if inbox and watchdog.on_duty and ended - oldest < _GATHER:
                following = self._take()
            if following is None:
                following = self._settle(worker)
                oldest = worker.began = began = clock()

    def _settle(self, worker: ThreadWorker | None) -> Call[Any] | None:
        """
        Settle all that is done and hand out what that makes room for. Returns what this worker should run next; it takes
        that last, because callbacks may keep it for long.
        """
        call_queue, done = self._call_queue, self._done
        queue, hook_dispatcher, totals = call_queue.queue, call_queue.hook_dispatcher, call_queue.totals
        counted: list[_Done] = []
        failed = 0
        with call_queue.lock:
            now = clock()
            while done:
                outcome = done.popleft()
                call, dispatch, _, error, ran_for = outcome
                del self._calls[dispatch]
                self._brief = self._brief + 1 if ran_for <= _BRIEF else 0
                if queue.settle(call, dispatch, now):
                    counted.append(outcome)
                    if error is not None:
                        failed += 1
            totals.failed += failed
            totals.succeeded += len(counted) - failed
            if queue.pending:
                self._hand_out(now)
            goes_on = worker is not None and self._goes_on(worker, now)
            wake = call_queue.collect_granted() if queue.granted else ()
            if hook_dispatcher.state is not None:
                hook_dispatcher.news.append((hook_dispatcher.state, queue.state()))
        for rouse in wake:
            rouse()
        for call, _, result, error, ran_for in counted:
            call.ran_for = ran_for
            if call.guarded:
                call_queue._unguard(call)
            call._settle(result, error)
        if counted:
            hook_dispatcher.note_run(hook_dispatcher.settle, [outcome[0] for outcome in counted])
        if hook_dispatcher.news or call_queue._when_idle:
            call_queue.after()
        return self._take() if goes_on else None

    def _goes_on(self, worker: ThreadWorker, now: float) -> bool:
        """With the lock held: whether there is more for this worker to do."""
        worker.busy = goes_on = bool(self._inbox) and not self._is_spare(worker, now)
        if goes_on:
            self._at_work = worker
            if self._brief >= _FOR_A_WHILE and not self._watchdog.on_duty and len(self._inbox) > 1:
                self._watchdog.call_up()
        return goes_on

    def _invoke(self, call: Call[Any]) -> Any:
        fn: Any = call.fn
        args, kwargs = call.body if type(call.body) is _Keyed else (call.body, {})
        if type(fn) is str:
            fn = getattr(self._target(), fn)
        if call.extra is not None:
            from penstock.telemetry.otel import run_traced  # noqa: PLC0415  # only where the caller traces

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
        return tuple(int(worker.running is not None) for worker in self.workers)

    def census(self) -> dict[str, int]:
        """How many workers are how (with the gate's lock held)."""
        if self.halted is not None:
            return {"halted": len(self.workers)}
        alive = 0 if self.stopped else sum(worker.thread is not None for worker in self.workers)
        counts = {"running": alive, "stopped": len(self.workers) - alive}
        return {name: number for name, number in counts.items() if number}

    # Stopping and starting

    def start(self) -> None:
        with self._call_queue.lock:
            for worker in self.workers:
                if worker.thread is None:
                    self._start(worker)

    def stop(self) -> None:
        """What runs cannot be taken back; nothing else starts until `resume`."""
        with self._call_queue.lock:
            self.stopped = True
            self._call_queue.queue.offer_slots(0, clock())

    def resume(self) -> None:
        def again(now: float) -> None:
            self.stopped, self.halted = False, None
            self._call_queue.queue.offer_slots(self._call_queue.queue.limits.max_in_flight, now)

        self._call_queue.change(again)

    def close(self, *, kill: bool) -> None:  # noqa: ARG002  # a thread cannot be killed
        with self._call_queue.lock:
            self._closing = True
            if not self._alive:
                self.gone.set()
            self._watchdog.close()
            while self._asleep:
                self._wake(self._asleep.pop())

    def abandon(self) -> None:
        """In a forked copy of this process, which has none of these threads but the one that forked."""
        self._call_queue.abandon()
        self._is_copy = True
        self.gone.set()


log = logging.getLogger("penstock")

#: How often it looks in.
LOOK: Final = 1e-3


class StallWatchdog:
    """`look` is called every millisecond; it says whether there is anything left to look out for."""

    __slots__ = ("_closing", "_look", "_name", "_thread", "_wakeup", "on_duty")

    def __init__(self, name: str, look: Callable[[], bool]) -> None:
        self._name = name
        self._look = look
        self._wakeup = allocate_lock()
        self._wakeup.acquire()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.on_duty = False

    def call_up(self) -> None:
        """One thread at a time may call this, and `close`: they happen under the owner's lock."""
        self.on_duty = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name=self._name, daemon=True)
            self._thread.start()
        self._ring()

    def close(self) -> None:
        self._closing = True
        self._ring()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it was rung before, and has not heard it yet
            self._wakeup.release()

    def _keep(self) -> None:
        never_block_here()
        while not self._closing:
            self._wakeup.acquire()
            while not self._closing and self._look_in():
                self._wakeup.acquire(timeout=LOOK)

    def _look_in(self) -> bool:
        """
        Off duty before looking, and on again if there is something to look out for: whoever relies on the lookout leaves
        its work first and looks for the lookout after, so one of the two sees the other.
        """
        self.on_duty = False
        try:
            self.on_duty = self._look()
        except Exception:  # a lookout that ended would leave every caller waiting
            log.exception("%s stumbled", self._name)
            self.on_duty = True  # to look again is all that it can do about it
        return self.on_duty
