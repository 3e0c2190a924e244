"""Batches: a named set of jobs that is submitted, shown, waited for, canceled and retried as one."""

from __future__ import annotations

import os
import shlex
import time
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.parsers import DURATION
from penstock.cli.printing import echo
from penstock.cli.session import NOT_FOUND, CliSession, fail, passes, wrong_options
from penstock.core.errors import BadIntent
from penstock.core.jobs.types import BATCH_TAG, CALLBACK_TAG, MOST_BATCH_NAME

if TYPE_CHECKING:
    from penstock import wire

#: Jobs of one request, without the two callbacks.
_MOST: Final = 998
_ENDED: Final = ("DONE", "FAILED", "CANCELED")
#: BLOCKED jobs wait for a person.
_SETTLED: Final = (*_ENDED, "BLOCKED")
_WIDTH: Final = 30
_LOOK_SEC: Final = 0.5


@click.group()
def batch() -> None:
    """A named set of jobs with callbacks, addressed as one."""


@batch.command("submit")
@click.argument("name")
@click.argument("file", type=click.File("r"), default="-")
@click.option("-a", "--addon", default="cli", help="The addon that the jobs count for.")
@click.option(
    "-c", "--cost", "cost_units", type=click.IntRange(1, 100), default=10, help="Units of each job."
)
@click.option("--on-end", metavar="LINE", help="A shell line that runs when all jobs have ended.")
@click.option("--on-failure", metavar="LINE", help="A shell line that runs when the first job has failed.")
@passes
def submit_batch(
    session: CliSession,
    /,
    name: str,
    file: Any,
    addon: str,
    cost_units: int,
    on_end: str | None,
    on_failure: str | None,
) -> None:
    """Submit a job for each line of FILE (by default standard input), a line of /bin/sh each; all or none."""
    scripts = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    if not 0 < len(name) <= MOST_BATCH_NAME:
        raise click.UsageError(f"NAME must have 1..{MOST_BATCH_NAME} characters")
    if not 0 < len(scripts) <= _MOST:
        raise click.UsageError(f"a batch has 1..{_MOST} jobs, this one {len(scripts)}")
    if sum(session.client.count(tag=f"{BATCH_TAG}{name}").values()):
        raise click.UsageError(f"there is a batch {name} already: give this one another name")

    from penstock.client.client import job_of

    def job(script: str, tag: str, **fields: Any) -> wire.SubmitBody:
        payload = {"script": script, "cwd": os.getcwd()}  # noqa: PTH109 - a text is sent
        given: dict[str, Any] = {"tags": (f"{tag}{name}",), "cost_units": cost_units, **fields}
        return job_of(addon, "penstock.shell", payload, **given)

    jobs = [job(script, BATCH_TAG) for script in scripts]
    positions = [f"#{at}" for at in range(len(scripts))]
    if on_end is not None:
        jobs.append(job(on_end, CALLBACK_TAG, after=tuple(f"{at}:done" for at in positions)))
    if on_failure is not None:
        after = tuple(f"{at}:failed" for at in positions)
        jobs.append(job(on_failure, CALLBACK_TAG, after=after, if_unmet="any"))
    try:
        answer = session.client.submit_many(jobs)
    except BadIntent as bad:
        raise wrong_options(bad) from None
    if not session.print_json(answer):
        jobs_word = "1 job" if len(scripts) == 1 else f"{len(scripts)} jobs"
        echo(f"{jobs_word}; penstock batch wait {shlex.quote(name)}")


@batch.command("show")
@click.argument("name")
@passes
def show_batch(session: CliSession, name: str) -> None:
    """Show how far a batch is: how many of its jobs are done, failed, canceled, and in all."""
    counts = _counts(session, name)
    if not session.print_json(counts):
        echo(_line(name, counts))


@batch.command("wait")
@click.argument("name")
@click.option("--timeout", type=DURATION, help="Give up after this time, with exit code 124.")
@passes
def wait_batch(session: CliSession, name: str, timeout: float | None) -> None:
    """Wait until every job of a batch is settled, with a progress bar. Exit code 1: not all are DONE."""
    end = None if timeout is None else time.monotonic() + timeout
    with session.aside.status("") as status:
        while True:
            counts = _counts(session, name)
            status.update(_line(name, counts))
            if sum(counts.get(state, 0) for state in _SETTLED) == counts["total"]:
                break
            if end is not None and time.monotonic() >= end:
                raise click.exceptions.Exit(124)
            time.sleep(_LOOK_SEC)
    if not session.print_json(counts):
        echo(_line(name, counts))
    raise click.exceptions.Exit(0 if counts.get("DONE") == counts["total"] else 1)


@batch.command("cancel")
@click.argument("name")
@passes
def cancel_batch(session: CliSession, name: str) -> None:
    """Cancel every job of a batch that has not ended."""
    _counts(session, name)
    _changed(session, session.client.cancel_all(tag=f"{BATCH_TAG}{name}"), "canceled")


@batch.command("retry")
@click.argument("name")
@passes
def retry_batch(session: CliSession, name: str) -> None:
    """Queue every FAILED or BLOCKED job of a batch again. Callbacks that ran do not run again."""
    _counts(session, name)
    _changed(session, session.client.retry_all(tag=f"{BATCH_TAG}{name}"), "queued again")


def _changed(session: CliSession, answer: wire.BulkChanged, what: str) -> None:
    if not session.print_json(answer):
        echo(f"{answer.changed} job{'s' * (answer.changed != 1)} {what}")


def _counts(session: CliSession, name: str) -> dict[str, int]:
    counts = {str(state): n for state, n in session.client.count(tag=f"{BATCH_TAG}{name}").items()}
    if not counts:
        fail(f"there is no batch {name}", NOT_FOUND)
    return counts | {"total": sum(counts.values())}


def _line(name: str, counts: dict[str, int]) -> str:
    total = counts["total"]
    ended = sum(counts.get(state, 0) for state in _ENDED)
    full = _WIDTH * ended // total
    words = [f"{n} {state}" for state, n in counts.items() if state != "total" and n]
    return f"{name}  {'#' * full}{'.' * (_WIDTH - full)}  {ended} of {total} ended: {', '.join(words)}"
