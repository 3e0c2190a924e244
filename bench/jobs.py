"""
Durable jobs against the queues that people use: who takes turns, at what, and what is wanted of ours.

    python -m bench.jobs [--quick] [--only NAME] [--rounds N] [--json PATH]

Every queue runs at the best setting that we could find for it, and its promise stands beside its name: "on disk" means that a submit which
was answered survives a power cut. Ours does, keeps the full audit trail, and fences every claim; the Redis queues keep jobs in memory.
Each queue has as many worker processes as the machine has cores, unless it cannot use them: one process dispatches from a file of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from bench.command_turns import SPOOLERS
from bench.harness import Contestant, Measure, Table, fresh, main
from bench.servers import postgres, redis

OURS, OVER_HTTP = "penstock (on disk)", "penstock over HTTP (on disk)"
ON_POSTGRES = "penstock, PostgreSQL (on disk)"
ALONE_ON_POSTGRES = "penstock, PostgreSQL, one process (on disk)"
RUNNER = "penstock daemon (on disk)"

CORES = os.cpu_count() or 1


class Queue(NamedTuple):
    """Its module, its server, how many jobs fill a turn, and how many worker processes it can use on this machine."""

    module: str
    server: str
    jobs: int
    processes: int = CORES


QUEUES: Mapping[str, Queue] = {
    OURS: Queue("penstock_", "", 20_000, processes=1),  # one process dispatches from a file
    OVER_HTTP: Queue("penstock_http", "", 8_000),
    ON_POSTGRES: Queue("penstock_pg", "postgres", 30_000),
    "PgQueuer (on disk)": Queue("pgqueuer_", "postgres", 30_000),
    "Procrastinate (on disk)": Queue("procrastinate_", "postgres", 500),
    "Huey, SQLite (on disk)": Queue("huey_", "", 2_000),
    "Dramatiq (in memory)": Queue("dramatiq_", "redis", 5_000),
    "taskiq (in memory)": Queue("taskiq_", "redis", 5_000),
    "Celery (in memory)": Queue("celery_", "redis", 1_500),
    "RQ (in memory)": Queue("rq_", "redis", 1_000),
}
#: Who drains: every queue, and ours on PostgreSQL once more with a single process.
DRAINS = {**QUEUES, ALONE_ON_POSTGRES: QUEUES[ON_POSTGRES]._replace(processes=1)}
DURABLE = [name for name in QUEUES if "on disk" in name and "penstock" not in name]
PEERS = [name for name in QUEUES if "penstock" not in name]
#: The queues that mind processes of their own for their jobs: name, module, server, and how many jobs fill a turn.
IN_PROCESSES: Mapping[str, tuple[str, str, int]] = {
    RUNNER: ("penstock_runner", "", 10_000),
    "Celery, prefork (in memory)": ("celery_", "redis", 2_000),
    "Dramatiq, 2 processes (in memory)": ("dramatiq_", "redis", 4_000),
    "taskiq, 2 processes (in memory)": ("taskiq_", "redis", 4_000),
    "Huey, 2 processes, SQLite (on disk)": ("huey_", "", 1_500),
    "RQ, a process a job (in memory)": ("rq_", "redis", 200),
}
#: What jobs that depend on each other look like: title, how many jobs, and how many times better than each durable peer.
SHAPES: Mapping[str, tuple[str, int, float]] = {
    "chain": ("A chain of 100 jobs", 100, 1.0),
    "fan": ("A fan of 1,000 jobs with a join", 1_000, 5.0),
    "array": ("An array of 10,000 jobs", 10_000, 5.0),
}
#: Module, server, worker processes, and how many jobs fill a turn at most. A server that syncs makes a queue durable.
SHAPED: Mapping[str, tuple[str, str, int, int]] = {
    OURS: ("penstock_shapes", "", 1, 10_000),  # one process dispatches from a file
    ON_POSTGRES: ("penstock_shapes", "postgres", CORES, 10_000),
    "PgQueuer, bulk submit (on disk)": ("pgqueuer_shapes", "postgres", CORES, 10_000),
    "Celery canvas (on disk)": ("celery_shapes", "redis-synced", CORES, 2_000),
    "Huey pipelines, SQLite (on disk)": ("huey_shapes", "", CORES, 2_000),
    "Dramatiq pipelines (on disk)": ("dramatiq_shapes", "redis-synced", CORES, 5_000),
    "RQ dependencies (on disk)": ("rq_shapes", "redis-synced", CORES, 1_000),
    "Celery canvas (in memory)": ("celery_shapes", "redis", CORES, 2_000),
    "Dramatiq pipelines (in memory)": ("dramatiq_shapes", "redis", CORES, 5_000),
    "RQ dependencies (in memory)": ("rq_shapes", "redis", CORES, 1_000),
}
#: Those who are on the same server: what several hosts could share.
SHARED = [name for name in PEERS if QUEUES[name].server == "postgres"]
BULK = {"penstock_", "penstock_http", "penstock_pg", "pgqueuer_", "procrastinate_", "rq_"}


def measures(servers: Mapping[str, str], quick: bool) -> Sequence[Measure]:
    return [
        drain(servers, quick),
        processes(servers, quick),
        commands(quick),
        submit(servers, quick, "one", "Submitting one by one"),
        submit(servers, quick, "bulk", "Submitting in bulk"),
        submit(servers, quick, "eight", "Submitting from 8 processes"),
        latency(servers, quick),
        *(shape(servers, quick, name) for name in SHAPES),
        depth(quick),
        backlog(quick),
        depth_on_postgres(servers["postgres"], quick),
        idle(quick),
    ]


def drain(servers: Mapping[str, str], quick: bool) -> Measure:
    wanted = {peer: 2.0 if peer.startswith("PgQueuer") else 8.0 for peer in PEERS}
    contestants = [
        _contestant(
            name,
            "drain",
            servers,
            "work",
            queue.processes,
            max(50, queue.jobs // (20 if quick else 1)),
        )
        for name, queue in DRAINS.items()
    ]
    title = "Claim, run and complete no-op jobs"
    shared = dict.fromkeys(SHARED, 1.0)
    tables = [
        Table(title, "jobs_s", "jobs/s", "more", OURS, wanted),
        Table(f"{title}, on PostgreSQL", "jobs_s", "jobs/s", "more", ON_POSTGRES, shared),
        Table(f"{title}, on PostgreSQL, one process", "jobs_s", "jobs/s", "more", ALONE_ON_POSTGRES),
        Table(f"{title}, with the SDK's worker", "jobs_s", "jobs/s", "more", OVER_HTTP),
    ]
    return Measure("drain", contestants, tables)


def processes(servers: Mapping[str, str], quick: bool) -> Measure:
    """Jobs in processes that the queue starts and minds, two of them each."""
    contestants = []
    for name, (module, server, full) in IN_PROCESSES.items():
        work, count = "work" if name == RUNNER else "work_in_processes", max(50, full // (10 if quick else 1))
        turn = partial(
            fresh, "bench.job_turns:drain", module, server and servers[server], work, 1, count, seconds=240
        )
        contestants.append(Contestant(name, turn, size=f"{count:,} jobs", ours=name == RUNNER))
    wanted = {name: 5.0 for name in IN_PROCESSES if name != RUNNER}
    table = Table("No-op functions in worker processes", "jobs_s", "jobs/s", "more", RUNNER, wanted)
    return Measure("processes", contestants, [table])


def commands(quick: bool) -> Measure:
    count = 100 if quick else 1_000
    turns = {RUNNER: "ours", "subprocess.run in a loop": "bare", **SPOOLERS}
    contestants = [
        Contestant(
            name,
            partial(fresh, f"bench.command_turns:{turn}", count, seconds=240),
            size=f"{count:,} commands",
            ours=name == RUNNER,
        )
        for name, turn in turns.items()
    ]
    tables = [
        Table("No-op commands", "commands_s", "commands/s", "more", RUNNER, dict.fromkeys(SPOOLERS, 1.0)),
        Table("A no-op command, of the time of all", "each_ms", "ms", "less", RUNNER),
    ]
    return Measure("commands", contestants, tables)


def submit(servers: Mapping[str, str], quick: bool, how: str, title: str) -> Measure:
    counts = {"one": 1_000, "bulk": 10_000, "eight": 8_000}
    count = counts[how] // (10 if quick else 1)
    contestants = [
        _contestant(name, "submit", servers, how, count)
        for name, queue in QUEUES.items()
        if how != "bulk" or queue.module in BULK
    ]
    wanted = (
        {}
        if how == "one"
        else {peer: 1.0 for peer in DURABLE if how != "bulk" or QUEUES[peer].module in BULK}
    )
    shared = {peer: 1.0 for peer in SHARED if how == "bulk"}
    tables = [
        Table(title, "submits_s", "submits/s", "more", OURS, wanted),
        Table(f"{title}, on PostgreSQL", "submits_s", "submits/s", "more", ON_POSTGRES, shared),
        Table(f"{title}, over HTTP", "submits_s", "submits/s", "more", OVER_HTTP),
    ]
    return Measure(f"submit-{how}", contestants, tables)


def latency(servers: Mapping[str, str], quick: bool) -> Measure:
    contestants = [
        _contestant(name, "latency", servers, queue.processes, 20 if quick else 200)
        for name, queue in QUEUES.items()
    ]
    tables = [
        Table("From submit to start, idle: median", "p50_ms", "ms", "less", OURS, dict.fromkeys(PEERS, 1.0)),
        Table("From submit to start, idle: 95th percentile", "p95_ms", "ms", "less", OURS),
        Table("From submit to start, idle, on PostgreSQL: median", "p50_ms", "ms", "less", ON_POSTGRES),
        Table(
            "From submit to start, idle, on PostgreSQL: 99th percentile", "p99_ms", "ms", "less", ON_POSTGRES
        ),
        Table("From submit to start, idle, with the SDK's worker: median", "p50_ms", "ms", "less", OVER_HTTP),
    ]
    return Measure("latency", contestants, tables)


def shape(servers: Mapping[str, str], quick: bool, name: str) -> Measure:
    """Jobs that depend on each other, and arrays: submitted by one call or a few, the workers being idle."""
    title, count, times = SHAPES[name]
    contestants = []
    for queue, (module, server, processes, most) in SHAPED.items():
        if name != "array" and module == "pgqueuer_shapes":  # it has no dependencies
            continue
        size = max(20, min(count, most) // (10 if quick else 1))
        run = partial(
            fresh,
            "bench.job_turns:shape",
            module,
            server and servers[server],
            processes,
            name,
            size,
            seconds=240,
        )
        of = f"{size:,} jobs, {processes} process" + "es" * (processes > 1)
        contestants.append(Contestant(queue, run, size=of, ours="penstock" in queue))
    shaped = [c.name for c in contestants]
    wanted = {
        peer: times for peer in shaped if "on disk" in peer and not peer.startswith(("penstock", "PgQueuer"))
    }
    tables = [
        Table(title, "jobs_s", "jobs/s", "more", OURS, wanted),
        Table(f"{title}, on PostgreSQL", "jobs_s", "jobs/s", "more", ON_POSTGRES),
        Table(f"{title}: processor time of all processes", "cpu_us", "us a job", "less", OURS),
    ]
    if name == "chain":
        tables += [
            Table(f"{title}: a step", "step_ms", "ms", "less", OURS),
            Table(f"{title}: a step, on PostgreSQL", "step_ms", "ms", "less", ON_POSTGRES),
        ]
    return Measure(name, contestants, tables)


def depth(quick: bool) -> Measure:
    """Ours against ours: the short queue stands in as the peer."""
    few, many = 1_000, 20_000 if quick else 1_000_000
    names = {count: f"{count:,} queued" for count in (many, few)}
    contestants = [
        Contestant(
            name,
            partial(fresh, "bench.job_depth:turn", count, 2_000 if quick else 10_000, seconds=400),
            size="10,000 jobs and 50 ticks",
            ours=count == many,
        )
        for count, name in names.items()
    ]
    tables = [
        Table(
            "Claim and complete, by length of the queue",
            "jobs_s",
            "jobs/s",
            "more",
            names[many],
            {names[few]: 0.8},
        ),
        Table("A tick that can start nothing, CPU", "tick_us", "us", "less", names[many], {names[few]: 0.5}),
    ]
    return Measure("depth", contestants, tables)


def backlog(quick: bool) -> Measure:
    """Every other measure of the file, again with few and with many in it."""
    few, many = 1_000, 20_000 if quick else 1_000_000
    deep, short = f"behind {many:,} queued", f"behind {few:,} queued"
    count = 1_000 if quick else 10_000
    contestants = [
        Contestant(
            name,
            partial(fresh, "bench.job_depth:behind_a_backlog", queued, count, seconds=900),
            size=f"{count:,} jobs and less",
            ours=name == deep,
        )
        for name, queued in ((deep, many), (short, few))
    ]
    rate = partial(Table, unit="a second", better="more", ours=deep, wanted={short: 0.8})
    tables = [
        rate("Claim, run and complete behind a long queue, as a library", "library"),
        rate("Claim, run and complete behind a long queue, with the SDK's worker", "sdk"),
        rate("Submitting one by one to a long queue", "one"),
        rate("Submitting in bulk to a long queue", "bulk"),
        rate("Submitting from 8 processes to a long queue", "eight"),
        Table("From submit to start beside a long queue: median", "p50_ms", "ms", "less", deep, {short: 0.8}),
    ]
    return Measure("backlog", contestants, tables)


def depth_on_postgres(server: str, quick: bool) -> Measure:
    """The same on a server, and with as many finished rows and a reader that lets nothing be cleaned up while we drain."""
    few, many = 1_000, 10_000 if quick else 1_000_000
    count, seconds = 2_000 if quick else 10_000, 900
    short, deep, worn = f"{few:,} queued", f"{many:,} queued", f"{many:,} finished, a long reader"
    turns = {deep: (many, 0), worn: (few, many), short: (few, 0)}
    contestants = [
        Contestant(
            name,
            partial(
                fresh, "bench.job_depth:turn_on_postgres", server, queued, finished, count, seconds=seconds
            ),
            size=f"{count:,} jobs",
            ours=name != short,
        )
        for name, (queued, finished) in turns.items()
    ]
    tables = [
        Table(f"On PostgreSQL with {name}", "jobs_s", "jobs/s", "more", name, {short: 0.8})
        for name in (deep, worn)
    ]
    return Measure("depth-postgres", contestants, tables)


def idle(quick: bool) -> Measure:
    name = "penstock, 100,000 waiting"
    turn = partial(
        fresh, "bench.job_depth:idle", 10_000 if quick else 100_000, 5 if quick else 20, seconds=200
    )
    table = Table("Idle, with 100,000 jobs that wait", "percent", "% of a core", "less", name, below=1.0)
    return Measure("idle", [Contestant(name, turn, ours=True)], [table])


def _contestant(name: str, turn: str, servers: Mapping[str, str], *arguments: object) -> Contestant:
    queue = DRAINS[name]
    server = queue.server and servers[queue.server]
    run = partial(fresh, f"bench.job_turns:{turn}", queue.module, server, *arguments, seconds=240)
    size = f"{arguments[-1]:,} jobs"
    if turn != "submit":
        size += f", {queue.processes} process" + "es" * (queue.processes > 1)
    return Contestant(name, run, size=size, ours="penstock" in name)


if __name__ == "__main__":
    with ExitStack() as up:
        addresses = {
            "postgres": up.enter_context(postgres()),
            "redis": up.enter_context(redis()),
            "redis-synced": up.enter_context(redis(synced=True)),
        }
        main("Durable jobs", partial(measures, addresses))
