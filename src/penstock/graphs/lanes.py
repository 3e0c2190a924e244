"""
Lanes: the queues in which nodes wait, and the threads, the event loop and the pools that run the nodes. Lanes
outlive runs.

An entry in a lane's queue is not a node but a run's `RunQueue`, once for each worker that the run could keep
busy. A worker takes the first entry, runs its ready nodes for a turn, and appends the entry again if nodes
are left. So runs take turns, however many nodes each of them has, and a node needs no entry of its own.

The queue is a deque and the sleeping workers are a list. Both are used only with operations that are atomic
in the interpreter, so no thread waits for a lock. One push wakes one worker.

`ThreadLane` has threads for `def` nodes. `LoopLane` is the event loop of the I/O lane and `PoolLane` feeds
the workers of a pool: these two only start calls, so runs take turns call by call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from penstock.graphs.run_context import thread_state
from penstock.pools.context import never_blocking
from penstock.pools.timers import clock

if TYPE_CHECKING:
    from penstock.cluster.engine import Cluster
    from penstock.graphs.run import Run
    from penstock.pools.pool import WorkerPool

log = logging.getLogger("penstock")


class NodeCall(Protocol):
    """One call in a lane: an attempt at a node, or a call of `schedule`."""

    cancel_start: Callable[[], object] | None  # cancels its asyncio task or its future of the pool

    @property
    def unwanted(self) -> bool: ...
    def context(self) -> Context: ...
    def node_name(self) -> str | None: ...
    def invoke(self) -> Any: ...
    def remote(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]: ...
    def settle(self, value: Any, error: BaseException | None) -> None: ...


class LaneEntry(Protocol):
    """An entry of a lane's queue: the queue of a run, or a call of `schedule`, which belongs to no run."""

    @property
    def run(self) -> Run | None: ...

    def turn(self, worker: LaneWorker) -> None:
        """Run calls of this entry for a turn, in a worker thread."""

    def next_call(self) -> NodeCall | None:
        """Take one call, for lanes that start calls instead of running them."""

    def has_more(self) -> bool:
        """Whether there is another call to take. If not, the entry leaves the queue."""

    def end_broken_run(self, worker: LaneWorker, error: BaseException) -> None:
        """End the run after an error of Penstock itself, so that no caller waits for ever."""


class LaneWorker:
    __slots__ = ("entry", "lane", "replaced", "thread", "wakeup")

    def __init__(self, lane: ThreadLane, number: int) -> None:
        self.lane = lane
        self.entry: LaneEntry | None = None
        self.wakeup = threading.Lock()
        self.wakeup.acquire()  # a worker sleeps by acquiring it a second time
        self.replaced = False  # replaced while it was stuck; its thread ends when its node returns
        self.thread = threading.Thread(
            target=lane.work, args=(self,), name=f"{lane.name}-{number}", daemon=True
        )

    def node_name(self) -> str | None:
        """The node that the worker runs. None: no node of a run."""
        run = None if self.entry is None else self.entry.run
        node = None if run is None else run.node_by_worker.get(self)
        return None if run is None or node is None else run.plan.names[node]


class ThreadLane:
    """
    Threads for `def` nodes. They start on demand, and stay. `width`: how many calls may run at once.
    `entries`: how often one run may be in the queue.
    """

    def __init__(self, name: str, width: int) -> None:
        self.name = name
        self.width = self.entries = width
        self.items: deque[LaneEntry] = deque()
        self.workers: list[LaneWorker] = []
        self._asleep: list[LaneWorker] = []
        self._stuck_workers: list[LaneWorker] = []
        self.threads_started = self.threads_given_up = 0
        self._workers_lock = threading.Lock()
        self._stopping = False

    def push(self, entry: LaneEntry) -> None:
        self.items.append(entry)
        asleep = self._asleep
        if asleep:
            try:
                worker = asleep.pop()
            except IndexError:
                return  # workers that have just woken up will take it
            worker.wakeup.release()
        elif len(self.workers) < self.width:
            self._start_worker()

    def replace_worker(self, worker: LaneWorker) -> None:
        """Start another worker in place of one whose node does not return: a thread cannot be ended."""
        with self._workers_lock:
            if worker not in self.workers:
                return
            self.workers.remove(worker)
            worker.replaced = True
            self.threads_given_up += 1
            self._stuck_workers = [lost for lost in self._stuck_workers if lost.thread.is_alive()] + [worker]
        self._start_worker()

    def stop(self) -> None:
        """Run no more nodes. Sleeping threads end now, the others when their node returns."""
        self._stopping = True
        self.items.clear()
        with self._workers_lock:
            workers = list(self.workers)
        for worker in workers:
            # A worker checks the flag after it has entered this list of sleepers, so none is missed.
            try:
                self._asleep.remove(worker)
            except ValueError:
                continue
            worker.wakeup.release()

    def join(self, until: float) -> list[LaneWorker]:
        """Wait until this moment. Returns the workers that have not ended, replaced ones included."""
        with self._workers_lock:
            workers = [*self.workers, *self._stuck_workers]
        for worker in workers:
            if worker.thread is not threading.current_thread():
                worker.thread.join(max(0.0, until - clock()))
        return [worker for worker in workers if worker.thread.is_alive()]

    def _start_worker(self) -> None:
        with self._workers_lock:
            if self._stopping or len(self.workers) >= self.width:
                return
            self.threads_started += 1  # before it starts: the run may end before this thread goes on
            worker = LaneWorker(self, self.threads_started)
            self.workers.append(worker)
            try:
                worker.thread.start()
            except RuntimeError:
                self.threads_started -= 1
                # The system has no more threads. The present workers will take the entry.
                self.workers.remove(worker)
                if not self.workers:
                    raise
                log.warning("%s: no thread could be started beyond %d", self.name, len(self.workers))

    def work(self, worker: LaneWorker) -> None:
        thread_state.worker = worker
        items = self.items
        while not (worker.replaced or self._stopping):
            try:
                entry: LaneEntry | None = items.popleft()
            except IndexError:
                self.sleep(worker)
                continue
            worker.entry = entry
            assert entry is not None
            try:
                entry.turn(worker)
            except BaseException as error:  # a bug of Penstock must not leave the run waiting
                log.exception("%s failed in a turn; please report this", self.name)
                entry.end_broken_run(worker, error)
            worker.entry = entry = None  # so that a sleeping worker does not keep its last run alive

    def sleep(self, worker: LaneWorker) -> None:
        asleep = self._asleep
        asleep.append(worker)
        if self.items or self._stopping:  # pushed before this worker was in the list: no wake-up may come
            try:
                asleep.remove(worker)
            except ValueError:
                pass  # a wake-up comes after all
            else:
                return
        worker.wakeup.acquire()


class StartingLane:
    """A lane that starts calls and is notified of their ends, at most `width` of them at once."""

    entries = 1  # one thread at a time takes from the queue

    def __init__(self, width: int) -> None:
        self.width = width
        self.items: deque[LaneEntry] = deque()
        self.running: dict[NodeCall, Any] = {}  # and the task or the future of each
        self._stopping = False

    def _can_start(self) -> bool:
        return bool(self.items) and len(self.running) < self.width and not self._stopping

    def _start_pending(self) -> None:
        while self._can_start():
            entry = self.items.popleft()
            node_call = entry.next_call()
            if entry.has_more():
                self.items.append(entry)
            if node_call is not None:
                self._start(node_call)

    def _start(self, node_call: NodeCall) -> None:
        raise NotImplementedError

    def _settle(self, node_call: NodeCall, value: Any, error: BaseException | None) -> None:
        """Remove the call from `running`, then settle it."""
        self.running.pop(node_call, None)
        node_call.settle(value, error)


class LoopLane(StartingLane):
    """Runs `async def` nodes. The thread of its event loop starts with the first node."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__(width)
        self.name = name
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._wakeup_pending = False

    def push(self, entry: LaneEntry) -> None:
        self.items.append(entry)
        if not self._wakeup_pending:
            self._wakeup_pending = True
            loop = self._started()
            if loop is not None:
                with suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(self._start_woken)

    def stop(self) -> None:
        """No more nodes start, and running ones are canceled."""
        self._stopping = True
        self.items.clear()
        with self._starting:
            if self._loop is not None:
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._cancel_all)

    def join(self, until: float) -> bool:
        """
        Wait until this moment. True: the thread has not ended, because a node blocks it. Nodes that cannot be
        canceled are dropped.
        """
        thread, loop = self.thread, self._loop
        if thread is None or loop is None or thread is threading.current_thread():
            return False
        thread.join(max(0.0, 0.9 * (until - clock())))
        if thread.is_alive():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(loop.stop)
            thread.join(max(0.0, until - clock()))
        return thread.is_alive()

    def node_in(self) -> str | None:
        """The node that blocks the loop."""
        stepping = asyncio.current_task(self._loop)
        running = list(self.running.items())
        return next((node_call.node_name() for node_call, task in running if task is stepping), None)

    def _started(self) -> asyncio.AbstractEventLoop | None:
        """The event loop, started on demand. None: the lane is closed."""
        with self._starting:
            if self._loop is None and not self._stopping:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._run_loop, args=(loop,), name=self.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads
                    loop.close()
                    self._wakeup_pending = False
                    raise
                self._loop, self.thread = loop, thread
            return None if self._stopping else self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            for node_call, task in self.running.items():
                log.warning(
                    "%s: node %r could not be canceled and was dropped", self.name, node_call.node_name()
                )
                task._log_destroy_pending = False  # noqa: SLF001  # asyncio would warn without the node's name
            asyncio.set_event_loop(None)
            loop.close()

    def _start_woken(self) -> None:
        self._wakeup_pending = False  # before the queue is read, so that a later push wakes the loop again
        self._start_pending()

    def _start(self, node_call: NodeCall) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._drive(node_call), context=node_call.context())
        self.running[node_call] = task
        task.add_done_callback(partial(self._ended, node_call))
        node_call.cancel_start = partial(_cancel_soon, loop, task)
        if node_call.unwanted:  # its run ended before the task existed
            task.cancel()

    async def _drive(self, node_call: NodeCall) -> None:
        try:
            value = await node_call.invoke()
        except BaseException as error:  # noqa: BLE001  # any exception is the node's error, and the loop goes on
            self._settle(node_call, None, error)
        else:
            self._settle(node_call, value, None)

    def _ended(self, node_call: NodeCall, _: asyncio.Task[None]) -> None:
        if node_call in self.running:  # canceled before its first step, so it has not settled itself
            self._settle(node_call, None, asyncio.CancelledError())
        if self._stopping:
            self._leave_if_idle()
        elif self.items and not self._wakeup_pending:
            self._start_pending()

    def _cancel_all(self) -> None:
        for task in list(self.running.values()):
            task.cancel()
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if not self.running:
            asyncio.get_running_loop().stop()


def _cancel_soon(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    """Cancel a task from any thread, by its own event loop."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(task.cancel)


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


class PoolLane(StartingLane):
    """
    Runs nodes in a pool: a given one, or one of its own, which `make` makes with the first node.

    Only as many ready nodes as keep the workers busy enter the pool's queue; the others wait here, where runs
    take turns. Bounds, crash policy and killing are those of the pool. Any `Executor` can be used, but only a
    WorkerPool can end a running call.
    """

    def __init__(
        self,
        pool: Executor | None,
        width: int,
        *,
        make: Callable[[], WorkerPool] | None = None,
        own: WorkerPool | None = None,
    ) -> None:
        super().__init__(width)
        self.pool = pool
        self._make = make
        self._own = own
        self._lock = threading.Lock()
        self._feeding = threading.Lock()

    def push(self, entry: LaneEntry) -> None:
        self.items.append(entry)
        self._feed()

    def stop(self) -> None:
        self._stopping = True
        self.items.clear()
        for future in list(self.running.values()):
            future.cancel()

    def close(self, timeout: float) -> None:
        """Dispose of the lane's own pool; a given pool stays open."""
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own.dispose(timeout=timeout)

    def _feed(self) -> None:
        """
        Start calls while there is room. If another thread is here, return: that thread checks again at its
        end.
        """
        while self._can_start() and self._feeding.acquire(blocking=False):
            try:
                self._start_pending()
            finally:
                self._feeding.release()

    def _start(self, node_call: NodeCall) -> None:
        try:
            fn, args, kwargs = node_call.remote()
            with never_blocking():  # if the pool is full, the Future waits, and not the thread that submits
                future = node_call.context().run(self._pool().submit, fn, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001  # a closed or full pool, or arguments that cannot be pickled: the node's error
            node_call.settle(None, error)
            return
        self.running[node_call] = future
        node_call.cancel_start = future.cancel
        future.add_done_callback(partial(self._ended, node_call))
        if node_call.unwanted:  # its run ended before the future existed
            future.cancel()

    def _ended(self, node_call: NodeCall, future: Future[Any]) -> None:
        try:
            value = future.result()
        except BaseException as error:  # noqa: BLE001  # any exception is the node's error
            self._settle(node_call, None, error)
        else:
            self._settle(node_call, value, None)
        self._feed()

    def _pool(self) -> Executor:
        with self._lock:
            if self.pool is None:
                assert self._make is not None
                self.pool = self._own = self._make()
            return self.pool


def _width_for(pool: Executor, workers: int) -> int:
    """
    How many calls to give to the pool: as many as it accepts without waiting, but no more than keep its
    workers busy. `workers`: an estimate for an Executor that does not show its number.
    """
    state = getattr(pool, "state", None)
    if state is None:
        return int(2 * getattr(pool, "_max_workers", workers))
    return int(state.max_in_flight + min(state.max_queue_depth, state.max_in_flight))


AnyLane = ThreadLane | LoopLane | PoolLane
