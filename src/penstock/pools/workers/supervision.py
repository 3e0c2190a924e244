"""
Worker groups whose workers can die: handles deaths, and retires and restarts workers.

The rules are the same for processes of this machine and for workers on a cluster. Sending calls, reading
results and noticing deaths differ.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from penstock.core.calls.ticket import ENDING, IN_FLIGHT
from penstock.core.errors import WorkerCrashedError
from penstock.pools.call_queue import CallQueue, Outcome
from penstock.pools.future import Call
from penstock.pools.options import CrashPolicy
from penstock.pools.timers import Timer, call_at, clock
from penstock.pools.workers.base import Condition, WorkerGroup, WorkerSlot

if TYPE_CHECKING:
    from penstock.pools.options import WorkerOptions

M = TypeVar("M", bound=WorkerSlot)

#: The longest delay before a restart, in seconds. The delay doubles with each crash in a row.
_LONGEST_DELAY: Final = 2.0

#: The outcomes of calls that fail because their worker died.
Failed = list[Outcome]


class SupervisedWorkers(WorkerGroup, Generic[M]):
    """The common part of ProcessWorkers and ClusterWorkers."""

    def __init__(self, call_queue: CallQueue, options: WorkerOptions, workers: list[M]) -> None:
        super().__init__(call_queue, options)
        self.workers: list[M] = workers
        self._calls_per_worker = -(-call_queue.queue.limits.max_in_flight // len(workers))
        self._idle_timer: Timer | None = None
        self._checks_idle = not (options.max_calls is options.max_memory is options.idle_stop is None)
        self.crashes = 0  # in a row

    # Differs between the kinds (with the call queue's lock held)

    @abstractmethod
    def _start(self, worker: M) -> None:
        """Start a worker in this cold slot."""

    @abstractmethod
    def _send_exit(self, worker: M) -> None:
        """Make the worker exit once it has finished its calls."""

    def _release(self, worker: M) -> None:
        """Release the resources of a dead worker."""
        worker.close()

    @abstractmethod
    def _close_when_empty(self) -> None:
        """The group is closing: set `gone` when the last worker is gone."""

    # Slots and cancels (with the call queue's lock held)

    def in_flight(self) -> Iterator[Call[Any]]:
        return (call for worker in self.workers for call in list(worker.calls.values()))

    def _update_slots(self, now: float) -> None:
        """
        Tell the queue how many calls the workers can have. A worker that backs off or retires, and a halted
        group, can have none.
        """
        slots = sum(map(self._slots, self.workers)) if self.halted is None else 0
        self._call_queue.queue.set_slots(slots, now)

    def _slots(self, worker: M) -> int:
        """How many calls a worker can have at once."""
        limit = self._options.max_calls
        if worker.condition not in (Condition.COLD, Condition.LIVE):
            return 0
        if limit is None:
            return self._calls_per_worker
        made = worker.assigned - len(worker.calls) if worker.condition is Condition.LIVE else 0
        return min(self._calls_per_worker, limit - made)

    def _start_grace(self, worker: M, dispatch: int, now: float) -> None:
        call_at(now + self._options.grace, self._grace_over, worker, dispatch)

    def _grace_over(self, worker: M, dispatch: int) -> None:
        """
        Kill the worker of a canceled call that has not stopped. If the call has not begun, wait for the calls
        before it.
        """
        with self._call_queue.lock:
            if dispatch not in worker.calls:
                return
            if worker.running == dispatch:
                self._call_queue.totals.terminated += 1
                worker.kill("a canceled call did not stop in time")
                self._update_slots(clock())
                return
        self._start_grace(worker, dispatch, clock())

    # Retiring workers that are idle, used up or too large (with the call queue's lock held)

    def _on_idle(self, worker: M, now: float) -> None:
        options = self._options
        worker.idle_since = now
        if worker.condition is not Condition.LIVE:
            return
        if options.max_calls is not None and worker.assigned >= options.max_calls:
            self._retire(worker, "it had made its calls")
        elif options.max_memory is not None and now - worker.looked_at > 0.05:
            worker.looked_at = now
            if worker.memory() > options.max_memory:
                self._retire(worker, "it had grown too large")
        if options.idle_stop is not None and self._idle_timer is None:
            self._idle_timer = call_at(now + options.idle_stop, self._stop_idle)

    def _stop_idle(self) -> None:
        idle_stop = self._options.idle_stop
        assert idle_stop is not None
        with self._call_queue.lock:
            self._idle_timer, now = None, clock()
            idle = [w for w in self.workers if w.condition is Condition.LIVE and not w.calls]
            for worker in idle:
                if now - worker.idle_since >= idle_stop:
                    self._retire(worker, "it was idle")
            since = [w.idle_since for w in idle if w.condition is Condition.LIVE]
            if since:
                self._idle_timer = call_at(min(since) + idle_stop, self._stop_idle)

    def _retire(self, worker: M, why: str) -> None:
        """Let the worker finish and exit. Its slot is then cold again."""
        worker.kill_reason = why
        worker.condition = Condition.RETIRING
        self._send_exit(worker)
        self._update_slots(clock())

    # Deaths

    def on_death(self, worker: M) -> None:
        """
        Handle a dead worker, after all its replies were read: fail or requeue its calls, and restart or
        retire it.
        """
        before = self.halted
        self._call_queue.change(partial(self._handle_death, worker))
        if self.halted is not None and self.halted is not before:
            self._halt(self.halted)

    def _handle_death(self, worker: M, now: float) -> Failed:
        """With the call queue's lock held."""
        cause = worker.reap()
        lost = list(worker.calls.values())
        begun = [call for call in lost if call.dispatch == worker.running or call.dispatch in worker.unread]
        worker.calls = {}
        planned = worker.kill_reason is not None
        if worker.condition is not Condition.STOPPED:
            worker.condition = Condition.COLD if planned else Condition.BACKING_OFF
        self._update_slots(now)  # first, so that its slots are not given to other calls
        failed: Failed = []
        if planned:
            self._requeue(lost, [], now)  # to the front of the queue, whatever the crash policy
        else:
            failed = self._on_crash(worker, lost, begun, cause, now)
        self._release(worker)
        self._update_slots(now)
        return failed

    def _on_crash(
        self, worker: M, lost: list[Call[Any]], begun: list[Call[Any]], cause: str, now: float
    ) -> Failed:
        call_queue, options = self._call_queue, self._options
        call_queue.totals.crashed += 1
        self.crashes += 1
        self.last_crash = f"worker {worker.number}: {cause}"
        failed: Failed = []
        fail = options.crash_policy is not CrashPolicy.RESTART_REQUEUE
        if fail:
            for call in begun:
                if call_queue.queue.settle(call, call.dispatch, now):
                    failed.append((call, None, worker.crashed(call, cause)))
        rest = [call for call in lost if call.stage is IN_FLIGHT or call.stage is ENDING]
        for call in self._requeue(rest, [] if fail else begun, now):
            words = f"{cause}; it has now crashed {call.crashes} workers"
            failed.append((call, None, worker.crashed(call, words)))
        call_queue.totals.failed += len(failed)
        if options.crash_policy is CrashPolicy.FAIL_TASK or self.crashes > options.crash_max_retries:
            times = f"{self.crashes} crash{'es' * (self.crashes > 1)} in a row"
            words = f"{call_queue.name} is halted after {times}; call restart() when the reason is gone. The last: {cause}"
            self.halted = worker.crashed(None, cause, words)
            worker.condition = Condition.STOPPED
        else:
            longest = max(_LONGEST_DELAY, options.restart_delay)
            delay = min(options.restart_delay * 2 ** (self.crashes - 1), longest)
            call_at(now + delay, self._backoff_over, worker)
        return failed

    def _requeue(self, calls: list[Call[Any]], blame: list[Call[Any]], now: float) -> list[Call[Any]]:
        call_queue = self._call_queue
        restart = [call for call in calls if call.stage is IN_FLIGHT]
        exhausted = call_queue.queue.requeue_lost(calls, now, blame=blame)
        for call in restart:
            if call not in exhausted:
                call_queue.totals.requeued += 1
                call_queue.hooks.record(call_queue.hooks.requeue, call)
        return exhausted

    def _backoff_over(self, worker: M) -> None:
        def restart(now: float) -> None:
            if worker.condition is Condition.BACKING_OFF:
                worker.condition = Condition.COLD
                self._update_slots(now)
                self._start_all(eager=True)

        if not self._closing:
            self._call_queue.change(restart)

    def _halt(self, why: WorkerCrashedError) -> None:
        self._call_queue.fail_all(why)
        self.stop()

    # Starting and stopping

    def start(self) -> None:
        with self._call_queue.lock:
            self._start_all()

    def _start_all(self, *, eager: bool = False) -> None:
        """Start the cold workers. `eager`: only in a pool that starts its workers before it has calls."""
        for worker in self.workers:
            if worker.condition is Condition.COLD and (self._options.eager or not eager):
                self._start(worker)

    def stop(self) -> None:
        """End all workers. Their calls go back to the queue, and none starts until `resume`."""
        with self._call_queue.lock:
            for worker in self.workers:
                if worker.condition in (Condition.LIVE, Condition.RETIRING):
                    worker.kill("the workers were stopped")
                worker.condition = Condition.STOPPED
            self._update_slots(clock())

    def resume(self) -> None:
        def start_again(now: float) -> None:
            self.crashes, self.halted = 0, None
            for worker in self.workers:
                if worker.condition is Condition.STOPPED:
                    worker.condition = Condition.RETIRING if worker.opened else Condition.COLD
            self._update_slots(now)
            self._start_all(eager=True)

        self._call_queue.change(start_again)

    def close(self, *, kill: bool) -> None:
        """Start no more calls. Each worker exits when it is idle; with `kill`, all are killed now."""
        with self._call_queue.lock:
            if self._closing and not kill:
                return
            self._closing = True
            for worker in self.workers:
                if kill and worker.opened:
                    worker.kill("the pool was closed")
                elif worker.condition is Condition.LIVE:
                    self._retire(worker, "the pool was closed")
                worker.condition = Condition.STOPPED
            self._update_slots(clock())
            if self._idle_timer is not None:
                self._idle_timer.cancel()
            if not self.gone.is_set():
                self._close_when_empty()

    # State (with the call queue's lock held)

    def loads(self) -> tuple[int, ...]:
        return tuple(len(worker.calls) for worker in self.workers)

    def worker_counts(self) -> dict[str, int]:
        if self.halted is not None:
            return {"halted": len(self.workers)}
        names = {
            Condition.LIVE: "running",
            Condition.RETIRING: "restarting",
            Condition.BACKING_OFF: "restarting",
        }
        return dict(Counter(names.get(worker.condition, "stopped") for worker in self.workers))
