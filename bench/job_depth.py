"""
Ours alone: what the length of the queue costs, and what waiting costs.

A tick is measured in CPU time, because that is what a machine pays for jobs that cannot start.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import psycopg

from bench.fresh import fresh
from bench.queues import backlog
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import AddonId
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.job_service import EndReport
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.api import Depth
from penstock.stores.postgres.store import PostgresStore
from penstock.stores.sqlite.store import SqliteStore

__all__ = ["behind_a_backlog", "idle", "turn", "turn_on_postgres"]

_LINES = 20  # as many in a short queue as in a long one: what a round costs follows them


def turn(queued: int, count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as where:
        store, service = _filled(Path(where), queued + count)
        took = _drain(service, count)
        tick = _ticks(service, 50)
        store.close()
    return {"jobs_s": count / took, "tick_us": tick}


def behind_a_backlog(queued: int, count: int) -> dict[str, float]:
    """All that `make bench-jobs` measures of the file, with so many in it that wait. Each in a process of its own, as there."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as where:
        backlog.make(Path(where) / "jobs.db", queued)
        ask = partial(fresh, seconds=200)
        turns = "bench.job_turns"
        return {
            "library": ask(f"{turns}:drain", "penstock_", "", "work", 1, count)["jobs_s"],
            "sdk": ask(f"{turns}:drain", "penstock_http", "", "work", 1, count // 2)["jobs_s"],
            "one": ask(f"{turns}:submit", "penstock_", "", "one", count // 10)["submits_s"],
            "bulk": ask(f"{turns}:submit", "penstock_", "", "bulk", count)["submits_s"],
            "eight": ask(f"{turns}:submit", "penstock_", "", "eight", count // 2)["submits_s"],
            "p50_ms": ask(f"{turns}:latency", "penstock_", "", 1, max(20, count // 100))["p50_ms"],
        }


def turn_on_postgres(server: str, queued: int, finished: int, count: int) -> dict[str, float]:
    """`finished`: so many rows of jobs that are done lie there too, and somebody has been reading since before the first claim."""
    with psycopg.connect(server, autocommit=True) as reader:
        reader.execute("DROP SCHEMA IF EXISTS penstock CASCADE")
        store = PostgresStore(server)
        service = SchedulerService(store, SchedulerRules(capacity=Capacity(fixed=100), depth=Depth()))
        _fill(service, queued + count)
        if finished:
            _finish(reader, finished)
        # What so much filling at once leaves the server to do is not what is measured.
        reader.execute("VACUUM ANALYZE")
        reader.execute("CHECKPOINT")
        if finished:
            reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT 1 FROM penstock.job LIMIT 1")
        took = _drain(service, count)
        store.close()
    return {"jobs_s": count / took}


def _finish(con: psycopg.Connection[tuple[object, ...]], count: int) -> None:
    """Made of one that is queued: what a finished job leaves in each table. Their names come before those of the others, as older ones do."""
    con.execute(
        """WITH one AS (SELECT * FROM penstock.job ORDER BY no LIMIT 1), number AS (SELECT generate_series(1, %(count)s) AS n),
        jobs AS (INSERT INTO penstock.job (no, job_id, addon_id, class_no, ready_at, priority, created_at, payload, unit, time_sensitive)
                 SELECT -n, '0-done-' || n, addon_id, class_no, ready_at, priority, created_at, payload, unit, time_sensitive FROM one, number),
        runs AS (INSERT INTO penstock.dispatch (dispatch_id, job_no, class_no, host, fence, phase, events, started_in, admitted_at, started_at,
                                                expires_at, ended_at, how)
                 SELECT '0-done-' || n || '.1', -n, class_no, 'local', 1, 'ended', 1, -n, created_at, created_at, created_at, created_at + n, 'completed'
                 FROM one, number),
        ends AS (INSERT INTO penstock.ended_jobs (batch, at, jobs) SELECT -n, created_at + n, ARRAY[-n] FROM one, number)
        INSERT INTO penstock.trail (batch, size, until, events)
        SELECT -n, 1, -n, format('[[1,"DONE","0-done-%%s",1,"DONE","completed","1",null]]', n) FROM number""",
        {"count": count},
    )


def _filled(where: Path, queued: int) -> tuple[SqliteStore, SchedulerService]:
    clock = SteadyClock()
    store = SqliteStore(where / "jobs.db", clock)
    service = SchedulerService(
        store, SchedulerRules(capacity=Capacity(fixed=100), depth=Depth()), clock=clock
    )
    _fill(service, queued)
    return store, service


def _fill(service: SchedulerService, queued: int) -> None:
    kinds = [Intent(addon_id=AddonId(f"addon-{n}"), job_type="tick", cost_units=1) for n in range(_LINES)]
    for first in range(0, queued, 1_000):
        service.job_service.submit([kinds[number % _LINES] for number in range(min(1_000, queued - first))])


def _drain(service: SchedulerService, count: int) -> float:
    kinds, done = WorkerKinds(), 0
    began = time.perf_counter()
    claimed = service.job_service.claim(kinds, 100)
    while claimed:
        done += len(claimed)
        reports = [EndReport(one.dispatch.dispatch_id) for one in claimed]
        room = min(100, count - done)
        if room <= 0:
            service.job_service.end_many(reports)
            break
        _, claimed = service.job_service.exchange(reports, kinds, room)
    return time.perf_counter() - began


def _ticks(service: SchedulerService, rounds: int) -> float:
    """With everything taken: the heads of all lines are looked at and nothing can start."""
    service.job_service.claim(WorkerKinds(job_types=frozenset({"tick"})), 100)
    began = time.process_time()
    for _ in range(rounds):
        service.dispatcher.step(service.store.now())
    return (time.process_time() - began) / rounds * 1e6


def idle(queued: int, seconds: int) -> dict[str, float]:
    """The daemon as it is, with that many jobs of an add-on whose worker never comes, and as many that lie in the future."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as where:
        home = Path(where) / "home"
        home.mkdir(mode=0o700)
        store, _ = _filled(home, queued)
        store.close()
        flags = [f"--set=data_dir={home}", "--set=server.listen=none", "--set=log.level=error"]
        daemon = subprocess.Popen([sys.executable, "-m", "penstock.daemon", *flags])
        try:
            while not (home / "daemon.json").exists():
                time.sleep(0.05)
            time.sleep(3)  # what a start costs is paid
            process = psutil.Process(daemon.pid)
            before = process.cpu_times()
            time.sleep(seconds)
            after = process.cpu_times()
        finally:
            daemon.terminate()
            daemon.wait(60)
    used = after.user + after.system - before.user - before.system
    return {"percent": used / seconds * 100}
