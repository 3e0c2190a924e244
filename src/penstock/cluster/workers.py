"""The thread that talks to the engine for one crew.

What is asked of it is done in order and with no lock held: a call into Ray may take a while, and Ray tells what happened
on threads of its own, which must not run callers' code.

Workers on a Ray cluster, behind the same gate and by the same rules as process workers.

What is handed out lies in one inbox on this side, and whichever worker is free takes the next: a worker has one call at
a time (see `worker`). Ray tells of a worker's death; a worker that may live on where nobody can reach it is taken for
dead when its lease is over (see `actor`), and not before.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import attrgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from penstock.cluster.actor import ClusterPacker, unpack
from penstock.cluster.actor_link import ActorLink, ClusterWorker, actor_class
from penstock.cluster.engine import (
    Cluster,
    ClusterUnreachable,
    check_connected,
    connect,
    failed_by_ray,
    in_words,
    is_certain,
)
from penstock.pools.blocking import never_block_here
from penstock.pools.call_queue import CallQueue
from penstock.pools.child import protocol
from penstock.pools.child.packing import PackedFunction
from penstock.pools.child.remote_errors import cannot_be_rebuilt, unpack_error
from penstock.pools.future import Call
from penstock.pools.timers import Timer, call_at, clock
from penstock.pools.workers.base import COLD, LIVE, Condition, Unled
from penstock.pools.workers.supervision import SupervisedWorkers

if TYPE_CHECKING:
    from penstock.pools.options import WorkerOptions

log = logging.getLogger("penstock")


class CallSender:
    def __init__(self, name: str) -> None:
        self._name = name
        self._errands: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, fn: Callable[..., object], *args: Any) -> None:
        """From any thread; the first one starts it, with the gate's lock held."""
        self._errands.put((fn, args))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"penstock-{self._name}", daemon=True)
            self._thread.start()

    def when(self, ref: Any, answer: Callable[[Any, BaseException | None], object]) -> None:
        """Have `answer` called with what Ray has to say about this reference."""
        ref.future().add_done_callback(lambda future: self.post(_tell, answer, future))

    def leave(self) -> None:
        self._errands.put(None)

    def _run(self) -> None:
        never_block_here()
        while (node_call := self._errands.get()) is not None:
            fn, args = node_call
            try:
                fn(*args)
            except Exception:  # the next errand is another worker's and knows nothing of this one
                log.exception("the courier of %s stumbled", self._name)
            del node_call, fn, args  # or the last result would live until the next one comes


def _tell(answer: Callable[[Any, BaseException | None], object], future: Any) -> None:
    error = future.exception()
    answer(None if error is not None else future.result(), error)


#: How often a worker hears from us within the time of its lease.
_BEATS: Final = 6
#: How long Ray has to say that a worker is dead, after something else went wrong with it.
_DOUBT: Final = 1.0
#: After so many seconds somebody should hear that the cluster has no place for a worker.
_LONG_TO_START: Final = 30.0


_in_order = attrgetter("serial")


class ClusterWorkers(Unled, SupervisedWorkers[ClusterWorker]):
    kind = "cluster"

    def __init__(self, call_queue: CallQueue, options: WorkerOptions) -> None:
        self._terms = options.cluster or Cluster()
        self._ray = connect(self._terms)
        self._actors = actor_class(self._ray, self._terms)
        self._sender = CallSender(call_queue.name)
        super().__init__(
            call_queue, options, [ClusterWorker(place, self._end) for place in range(options.workers)]
        )
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109  # pathlib is slow to import
        self._setup = paths, protocol.pack_setup(options.setup(), portable=True)
        self._inbox: list[
            Call[Any]
        ] = []  # handed out, and with no worker yet; what came back from one is first
        self._beat_timer: Timer | None = None
        self.gone = threading.Event()
        self.describe = ClusterPacker(self._ray).describe

    # Handing out (with the gate's lock held)

    def pump(self, now: float) -> None:
        call_queue = self._call_queue
        queue, hook_dispatcher = call_queue.queue, call_queue.hook_dispatcher
        while queue.pending and (call := queue.take(now)) is not None:
            call_queue.totals.dispatched += 1
            insort(self._inbox, call, key=_in_order)
            hook_dispatcher.note(hook_dispatcher.dispatch, call)
        if self._inbox:
            self._share_out()

    def _share_out(self) -> None:
        limit = self._options.max_calls
        for worker in self.workers:
            if not self._inbox:
                return
            if worker.free and (limit is None or worker.handed < limit):
                self._hand(worker, self._inbox.pop(0))
        short = len(self._inbox) - sum(worker.coming for worker in self.workers)
        cold = [worker for worker in self.workers if worker.condition is COLD]
        for worker in cold[: max(short, 0)]:
            self._start(worker)

    def _hand(self, worker: ClusterWorker, call: Call[Any]) -> None:
        function, blob = call.function, None
        if type(function) is PackedFunction:
            if function.number not in worker.known:
                worker.known.add(function.number)
                blob = function.blob
            function = function.number
        call.home = worker
        worker.calls[call.dispatch] = call
        worker.handed += 1
        self._sender.post(self._send, worker, worker.link, call, call.dispatch, (call.body, function, blob))

    def tell_canceled(self, call: Call[Any], now: float) -> None:
        if call in self._inbox:
            self._inbox.remove(call)
            self._call_queue.queue.settle(call, call.dispatch, now)
            return
        worker: ClusterWorker = call.home
        self._sender.post(self._cancel, worker, worker.link, call.dispatch)
        self._give_grace(worker, call.dispatch, now)

    def in_flight(self) -> Iterator[Call[Any]]:
        yield from super().in_flight()
        yield from list(self._inbox)

    # Coming and going (with the gate's lock held)

    def _start(self, worker: ClusterWorker) -> None:
        link = ActorLink(self._ray, self._actors, self._terms.lease, self._sender.when)
        worker.connect(link)
        self._call_queue.totals.spawned += 1
        self._sender.post(self._spawn, worker, link)
        call_at(clock() + _LONG_TO_START, self._complain, worker, link)
        if self._beat_timer is None:
            self._beat_later()

    def _dismiss(self, worker: ClusterWorker) -> None:
        self._sender.post(self._see_out, worker, worker.link, worker.ready)

    def _end(self, worker: ClusterWorker, link: ActorLink) -> None:
        self._sender.post(self._try, worker, link, link.kill)

    def _clear_away(self, worker: ClusterWorker) -> None:
        super()._clear_away(worker)
        if self._closing:
            self._wind_up()

    def _wind_up(self) -> None:
        if not any(worker.opened for worker in self.workers):
            if self._beat_timer is not None:
                self._beat_timer.cancel()
            self._sender.leave()
            self.gone.set()

    def stop(self) -> None:
        super().stop()
        with self._call_queue.lock:
            inbox = list(self._inbox)
            self._inbox.clear()
            self._requeue(inbox, [], clock())

    # What the courier does (with no lock held)

    def _try(self, worker: ClusterWorker, link: ActorLink, act: Any, *args: Any) -> None:
        """Tell the engine something about this worker. If it will not hear us, the worker is lost to us."""
        if worker.link is not link:
            return
        try:
            check_connected(self._ray)
            act(*args)
        except Exception as error:  # noqa: BLE001  # Ray raises whatever comes up, a bare Exception for an unknown actor
            self._lost(worker, link, error)

    def _spawn(self, worker: ClusterWorker, link: ActorLink) -> None:
        self._try(worker, link, self._open, worker, link)

    def _open(self, worker: ClusterWorker, link: ActorLink) -> None:
        link.open(
            self._setup,
            reports_memory=self._options.max_memory is not None,
            ready=lambda answer, error: self._came(worker, link, answer, error),
            dead=lambda _, error: self._lost(worker, link, error) if error is not None else None,
        )

    def _came(self, worker: ClusterWorker, link: ActorLink, answer: Any, error: BaseException | None) -> None:
        if error is not None:
            self._lost(worker, link, error)
            return
        link.node, pid, words = answer
        if words is not None:
            worker.last_words = words
            self._try(worker, link, link.kill)
            return

        def is_ready(now: float) -> None:
            if worker.link is link:
                worker.ready, worker.pid, worker.idle_since = True, pid, now

        self._try(worker, link, link.beat)
        self._call_queue.change(is_ready)
        with self._call_queue.lock:
            if worker.free and self._minds_idleness:
                self._fell_idle(worker, clock())

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
            # The clocks of two machines have nothing in common: a deadline travels as the time that is left.
            remaining = None if call.deadline is None else call.deadline - clock()
            key = call.key if protocol.is_plain(call.key) else protocol.try_dump(call.key)
            extra = (call.attempt, key, remaining), call.extra

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
            self._lost(worker, link, error)
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
            if self._minds_idleness:
                self._fell_idle(worker, now)
            self.pump(now)
            wake = call_queue.collect_granted()
            call_queue.note_state()
        call_queue.report([(call, *_unpack(kind, value))] if counts else (), wake)

    def _see_out(self, worker: ClusterWorker, link: ActorLink, was_ready: bool) -> None:
        if not was_ready:  # it may be waiting for a place on the cluster, and would do so to the end of time
            self._try(worker, link, link.kill)
            return
        self._try(worker, link, link.dismiss, lambda _, error: self._lost(worker, link, error))
        call_at(clock() + self._options.grace, self._end, worker, link)

    # Deaths, and what may be one (with no lock held)

    def _lost(self, worker: ClusterWorker, link: ActorLink, error: BaseException | None) -> None:
        """Ray says that it died, or it cannot be reached. `error` is None for one that left as it was told."""
        if worker.link is not link or link.given_up:
            return
        worker.cause = worker.cause or in_words(error)
        if error is None or is_certain(self._ray, error, link.node):
            self._bury(worker, link)
        elif not link.doubted:
            link.doubted = True
            with self._call_queue.lock:  # it gets no call from now on
                if worker.condition is LIVE:
                    worker.condition = Condition.LEAVING
                    self._offer(clock())
            call_at(clock() + _DOUBT, self._sender.post, self._give_up, worker, link)

    def _give_up(self, worker: ClusterWorker, link: ActorLink) -> None:
        """Nobody has said that it is dead. What Ray says after we had it killed is no proof: it may have reached nobody."""
        if worker.link is not link:
            return
        link.given_up = True
        with suppress(Exception):  # it will not hear us either, or is dead already; its lease ends it
            link.kill()
        call_at(max(link.lease_over(), clock()), self._sender.post, self._bury, worker, link)

    def _bury(self, worker: ClusterWorker, link: ActorLink) -> None:
        if worker.link is link:
            self.bury(worker)

    def _beat_later(self) -> None:
        self._beat_timer = call_at(clock() + self._terms.lease / _BEATS, self._sender.post, self._beat_all)

    def _beat_all(self) -> None:
        for worker in self.workers:
            if worker.link is not None and worker.ready:
                self._try(worker, worker.link, self._beat, worker.link)
        with self._call_queue.lock:
            self._beat_timer = None
            if any(worker.opened for worker in self.workers):
                self._beat_later()

    def _beat(self, link: ActorLink) -> None:
        if not link.beat():
            raise ClusterUnreachable(
                f"it has not answered for {self._terms.lease:g} s; its machine may be lost"
            )

    def _complain(self, worker: ClusterWorker, link: ActorLink) -> None:
        if worker.link is link and worker.coming:
            log.warning(
                "%s: the cluster has had no place for worker %d yet", self._call_queue.name, worker.place
            )


def _unpack(kind: int, value: Any) -> tuple[Any, BaseException | None]:
    if kind == protocol.PLAIN:
        return value, None
    try:
        return (None, unpack_error(value)) if kind == protocol.ERROR else (unpack(value), None)
    except Exception as error:  # noqa: BLE001  # the result's own code runs here
        return None, cannot_be_rebuilt(error)
