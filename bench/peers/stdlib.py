"""`concurrent.futures` and `multiprocessing`, from the standard library."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from bench.peers import WORKERS, Peer
from bench.peers.executors import ExecutorPeer


class Threads(ExecutorPeer):
    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(WORKERS)


class Processes(ExecutorPeer):
    def __init__(self) -> None:
        self.executor = ProcessPoolExecutor(WORKERS)


class PoolApply(Peer):
    pool: Any

    def __init__(self) -> None:
        self.pool = multiprocessing.Pool(WORKERS)

    def __exit__(self, *error: object) -> None:
        self.pool.terminate()
        self.pool.join()

    def call(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return self.pool.apply(fn, (item,))

    def burst(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        handles = [self.pool.apply_async(fn, (item,)) for item in items]
        return [handle.get() for handle in handles]

    async def acall(self, fn: Callable[[Any], Any], item: Any) -> Any:
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self.pool.apply_async(
            fn,
            (item,),
            callback=lambda value: loop.call_soon_threadsafe(answer.set_result, value),
            error_callback=lambda error: loop.call_soon_threadsafe(answer.set_exception, error),
        )
        return await answer


class PoolImap(PoolApply):
    def burst(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        return list(self.feed(fn, items))

    def feed(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
        return self.pool.imap_unordered(fn, items, chunksize=1)
