"""What every `concurrent.futures.Executor` has in common, ours included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, Self

from bench.peers import Peer


class ExecutorPeer(Peer):
    executor: Executor

    def __enter__(self) -> Self:
        self.executor.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.executor.__exit__(None, None, None)

    def call(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return self.executor.submit(fn, item).result()

    def burst(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        futures = [self.executor.submit(fn, item) for item in items]
        return [future.result() for future in futures]

    def feed(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
        return self.executor.map(fn, items)

    async def acall(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.executor, fn, item)
