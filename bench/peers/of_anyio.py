from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from anyio import CapacityLimiter, to_process, to_thread

from bench.peers import WORKERS, Peer


class Processes(Peer):
    """AnyIO has no pool to hold: workers belong to the event loop, the limiter says how many."""

    async def __aenter__(self) -> Self:
        self.limiter = CapacityLimiter(WORKERS)
        return self

    async def acall(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return await to_process.run_sync(fn, item, limiter=self.limiter)


class Threads(Processes):
    async def acall(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return await to_thread.run_sync(fn, item, limiter=self.limiter)
