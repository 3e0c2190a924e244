from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from distributed import Client, LocalCluster

from bench.peers import WORKERS, Peer

#: Two processes of one thread each, loopback alone, and no web server beside them.
CLUSTER = {
    "n_workers": WORKERS,
    "threads_per_worker": 1,
    "processes": True,
    "host": "127.0.0.1",
    "dashboard_address": None,
    "worker_dashboard_address": None,
}


class Dask(Peer):
    """`pure=False` everywhere: a call is made, not looked up by the hash of its arguments."""

    def __enter__(self) -> Self:
        self.cluster = LocalCluster(**CLUSTER)
        self.client = Client(self.cluster)
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self.cluster.close()

    def call(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return self.client.submit(fn, item, pure=False).result()

    def burst(self, fn: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
        return self.client.gather([self.client.submit(fn, item, pure=False) for item in items])


class AsyncDask(Peer):
    async def __aenter__(self) -> Self:
        self.cluster = await LocalCluster(**CLUSTER, asynchronous=True)
        self.client = await Client(self.cluster, asynchronous=True)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()
        await self.cluster.close()

    async def acall(self, fn: Callable[[Any], Any], item: Any) -> Any:
        return await self.client.submit(fn, item, pure=False)
