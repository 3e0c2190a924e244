"""
One turn of one contestant, as a function from its name to its figures.  Each runs in an interpreter of its own.

Starting the workers is never part of a figure: every turn warms its pool up first.  Every answer is checked.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from bench import work
from bench.gauges import CpuOfTheTree, MemoryGrowth
from bench.peers import Peer, flow, peer

Sample = dict[str, float]

WARM_UP = 50
AT_ONCE = 8  # coroutines in progress, for the flow measures
MILLION = 1_000_000


def saturation(name: str, count: int) -> Sample:
    """One thread makes calls as quickly as they are taken, then waits for all."""
    with peer(name) as pool:
        pool.burst(work.bump, range(WARM_UP))
        with CpuOfTheTree() as cpu:
            start = perf_counter()
            answers = pool.burst(work.bump, range(count))
            seconds = perf_counter() - start
        expect_sum(answers, count)
    return {"rate": count / seconds, "cpu": cpu.seconds / count * 1e6}


def saturation_from_asyncio(name: str, count: int) -> Sample:
    """One loop makes all calls at once and gathers them."""

    async def turn() -> Sample:
        async with peer(name) as pool:
            await pool.aburst(work.bump, range(WARM_UP))
            with CpuOfTheTree() as cpu:
                start = perf_counter()
                answers = await pool.aburst(work.bump, range(count))
                seconds = perf_counter() - start
            expect_sum(answers, count)
        return {"rate": count / seconds, "cpu": cpu.seconds / count * 1e6}

    return asyncio.run(turn())


def round_trip(name: str, count: int) -> Sample:
    """One call at a time through an idle pool; the median of many."""
    with peer(name) as pool:
        pool.burst(work.bump, range(WARM_UP))
        return {"p50": median(trips(pool, work.bump, 1, 2, count)) * 1e6}


def round_trip_from_asyncio(name: str, count: int) -> Sample:
    async def turn() -> Sample:
        async with peer(name) as pool:
            await pool.aburst(work.bump, range(WARM_UP))
            return {"p50": median(await atrips(pool, work.bump, 1, 2, count)) * 1e6}

    return asyncio.run(turn())


def payloads(name: str, counts: dict[str, int]) -> Sample:
    """There and back, one at a time; `counts` says how often for each size."""
    with peer(name) as pool:
        pool.burst(work.bump, range(WARM_UP))
        return {
            figure: median(trips(pool, fn, sent, back, counts[size])) * 1e3
            for figure, size, fn, sent, back in parcels(counts)
        }


def payloads_from_asyncio(name: str, counts: dict[str, int]) -> Sample:
    async def turn() -> Sample:
        async with peer(name) as pool:
            await pool.aburst(work.bump, range(WARM_UP))
            return {
                figure: median(await atrips(pool, fn, sent, back, counts[size])) * 1e3
                for figure, size, fn, sent, back in parcels(counts)
            }

    return asyncio.run(turn())


def feeding(name: str, count: int) -> Sample:
    """Memory that feeding takes, in MB for a million items, and how quickly they went."""
    with peer(name) as pool:
        pool.burst(work.bump, range(WARM_UP))
        with MemoryGrowth() as memory:
            start = perf_counter()
            total = sum(pool.feed(work.bump, range(count)))
            seconds = perf_counter() - start
    expect(total, count * (count + 1) // 2)
    return {"memory": memory.grown / 1e6 * MILLION / count, "rate": count / seconds}


def flowing(name: str, step: str, count: int) -> Sample:
    async def turn() -> Sample:
        limit, fn = getattr(flow, name), getattr(work, step)
        await limit(range(WARM_UP), AT_ONCE, fn)
        with MemoryGrowth() as memory:
            start = perf_counter()
            total = await limit(range(count), AT_ONCE, fn)
            seconds = perf_counter() - start
        expect(total, count * (count + 1) // 2)
        return {"item": seconds / count * 1e6, "memory": memory.grown / 1e6 * MILLION / count}

    return asyncio.run(turn())


def importing(statement: str, count: int) -> Sample:
    """Fresh interpreters that time one statement; the first, which may write bytecode, does not count."""
    code = f"from time import perf_counter as now; start = now(); {statement}; print(now() - start)"
    seconds = []
    for _ in range(count + 1):
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
        if done.returncode:
            sys.exit(done.returncode)  # it has said why
        seconds.append(float(done.stdout))
    return {"import": median(seconds[1:]) * 1e3}


def trips(pool: Peer, fn: Callable[[Any], Any], sent: Any, back: Any, count: int) -> list[float]:
    seconds = []
    for _ in range(count + 1):
        start = perf_counter()
        answer = pool.call(fn, sent)
        touched = every_page(answer)
        seconds.append(perf_counter() - start)
        expect(touched, every_page(back))
    return seconds[1:]


async def atrips(pool: Peer, fn: Callable[[Any], Any], sent: Any, back: Any, count: int) -> list[float]:
    seconds = []
    for _ in range(count + 1):
        start = perf_counter()
        answer = await pool.acall(fn, sent)
        touched = every_page(answer)
        seconds.append(perf_counter() - start)
        expect(touched, every_page(back))
    return seconds[1:]


def every_page(answer: Any) -> Any:
    """
    One byte of each page, within the time taken: an answer that is still to be mapped or fetched is not yet back.
    """
    if isinstance(answer, int):
        return answer
    step = 4096 // getattr(answer, "itemsize", 1)
    return bytes(answer[::step])


def parcels(counts: dict[str, int]) -> list[tuple[str, str, Callable[[Any], Any], Any, Any]]:
    """Figure, size, function, what goes there and what must come back."""
    import numpy as np

    sizes = {"1 KB": 1 << 10, "1 MB": 1 << 20, "32 MB": 32 << 20}
    made: list[tuple[str, str, Callable[[Any], Any], Any, Any]] = []
    for size in counts:
        text = bytes(range(256)) * (sizes[size] // 256)
        array = np.arange(sizes[size] // 8, dtype=np.int64)
        made.append((f"bytes {size}", size, work.echo, text, text))
        made.append((f"NumPy {size}", size, work.echo, array, array))
        if size == "32 MB":
            made.append((f"NumPy {size}, new answer", size, work.renew, array, array + 1))
    return made


def expect_sum(answers: Sequence[int], count: int) -> None:
    expect(len(answers), count)
    expect(sum(answers), count * (count + 1) // 2)


def expect(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise AssertionError("wrong answers")
