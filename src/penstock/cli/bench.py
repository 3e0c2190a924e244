"""`penstock bench`: measure this machine and this disk, on a temporary database."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from penstock.cli.daemon import load_settings
from penstock.cli.parsers import span
from penstock.cli.session import CliSession, passes
from penstock.cli.tables import Column, table
from penstock.core.jobs.states import JobState

if TYPE_CHECKING:
    from penstock import JobFunction, Scheduler


_BULK = 1_000


class Measured(NamedTuple):
    what: str
    per_sec: float
    #: Of one: half of them took at most so long, and 99 of 100. None where they were not told apart.
    p50_sec: float | None = None
    p99_sec: float | None = None


@click.command()
@click.option(
    "--jobs",
    type=click.IntRange(10, 1_000_000),
    default=1_000,
    show_default=True,
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

    The jobs do nothing, so the figures are upper limits. The speed of the disk alone is printed beside them.
    A running daemon is not touched, and shares the machine.
    """
    place = folder or _data_folder()
    with tempfile.TemporaryDirectory(prefix=".penstock-bench-", dir=place) as scratch:
        measured = []
        for words, step in _steps(Path(scratch), jobs):
            with session.aside.status(f"{words} ..."):
                measured.append(step())
    if session.print_json({"dir": str(place), "jobs": jobs, "measured": [one._asdict() for one in measured]}):
        return
    columns = [Column("on " + str(place)), Column("a second", True), Column("p50", True), Column("p99", True)]
    rows = [(one.what, f"{one.per_sec:,.0f}", _span(one.p50_sec), _span(one.p99_sec)) for one in measured]
    table(session.console, columns, rows)


def _span(seconds: float | None) -> str:
    return "" if seconds is None else span(seconds)


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
        yield (
            "one at a time",
            lambda: _timed("from submit to result", few, lambda: nothing.enqueue().result()),
        )


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
    """The floor under everything durable: a few bytes, and the disk's word that it has them."""
    with file.open("wb", buffering=0) as raw:

        def write() -> None:
            raw.write(b"x" * 512)
            os.fdatasync(raw.fileno())

        return _timed("fdatasync, as the disk does it", times, write)


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
