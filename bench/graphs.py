"""
Graphs of steps against their peers: who takes turns, at what, and what is wanted of ours.

    python -m bench.graphs [--quick] [--only NAME] [--rounds N] [--json PATH]

Every node does next to nothing, so what is measured is what it costs to run a node, not what nodes do. A C++ graph
(TBB with counters) runs a node in 9 to 140 ns; no Python function can even be called in 30, so that is the distance to what
another language allows, and not something to be had here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench.harness import Contestant, Measure, Table, fresh, main

OURS, BARE, DASK, GRAPHLIB = "penstock", "bare prototype", "dask threaded", "graphlib + threads"

#: How many repetitions fill a turn of a second or less; slow peers get fewer.
SHAPES = {
    "chain": ("chain 1000", 1, 200),
    "fan": ("fan 1000", 1, 200),
    "layered": ("layered 10000", 1, 20),
    "tree": ("tree 8192", 1, 15),
    "concurrent": ("small 10", 100, 120),
}
TITLES = {
    "chain": "Chain of 1,000",
    "fan": "Fan-out and fan-in of 1,000",
    "layered": "Layered graph of 10,000, 3 edges a node",
    "tree": "Tree reduction of 8,192",
    "concurrent": "100 concurrent runs of 10 nodes",
}
SLOWER = {OURS: 1, BARE: 1, "serial loop": 1, "asyncio tasks": 4, GRAPHLIB: 10, DASK: 40, "Hamilton": 60}
#: How much slower a graph of 100,000 nodes may be a node than one of 1,000 and still be called flat.
FLAT = 1.5
TBB_NS = (9, 140)


def measures(quick: bool) -> Sequence[Measure]:
    return [*(of_shape(name, quick) for name in SHAPES), flatness(quick)]


def of_shape(name: str, quick: bool) -> Measure:
    graph, at_once, repetitions = SHAPES[name]
    contestants = [
        contestant(who, graph, at_once, max(1, repetitions // slower // (10 if quick else 1)))
        for who, slower in SLOWER.items()
    ]
    table = Table(
        TITLES[name],
        figure="us",
        unit="us a node",
        better="less",
        ours=OURS,
        wanted={DASK: 30, GRAPHLIB: 5, BARE: 1 / 2.5},
        note=f"C++ with counters: {TBB_NS[0]} to {TBB_NS[1]} ns a node",
    )
    return Measure(name, contestants, [table])


def contestant(who: str, graph: str, at_once: int, repetitions: int) -> Contestant:
    run = partial(fresh, "bench.graph_turns:turn", who, graph, at_once, repetitions, seconds=120)
    return Contestant(
        who, run, size=f"{repetitions} x {at_once} run{'s' if at_once > 1 else ''}", ours=who == OURS
    )


def flatness(quick: bool) -> Measure:
    """The same graph at three sizes; ours against ours, so the smaller ones stand in as peers."""
    sizes = {1_000: 200, 10_000: 20, 100_000: 3}
    contestants = []
    for size, repetitions in sizes.items():
        run = partial(
            fresh,
            "bench.graph_turns:turn",
            OURS,
            f"layered {size}",
            1,
            2 if quick else repetitions,
            seconds=120,
        )
        contestants.append(
            Contestant(f"{size:,} nodes", run, size=f"{repetitions} runs", ours=size == 100_000)
        )
    wanted = {f"{size:,} nodes": 1 / FLAT for size in sizes if size != 100_000}
    table = Table(
        "Cost a node as the graph grows",
        figure="us",
        unit="us a node",
        better="less",
        ours="100,000 nodes",
        wanted=wanted,
    )
    return Measure("flat", contestants, [table])


if __name__ == "__main__":
    main("Graphs of steps", measures)
