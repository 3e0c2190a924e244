from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pebble import ProcessPool, ThreadPool

from bench.peers import WORKERS, Peer


class Pebble(Peer):
    """Pebble's pools look like executors, but their `submit` takes a timeout first."""

    def __init__(self) -> None:
        self.pool = ProcessPool(max_workers=WORKERS)

    def __exit__(self, *error: object) -> None:
        self.pool.stop()
        self.pool.join()

    def call(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return self.pool.schedule(fn, args=(item,)).result()

    def burst(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        futures = [self.pool.schedule(fn, args=(item,)) for item in items]
        return [future.result() for future in futures]

    async def acall(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return await asyncio.wrap_future(self.pool.schedule(fn, args=(item,)))


class PebbleThreads(Pebble):
    def __init__(self) -> None:
        self.pool = ThreadPool(max_workers=WORKERS)
