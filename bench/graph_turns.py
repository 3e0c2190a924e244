"""
What one turn does: make the graph, warm up, run it again and again, and tell the median time a node.

Making graphs, plans and drivers is not timed: a graph is made once and run often. Each contestant is called by the
quickest way it has, with two workers where it has workers.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from graphlib import TopologicalSorter
from queue import SimpleQueue
from statistics import median
from time import perf_counter

from bench.graph_prototype import BareExecutor, BareGraph
from bench.graph_shapes import Preds, answer, function, shape

WORKERS = 2
Runs = Callable[[], list[int]]  # one repetition: the last value of each run


def turn(contestant: str, graph: str, at_once: int, repetitions: int) -> dict[str, float]:
    """Microseconds a node, over `repetitions` of `at_once` runs side by side."""
    preds = shape(graph)
    times: list[float] = []
    repeat = CONTESTANTS[contestant](preds, at_once, times)
    expected = [answer(preds)] * at_once
    for number in range(repetitions + 2):  # the first two warm up
        before = len(times)
        began = perf_counter()
        values = repeat()
        took = perf_counter() - began
        assert values == expected, "a wrong answer"
        if len(times) == before:  # else the contestant kept its own time
            times.append(took)
        if number == 1:
            times.clear()
    nodes = len(preds) * at_once
    return {"us": median(times) / nodes * 1e6, "best": min(times) / nodes * 1e6}


def penstock(preds: Preds, at_once: int, _: list[float]) -> Runs:
    from penstock.graphs.builder import Graph
    from penstock.graphs.executor import GraphExecutor

    graph = Graph()
    for node, needs in enumerate(preds):
        names = [f"n{one}" for one in needs]
        inputs = {"parts": names} if len(needs) > 3 else dict(zip("abc", names, strict=False))
        graph.add(function(len(needs)), name=f"n{node}", inputs=inputs)
    plan, last = graph.compile(), f"n{len(preds) - 1}"
    executor = GraphExecutor(compute=WORKERS)
    if at_once == 1:
        return lambda: [executor.run(plan)[last]]

    def repeat() -> list[int]:
        runs = [executor.submit(plan) for _ in range(at_once)]
        return [run.result()[last] for run in runs]

    return repeat


def prototype(preds: Preds, at_once: int, _: list[float]) -> Runs:
    gather = {node for node, needs in enumerate(preds) if len(needs) > 3}
    graph = BareGraph([function(len(needs)) for needs in preds], preds, gather)
    executor = BareExecutor(WORKERS)

    def repeat() -> list[int]:
        runs = [executor.submit(graph) for _ in range(at_once)]
        for run in runs:
            run.finished.wait()
        return [run.values[-1] for run in runs]

    return repeat


def serial(preds: Preds, at_once: int, _: list[float]) -> Runs:
    calls = [(function(len(needs)), needs, len(needs) > 3) for needs in preds]

    def run() -> int:
        values: list[int] = []
        for fn, needs, gather in calls:
            inputs = [values[one] for one in needs]
            values.append(fn(inputs) if gather else fn(*inputs))
        return values[-1]

    return lambda: [run() for _ in range(at_once)]


def graphlib_threads(preds: Preds, at_once: int, _: list[float]) -> Runs:
    """A sorter cannot be used twice, so making it is part of every run; one thread hands out for all runs."""
    pool = ThreadPoolExecutor(WORKERS)
    feeds = {node: tuple(needs) for node, needs in enumerate(preds)}
    calls = [(function(len(needs)), needs, len(needs) > 3) for needs in preds]

    def repeat() -> list[int]:
        done: SimpleQueue[tuple[int, int]] = SimpleQueue()
        values = [[0] * len(preds) for _ in range(at_once)]

        def work(run: int, node: int) -> None:
            fn, needs, gather = calls[node]
            inputs = [values[run][one] for one in needs]
            values[run][node] = fn(inputs) if gather else fn(*inputs)
            done.put((run, node))

        sorters = [TopologicalSorter(feeds) for _ in range(at_once)]
        for run, sorter in enumerate(sorters):
            sorter.prepare()
            for node in sorter.get_ready():
                pool.submit(work, run, node)
        for _ in range(at_once * len(preds)):
            run, node = done.get()
            sorters[run].done(node)
            for ready in sorters[run].get_ready():
                pool.submit(work, run, ready)
        return [mine[-1] for mine in values]

    return repeat


def asyncio_tasks(preds: Preds, at_once: int, times: list[float]) -> Runs:
    calls = [(function(len(needs)), needs, len(needs) > 3) for needs in preds]

    async def run() -> int:
        tasks: list[asyncio.Task[int]] = []

        async def work(node: int) -> int:
            fn, needs, gather = calls[node]
            inputs = [await tasks[one] for one in needs]
            return fn(inputs) if gather else fn(*inputs)

        tasks += [asyncio.create_task(work(node)) for node in range(len(preds))]
        return await tasks[-1]

    async def all_runs() -> list[int]:
        began = perf_counter()
        values = await asyncio.gather(*(run() for _ in range(at_once)))
        times.append(perf_counter() - began)
        return list(values)

    return lambda: asyncio.run(all_runs())


def dask_threaded(preds: Preds, at_once: int, _: list[float]) -> Runs:
    """Its tasks in the form that its scheduler works with, so that no time goes into converting them."""
    import dask
    from dask._task_spec import convert_legacy_graph
    from dask.threaded import get

    legacy = {
        f"n{node}": (
            function(len(needs)),
            *([[f"n{one}" for one in needs]] if len(needs) > 3 else (f"n{one}" for one in needs)),
        )
        for node, needs in enumerate(preds)
    }
    graph, last = convert_legacy_graph(legacy), f"n{len(preds) - 1}"
    pool, callers = ThreadPoolExecutor(WORKERS), ThreadPoolExecutor(at_once)
    dask.config.set(pool=pool)
    if at_once == 1:
        return lambda: [get(graph, last, pool=pool)]

    def repeat() -> list[int]:
        runs = [callers.submit(get, graph, last, pool=pool) for _ in range(at_once)]
        wait(runs)
        return [run.result() for run in runs]

    return repeat


def hamilton(preds: Preds, at_once: int, _: list[float]) -> Runs:
    """Its functions are nodes by their names, so each node gets one; it walks the graph by recursion, which needs room."""
    from hamilton import ad_hoc_utils, driver

    sys.setrecursionlimit(10 * len(preds) + 1000)
    module = ad_hoc_utils.create_temporary_module(*_named_functions(preds), module_name="graph")
    built = driver.Builder().with_modules(module).build()
    last = [f"n{len(preds) - 1}"]

    def run() -> int:
        value: int = built.execute(last)[last[0]]
        return value

    return _deep(lambda: [run() for _ in range(at_once)])


def _named_functions(preds: Preds) -> list[Callable[..., int]]:
    found: dict[str, Callable[..., int]] = {}
    for node, needs in enumerate(preds):
        parameters = ", ".join(f"n{one}: int" for one in needs)
        total = " + ".join(f"n{one}" for one in needs) or "1"
        plus = " + 1" if len(needs) == 1 else ""
        exec(f"def n{node}({parameters}) -> int: return {total}{plus} & 0xFFFF", found)  # a function a node
    found.pop("__builtins__")
    return list(found.values())


def _deep(fn: Runs) -> Runs:
    """In a thread with a stack for deep recursion. Starting it is microseconds against its thousands."""

    def call() -> list[int]:
        out: list[int] = []
        threading.stack_size(512 * 1024 * 1024)
        thread = threading.Thread(target=lambda: out.extend(fn()))
        thread.start()
        thread.join()
        return out

    return call


CONTESTANTS: dict[str, Callable[[Preds, int, list[float]], Runs]] = {
    "penstock": penstock,
    "bare prototype": prototype,
    "serial loop": serial,
    "graphlib + threads": graphlib_threads,
    "asyncio tasks": asyncio_tasks,
    "dask threaded": dask_threaded,
    "Hamilton": hamilton,
}
