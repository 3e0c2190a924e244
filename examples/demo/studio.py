"""
A program that shows its pools and graphs on the scheduler's page: `python -m examples.demo.studio`.

It works in bursts, so that its queues fill and empty visibly. Its calls only sleep, so they use hardly any CPU.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import Future

import penstock
from penstock.client.signals import handled_signals

__all__ = ["gallery"]

dice = random.Random(7)  # no secret


def main() -> None:
    over = threading.Event()
    with (
        handled_signals(lambda _: over.set()),
        penstock.attach(name="studio"),
        penstock.WorkerPool(workers=4, kind="thread", name="develop", max_queue_depth=40) as develop,
        penstock.WorkerPool(workers=2, kind="thread", name="print", max_queue_depth=10) as prints,
        penstock.GraphExecutor(compute=2, io=4, name="press") as executor,
    ):
        plan = gallery()
        photographers = [
            threading.Thread(target=_burst, args=(pool, over), daemon=True)
            for pool in (develop, *[prints] * 14)
        ]
        for photographer in photographers:
            photographer.start()
        while not over.wait(0.3):
            executor.run(plan, {"album": dice.randrange(100)}, check=False)
        for pool in (develop, prints):
            pool.shutdown(wait=False, cancel_futures=True)


def _burst(pool: penstock.WorkerPool, over: threading.Event) -> None:
    """Submit calls as fast as the pool accepts them, then pause; repeat."""
    while not over.is_set():
        try:
            calls: list[Future[None]] = [
                pool.submit(time.sleep, dice.uniform(0.1, 0.9)) for _ in range(dice.randrange(2, 30))
            ]
            for call in calls:
                call.result()
        except (penstock.PoolClosedError, penstock.CallCanceled):
            return
        over.wait(dice.uniform(0.5, 4.0))


def gallery() -> penstock.Plan:
    """A graph: fetch, decode, resize to three sizes and describe in parallel, then publish and announce."""
    graph = penstock.Graph("gallery", env={"album": int})

    @graph.node
    async def fetch(album: int) -> int:
        await asyncio.sleep(dice.uniform(0.1, 0.25))
        return album

    @graph.node(lane="io")
    def captions(album: int) -> int:
        time.sleep(dice.uniform(0.2, 0.5))
        return album

    @graph.node
    def decode(fetch: int) -> int:
        time.sleep(dice.uniform(0.05, 0.15))
        return fetch

    for size in ("small", "medium", "large"):

        @graph.node(name=size)
        def resize(decode: int) -> int:
            time.sleep(dice.uniform(0.1, 0.3))
            return decode

    @graph.node
    def describe(decode: int, captions: int) -> int:
        time.sleep(dice.uniform(0.1, 0.2))
        return decode + captions

    @graph.node(lane="io")
    def publish(small: int, medium: int, large: int, describe: int) -> int:
        time.sleep(dice.uniform(0.05, 0.2))
        return small + medium + large + describe

    @graph.node
    async def announce(publish: int) -> str:
        await asyncio.sleep(dice.uniform(0.05, 0.1))
        return f"{publish} is out"

    return graph.compile()


if __name__ == "__main__":
    main()
