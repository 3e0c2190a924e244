"""Changing jobs: cancel, retry, edit."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.parsers import JOB, PRIORITY, WHEN, short
from penstock.cli.printing import echo
from penstock.cli.session import CliSession, passes

if TYPE_CHECKING:
    from penstock import wire


@click.command()
@click.option(
    "--now",
    is_flag=True,
    help="Kill a command or function of the scheduler instead of asking it to stop first.",
)
@click.argument("jobs", nargs=-1, required=True, type=JOB, metavar="JOB...")
@passes
def cancel(session: CliSession, jobs: tuple[str, ...], now: bool) -> None:
    """Cancel jobs. A running job is told to stop, and killed if it does not."""
    _each(session, jobs, lambda job_id: session.client.cancel(job_id, now=now))


@click.command()
@click.argument("jobs", nargs=-1, required=True, type=JOB, metavar="JOB...")
@passes
def retry(session: CliSession, jobs: tuple[str, ...]) -> None:
    """Queue FAILED or BLOCKED jobs again, with fresh attempts and limits."""
    _each(session, jobs, session.client.retry)


@click.command()
@click.argument("job", type=JOB)
@click.option("-p", "--priority", type=PRIORITY, help="1..100, or low, normal, high, urgent.")
@click.option(
    "--not-before", type=WHEN, help="+10m, 22:30, 2026-12-24 18:00; `--not-before-none` removes it."
)
@click.option("--not-before-none", is_flag=True, hidden=True)
@click.option("--deadline", type=WHEN, help="The latest start; `--deadline-none` removes it.")
@click.option("--deadline-none", is_flag=True, hidden=True)
@passes
def edit(
    session: CliSession,
    job: str,
    priority: int | str | None,
    not_before: datetime | None,
    not_before_none: bool,
    deadline: datetime | None,
    deadline_none: bool,
) -> None:
    """Change the priority and the times of a queued job."""
    fields: dict[str, Any] = {}
    if priority is not None:
        fields["priority"] = priority
    if not_before is not None or not_before_none:
        fields["earliest_start_at"] = None if not_before_none else not_before
    if deadline is not None or deadline_none:
        fields["deadline_at"] = None if deadline_none else deadline
    if not fields:
        raise click.UsageError("nothing to change: give --priority, --not-before or --deadline")
    _say(session, [session.client.edit(session.job_id(job), **fields)])


def _each(session: CliSession, jobs: tuple[str, ...], act: Callable[[str], wire.JobInfo]) -> None:
    ids = [session.job_id(job) for job in jobs]  # all are found before any is touched
    _say(session, [act(job_id) for job_id in ids])


def _say(session: CliSession, jobs: list[wire.JobInfo]) -> None:
    if session.print_json(jobs):
        return
    for job in jobs:
        stopping = " (told to stop)" if job.state == "RUNNING" else ""
        echo(f"{short(job.job_id)}  {job.state}{stopping}")
