"""The lanes for processes and for clusters: compute nodes in the workers of a pool."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.pools.blocking import may_block, own_threads

if TYPE_CHECKING:
    from penstock.cluster.engine import Cluster
    from penstock.graphs.lanes import LaneEntry, NodeCall
    from penstock.pools.pool import WorkerPool

__all__ = ["PoolLane", "cluster_lane", "process_lane"]


def process_lane(pool: Executor | None, workers: int) -> PoolLane:
    if pool is not None:
        return PoolLane(pool, _room_of(pool, workers))

    def make() -> WorkerPool:
        from penstock.pools.pool import WorkerPool  # noqa: PLC0415  # most graphs have no node for it

        return WorkerPool(workers, max_queue_depth=workers)

    return PoolLane(None, 2 * workers, make=make)


def cluster_lane(cluster: WorkerPool | Cluster | None) -> PoolLane:
    if cluster is None:
        return PoolLane(None, 0)
    from penstock.pools.pool import WorkerPool  # noqa: PLC0415  # as above

    if isinstance(cluster, WorkerPool):
        return PoolLane(cluster, _room_of(cluster, 1))
    made = WorkerPool(kind="cluster", cluster=cluster)
    return PoolLane(made, _room_of(made, 1), own=made)


class PoolLane:
    """
    Feeds a pool: one that somebody gave us, or one of our own, which `make` makes with the first node.

    Not everything that is ready goes into the pool's queue: only as much as keeps its workers busy, the rest waits
    here, where runs take turns. Bounds, crash policy and killing are the pool's business; any `Executor` will do, but
    only a WorkerPool can end a call that already runs.
    """

    entries = 1  # one thread at a time takes from the queue

    def __init__(
        self,
        pool: Executor | None,
        width: int,
        *,
        make: Callable[[], WorkerPool] | None = None,
        own: WorkerPool | None = None,
    ) -> None:
        self.pool = pool
        self.width = width
        self._make = make
        self._own = own
        self.items: deque[LaneEntry] = deque()
        self.running: dict[Future[Any], NodeCall] = {}
        self._lock = threading.Lock()
        self._feeding = threading.Lock()
        self._stopping = False

    def push(self, task: LaneEntry) -> None:
        self.items.append(task)
        self._feed()

    def stop(self) -> None:
        self._stopping = True
        self.items.clear()
        for future in list(self.running):
            future.cancel()

    def close(self, timeout: float) -> None:
        """Our own pool goes with us, its workers killed if need be; one that we were given stays."""
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own.dispose(timeout=timeout)

    def _feed(self) -> None:
        """Who finds it taken leaves: the one who has it looks again after letting go."""
        while self._can_start() and self._feeding.acquire(blocking=False):
            try:
                while self._can_start():
                    task = self.items.popleft()
                    node_call = task.next_call()
                    if task.has_more():
                        self.items.append(task)
                    if node_call is not None:
                        self._start(node_call)
            finally:
                self._feeding.release()

    def _can_start(self) -> bool:
        return bool(self.items) and len(self.running) < self.width and not self._stopping

    def _start(self, node_call: NodeCall) -> None:
        try:
            fn, args, kwargs = node_call.remote()
            with _not_waiting():
                future = node_call.context().run(self._pool().submit, fn, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001  # a closed or full pool, or what cannot be pickled: the node's error
            node_call.settle(None, error)
            return
        self.running[future] = node_call
        node_call.handle = future
        future.add_done_callback(self._ended)
        if node_call.unwanted:  # its run ended before there was anything to cancel
            future.cancel()

    def _ended(self, future: Future[Any]) -> None:
        node_call = self.running.pop(future)
        try:
            value = future.result()
        except BaseException as error:  # noqa: BLE001  # whatever a node raises is its error
            node_call.settle(None, error)
        else:
            node_call.settle(value, None)
        self._feed()

    def _pool(self) -> Executor:
        with self._lock:
            if self.pool is None:
                assert self._make is not None
                self.pool = self._own = self._make()
            return self.pool


def _room_of(pool: Executor, workers: int) -> int:
    """
    What the pool takes without anybody waiting at its door, but never more than keeps its workers busy. `workers` is a
    guess, for an Executor that does not say how many it has.
    """
    state = getattr(pool, "state", None)
    if state is None:
        return int(2 * getattr(pool, "_max_workers", workers))
    return int(state.max_in_flight + min(state.max_queue_depth, state.max_in_flight))


@contextmanager
def _not_waiting() -> Iterator[None]:
    """If others have filled the pool, the Future waits for room, and not the worker that happened to get us here."""
    if not may_block():
        yield
        return
    own_threads.yes = True
    try:
        yield
    finally:
        own_threads.yes = False
