"""
Verbs for trials: bench (measure this machine and its disk) and chaos (kill a scheduler and its jobs, and
check that nothing was lost).

None of them touches a running scheduler.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from penstock.cli.daemon import load_settings
from penstock.cli.db import opened_store
from penstock.cli.parsers import Whole, span
from penstock.cli.printing import Column, table
from penstock.cli.session import FAILED, CliSession, fail, passes
from penstock.core.jobs.states import JobState

if TYPE_CHECKING:
    from penstock import JobFunction, Scheduler
    from penstock.chaos import Aftermath, PromiseCheck

_BULK = 1_000


class Measured(NamedTuple):
    what: str
    per_sec: float
    #: Percentiles of the time of one. None: only the total was measured.
    p50_sec: float | None = None
    p99_sec: float | None = None


@click.command()
@click.option(
    "--jobs",
    type=Whole(10, 1_000_000),
    default=1_000,
    help="How many jobs in each measurement.",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="A directory on the disk to measure; by default the data directory.",
)
@passes
def bench(session: CliSession, /, jobs: int, folder: Path | None) -> None:
    """
    Measure submits and runs on this disk, as durable as real ones.

    The jobs do nothing, so the figures are upper limits. The speed of the disk alone is printed with them.
    A running daemon is not touched, and shares the machine.
    """
    place = folder or _data_folder()
    with tempfile.TemporaryDirectory(prefix=".penstock-bench-", dir=place) as scratch:
        measured = []
        for words, step in _steps(Path(scratch), jobs):
            with session.stderr.status(f"{words} ..."):
                measured.append(step())
    if session.print_json({"dir": str(place), "jobs": jobs, "measured": [one._asdict() for one in measured]}):
        return
    columns = [Column("on " + str(place)), Column("a second", True), Column("p50", True), Column("p99", True)]
    rows = [(one.what, f"{one.per_sec:,.0f}", span(one.p50_sec), span(one.p99_sec)) for one in measured]
    table(session.console, columns, rows)


def _data_folder() -> Path:
    folder: Path = load_settings(None, {}).data_dir
    return folder if folder.is_dir() else Path.cwd()


def _steps(scratch: Path, jobs: int) -> Iterator[tuple[str, Callable[[], Measured]]]:
    few = max(10, jobs // 10)
    yield "syncing the disk", lambda: _sync(scratch / "sync", few)
    with _scheduler(scratch / "jobs.db") as (scheduler, nothing):
        yield "submitting one by one", lambda: _timed("submit", jobs, nothing.enqueue)
        yield "submitting in bulk", lambda: _bulk(nothing, jobs)
        yield "running what is queued", lambda: _drain(scheduler, 2 * jobs)
    with _scheduler(scratch / "again.db") as (scheduler, nothing), scheduler:
        yield "one at a time", lambda: _timed("submit to result", few, lambda: nothing.enqueue().result())


@contextmanager
def _scheduler(file: Path) -> Iterator[tuple[Scheduler, JobFunction[[], None, None]]]:
    import penstock

    scheduler = penstock.Scheduler(str(file), capacity=100)

    @scheduler.job(cost=1)
    def nothing() -> None:
        pass

    try:
        yield scheduler, nothing
    finally:
        scheduler.close()


def _sync(file: Path, times: int) -> Measured:
    """The lowest cost of a durable write: a few bytes and the disk's confirmation."""
    with file.open("wb", buffering=0) as raw:

        def write() -> None:
            raw.write(b"x" * 512)
            os.fdatasync(raw.fileno())

        return _timed("fdatasync of the disk alone", times, write)


def _timed(what: str, times: int, act: Callable[[], Any]) -> Measured:
    took = []
    began = time.perf_counter()
    for _ in range(times):
        since = time.perf_counter()
        act()
        took.append(time.perf_counter() - since)
    took.sort()
    return Measured(what, times / (time.perf_counter() - began), took[times // 2], took[times * 99 // 100])


def _bulk(nothing: JobFunction[[], None, None], jobs: int) -> Measured:
    began = time.perf_counter()
    for first in range(0, jobs, _BULK):
        nothing.enqueue_many([()] * min(_BULK, jobs - first))
    return Measured(f"submit, {min(_BULK, jobs)} at a time", jobs / (time.perf_counter() - began))


def _drain(scheduler: Scheduler, jobs: int) -> Measured:
    began = time.perf_counter()
    with scheduler:
        while scheduler.counts()[JobState.DONE] < jobs:
            time.sleep(0.02)
        return Measured("run", jobs / (time.perf_counter() - began))


@click.command()
@click.option("--kills", type=Whole(1, 100_000), default=20, help="How many kills and freezes.")
@click.option("--jobs", type=Whole(1, 1_000_000), default=60, help="How many jobs.")
@click.option("--workers", type=Whole(0, 100), default=2, help="How many SDK workers, besides commands.")
@click.option(
    "--database", metavar="ADDRESS", help="A postgresql:// address: use a new schema there, not SQLite."
)
@click.option(
    "--daemons", type=Whole(1, 20), help="How many schedulers share it; by default 2 on PostgreSQL, else 1."
)
@click.option(
    "--patience",
    type=Whole(1, 86_400),
    default=120,
    help="Seconds without the end of any job after which the others count as stuck.",
)
@click.option("--seed", type=Whole(), default=1, help="The same seed kills in the same order.")
@click.option("--keep", is_flag=True, help="Keep the directory even if every promise holds.")
@passes
def chaos(
    session: CliSession,
    /,
    kills: int,
    jobs: int,
    workers: int,
    database: str | None,
    daemons: int | None,
    patience: int,
    seed: int,
    keep: bool,
) -> None:
    """
    Kill and freeze a real scheduler, its workers and jobs again and again, and check its promises.

    It starts a scheduler of its own in a new directory, with SDK workers, and submits jobs. Then it kills
    (SIGKILL) or freezes (SIGSTOP, for longer than a lease) the scheduler, a worker or a job, in random order.
    At the end it checks every promise against the audit trail and against marks that the jobs wrote outside
    of it. Your own scheduler is not touched. Exits with 1 if a promise is broken, and prints where the data
    is.
    """
    from penstock.chaos import KillLoop, TrialPlace, TrialPlan, check_promises
    from penstock.stores.opening import SharedOptions, drop_schema, is_address

    if database is not None and not is_address(database):
        fail(
            f"--database takes a postgresql:// address, not {database!r}; without it a SQLite file is used", 2
        )
    if daemons is None:
        daemons = 1 if database is None else 2
    elif daemons > 1 and database is None:
        fail("several schedulers need a database that they can share: give --database postgresql://...", 2)
    folder = Path(tempfile.mkdtemp(prefix="pst-chaos-"))
    place = TrialPlace(folder, database, folder.name.replace("-", "_"))

    def remove() -> None:
        shutil.rmtree(folder)
        if database is not None:
            drop_schema(database, place.schema)

    try:
        with session.stderr.status("starting") as status:
            aftermath = KillLoop(place, TrialPlan(jobs, kills, seed, daemons, workers, patience)).run(
                status.update
            )
            with opened_store(place.database, SharedOptions(schema=place.schema)) as store:
                promises = check_promises(aftermath, store)
    except KeyboardInterrupt:
        if keep:
            session.stderr.print(f"Database, log and marks are in {folder}.", markup=False)
        else:
            remove()
        raise
    broken = any(promise.broken for promise in promises) or not aftermath.settled
    if not (broken or keep):
        remove()
    answer = {
        "holds": not broken,
        "folder": str(folder) if broken or keep else None,
        "trouble": aftermath.trouble or ("" if aftermath.settled else "not all jobs ended"),
        "schema": place.schema if database is not None and (broken or keep) else None,
        "jobs": len(aftermath.acknowledged),
        "done": [
            {"verb": verb, "target": target, "times": times}
            for (verb, target), times in sorted(aftermath.done_to.items())
        ],
        "promises": [promise._asdict() for promise in promises],
    }
    if not session.print_json(answer):
        _show_promises(session, aftermath, promises)
        if broken or keep:
            session.console.print(f"Database, log and marks are in {folder}.", markup=False)
        if answer["schema"]:
            session.console.print(f"The jobs are in the schema {place.schema}.", markup=False)
    raise click.exceptions.Exit(FAILED if broken else 0)


def _show_promises(session: CliSession, aftermath: Aftermath, promises: Sequence[PromiseCheck]) -> None:
    deeds = [f"{verb} {target} {times} times" for (verb, target), times in sorted(aftermath.done_to.items())]
    session.console.print(f"{len(aftermath.acknowledged)} jobs; {', '.join(deeds)}")
    for promise in promises:
        verdict = "[red]broken[/]" if promise.broken else "[green]holds[/] "
        session.console.print(f"  {verdict}  {promise.name}  {promise.promise}")
        for line in promise.broken[:5]:
            session.console.print(f"            {line}", markup=False)
    if not aftermath.settled:
        session.console.print(f"  {aftermath.trouble or 'not all jobs ended'}", markup=False, style="red")
