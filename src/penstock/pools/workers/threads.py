"""
Worker threads, with the same call queue as worker processes.

A thread that ends a call takes the next one itself. A thread that finds none sleeps on a lock of its own; the
last to fall asleep is woken first.

Waking a thread takes longer than a short call, and because of the interpreter lock short calls gain nothing
from a second thread. So after some short calls in a row a *watchdog* checks the pool every millisecond, on
the timer thread. While it is active

- no further thread is woken while one works, and of two working threads one goes to sleep;
- the working thread settles in batches: it collects ended calls in a list until the inbox is empty or a
  fraction of a millisecond is over. Settling calls one by one took most of the time, above all on two free
  cores, where a settling thread and a caller could wait for each other at the queue's lock.

If a call is long after all, the watchdog settles the calls that ended before it and wakes threads for those
behind it. So none is delayed by more than a millisecond or two.

A thread cannot be ended from outside: a canceled call that does not check `current_call().canceled` keeps
its slot until it returns, so that the pool never runs more calls than its limit.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.calls.ticket import IN_FLIGHT
from penstock.core.errors import WorkerCrashedError
from penstock.core.text import error_line
from penstock.pools.call_queue import CallQueue, Outcome
from penstock.pools.context import CallContext, end_copy, never_block_here, thread_state
from penstock.pools.future import Call
from penstock.pools.timers import call_at, clock
from penstock.pools.workers.base import WorkerGroup

if TYPE_CHECKING:
    from penstock.pools.options import WorkerOptions

#: How often the watchdog checks, in seconds.
CHECK_INTERVAL: Final = 1e-3
#: The longest short call, in seconds: waking another thread for it takes longer than waiting.
_SHORT: Final = 50e-6
#: After so many short calls in a row the next ones are expected to be short too.
_SHORT_IN_A_ROW: Final = 32
#: Seconds for which short calls may gather before they are settled together.
_GATHER: Final = 200e-6


class _Keyed(NamedTuple):
    """The arguments of the few calls that have keywords; those of the others are a plain tuple."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ThreadWorker:
    __slots__ = ("began", "busy", "number", "running", "settled", "thread", "wakeup")

    def __init__(self, number: int) -> None:
        self.number = number
        self.settled = 0
        self.thread: threading.Thread | None = None
        self.wakeup = allocate_lock()  # released to wake its thread
        self.wakeup.acquire()
        self.running: Call[Any] | None = None
        self.busy = False  # neither asleep nor about to sleep
        self.began = 0.0  # when its latest call began

    def context(self) -> CallContext | None:
        return None if self.running is None else self.running.make_context()


class ThreadWorkers(WorkerGroup):
    kind = "thread"
    can_be_killed = False  # only its function ends a thread

    def __init__(self, call_queue: CallQueue, options: WorkerOptions) -> None:
        super().__init__(call_queue, options)
        self._calls: dict[int, Call[Any]] = {}  # dispatched calls that are not settled, by dispatch
        self._inbox: deque[Call[Any]] = deque()  # those that no thread has taken; taken without the lock
        self._ended: deque[Outcome] = deque()  # those that have ended
        self._asleep: list[ThreadWorker] = []
        self._watched = False  # the watchdog is active: `_check_progress` will be called
        self._seen = 0  # how many calls had ended at its last check
        self._coming = 0  # threads that were woken or started for the inbox and have not read it yet
        self._alive = 0
        self._short_calls = 0  # short calls in a row
        self._object: Any = None
        self._building = threading.Lock()
        self.stopped = self._is_copy = False
        self.workers: list[ThreadWorker] = [ThreadWorker(number) for number in range(options.workers)]
        self._latest_worker = self.workers[0]  # the worker that took a call last

    # With the call queue's lock held

    def dispatch_pending(self, now: float) -> None:
        self._take_pending(now)
        if len(self._inbox) > self._coming and not (self._watched and self._will_be_taken(now)):
            self._wake_for_inbox()

    def _will_be_taken(self, now: float) -> bool:
        """Whether a thread will take the inbox soon. One that began its last call a while ago may not."""
        worker = self._latest_worker
        return (worker.busy and now - worker.began < CHECK_INTERVAL) or self._coming > 0

    def _take_pending(self, now: float) -> None:
        call_queue = self._call_queue
        queue, hooks = call_queue.queue, call_queue.hooks
        taken: list[Call[Any]] = []
        while queue.pending and (call := queue.take(now)) is not None:
            self._calls[call.dispatch] = call
            self._inbox.append(call)
            taken.append(call)
        if taken:
            call_queue.totals.dispatched += len(taken)
            hooks.record_all(hooks.dispatch, taken)

    def _wake_for_inbox(self) -> None:
        """Wake or start one thread for each call in the inbox that no woken thread will take."""
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
        name = f"penstock-{self._call_queue.name}-{worker.number}"
        thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
        thread.start()
        worker.thread = thread
        self._coming += 1
        self._alive += 1
        self._call_queue.totals.spawned += 1

    def stop_call(self, call: Call[Any], now: float) -> None:
        """Do nothing: the function reads the cancel through `current_call()`."""

    def in_flight(self) -> Iterator[Call[Any]]:
        return iter([*self._calls.values()])

    # With the lock released

    def pack_call(
        self,
        call: Call[Any],
        fn: Any,  # noqa: ARG002  # the call has it
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[[], None] | None:
        call.body = _Keyed(args, kwargs) if kwargs else args
        return None

    def _work(self, worker: ThreadWorker) -> None:
        never_block_here()
        thread_state.make_context = worker.context
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
        """
        Run the initializer. If it fails, all calls fail until the pool is restarted.
        """
        try:
            if self._options.initializer is not None:
                self._options.initializer(*self._options.initargs)
        except BaseException as raised:  # noqa: BLE001  # the callers get any exception
            self._halt(worker, raised)
            return False
        return True

    def _halt(self, worker: ThreadWorker, raised: BaseException) -> None:
        call_queue = self._call_queue
        cause = f"its initializer raised {error_line(raised)}"
        words = f"{call_queue.name} is halted; call restart() when the reason is gone. Worker {worker.number}: {cause}"
        why = WorkerCrashedError(words, worker=worker.number, attempt=0, cause=cause, started=False)
        why.__cause__ = raised
        with call_queue.lock:
            call_queue.totals.crashed += 1
            self.halted, self.last_crash = why, f"worker {worker.number}: {cause}"
        call_queue.fail_all(why)
        with call_queue.lock:
            now = clock()
            while (call := self._take()) is not None:  # free the slots of calls that no thread will take
                del self._calls[call.dispatch]
                call_queue.queue.settle(call, call.dispatch, now)
        call_queue.deliver((), ())

    def _next(self, worker: ThreadWorker) -> Call[Any] | None:
        """Sleep until there is a call to run. None: the pool is closed."""
        woken = 0
        while True:
            with self._call_queue.lock:
                self._coming -= woken
                call = None if self._is_unneeded(worker, clock()) else self._take()
                if call is not None:
                    return call
                if self._closing:
                    return None
                worker.busy = False
                self._asleep.append(worker)
            worker.wakeup.acquire()
            woken = 1

    def _is_unneeded(self, worker: ThreadWorker, now: float) -> bool:
        """
        Whether another thread can run all calls and this one would only compete with it. Called with the lock
        held.
        """
        other = self._latest_worker
        return self._watched and other is not worker and other.busy and now - other.began < CHECK_INTERVAL

    def _watch(self) -> None:
        self._watched = True
        call_at(clock() + CHECK_INTERVAL, self._check_progress)

    def _check_progress(self) -> None:
        """
        One check of the watchdog, on the timer thread. If a call is stuck, settle the calls before it and
        wake threads for those behind it.

        The watchdog becomes inactive before it searches for stuck calls. A worker first adds its ended calls
        to the list and then checks whether the watchdog is active. So one of the two sees the other.
        """
        ended = sum(worker.settled for worker in self.workers)
        if ended != self._seen:
            self._seen = ended
            self._watch()
            return
        self._watched = False
        if not self._inbox and not self._ended:
            return
        with self._call_queue.lock:
            self._short_calls = 0
            self._wake_for_inbox()
            if not self._watched:
                self._watch()
        self._settle(None)

    def _take(self) -> Call[Any] | None:
        try:
            return self._inbox.popleft()
        except IndexError:
            return None

    def _run(self, worker: ThreadWorker, call: Call[Any]) -> None:
        """
        Run this call and those behind it, until there are none.

        An ended call is recorded before the watchdog is checked (see `_check_progress`), so none is left
        unsettled.
        """
        inbox, ended_calls = self._inbox, self._ended
        following: Call[Any] | None = call
        oldest = worker.began = began = clock()
        worker.busy = True
        self._latest_worker = worker
        while following is not None:
            call, following = following, None
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
                except BaseException as raised:  # noqa: BLE001  # the caller gets any exception
                    error = raised
                if self._is_copy:
                    end_copy(error)
                worker.running = None
            ended = clock()
            worker.settled += 1
            call.ran_for = ended - began
            ended_calls.append((call, result, error))
            worker.began = began = ended
            if inbox and self._watched and ended - oldest < _GATHER:
                following = self._take()
            if following is None:
                following = self._settle(worker)
                oldest = worker.began = began = clock()

    def _settle(self, worker: ThreadWorker | None) -> Call[Any] | None:
        """
        Settle all ended calls and dispatch others in their place. Returns the next call of this worker, which
        is taken last, because callbacks may take long.
        """
        call_queue = self._call_queue
        queue, totals = call_queue.queue, call_queue.totals
        outcomes: list[Outcome] = []
        failed = 0
        with call_queue.lock:
            now = clock()
            while self._ended:
                outcome = self._ended.popleft()
                call = outcome[0]
                del self._calls[call.dispatch]
                self._short_calls = self._short_calls + 1 if call.ran_for <= _SHORT else 0
                if queue.settle(call, call.dispatch, now):
                    outcomes.append(outcome)
                    failed += outcome[2] is not None
            totals.failed += failed
            totals.succeeded += len(outcomes) - failed
            if queue.pending:
                self._take_pending(now)
            continues = worker is not None and self._continues(worker, now)
            wake = call_queue.end_change()
        call_queue.deliver(outcomes, wake)
        return self._take() if continues else None

    def _continues(self, worker: ThreadWorker, now: float) -> bool:
        """Whether this worker has more to do. Called with the lock held."""
        worker.busy = continues = bool(self._inbox) and not self._is_unneeded(worker, now)
        if continues:
            self._latest_worker = worker
            if self._short_calls >= _SHORT_IN_A_ROW and not self._watched and len(self._inbox) > 1:
                self._watch()
        return continues

    def _invoke(self, call: Call[Any]) -> Any:
        fn: Any = call.fn
        args, kwargs = call.body if type(call.body) is _Keyed else (call.body, {})
        if type(fn) is str:
            fn = getattr(self._target(), fn)
        if call.extra is not None:
            from penstock.telemetry.spans import run_as_child  # noqa: PLC0415  # only where the caller traces

            return run_as_child(call.extra, fn, args, kwargs)
        return fn(*args, **kwargs)

    def _target(self) -> Any:
        """The object that all threads of a pool share, made by the first that needs it."""
        with self._building:
            if self._object is None:
                assert self._options.target is not None
                self._object = self._options.target(*self._options.args)
            return self._object

    def loads(self) -> tuple[int, ...]:
        return tuple(int(worker.running is not None) for worker in self.workers)

    def worker_counts(self) -> dict[str, int]:
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
        """Start no more calls until `resume`. Running calls cannot be taken back."""
        with self._call_queue.lock:
            self.stopped = True
            self._call_queue.queue.set_slots(0, clock())

    def resume(self) -> None:
        def start_again(now: float) -> None:
            self.stopped, self.halted = False, None
            self._call_queue.queue.set_slots(self._call_queue.queue.limits.max_in_flight, now)

        self._call_queue.change(start_again)

    def close(self, *, kill: bool) -> None:  # noqa: ARG002  # a thread cannot be killed
        with self._call_queue.lock:
            self._closing = True
            if not self._alive:
                self.gone.set()
            while self._asleep:
                self._wake(self._asleep.pop())

    def abandon(self) -> None:
        """Disable the group in a forked copy of this process, which has only the thread that forked."""
        super().abandon()
        self._is_copy = True
