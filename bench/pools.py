"""
Worker pools and `parallel_limit` against their peers: who takes turns, at what, and what is wanted of ours.

    python -m bench.pools [--quick] [--only NAME] [--rounds N] [--json PATH]

How each figure is taken is in `pool_turns`; how each peer is called is in `peers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from bench.harness import Contestant, Measure, Table, fresh, main

PPE = "ProcessPoolExecutor"
TPE = "ThreadPoolExecutor"
POOL_APPLY = "multiprocessing.Pool apply"
POOL_IMAP = "multiprocessing.Pool imap"
STDLIB_IMPORTS = "concurrent.futures, asyncio"

#: Slow peers get fewer calls, so that a turn takes them about a second.
CALLS = {
    "penstock": 50_000,
    "penstock, roomy": 50_000,
    "penstock map, roomy": 50_000,
    PPE: 5_000,
    POOL_APPLY: 15_000,
    POOL_IMAP: 20_000,
    "loky": 5_000,
    "pebble": 8_000,
    "mpire": 6_000,
    "joblib": 3_000,
    "Dask": 400,
}
THREAD_CALLS = {
    "penstock threads": 50_000,
    "penstock threads, roomy": 50_000,
    TPE: 50_000,
    "pebble threads": 20_000,
}
ASYNC_CALLS = {
    "penstock": 20_000,
    "penstock, roomy": 20_000,
    PPE: 4_000,
    POOL_APPLY: 5_000,
    "loky": 3_000,
    "pebble": 5_000,
    "mpire": 3_000,
    "Dask, asyncio": 200,
    "anyio to_process": 5_000,
}
ASYNC_THREAD_CALLS = {
    "penstock threads": 20_000,
    "penstock threads, roomy": 20_000,
    TPE: 10_000,
    "pebble threads": 10_000,
    "anyio to_thread": 5_000,
}
ROUND_TRIPS = {
    "penstock": 1_000,
    PPE: 1_000,
    POOL_APPLY: 1_000,
    "loky": 1_000,
    "pebble": 1_000,
    "mpire": 1_000,
    "joblib": 30,
    "Dask": 30,
}
ASYNC_ROUND_TRIPS = {
    "penstock": 1_000,
    PPE: 1_000,
    POOL_APPLY: 1_000,
    "loky": 1_000,
    "pebble": 1_000,
    "mpire": 1_000,
    "Dask, asyncio": 30,
    "anyio to_process": 1_000,
}
THREAD_ROUND_TRIPS = {"penstock threads": 2_000, TPE: 2_000, "pebble threads": 2_000}
PAYLOAD_PEERS = ("penstock", PPE, POOL_APPLY, "loky", "pebble", "mpire", "joblib", "Dask")
PAYLOAD_TRIPS = {"1 KB": 100, "1 MB": 10, "32 MB": 1}
#: Ours gets the whole million.  What grows with every item is scaled up from fewer.
FED = {"penstock, wide": 1_000_000, PPE: 5_000, TPE: 50_000, POOL_IMAP: 20_000, "joblib": 2_000}
FLOWS = {
    "parallel_limit": ("ours", 1_000_000),
    "Semaphore + gather": ("semaphore_and_gather", 30_000),
    "asyncio.wait windows": ("wait_windows", 50_000),
    "aiometer": ("of_aiometer", 8_000),
    "aiostream": ("of_aiostream", 5_000),
    "bare pullers": ("bare_pullers", 300_000),
    "bare pullers that keep": ("pullers_that_keep", 300_000),
}
IMPORTS = {
    "penstock": "import penstock; penstock.WorkerPool, penstock.parallel_limit",
    STDLIB_IMPORTS: "import concurrent.futures, asyncio",
    "multiprocessing.pool": "import multiprocessing.pool",
    "loky": "import loky",
    "pebble": "import pebble",
    "mpire": "import mpire",
    "joblib": "import joblib",
    "Dask": "import distributed",
    "anyio": "import anyio.to_process, anyio.to_thread",
}


def measures(quick: bool) -> Sequence[Measure]:
    return [
        saturation(quick),
        threads(quick),
        *round_trips(quick),
        asyncio_calls(quick),
        asyncio_threads(quick),
        asyncio_round_trips(quick),
        payloads(quick),
        feeding(quick),
        *flow(quick),
        imports(quick),
    ]


def saturation(quick: bool) -> Measure:
    """Like with like: `submit` beside `apply_async`, which both give a handle for each call, and `map` beside `imap`."""
    rate = partial(Table, figure="rate", unit="calls/s", better="more")
    cpu = partial(
        Table, figure="cpu", unit="us a call", better="less", note="parent and workers, user and system"
    )
    by_default, roomy, mapped = "penstock", "penstock, roomy", "penstock map, roomy"
    return Measure(
        "saturation",
        contestants("saturation", CALLS, quick),
        [
            rate("Throughput, default bounds", ours=by_default, wanted={PPE: 4}),
            rate("Throughput, room to prefetch", ours=roomy, wanted={PPE: 20, POOL_APPLY: 5}),
            rate("Throughput of map, room to prefetch", ours=mapped, wanted={PPE: 20, POOL_IMAP: 5}),
            cpu("CPU per call, default bounds", ours=by_default, wanted={PPE: 10}),
            cpu("CPU per call, room to prefetch", ours=roomy, wanted={PPE: 10}),
        ],
    )


def threads(quick: bool) -> Measure:
    rate = partial(Table, figure="rate", unit="calls/s", better="more", wanted={TPE: 2})
    return Measure(
        "threads",
        contestants("saturation", THREAD_CALLS, quick),
        [
            rate("Thread workers, default bounds", ours="penstock threads"),
            rate("Thread workers, room to prefetch", ours="penstock threads, roomy"),
        ],
    )


def round_trips(quick: bool) -> Sequence[Measure]:
    p50 = partial(Table, figure="p50", unit="us", better="less")
    return [
        Measure(
            "round-trip",
            contestants("round_trip", ROUND_TRIPS, quick),
            [p50("Idle round trip", ours="penstock", wanted={PPE: 4})],
        ),
        Measure(
            "round-trip-threads",
            contestants("round_trip", THREAD_ROUND_TRIPS, quick),
            [p50("Idle round trip, thread workers", ours="penstock threads")],
        ),
    ]


def asyncio_calls(quick: bool) -> Measure:
    rate = partial(Table, figure="rate", unit="calls/s", better="more", wanted={PPE: 4})
    return Measure(
        "asyncio",
        contestants("saturation_from_asyncio", ASYNC_CALLS, quick),
        [
            rate("Calls from asyncio, default bounds", ours="penstock"),
            rate("Calls from asyncio, room to prefetch", ours="penstock, roomy"),
        ],
    )


def asyncio_threads(quick: bool) -> Measure:
    rate = partial(Table, figure="rate", unit="calls/s", better="more", wanted={TPE: 4})
    return Measure(
        "asyncio-threads",
        contestants("saturation_from_asyncio", ASYNC_THREAD_CALLS, quick),
        [
            rate("Thread workers from asyncio, default bounds", ours="penstock threads"),
            rate("Thread workers from asyncio, room to prefetch", ours="penstock threads, roomy"),
        ],
    )


def asyncio_round_trips(quick: bool) -> Measure:
    title = "Idle round trip from asyncio"
    return Measure(
        "asyncio-round-trip",
        contestants("round_trip_from_asyncio", ASYNC_ROUND_TRIPS, quick),
        [Table(title, figure="p50", unit="us", better="less", ours="penstock", wanted={PPE: 4})],
    )


def payloads(quick: bool) -> Measure:
    """AnyIO has no way in but asyncio's; the others are called from a thread."""
    trips = {size: max(1, count // 10) if quick else count for size, count in PAYLOAD_TRIPS.items()}
    ways = dict.fromkeys(PAYLOAD_PEERS, "payloads") | {"anyio to_process": "payloads_from_asyncio"}
    entrants = [
        Contestant(name, partial(fresh, f"bench.pool_turns:{way}", name, trips), ours=is_ours(name))
        for name, way in ways.items()
    ]
    there_and_back = partial(Table, unit="ms", better="less", ours="penstock")
    tables = [
        there_and_back(
            f"{kind} {size}, there and back",
            f"{kind} {size}",
            wanted={PPE: 4} if (kind, size) == ("NumPy", "32 MB") else {},
            note=f"one at a time, {count} a turn; every page of the answer is touched",
        )
        for size, count in trips.items()
        for kind in ("bytes", "NumPy")
    ]
    renewed = there_and_back("NumPy 32 MB there, another 32 MB back", "NumPy 32 MB, new answer")
    return Measure("payloads", entrants, [*tables, renewed])


def feeding(quick: bool) -> Measure:
    note = (
        "rise of the parent's resident memory; `one turn` says from how many items it is scaled to 1,000,000"
    )
    table = partial(
        Table, figure="memory", unit="MB", better="less", ours="penstock, wide", below=50, note=note
    )
    rate = partial(Table, figure="rate", unit="items/s", better="more", ours="penstock, wide")
    return Measure(
        "feeding",
        contestants("feeding", FED, quick, "items", seconds=180),
        [table("Memory while `map` is fed 1,000,000 items"), rate("Throughput of `map`, one item a call")],
    )


def flow(quick: bool) -> Sequence[Measure]:
    """
    Twice: a step that gives the loop a turn, as real ones do, and one that never does.

    "Bare pullers that keep" hold every answer until the end, and where the step never waits, one of them takes all items
    in one turn of the loop: no iterator that is consumed as it goes can be near, so nothing is wanted there.
    """
    ahead = dict.fromkeys(("Semaphore + gather", "asyncio.wait windows", "aiometer", "aiostream"), 1.0)
    pullers = {"bare pullers": 0.5}
    item = partial(Table, figure="item", unit="us an item", better="less", ours="parallel_limit")
    note = "rise of resident memory; `one turn` says from how many items it is scaled to 1,000,000"
    memory = partial(
        Table, figure="memory", unit="MB", better="less", ours="parallel_limit", below=50, note=note
    )
    waiting = ahead | pullers | {"bare pullers that keep": 0.5}
    return [
        Measure(
            "flow",
            flowing("abump_later", quick),
            [
                item("parallel_limit, 8 at a time, a step that waits", wanted=waiting),
                memory("Memory while parallel_limit is fed 1,000,000 items"),
            ],
        ),
        Measure(
            "flow-at-once",
            flowing("abump", quick),
            [item("parallel_limit, 8 at a time, a step that never waits", wanted=ahead | pullers)],
        ),
    ]


def imports(quick: bool) -> Measure:
    starts = 1 if quick else 3
    entrants = [
        Contestant(
            name,
            partial(fresh, "bench.pool_turns:importing", statement, starts),
            size=f"{starts} starts",
            ours=is_ours(name),
        )
        for name, statement in IMPORTS.items()
    ]
    wanted = {STDLIB_IMPORTS: 0.5}
    return Measure("import", entrants, [Table("Import time", "import", "ms", "less", "penstock", wanted)])


def contestants(
    turn: str, counts: Mapping[str, int], quick: bool, what: str = "calls", seconds: float = 60
) -> list[Contestant]:
    return [
        Contestant(
            name,
            partial(fresh, f"bench.pool_turns:{turn}", name, count, seconds=seconds),
            size=f"{count:,} {what}",
            ours=is_ours(name),
        )
        for name, count in smaller(counts, quick).items()
    ]


def flowing(step: str, quick: bool) -> list[Contestant]:
    counts = smaller({name: count for name, (_, count) in FLOWS.items()}, quick)
    return [
        Contestant(
            name,
            partial(fresh, "bench.pool_turns:flowing", recipe, step, counts[name]),
            size=f"{counts[name]:,} items",
            ours=recipe == "ours",
        )
        for name, (recipe, _) in FLOWS.items()
    ]


def smaller(counts: Mapping[str, int], quick: bool) -> Mapping[str, int]:
    return {name: max(20, count // 20) for name, count in counts.items()} if quick else counts


def is_ours(name: str) -> bool:
    return name.startswith("penstock")


if __name__ == "__main__":
    main("Worker pools", measures)
