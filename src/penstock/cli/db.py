"""
Verbs for the database: check, backup, restore, migrate, copy. They open the database themselves, so they need
no daemon.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from penstock.cli.printing import echo
from penstock.cli.session import CliSession, fail, passes
from penstock.core.jobs.ordering import Ordering
from penstock.settings import load
from penstock.stores.api import Apply, Store, committed
from penstock.stores.opening import SharedOptions, is_address, open_store, shown


@click.group()
def db() -> None:
    """Check, back up, restore, migrate and copy the database."""


def _place(given: str | None) -> str:
    return given or load().jobs_at


@db.command()
@click.argument("path", required=False)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Accept a file that has lost acknowledged work; the trail records it.",
)
@passes
def check(session: CliSession, path: str | None, accept_loss: bool) -> None:
    """Check the whole database: pages, totals and events. Exits with 1 if something is wrong."""
    from penstock.stores.sqlite.connection import integrity
    from penstock.stores.sqlite.guard import refuse_lost

    place = _place(path)
    name = shown(place)
    with session.stderr.status(f"checking {name}"):
        problems = []
        if not is_address(place):
            if accept_loss:
                with opened_store(place, accept_loss=True):
                    pass
            else:
                refuse_lost(Path(place))
            problems = integrity(_existing(path))
        if not problems:
            with opened_store(place) as store:
                problems = store.audit()
    if session.print_json({"path": name, "problems": problems}):
        raise click.exceptions.Exit(1 if problems else 0)
    if problems:
        fail("\n          ".join([f"{name}: {len(problems)} problems", *problems[:50]]))
    echo(f"{name}: no problems")


@db.command()
@click.argument("target", type=click.Path(dir_okay=False))
@click.option("--path", help="The database; by default this user's own.")
@passes
def backup(session: CliSession, target: str, path: str | None) -> None:
    """Write a consistent copy to TARGET, even while the scheduler runs."""
    from penstock.stores.sqlite.connection import copy

    file = _existing(path)
    if Path(target).exists():
        fail(f"{target} exists already: choose another name")
    with session.stderr.status(f"copying {file}"):
        copy(file, Path(target))
    session.print_answer(
        {"path": str(file), "backup": target}, f"{target}: {Path(target).stat().st_size:,} bytes"
    )


@db.command()
@click.argument("source", metavar="BACKUP", type=click.Path(exists=True, dir_okay=False))
@click.option("--path", help="The database; by default this user's own.")
@passes
def restore(session: CliSession, source: str, path: str | None) -> None:
    """Replace the database by BACKUP, while no scheduler runs. The old file is kept under another name."""
    from penstock.stores.sqlite.restore import restore as put_back

    place = _place(path)
    if is_address(place):
        fail(f"{shown(place)} is on a server: restore it with pg_restore")
    file = Path(place).absolute()
    with session.stderr.status(f"restoring {file}"):
        kept = put_back(Path(source).absolute(), file)
        _record_restore(file, source)
    if session.print_json({"path": str(file), "backup": source, "kept": None if kept is None else str(kept)}):
        return
    echo(f"{file}: restored from {source}")
    if kept is not None:
        echo(f"The old file is {kept}.")


def _record_restore(file: Path, source: str) -> None:
    """Record the restore and its user in the restored trail."""
    import getpass

    from penstock.core.jobs.changes import admin_event
    from penstock.core.jobs.job import EventKind

    with opened_store(str(file)) as store:
        by, data = f"user {getpass.getuser()}", {"backup": str(Path(source).absolute())}
        committed(store, Apply([admin_event(store.now(), EventKind.RESTORED, "", by, data)]))


@db.command()
@click.argument("path", required=False)
@passes
def migrate(session: CliSession, path: str | None) -> None:
    """
    Bring the database to this version's schema, after a backup beside it. The daemon also does so when it
    starts.
    """

    place = _place(path)
    if not is_address(place):
        _existing(path)
    with session.stderr.status(f"migrating {shown(place)}"), opened_store(place):
        pass
    session.print_answer({"path": shown(place), "migrated": True}, f"{shown(place)}: up to date")


@db.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False))
@click.argument("target")
@passes
def copy(session: CliSession, source: str, target: str) -> None:
    """
    Copy a SQLite file to PostgreSQL, and compare every count.

    SOURCE is the file; TARGET is the address of an empty database: postgresql://USER@HOST/NAME.
    """
    if not is_address(target):
        raise click.UsageError(f"TARGET is {shown(target)}; it must be postgresql://USER@HOST/NAME")
    from penstock.stores.copying import copy_to_postgres

    with session.stderr.status(f"copying {source}"):
        copied = copy_to_postgres(Path(source).absolute(), target, load().sharing)
    if session.print_json({"source": source, "target": shown(target), "counts": copied.counts}):
        return
    for name, count in copied.counts.items():
        echo(f"{count:>12,}  {name}")
    echo(
        f"{source} and {shown(target)} have the same rows. Set `database` to the latter, and start the daemons."
    )


@contextmanager
def opened_store(
    place: str, sharing: SharedOptions | None = None, *, accept_loss: bool = False
) -> Iterator[Store]:
    """Open a store. `sharing`: the options of a PostgreSQL database; by default those of the settings."""
    store = open_store(place, _now, Ordering(), sharing or load().sharing, accept_loss=accept_loss)
    try:
        yield store
    finally:
        store.close()


def _existing(path: str | None) -> Path:

    place = _place(path)
    if is_address(place):
        fail(f"{shown(place)} is on a server: copy it with pg_dump")
    file = Path(place)
    if not file.exists():
        fail(f"there is no database at {file}", 4)
    return file


def _now() -> int:
    return time.time_ns() // 1_000
