from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpire import WorkerPool

from bench.peers import WORKERS, Peer


class Mpire(Peer):
    def __init__(self) -> None:
        self.pool = WorkerPool(n_jobs=WORKERS, keep_alive=True)

    def __exit__(self, *error: object) -> None:
        self.pool.terminate()

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
