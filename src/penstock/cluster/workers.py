"""
Workers on a Ray cluster, with the same call queue and the same rules as worker processes.

Dispatched calls wait in one inbox of the pool, and each free worker takes the next: a worker has one call at
a time (see `ClusterWorker`). Ray reports a worker's death. A worker that may live out of reach counts as dead
only when its lease is over (see `actor.py`).

One thread of the group makes all calls into Ray, in order and without a lock: they may take long. Ray reports
events on threads of its own, which must not run callers' code.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import attrgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from penstock.cluster.actor import ActorLink, ClusterWorker, actor_class, unpack
from penstock.cluster.engine import (
    Cluster,
    ClusterUnreachable,
    check_connected,
    connect,
    failed_by_ray,
    in_words,
    is_certain,
)
from penstock.pools.call_queue import CallQueue
from penstock.pools.child import protocol
from penstock.pools.child.protocol import PLAIN, unpack_outcome
from penstock.pools.context import never_block_here
from penstock.pools.future import Call
from penstock.pools.timers import Timer, call_at, clock
from penstock.pools.workers.base import COLD, LIVE, Condition
from penstock.pools.workers.supervision import SupervisedWorkers
from penstock.pools.workers.worker_process import PackedFunction, Packer

if TYPE_CHECKING:
    from penstock.pools.options import WorkerOptions

log = logging.getLogger("penstock")


class RayThread:
    """The thread that talks to Ray for one worker group."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, fn: Callable[..., object], *args: Any) -> None:
        """
        Call `fn` on this thread. May be called from any thread; the first call starts the thread and needs
        the call queue's lock.
        """
        self._tasks.put((fn, args))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"penstock-{self._name}", daemon=True)
            self._thread.start()

    def when(self, ref: Any, answer: Callable[[Any, BaseException | None], object]) -> None:
        """Call `answer` with the result or the error of this reference."""
        ref.future().add_done_callback(lambda future: self.run(_call_answer, answer, future))

    def stop(self) -> None:
        self._tasks.put(None)

    def _run(self) -> None:
        never_block_here()
        while (task := self._tasks.get()) is not None:
            fn, args = task
            try:
                fn(*args)
            except Exception:  # the next task concerns another worker
                log.exception("a task for Ray of %s failed", self._name)
            del task, fn, args  # free the last result before the next task


def _call_answer(answer: Callable[[Any, BaseException | None], object], future: Any) -> None:
    error = future.exception()
    answer(None if error is not None else future.result(), error)


#: How many heartbeats are sent within the time of a lease.
_HEARTBEATS_PER_LEASE: Final = 6
#: Seconds that Ray has to report a worker's death after another error.
_DOUBT: Final = 1.0
#: Seconds without a place on the cluster after which a warning is logged.
_LONG_TO_START: Final = 30.0


_in_order = attrgetter("serial")


class ClusterWorkers(SupervisedWorkers[ClusterWorker]):
    kind = "cluster"

    def __init__(self, call_queue: CallQueue, options: WorkerOptions) -> None:
        self._terms = options.cluster or Cluster()
        self._ray = connect(self._terms)
        self._actors = actor_class(self._ray, self._terms)
        self._ray_thread = RayThread(call_queue.name)
        super().__init__(
            call_queue, options, [ClusterWorker(number, self._end) for number in range(options.workers)]
        )
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109  # pathlib is slow to import
        self._setup = paths, protocol.pack_setup(options.setup(), portable=True)
        self._inbox: list[Call[Any]] = []  # dispatched, without a worker yet; requeued calls are first
        self._heartbeat_timer: Timer | None = None
        self.pack_call = ClusterPacker(self._ray).pack_call

    # Assigning calls (with the call queue's lock held)

    def dispatch_pending(self, now: float) -> None:
        call_queue = self._call_queue
        queue, hooks = call_queue.queue, call_queue.hooks
        while queue.pending and (call := queue.take(now)) is not None:
            call_queue.totals.dispatched += 1
            insort(self._inbox, call, key=_in_order)
            hooks.record(hooks.dispatch, call)
        if self._inbox and self.halted is None:
            self._assign_inbox()

    def _assign_inbox(self) -> None:
        limit = self._options.max_calls
        for worker in self.workers:
            if not self._inbox:
                return
            if worker.free and (limit is None or worker.assigned < limit):
                self._assign(worker, self._inbox.pop(0))
        short = len(self._inbox) - sum(worker.coming for worker in self.workers)
        cold = [worker for worker in self.workers if worker.condition is COLD]
        for worker in cold[: max(short, 0)]:
            self._start(worker)

    def _assign(self, worker: ClusterWorker, call: Call[Any]) -> None:
        function, blob = call.function, None
        if type(function) is PackedFunction:
            if function.number not in worker.functions_sent:
                worker.functions_sent.add(function.number)
                blob = function.blob
            function = function.number
        call.worker = worker
        worker.calls[call.dispatch] = call
        worker.assigned += 1
        self._ray_thread.run(
            self._send, worker, worker.link, call, call.dispatch, (call.body, function, blob)
        )

    def stop_call(self, call: Call[Any], now: float) -> None:
        if call in self._inbox:
            self._inbox.remove(call)
            self._call_queue.queue.settle(call, call.dispatch, now)
            return
        worker: ClusterWorker = call.worker
        self._ray_thread.run(self._cancel, worker, worker.link, call.dispatch)
        self._start_grace(worker, call.dispatch, now)

    def in_flight(self) -> Iterator[Call[Any]]:
        yield from super().in_flight()
        yield from list(self._inbox)

    # Starting and ending workers (with the call queue's lock held)

    def _start(self, worker: ClusterWorker) -> None:
        link = ActorLink(self._ray, self._actors, self._terms.lease, self._ray_thread.when)
        worker.connect(link)
        self._call_queue.totals.spawned += 1
        self._ray_thread.run(self._try, worker, link, self._open, worker, link)
        call_at(clock() + _LONG_TO_START, self._warn_not_placed, worker, link)
        if self._heartbeat_timer is None:
            self._schedule_heartbeats()

    def _send_exit(self, worker: ClusterWorker) -> None:
        self._ray_thread.run(self._retire_actor, worker, worker.link, worker.ready)

    def _end(self, worker: ClusterWorker, link: ActorLink) -> None:
        self._ray_thread.run(self._try, worker, link, link.kill)

    def _release(self, worker: ClusterWorker) -> None:
        super()._release(worker)
        if self._closing:
            self._close_when_empty()

    def _close_when_empty(self) -> None:
        if not any(worker.opened for worker in self.workers):
            if self._heartbeat_timer is not None:
                self._heartbeat_timer.cancel()
            self._ray_thread.stop()
            self.gone.set()

    def stop(self) -> None:
        super().stop()
        with self._call_queue.lock:
            inbox = list(self._inbox)
            self._inbox.clear()
            self._requeue(inbox, [], clock())

    # On the Ray thread (with no lock held)

    def _try(self, worker: ClusterWorker, link: ActorLink, act: Any, *args: Any) -> None:
        """Make a call to Ray for this worker. If that fails, the worker is given up."""
        if worker.link is not link:
            return
        try:
            check_connected(self._ray)
            act(*args)
        except Exception as error:  # noqa: BLE001  # Ray may raise anything
            self._on_error(worker, link, error)

    def _open(self, worker: ClusterWorker, link: ActorLink) -> None:
        link.open(
            self._setup,
            reports_memory=self._options.max_memory is not None,
            ready=lambda answer, error: self._on_ready(worker, link, answer, error),
            dead=lambda _, error: self._on_error(worker, link, error) if error is not None else None,
        )

    def _on_ready(
        self, worker: ClusterWorker, link: ActorLink, answer: Any, error: BaseException | None
    ) -> None:
        if error is not None:
            self._on_error(worker, link, error)
            return
        link.node, pid, words = answer
        if words is not None:
            worker.failure = words
            self._try(worker, link, link.kill)
            return

        def is_ready(now: float) -> None:
            if worker.link is link:
                worker.ready, worker.pid, worker.idle_since = True, pid, now

        self._try(worker, link, link.heartbeat)
        self._call_queue.change(is_ready)
        with self._call_queue.lock:
            if worker.free and self._checks_idle:
                self._on_idle(worker, clock())

    def _send(
        self,
        worker: ClusterWorker,
        link: ActorLink,
        call: Call[Any],
        dispatch: int,
        what: tuple[Any, Any, bytes | None],
    ) -> None:
        if worker.link is not link:
            return
        extra = None
        if call.attempt > 1 or call.guarded or call.extra is not None:
            # The clocks of two machines differ, so a deadline is sent as the remaining time.
            remaining = None if call.deadline is None else call.deadline - clock()
            extra = (call.attempt, protocol.pack_key(call.key), remaining), call.extra

        def settled(answer: Any, error: BaseException | None) -> None:
            self._settled(worker, link, dispatch, answer, error)

        worker.sent = dispatch
        self._try(worker, link, link.call, (dispatch, *what, extra), settled)

    def _cancel(self, worker: ClusterWorker, link: ActorLink, dispatch: int) -> None:
        self._try(worker, link, link.cancel, dispatch)

    def _settled(
        self, worker: ClusterWorker, link: ActorLink, dispatch: int, answer: Any, error: BaseException | None
    ) -> None:
        if isinstance(error, self._ray.exceptions.RayTaskError):
            answer = failed_by_ray(error)
        elif error is not None:
            self._on_error(worker, link, error)
            return
        call_queue = self._call_queue
        kind, value, ran_for, size = answer
        with call_queue.lock:
            now = clock()
            call = worker.calls.pop(dispatch, None) if worker.link is link else None
            if call is None:
                return
            worker.settled += 1
            worker.size = size
            call.ran_for = ran_for
            counts = call_queue.queue.settle(call, dispatch, now)
            if counts and kind == protocol.ERROR:
                call_queue.totals.failed += 1
            elif counts:
                call_queue.totals.succeeded += 1
                self.crashes = 0
            if self._checks_idle:
                self._on_idle(worker, now)
            self.dispatch_pending(now)
            wake = call_queue.end_change()
        outcome = (value, None) if kind == PLAIN else unpack_outcome(kind, value, unpack)
        call_queue.deliver([(call, *outcome)] if counts else (), wake)

    def _retire_actor(self, worker: ClusterWorker, link: ActorLink, was_ready: bool) -> None:
        if not was_ready:  # it might wait for ever for a place on the cluster
            self._try(worker, link, link.kill)
            return
        self._try(worker, link, link.retire, lambda _, error: self._on_error(worker, link, error))
        call_at(clock() + self._options.grace, self._end, worker, link)

    # Deaths, certain and possible (with no lock held)

    def _on_error(self, worker: ClusterWorker, link: ActorLink, error: BaseException | None) -> None:
        """
        Handle an error of a worker: Ray reports its death, or it cannot be reached. `error` None: it exited
        on request.
        """
        if worker.link is not link or link.given_up:
            return
        worker.cause = worker.cause or in_words(error)
        if error is None or is_certain(self._ray, error, link.node):
            self._confirm_death(worker, link)
        elif not link.doubted:
            link.doubted = True
            with self._call_queue.lock:  # it gets no more calls
                if worker.condition is LIVE:
                    worker.condition = Condition.RETIRING
                    self._update_slots(clock())
            call_at(clock() + _DOUBT, self._ray_thread.run, self._give_up, worker, link)

    def _give_up(self, worker: ClusterWorker, link: ActorLink) -> None:
        """
        Give up a worker whose death was not reported. A report after the kill would be no proof: the kill may
        not have reached it.
        """
        if worker.link is not link:
            return
        link.given_up = True
        with suppress(Exception):  # it is dead or cannot be reached; then its lease ends it
            link.kill()
        call_at(max(link.lease_over(), clock()), self._ray_thread.run, self._confirm_death, worker, link)

    def _confirm_death(self, worker: ClusterWorker, link: ActorLink) -> None:
        if worker.link is link:
            self.on_death(worker)

    def _schedule_heartbeats(self) -> None:
        self._heartbeat_timer = call_at(
            clock() + self._terms.lease / _HEARTBEATS_PER_LEASE, self._ray_thread.run, self._heartbeat_all
        )

    def _heartbeat_all(self) -> None:
        for worker in self.workers:
            if worker.link is not None and worker.ready:
                self._try(worker, worker.link, self._heartbeat, worker.link)
        with self._call_queue.lock:
            self._heartbeat_timer = None
            if any(worker.opened for worker in self.workers):
                self._schedule_heartbeats()

    def _heartbeat(self, link: ActorLink) -> None:
        if not link.heartbeat():
            raise ClusterUnreachable(
                f"it has not answered for {self._terms.lease:g} s; its machine may be lost"
            )

    def _warn_not_placed(self, worker: ClusterWorker, link: ActorLink) -> None:
        if worker.link is link and worker.coming:
            log.warning(
                "%s: the cluster has had no place for worker %d yet", self._call_queue.name, worker.number
            )


class ClusterPacker(Packer):
    """
    Packs calls for machines that may lack the caller's script. Large buffers go into Ray's object store.

    A payload stays there from before the call enters the queue until it is settled, so a requeued call does
    not copy it again.
    """

    def __init__(self, ray: Any) -> None:
        super().__init__()
        self._ray = ray

    def _function(self, fn: Any) -> PackedFunction | None:
        """
        How to name the function. One of `__main__` is sent with each call: no other machine could import it.
        """
        return None if getattr(fn, "__module__", None) == "__main__" else super()._function(fn)

    def _pack(self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data, buffers = protocol.pack_arguments(fn, args, kwargs, portable=True)
        large = buffers or len(data) >= protocol.LARGE
        call.body = self._ray.put([data, *map(pickle.PickleBuffer, buffers)]) if large else data
