"""The I/O lane's event loop: a thread that runs `async def` nodes, so many at once."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.local.timers import clock

if TYPE_CHECKING:
    from penstock.local.graphs.lanes import LaneEntry, NodeCall

__all__ = ["LoopLane"]

log = logging.getLogger("penstock")


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
