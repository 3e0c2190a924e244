"""The database file: check, back up, migrate. They work on the file itself, with or without a daemon."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.session import Session, fail, passes

__all__ = ["db"]


@click.group()
def db() -> None:
    """Check, back up and migrate the database."""


def _path(given: str | None) -> Path:
    from penstock.settings import load

    return Path(given) if given else load().database


@db.command()
@click.argument("path", required=False)
@passes
def check(session: Session, path: str | None) -> None:
    """Every page, every sum and every trail. Exits with 1 when something is wrong."""
    from penstock.stores.sqlite import SqliteStore
    from penstock.stores.sqlite_file import integrity

    file = _existing(path)
    with session.aside.status(f"checking {file}"):
        problems = integrity(file)
        if not problems:
            store = SqliteStore(file, _now)
            try:
                problems = store.audit()
            finally:
                store.close()
    if session.tell({"path": str(file), "problems": problems}):
        raise click.exceptions.Exit(1 if problems else 0)
    if problems:
        fail("\n          ".join([f"{file}: {len(problems)} problems", *problems[:50]]))
    click.echo(f"{file}: all well")


@db.command()
@click.argument("target", type=click.Path(dir_okay=False))
@click.option("--path", help="The database; this user's own unless given.")
@passes
def backup(session: Session, target: str, path: str | None) -> None:
    """A copy that is whole, taken while the scheduler runs."""
    from penstock.stores.sqlite_file import copy

    file = _existing(path)
    if Path(target).exists():
        fail(f"{target} is there already: choose another name")
    with session.aside.status(f"copying {file}"):
        copy(file, Path(target))
    if not session.tell({"path": str(file), "backup": target}):
        click.echo(f"{target}: {Path(target).stat().st_size:,} bytes")


@db.command()
@click.argument("path", required=False)
@passes
def migrate(session: Session, path: str | None) -> None:
    """Bring it to this version's schema, after a backup beside it. The daemon does so by itself when it starts."""
    from penstock.stores.sqlite import SqliteStore

    file = _existing(path)
    SqliteStore(file, _now).close()
    if not session.tell({"path": str(file), "migrated": True}):
        click.echo(f"{file}: up to date")


def _existing(path: str | None) -> Path:
    file = _path(path)
    if not file.exists():
        fail(f"there is no database at {file}", 4)
    return file


def _now() -> int:
    import time

    return time.time_ns() // 1_000
