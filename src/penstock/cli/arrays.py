"""`penstock array`: ls, show, wait, cancel, retry. `penstock submit --array 1-1000%8` submits one."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from penstock.cli.parsers import DURATION, short
from penstock.cli.printing import Column, echo, table
from penstock.cli.session import EXITS, NOT_FOUND, CliSession, fail, passes
from penstock.client.signals import interruptible

if TYPE_CHECKING:
    from penstock import wire

ARRAY = "ARRAY"


@click.group()
def array() -> None:
    """Arrays: one submit for many jobs, one for each index."""


@array.command("ls")
@passes
def array_ls(session: CliSession, /) -> None:
    """List arrays, the newest first."""
    arrays = session.client.arrays()
    if session.print_json(arrays):
        return
    if not arrays:
        echo("No arrays. `penstock submit --array` makes one.")
        return
    columns = [
        Column("array"), Column("state"), Column("done", True), Column("live", True), Column("failed", True),
        Column("of", True), Column("at once", True, 80), Column("job"),
    ]  # fmt: skip
    rows = [
        (short(a.array_id), a.state, a.done, a.live, a.failed, a.total, a.at_once or "-", a.title)
        for a in arrays
    ]
    table(session.console, columns, rows)


@array.command("show")
@click.argument("array_id", metavar=ARRAY)
@passes
def array_show(session: CliSession, /, array_id: str) -> None:
    """Show how far an array is, and which indices failed."""
    show(session, session.client.array(find(session, array_id)))


@array.command("wait")
@click.argument("array_id", metavar=ARRAY)
@click.option("--timeout", type=DURATION, help="Exit with 124 when the array has not ended by then.")
@passes
@interruptible()
def array_wait(session: CliSession, /, array_id: str, timeout: float | None) -> None:
    """Wait until the last index has ended. The exit code says how the array ended, as for `penstock wait`."""
    info = _follow(session, find(session, array_id), timeout)
    show(session, info)
    raise click.exceptions.Exit(EXITS[info.state] if info.state != "RUNNING" else 124)


@array.command("cancel")
@click.argument("array_id", metavar=ARRAY)
@passes
def array_cancel(session: CliSession, /, array_id: str) -> None:
    """Cancel all indices that have not ended. Running ones are asked to stop."""
    show(session, session.client.cancel_array(find(session, array_id)))


@array.command("retry")
@click.argument("array_id", metavar=ARRAY)
@passes
def array_retry(session: CliSession, /, array_id: str) -> None:
    """Run the failed indices again."""
    show(session, session.client.retry_array(find(session, array_id)))


def find(session: CliSession, part: str) -> str:
    """The whole id: `last`, or a part that belongs to one of the newest arrays alone."""
    if len(part) == 36:
        return part
    ids = [one.array_id for one in session.client.arrays(limit=500)]
    if part == "last" and ids:
        return ids[0]
    matches = [array_id for array_id in ids if part in array_id]
    if len(matches) != 1:
        if part == "last":
            fail("there are no arrays yet", NOT_FOUND)
        if not matches:
            fail(f"there is no array with {part!r} in its id", NOT_FOUND)
        fail(f"{len(matches)} arrays have {part!r} in their ids: give more of the id", NOT_FOUND)
    return matches[0]


def show(session: CliSession, info: wire.ArrayInfo) -> None:
    if session.print_json(info):
        return
    limit = f", {info.at_once} at once" if info.at_once else ""
    lines = [
        f"{info.array_id}  {info.state}  {info.title}",
        f"  {info.done} of {info.total} done, {info.live} live, {info.waiting} to come{limit}",
    ]
    if info.canceled:
        lines.append(f"  {info.canceled} canceled")
    if info.failed:
        lines.append(f"  {info.failed} failed: {info.failed_indices}")
    for line in lines:
        session.console.print(line, markup=False, highlight=False)


def _follow(session: CliSession, array_id: str, timeout: float | None) -> wire.ArrayInfo:
    from rich.progress import Progress

    until = None if timeout is None else time.monotonic() + timeout
    with ExitStack() as stack:
        bar = stack.enter_context(
            Progress(console=session.stderr, transient=True, disable=not session.stderr.is_terminal)
        )
        task = bar.add_task(f"array {short(array_id)}")
        while True:
            rest = 1.0 if until is None else max(0.001, min(1.0, until - time.monotonic()))
            info = session.client.array(array_id, wait_sec=rest)
            bar.update(task, total=info.total, completed=info.done + info.failed + info.canceled)
            if info.state != "RUNNING" or (until is not None and time.monotonic() >= until):
                return info
