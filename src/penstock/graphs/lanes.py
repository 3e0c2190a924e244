"""Where nodes wait and who runs them: one queue a lane, served by threads that outlive every run.

What waits in a queue is not a node but a run's `Share` of the lane, once for each worker that it could keep busy. A
worker takes the share at the head, works on its ready nodes for a turn, and puts it back at the tail if any are left.
So runs take turns however many nodes each of them has, and a node costs no entry of its own.

A lane's queue is a deque and its sleepers are a list: both are touched only by operations that the interpreter makes
atomic, and nobody ever waits for a lock to hand out work. One push rings one bell.

The I/O lane's event loop: a thread that runs `async def` nodes, so many at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Protocol

from penstock.graphs.run_context import RunContext, here
from penstock.pools.timers import clock

__all__ = ["LaneEntry", "LaneQueue", "LaneWorker", "LoopLane", "NodeCall", "ThreadLane"]

log = logging.getLogger("penstock")


class NodeCall(Protocol):
    """One call on its way: an attempt at a node, or what `schedule` was given."""

    handle: Any  # what can be cancelled: an asyncio task, a future of the pool, or nothing yet

    @property
    def unwanted(self) -> bool: ...
    def context(self) -> Context: ...
    def node_name(self) -> str | None: ...
    def invoke(self) -> Any: ...
    def remote(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]: ...
    def settle(self, value: Any, error: BaseException | None) -> None: ...


class LaneEntry(Protocol):
    """What waits in a lane's queue."""

    def turn(self, worker: LaneWorker) -> None:
        """Work on it for a while, in a worker thread."""

    def next_call(self) -> NodeCall | None:
        """Take one call off it, for lanes that start calls instead of making them."""

    def has_more(self) -> bool:
        """Is there another call to take? If not, its entry in the queue is over."""

    def broken(self, worker: LaneWorker, error: BaseException) -> None:
        """Something of ours failed in its turn. Whoever waits for it must not wait for ever."""

    def node_in(self, worker: LaneWorker) -> str | None:
        """The node that the worker is in."""

    def context_in(self, worker: LaneWorker) -> RunContext | None:
        """What `current_run` finds there."""


class LaneQueue(Protocol):
    width: int  # how many may run at once
    entries: int  # how often one run may stand in the queue

    def push(self, task: LaneEntry) -> None: ...


class LaneWorker:
    __slots__ = ("lane", "number", "surplus", "task", "thread", "wakeup")

    def __init__(self, lane: ThreadLane, number: int) -> None:
        self.lane = lane
        self.number = number
        self.task: LaneEntry | None = None
        self.wakeup = threading.Lock()
        self.wakeup.acquire()  # sleeping is taking it a second time
        self.surplus = False  # written off while it was stuck; leaves when it comes back
        self.thread = threading.Thread(
            target=lane._work, args=(self,), name=f"{lane.name}-{number}", daemon=True
        )


class ThreadLane:
    """Threads for `def` nodes. They start when there is work for them, and stay."""

    def __init__(self, name: str, width: int, numbers: Iterator[int]) -> None:
        self.name = name
        self.width = self.entries = width
        self.items: deque[LaneEntry] = deque()
        self.workers: dict[int, LaneWorker] = {}
        self._asleep: list[LaneWorker] = []
        self._written_off: list[LaneWorker] = []
        self.hired = self.given_up = 0
        self._numbers = numbers  # shared by the lanes of an executor: a run knows its workers by number
        self._roster = threading.Lock()
        self._stopping = False

    def push(self, task: LaneEntry) -> None:
        self.items.append(task)
        asleep = self._asleep
        if asleep:
            try:
                worker = asleep.pop()
            except IndexError:
                return  # those who just woke up will see it
            worker.wakeup.release()
        elif len(self.workers) < self.width:
            self._hire()

    def write_off(self, number: int) -> None:
        """Its node does not come back: let somebody else have its place. The thread itself cannot be ended."""
        with self._roster:
            worker = self.workers.pop(number, None)
            if worker is None:
                return
            worker.surplus = True
            self.given_up += 1
            self._written_off = [lost for lost in self._written_off if lost.thread.is_alive()] + [worker]
        self._hire()

    def census(self) -> list[int]:
        """The numbers of those that work here."""
        return list(self.workers)

    def stop(self) -> None:
        """No more turns. Threads that sleep leave now, the others when they come back from their node."""
        self._stopping = True
        self.items.clear()
        with self._roster:
            workers = list(self.workers.values())
        for worker in workers:
            # A worker about to lie down looks at the flag after entering the list, so each either sees it or is here.
            try:
                self._asleep.remove(worker)
            except ValueError:
                continue
            worker.wakeup.release()

    def join(self, until: float) -> list[LaneWorker]:
        """Those that have not left by then, the written-off among them."""
        with self._roster:
            workers = [*self.workers.values(), *self._written_off]
        for worker in workers:
            if worker.thread is not threading.current_thread():
                worker.thread.join(max(0.0, until - clock()))
        return [worker for worker in workers if worker.thread.is_alive()]

    def _hire(self) -> None:
        with self._roster:
            if self._stopping or len(self.workers) >= self.width:
                return
            worker = LaneWorker(self, next(self._numbers))
            self.workers[worker.number] = worker
            try:
                worker.thread.start()
                self.hired += 1
            except RuntimeError:
                # No more threads to be had. Whoever is here already will get round to it.
                del self.workers[worker.number]
                if not self.workers:
                    raise
                log.warning("%s: no thread could be started beyond %d", self.name, len(self.workers))

    def _work(self, worker: LaneWorker) -> None:
        here.worker = worker
        items = self.items
        while not (worker.surplus or self._stopping):
            try:
                task: LaneEntry | None = items.popleft()
            except IndexError:
                self._sleep(worker)
                continue
            worker.task = task
            assert task is not None
            try:
                task.turn(worker)
            except BaseException as error:  # a mistake of ours must not leave the run waiting
                log.exception("%s failed in a turn; please report this", self.name)
                task.broken(worker, error)
            worker.task = task = None  # or a sleeping worker keeps its last run alive

    def _sleep(self, worker: LaneWorker) -> None:
        asleep = self._asleep
        asleep.append(worker)
        if self.items or self._stopping:  # pushed before we could be seen asleep: nobody may ring
            try:
                asleep.remove(worker)
            except ValueError:
                pass  # somebody rings after all
            else:
                return
        worker.wakeup.acquire()


class LoopLane:
    """Its thread starts with the first node. Runs take turns node by node: starting one is all that happens here."""

    entries = 1  # the loop itself is the only one who takes from the queue

    def __init__(self, name: str, width: int) -> None:
        self.name = name
        self.width = width
        self.items: deque[LaneEntry] = deque()
        self.running: dict[NodeCall, asyncio.Task[None]] = {}
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._rung = False
        self._stopping = False

    def push(self, task: LaneEntry) -> None:
        self.items.append(task)
        if not self._rung:
            self._rung = True
            loop = self._started()
            if loop is not None:
                with suppress(RuntimeError):  # closed meanwhile
                    loop.call_soon_threadsafe(self._pump)

    def stop(self) -> None:
        """No more nodes start, and those that run are cancelled."""
        self._stopping = True
        self.items.clear()
        with self._starting:
            if self._loop is not None:
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._wind_up)

    def join(self, until: float) -> bool:
        """
        True: the thread has not left by then, because a node blocks it. Nodes that will not be cancelled do not hold
        it up: they are dropped.
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
        """None: the lane is closed, nothing starts any more."""
        with self._starting:
            if self._loop is None and not self._stopping:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._serve, args=(loop,), name=self.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads to be had
                    loop.close()
                    self._rung = False
                    raise
                self._loop, self.thread = loop, thread
            return None if self._stopping else self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            for node_call, task in self.running.items():
                log.warning(
                    "%s: node %r would not be cancelled and was dropped", self.name, node_call.node_name()
                )
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio would say the same, nameless
            asyncio.set_event_loop(None)
            loop.close()

    def _pump(self) -> None:
        self._rung = False  # before looking: what comes later rings again
        while self.items and len(self.running) < self.width and not self._stopping:
            task = self.items.popleft()
            node_call = task.next_call()
            if task.has_more():
                self.items.append(task)
            if node_call is not None:
                self._begin(node_call)

    def _begin(self, node_call: NodeCall) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._drive(node_call), context=node_call.context())
        self.running[node_call] = task
        task.add_done_callback(partial(self._ended, node_call))
        node_call.handle = _FromAnyThread(loop, task)
        if node_call.unwanted:  # its run ended before there was anything to cancel
            task.cancel()

    async def _drive(self, node_call: NodeCall) -> None:
        try:
            value = await node_call.invoke()
        except BaseException as error:  # noqa: BLE001  # whatever a node raises is its error, and the loop lives on
            self._settle(node_call, None, error)
        else:
            self._settle(node_call, value, None)

    def _settle(self, node_call: NodeCall, value: Any, error: BaseException | None) -> None:
        """It counts as gone before anybody hears of it."""
        self.running.pop(node_call, None)
        node_call.settle(value, error)

    def _ended(self, node_call: NodeCall, _: asyncio.Task[None]) -> None:
        if node_call in self.running:  # cancelled before its first step, so nothing in it could say so
            self._settle(node_call, None, asyncio.CancelledError())
        if self._stopping:
            self._leave_if_idle()
        elif self.items and not self._rung:
            self._pump()

    def _wind_up(self) -> None:
        for task in list(self.running.values()):
            task.cancel()
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if not self.running:
            asyncio.get_running_loop().stop()


class _FromAnyThread:
    """An asyncio task may only be cancelled by its own loop."""

    __slots__ = ("_loop", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        self._loop = loop
        self._task = task

    def cancel(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
