"""
One small adapter per peer, each written the way its documentation tells a user to, with two workers.

Where a library has several ways to make a call, the adapter takes the quickest that makes one call per item:
chunking is off everywhere, because a chunk of 100 is one call of another function.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

WORKERS = 2

#: What the tables call a contestant, and where its adapter is.
ADAPTERS = {
    "penstock": "ours:processes",
    "penstock, roomy": "ours:roomy_processes",
    "penstock map, roomy": "ours:MappedRoomily",
    "penstock, wide": "ours:wide_processes",
    "penstock threads": "ours:threads",
    "penstock threads, roomy": "ours:roomy_threads",
    "ThreadPoolExecutor": "stdlib:Threads",
    "ProcessPoolExecutor": "stdlib:Processes",
    "multiprocessing.Pool apply": "stdlib:PoolApply",
    "multiprocessing.Pool imap": "stdlib:PoolImap",
    "loky": "of_loky:Loky",
    "pebble": "of_pebble:Pebble",
    "pebble threads": "of_pebble:PebbleThreads",
    "mpire": "of_mpire:Mpire",
    "joblib": "of_joblib:Joblib",
    "Dask": "of_dask:Dask",
    "Dask, asyncio": "of_dask:AsyncDask",
    "anyio to_process": "of_anyio:Processes",
    "anyio to_thread": "of_anyio:Threads",
}


class Peer:
    """
    Two workers of one library.  The measures use whichever of these ways in they are about.

    A way that an adapter leaves out is one that its library does not have.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__(*error)

    def call(self, fn: Callable[[Any], Any], item: Any) -> Any:
        """One call, and wait for it."""
        raise NotImplementedError

    def burst(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        """One call per item, all made from this thread as quickly as they are taken; then all the answers."""
        raise NotImplementedError

    def feed(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
        """The answers one by one, pulling items as lazily as the library can."""
        raise NotImplementedError

    async def acall(self, fn: Callable[[Any], Any], item: Any) -> Any:
        raise NotImplementedError

    async def aburst(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        return await asyncio.gather(*(self.acall(fn, item) for item in items))


def peer(name: str) -> Peer:
    module, _, adapter = ADAPTERS[name].partition(":")
    made: Peer = getattr(importlib.import_module(f"{__name__}.{module}"), adapter)()
    return made
