"""
At most `n` coroutines at a time over many items: ours, the recipes people write, and the libraries that offer it.

Every contestant consumes all answers and returns their sum, so that none is spared a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

Step = Callable[[int], Awaitable[int]]


async def ours(items: Iterable[int], n: int, fn: Step) -> int:
    import penstock

    total = 0
    async for answer in penstock.parallel_limit(items, n, fn):
        total += answer
    return total


async def semaphore_and_gather(items: Iterable[int], n: int, fn: Step) -> int:
    semaphore = asyncio.Semaphore(n)

    async def bounded(item: int) -> int:
        async with semaphore:
            return await fn(item)

    return sum(await asyncio.gather(*(bounded(item) for item in items)))


async def wait_windows(items: Iterable[int], n: int, fn: Step) -> int:
    total = 0
    running: set[asyncio.Future[int]] = set()
    for item in items:
        if len(running) >= n:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            total += sum(task.result() for task in done)
        running.add(asyncio.ensure_future(fn(item)))
    return total + sum(await asyncio.gather(*running))


async def of_aiometer(items: Iterable[int], n: int, fn: Step) -> int:
    import aiometer

    total = 0
    async with aiometer.amap(fn, items, max_at_once=n) as answers:
        async for answer in answers:
            total += answer
    return total


async def of_aiostream(items: Iterable[int], n: int, fn: Step) -> int:
    from aiostream import stream

    total = 0
    async with stream.map(stream.iterate(items), fn, task_limit=n, ordered=False).stream() as answers:
        async for answer in answers:
            total += answer
    return total


async def bare_pullers(items: Iterable[int], n: int, fn: Step) -> int:
    """
    The floor for an iterator: n tasks share the items and leave answers in a deque of at most n; somebody takes them.

    No errors, no cancellation, no leaving early, no order.
    """
    source = iter(items)
    answers: deque[int] = deque()
    full: deque[asyncio.Future[None]] = deque()
    loop = asyncio.get_running_loop()
    bell = loop.create_future()

    def ring(_: object = None) -> None:
        if not bell.done():
            bell.set_result(None)

    async def pull() -> None:
        for item in source:
            answers.append(await fn(item))
            ring()
            if len(answers) >= n:
                full.append(room := loop.create_future())
                await room

    total = 0
    pulling = asyncio.gather(*(pull() for _ in range(n)))
    pulling.add_done_callback(ring)
    while not pulling.done():
        await bell
        bell = loop.create_future()
        while answers:
            total += answers.popleft()
        while full:
            full.popleft().set_result(None)
    return total + sum(answers)


async def pullers_that_keep(items: Iterable[int], n: int, fn: Step) -> int:
    """The floor without a bound: nobody takes an answer before the last one is there, so all are kept."""
    source = iter(items)
    answers: deque[int] = deque()

    async def pull() -> None:
        for item in source:
            answers.append(await fn(item))

    await asyncio.gather(*(pull() for _ in range(n)))
    return sum(answers)
