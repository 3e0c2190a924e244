from __future__ import annotations

from mpire import WorkerPool

from bench.peers import WORKERS
from bench.peers.stdlib import PoolApply


class Mpire(PoolApply):
    """Its pool has multiprocessing's ways in."""

    def __init__(self) -> None:
        self.pool = WorkerPool(n_jobs=WORKERS, keep_alive=True)

    def __exit__(self, *error: object) -> None:
        self.pool.terminate()
