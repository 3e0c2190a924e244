from __future__ import annotations

from loky import ProcessPoolExecutor

from bench.peers import WORKERS
from bench.peers.executors import ExecutorPeer


class Loky(ExecutorPeer):
    def __init__(self) -> None:
        self.executor = ProcessPoolExecutor(WORKERS)
