"""Ours, with hooks on: somebody counts every change, as a metrics exporter would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import penstock
from bench.peers import WORKERS
from bench.peers.executors import ExecutorPeer


class Counting(penstock.QueueHooks):
    """Listens to everything, and does the least that a listener can."""

    def __init__(self) -> None:
        self.heard = 0

    def on_queued(self, *_: Any) -> None:
        self.heard += 1

    on_dispatch = on_settle = on_cancel = on_reject = on_requeue = on_state_change = on_queued


class Ours(ExecutorPeer):
    def __init__(self, **options: Any) -> None:
        self.executor = self.pool = penstock.WorkerPool(workers=WORKERS, hooks=Counting(), **options)

    async def acall(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return await self.pool.call(fn, item)


#: Room to prefetch: calls wait in the workers' pipes, so that no worker waits for one.
ROOM = {"max_in_flight": 128, "max_queue_depth": 100_000}


def processes() -> Ours:
    """With the bounds that a user gets who names none."""
    return Ours(kind="process")


def roomy_processes() -> Ours:
    return Ours(kind="process", **ROOM)


def wide_processes() -> Ours:
    """Room to prefetch, and the default depth that goes with it: wide and still bounded."""
    return Ours(kind="process", max_in_flight=128)


def threads() -> Ours:
    return Ours(kind="thread")


def roomy_threads() -> Ours:
    return Ours(kind="thread", **ROOM)
