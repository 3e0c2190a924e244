"""
Verbs for jobs: ls, show, explain; cancel, retry, edit; and `job`, by which a running command reports about
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.parsers import ADDON, JOB, PRIORITY, WHEN, Whole, age, short, span
from penstock.cli.printing import Column, echo, state_text, table
from penstock.cli.session import CliSession, passes
from penstock.runner.job import __doc__ as usage
from penstock.runner.job import main

if TYPE_CHECKING:
    from msgspec import Raw

    from penstock import wire

_STATES = ("QUEUED", "DISPATCHING", "RUNNING", "DONE", "FAILED", "BLOCKED", "CANCELED")


@click.command()
@click.option(
    "-s",
    "--state",
    "states",
    multiple=True,
    type=click.Choice(_STATES, case_sensitive=False),
    metavar="STATE",
    help=f"Only jobs in this state: {', '.join(_STATES).lower()}; may be repeated.",
)
@click.option("-a", "--addon", "addon_id", type=ADDON, help="Only jobs of this addon.")
@click.option("-t", "--type", "job_type", help="Only jobs of this type.")
@click.option("--tag", help="Only jobs with this tag.")
@click.option("-n", "--limit", type=Whole(1, 500), default=20, help="How many jobs to list.")
@click.option("--oldest", is_flag=True, help="Oldest first instead of newest first.")
@passes
def ls(session: CliSession, /, states: tuple[str, ...], limit: int, oldest: bool, **filters: Any) -> None:
    """List jobs."""
    named = [state.upper() for state in states]
    page = session.client.jobs(states=named, limit=limit, newest_first=not oldest, **filters)
    if session.print_json(page):
        return
    now = datetime.now(UTC)
    table(session.console, JOB_COLUMNS, [job_row(job, now) for job in page.jobs])
    if not page.jobs:
        session.aside.print("[dim]No matching jobs. `penstock submit -- echo hello` submits one.[/]")
    if page.next is not None:
        session.aside.print(f"[dim]The first {limit}; -n shows more.[/]")


#: Why a job waits is what people look for, so other columns go first in a narrow terminal.
JOB_COLUMNS: Final = (
    Column("job"), Column("state"), Column("addon", keep=80), Column("type", keep=70),
    Column("units", True, 100), Column("prio", True, 100), Column("tries", True, 110),
    Column("age", True, 45), Column("reason or progress"),
)  # fmt: skip


def job_row(job: wire.JobSummary, now: datetime) -> tuple[object, ...]:
    """The cells of `JOB_COLUMNS`."""
    return (
        short(job.job_id), state_text(job.state), job.addon_id, job.job_type, job.cost_units, job.priority,
        job.attempts, age(job.created_at, now), _standing(job, now),
    )  # fmt: skip


def _standing(job: wire.JobSummary, now: datetime) -> str:
    """Why a job waits, or its progress, in a word or two."""
    if job.state == "QUEUED":
        start = job.next_earliest_start_at
        if start is not None and start > now:
            return f"starts in {span((start - now).total_seconds())}"
        return job.denied.replace("_", " ")
    return _progress(job.progress) if job.state == "RUNNING" else ""


def _progress(progress: float | None) -> str:
    return "" if progress is None else f"{progress:.0%}"


@click.command()
@click.argument("job", type=JOB)
@passes
def show(session: CliSession, job: str) -> None:
    """Show everything about a job. JOB is its id, a part of the id, or `last`."""
    info = session.client.job(session.job_id(job))
    if session.print_json(info):
        return
    console = session.console
    console.print(state_text(info.state), f"{info.job_type} of {info.addon_id}", info.job_id)
    facts = {
        "cost": f"{info.cost_units} units",
        "priority": info.priority,
        "preemptible": "" if info.preemptible else "no",
        "run when": info.run_when + (f", quiet for {span(info.quiet_for_sec)}" if info.quiet_for_sec else ""),
        "created": f"{info.created_at.astimezone():%Y-%m-%d %H:%M:%S} ({age(info.created_at)} ago)",
        "not before": _moment(info.next_earliest_start_at),
        "deadline": _moment(info.deadline_at),
        "ended": _moment(info.ended_at),
        "tries": info.attempts,
        "progress": _progress(info.progress),
        "spent": f"{info.spent:g} {info.unit}" if info.spent else "",
        "limit": f"{info.cost_limit:g} {info.unit}" if info.cost_limit else "",
        "worker": info.worker,
        "pid": info.pid,
        "tags": ", ".join(info.tags),
        "labels": ", ".join(info.labels),
        "key": info.idempotency_key,
        "payload": _json(info.payload),
        "checkpoint": _json(info.checkpoint),
        "result": _json(info.result),
        "error": info.error,
    }
    for name, value in facts.items():
        if value not in (None, ""):
            console.print(f"[dim]{name:>12}[/]  ", end="")
            console.print(str(value), markup=False, highlight=False)


def _moment(moment: object) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}" if isinstance(moment, datetime) else ""


def _json(raw: Raw | None) -> str:
    text = bytes(raw).decode() if raw is not None else ""
    return "" if text in ("", "null") else text


@click.command()
@click.argument("job", type=JOB)
@passes
def explain(session: CliSession, job: str) -> None:
    """Say why a job is in its state, and when it will likely start."""
    from penstock.core.jobs.explain import GOES_FIRST

    answer = session.client.explain(session.job_id(job))
    if session.print_json(answer):
        return
    session.console.print(answer.text, markup=False)
    for ahead in answer.ahead[:5]:
        name = " ".join(filter(None, [short(ahead.job_id or ""), ahead.addon_id]))
        session.console.print(f"  ahead: {name} ({GOES_FIRST.get(ahead.why, ahead.why)})", markup=False)


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
@click.option(
    "-p", "--priority", type=PRIORITY, help="1..100, or low, normal, high, urgent; higher goes first."
)
@click.option(
    "--not-before",
    "earliest_start_at",
    type=WHEN,
    help="+10m, 22:30, 2026-12-24 18:00; `--not-before-none` removes it.",
)
@click.option("--not-before-none", "no_earliest_start_at", is_flag=True, hidden=True)
@click.option("--deadline", "deadline_at", type=WHEN, help="The latest start; `--deadline-none` removes it.")
@click.option("--deadline-none", "no_deadline_at", is_flag=True, hidden=True)
@passes
def edit(session: CliSession, /, job: str, priority: int | str | None, **times: Any) -> None:
    """Change the priority and the times of a queued job."""
    fields: dict[str, Any] = {} if priority is None else {"priority": priority}
    for name in ("earliest_start_at", "deadline_at"):
        if times[name] is not None or times[f"no_{name}"]:
            fields[name] = None if times[f"no_{name}"] else times[name]
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


def _help() -> str:
    """The module's docstring; `\\b` keeps click from filling the paragraph that is a table."""
    paragraphs = (usage or "").strip().split("\n\n")
    return "\n\n".join(f"\b\n{text}" if text.startswith(" ") else text for text in paragraphs)


@click.command(context_settings={"ignore_unknown_options": True}, help=_help())
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def job(words: tuple[str, ...]) -> None:
    raise click.exceptions.Exit(main(words))
