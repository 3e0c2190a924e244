"""Ours, with hooks on: somebody counts every change, as a metrics exporter would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import penstock
from bench.peers import WORKERS
from bench.peers.executors import ExecutorPeer


class Counting(penstock.QueueHooks):
    """Listens to everything, and does the least that a listener can."""

    def __init__(self) -> None:
        self.heard = 0

    def on_queued(self, call: penstock.Call[Any]) -> None:
        self.heard += 1

    def on_dispatch(self, call: penstock.Call[Any]) -> None:
        self.heard += 1

    def on_settle(self, call: penstock.Call[Any]) -> None:
        self.heard += 1

    def on_cancel(self, call: penstock.Call[Any], phase: object) -> None:
        self.heard += 1

    def on_reject(self, call: penstock.Call[Any]) -> None:
        self.heard += 1

    def on_requeue(self, call: penstock.Call[Any]) -> None:
        self.heard += 1

    def on_state_change(self, state: object) -> None:
        self.heard += 1

    def expect_news(self) -> None:
        if not self.heard:
            raise RuntimeError("the hooks heard nothing, so these would not be figures with hooks on")


class Ours(ExecutorPeer):
    def __init__(self, **options: Any) -> None:
        self.hooks = Counting()
        self.executor = self.pool = penstock.WorkerPool(workers=WORKERS, hooks=self.hooks, **options)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.hooks.expect_news()

    async def __aenter__(self) -> Self:
        await self.pool.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.pool.__aexit__(None, None, None)
        self.hooks.expect_news()

    async def acall(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return await self.pool.call(fn, item)


#: Room to prefetch: calls wait in the workers' pipes, so that no worker waits for one.
ROOM = {"max_in_flight": 128, "max_queue_depth": 100_000}


def processes() -> Ours:
    """With the bounds that a user gets who names none."""
    return Ours(kind="process")


def roomy_processes() -> Ours:
    return Ours(kind="process", **ROOM)


class MappedRoomily(Ours):
    """By `map`, which is what `imap` is the counterpart of; chunking is off, so each item is a call with a Future of its own."""

    def __init__(self) -> None:
        super().__init__(kind="process", **ROOM)

    def burst(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        return list(self.feed(fn, items))


def wide_processes() -> Ours:
    """Room to prefetch, and the default depth that goes with it: wide and still bounded."""
    return Ours(kind="process", max_in_flight=128)


def threads() -> Ours:
    return Ours(kind="thread")


def roomy_threads() -> Ours:
    return Ours(kind="thread", **ROOM)
