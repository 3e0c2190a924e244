"""`penstock batch`: submit, open, close, ls, show, wait, cancel, retry. `penstock submit --batch NAME` adds a job."""

from __future__ import annotations

import os
import shlex
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.parsers import DURATION, Whole
from penstock.cli.printing import Column, echo, table
from penstock.cli.session import EXITS, CliSession, passes
from penstock.client.signals import interruptible

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock import wire

#: The most jobs of one request, and of a batch.
_PIECE: Final = 1_000
_MOST: Final = 10_000
_WIDTH: Final = 30
_LOOK_SEC: Final = 1.0


@click.group()
def batch() -> None:
    """A named set of jobs with callbacks, addressed as one."""


_CALLBACKS: Final = (
    click.option("-a", "--addon", default="cli", help="The addon that the jobs count for."),
    click.option("-c", "--cost", "cost_units", type=Whole(1, 100), default=10, help="Units of each job."),
    click.option("--on-end", metavar="LINE", help="A shell line that runs when all jobs have ended."),
    click.option(
        "--on-failure", metavar="LINE", help="A shell line that runs when the first job has failed."
    ),
)


def _with_callbacks(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_CALLBACKS):
        command = option(command)
    return command


@batch.command("submit")
@click.argument("name")
@click.argument("file", type=click.File("r"), default="-")
@click.option("--open", "is_open", is_flag=True, help="Take more jobs until `penstock batch close NAME`.")
@_with_callbacks
@passes
def submit_batch(
    session: CliSession, /, name: str, file: Any, is_open: bool, addon: str, **options: Any
) -> None:
    """Submit a job for each line of FILE (by default standard input). Each line is run by /bin/sh."""
    scripts = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    if len(scripts) > _MOST:
        raise click.UsageError(f"FILE has {len(scripts):,} lines; a batch has at most {_MOST:,} jobs")
    info = _submit(session, name, addon, scripts, is_open=is_open, **options)
    if not session.print_json(info):
        jobs = "1 job" if len(scripts) == 1 else f"{len(scripts):,} jobs"
        verb = "close" if info.open else "wait"
        echo(f"{jobs}; penstock batch {verb} {shlex.quote(name)}")


@batch.command("open")
@click.argument("name")
@_with_callbacks
@passes
def open_batch(session: CliSession, /, name: str, addon: str, **options: Any) -> None:
    """Begin a batch without jobs. `penstock submit --batch NAME` adds them; it ends after `batch close NAME`."""
    info = _submit(session, name, addon, [], is_open=True, **options)
    if not session.print_json(info):
        echo(f"open; penstock submit --batch {shlex.quote(name)} -- CMD")


def _submit(
    session: CliSession,
    name: str,
    addon: str,
    scripts: list[str],
    *,
    is_open: bool,
    cost_units: int,
    on_end: str | None,
    on_failure: str | None,
) -> wire.BatchInfo:
    from penstock.client.client import job_of

    def job(script: str, **fields: Any) -> wire.SubmitBody:
        payload = {"script": script, "cwd": os.getcwd()}  # noqa: PTH109 - a text is sent
        return job_of(addon, "penstock.shell", payload, cost_units=cost_units, **fields)

    client = session.client
    first, rest = scripts[:_PIECE], scripts[_PIECE:]
    info = client.submit_batch(
        name,
        addon,
        [job(script) for script in first],
        on_end=None if on_end is None else job(on_end),
        on_failure=None if on_failure is None else job(on_failure),
        open=is_open or bool(rest),
    )
    if rest:  # the batch stays open until all jobs are in
        for at in range(0, len(rest), _PIECE):
            piece = rest[at : at + _PIECE]
            client.submit_many([job(script, batch=name) for script in piece])
        info = client.batch(name) if is_open else client.close_batch(name)
    return info


@batch.command("close")
@click.argument("name")
@passes
def close_batch(session: CliSession, /, name: str) -> None:
    """Close an open batch: it takes no more jobs, and ends when its jobs have ended."""
    _show(session, session.client.close_batch(name))


@batch.command("ls")
@passes
def list_batches(session: CliSession, /) -> None:
    """List batches, the newest first."""
    batches = session.client.batches()
    if session.print_json(batches):
        return
    if not batches:
        echo("No batches. `penstock batch submit` makes one.")
        return
    columns = [
        Column("batch"), Column("state"), Column("ended", True), Column("of", True), Column("failed", True),
        Column("canceled", True, 80), Column("addon", False, 70),
    ]  # fmt: skip
    rows = [
        (b.name, "OPEN" if b.open else b.state, b.total - b.live, b.total, b.failed, b.canceled, b.addon_id)
        for b in batches
    ]
    table(session.console, columns, rows)


@batch.command("show")
@click.argument("name")
@passes
def show_batch(session: CliSession, /, name: str) -> None:
    """Show how far a batch is, and its callbacks. `penstock ls --tag batch:NAME` lists its jobs."""
    _show(session, session.client.batch(name))


@batch.command("wait")
@click.argument("name")
@click.option("--timeout", type=DURATION, help="Exit with 124 when the batch has not ended by then.")
@passes
@interruptible()
def wait_batch(session: CliSession, /, name: str, timeout: float | None) -> None:
    """
    Wait until a batch has ended, with a progress bar. The exit code says how, as for `penstock wait`: 1 if a job failed, 6 if
    one was canceled, 7 if all that is left waits for a person.
    """
    info, is_blocked = _follow(session, name, timeout)
    _show(session, info)
    code = EXITS["BLOCKED"] if is_blocked else EXITS[info.state] if info.state != "RUNNING" else 124
    raise click.exceptions.Exit(code)


@batch.command("cancel")
@click.argument("name")
@passes
def cancel_batch(session: CliSession, /, name: str) -> None:
    """Close a batch and cancel every job of it that has not ended. Running ones are asked to stop."""
    _changed(session, session.client.cancel_batch(name), "canceled")


@batch.command("retry")
@click.argument("name")
@passes
def retry_batch(session: CliSession, /, name: str) -> None:
    """Queue every FAILED or BLOCKED job of a batch again. Callbacks that ran do not run again."""
    _changed(session, session.client.retry_batch(name), "queued again")


def _changed(session: CliSession, answer: wire.BatchChangedAnswer, what: str) -> None:
    if not session.print_json(answer):
        echo(f"{answer.changed} job{'s' * (answer.changed != 1)} {what}")


def _show(session: CliSession, info: wire.BatchInfo) -> None:
    if session.print_json(info):
        return
    ended = info.total - info.live
    full = _WIDTH * ended // info.total if info.total else _WIDTH * (info.state == "DONE")
    state = "OPEN" if info.open else info.state
    lines = [
        f"{info.name}  {state}",
        f"  {'#' * full}{'.' * (_WIDTH - full)}  {ended:,} of {info.total:,} ended",
    ]
    counts = [(info.done, "done"), (info.failed, "failed"), (info.canceled, "canceled"), (info.live, "live")]
    if words := [f"{count:,} {word}" for count, word in counts if count]:
        lines.append(f"  {', '.join(words)}")
    lines += [f"  on {c.on}: {c.state} {c.job_id[-8:]} {c.title}" for c in info.callbacks]
    for line in lines:
        session.console.print(line, markup=False, highlight=False)


def _follow(session: CliSession, name: str, timeout: float | None) -> tuple[wire.BatchInfo, bool]:
    """Wait for the batch, or until the time is over. True: all jobs that are left wait for a person."""
    from rich.progress import Progress

    from penstock.core.jobs.states import JobState

    until = None if timeout is None else time.monotonic() + timeout
    with ExitStack() as stack:
        bar = stack.enter_context(
            Progress(console=session.stderr, transient=True, disable=not session.stderr.is_terminal)
        )
        task = bar.add_task(f"batch {name}", total=None)
        while True:
            rest = _LOOK_SEC if until is None else max(0.001, min(_LOOK_SEC, until - time.monotonic()))
            info = session.client.batch(name, wait_sec=rest)
            bar.update(task, total=info.total or None, completed=info.total - info.live)
            if info.state != "RUNNING" or (until is not None and time.monotonic() >= until):
                return info, False
            if info.live and not info.open:
                counts = session.client.count(tag=f"batch:{name}")
                if counts.get(JobState.BLOCKED, 0) == info.live:
                    return info, True
