"""The process and cluster lanes: compute nodes in the workers of a pool."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.pools.context import may_block, thread_state

if TYPE_CHECKING:
    from penstock.cluster.engine import Cluster
    from penstock.graphs.lanes import LaneEntry, NodeCall
    from penstock.pools.pool import WorkerPool


def process_lane(pool: Executor | None, workers: int) -> PoolLane:
    if pool is not None:
        return PoolLane(pool, _width_for(pool, workers))

    def make() -> WorkerPool:
        from penstock.pools.pool import WorkerPool  # noqa: PLC0415  # most graphs have no process node

        return WorkerPool(workers, max_queue_depth=workers)

    return PoolLane(None, 2 * workers, make=make)


def cluster_lane(cluster: WorkerPool | Cluster | None) -> PoolLane:
    if cluster is None:
        return PoolLane(None, 0)
    from penstock.pools.pool import WorkerPool  # noqa: PLC0415  # as above

    if isinstance(cluster, WorkerPool):
        return PoolLane(cluster, _width_for(cluster, 1))
    made = WorkerPool(kind="cluster", cluster=cluster)
    return PoolLane(made, _width_for(made, 1), own=made)


class PoolLane:
    """
    Feeds a pool: a given one, or one of its own, which `make` makes with the first node.

    Not all ready nodes go into the pool's queue: only as many as keep its workers busy; the others wait here,
    where runs take turns. Bounds, crash policy and killing are the pool's; any `Executor` will do, but only a
    WorkerPool can end a call that already runs.
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

    def push(self, entry: LaneEntry) -> None:
        self.items.append(entry)
        self._feed()

    def stop(self) -> None:
        self._stopping = True
        self.items.clear()
        for future in list(self.running):
            future.cancel()

    def close(self, timeout: float) -> None:
        """Dispose of the lane's own pool, with its workers; a given one stays."""
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own.dispose(timeout=timeout)

    def _feed(self) -> None:
        """
        Start calls while there is room. A thread that finds another one here returns: the other looks again
        after it has finished.
        """
        while self._can_start() and self._feeding.acquire(blocking=False):
            try:
                while self._can_start():
                    entry = self.items.popleft()
                    node_call = entry.next_call()
                    if entry.has_more():
                        self.items.append(entry)
                    if node_call is not None:
                        self._start(node_call)
            finally:
                self._feeding.release()

    def _can_start(self) -> bool:
        return bool(self.items) and len(self.running) < self.width and not self._stopping

    def _start(self, node_call: NodeCall) -> None:
        try:
            fn, args, kwargs = node_call.remote()
            with _never_blocking():
                future = node_call.context().run(self._pool().submit, fn, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001  # a closed or full pool, or arguments that cannot be pickled: the node's error
            node_call.settle(None, error)
            return
        self.running[future] = node_call
        node_call.handle = future
        future.add_done_callback(self._ended)
        if node_call.unwanted:  # its run ended before the future existed
            future.cancel()

    def _ended(self, future: Future[Any]) -> None:
        node_call = self.running.pop(future)
        try:
            value = future.result()
        except BaseException as error:  # noqa: BLE001  # any exception is the node's error
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


def _width_for(pool: Executor, workers: int) -> int:
    """
    The number of calls that the pool takes without making a caller wait, but no more than keep its workers
    busy. `workers` is a guess, for an Executor that does not say how many it has.
    """
    state = getattr(pool, "state", None)
    if state is None:
        return int(2 * getattr(pool, "_max_workers", workers))
    return int(state.max_in_flight + min(state.max_queue_depth, state.max_in_flight))


@contextmanager
def _never_blocking() -> Iterator[None]:
    """If the pool is full, the Future waits for a place, and not the worker thread that submits."""
    if not may_block():
        yield
        return
    thread_state.never_blocks = True
    try:
        yield
    finally:
        thread_state.never_blocks = False
