"""
Verbs for jobs: ls, show, explain, cancel, retry, rerun, edit; and `job`, by which a running command reports.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from penstock.cli.parsers import ADDON, DURATION, JOB, PRIORITY, WHEN, WHOLE_SECONDS, Whole, age, short, span
from penstock.cli.printing import Column, echo, print_facts, state_text, table
from penstock.cli.session import (
    INTERRUPTED,
    REFUSED,
    CliFailure,
    CliSession,
    failure_of,
    passes,
)
from penstock.cli.submit import LOADS, read_payload
from penstock.client.signals import interruptible
from penstock.runner.job import __doc__ as usage
from penstock.runner.job import main

if TYPE_CHECKING:
    from msgspec import Raw

    from penstock import wire

_STATES = ("QUEUED", "DISPATCHING", "RUNNING", "DONE", "FAILED", "BLOCKED", "CANCELED")


F = TypeVar("F", bound=Callable[..., Any])

_FILTERS: Final = (
    click.option("-s", "--state", "states", multiple=True, type=click.Choice(_STATES, case_sensitive=False),
                 metavar="STATE", help=f"Only jobs in this state: {', '.join(_STATES).lower()}; may be repeated."),
    click.option("-a", "--addon", "addon_id", type=ADDON, help="Only jobs of this addon."),
    click.option("-t", "--type", "job_type", help="Only jobs of this type."),
    click.option("--tag", help="Only jobs with this tag."),
    click.option("--since", type=DURATION, help="Only jobs submitted in the last DURATION: 90s, 15m, 2h."),
    click.option("--older", type=DURATION, help="Only jobs submitted more than DURATION ago."),
    click.option("--search", "text", metavar="TEXT",
                 help="Only jobs with this text in their type, arguments, tags or error."),
)  # fmt: skip


def filtered(command: F) -> F:
    """Add the options that filter jobs."""
    for option in reversed(_FILTERS):
        command = option(command)
    return command


def _job_filter(options: dict[str, Any]) -> dict[str, Any]:
    """The given options of `filtered`, as fields of `wire.JobFilter`."""
    now = datetime.now(UTC)
    moments = {
        name: now - timedelta(seconds=options[option])
        for name, option in (("since", "since"), ("before", "older"))
        if options[option] is not None
    }
    fields = {
        name: options[name] for name in ("addon_id", "job_type", "tag", "text") if options[name] is not None
    }
    states = ",".join(state.upper() for state in options["states"])
    return fields | moments | ({"state": states} if states else {})


@click.command()
@filtered
@click.option("-n", "--limit", type=Whole(1, 500), default=20, help="How many jobs to list.")
@click.option("--oldest", is_flag=True, help="Oldest first instead of newest first.")
@click.option("-w", "--watch", is_flag=True, help="List again when something has changed, until Ctrl-C.")
@passes
@interruptible()
def ls(session: CliSession, /, limit: int, oldest: bool, watch: bool, **options: Any) -> None:
    """List jobs, and why each waits or how it ended."""
    while True:
        newest = session.client.stats().newest_event if watch else 0
        job_filter = _job_filter(options)
        states = job_filter.pop("state", "").split(",") if "state" in job_filter else ()
        page = session.client.jobs(states=states, limit=limit, newest_first=not oldest, **job_filter)
        if watch and session.console.is_terminal and not session.as_json:
            session.console.clear()
        _print_jobs(session, page, limit, filtered_by=options)
        if not watch:
            return
        while not session.client.events(after=newest, limit=1, wait_sec=20).events:
            pass
        time.sleep(_WATCH_PAUSE)


_NO_MATCH: Final = "No matching jobs."

#: The shortest time between two lists of `--watch`, in seconds.
_WATCH_PAUSE: Final = 0.5


def _print_jobs(session: CliSession, page: wire.Jobs, limit: int, *, filtered_by: dict[str, Any]) -> None:
    if session.print_json(page):
        return
    now = datetime.now(UTC)
    table(session.console, JOB_COLUMNS, [job_row(job, now) for job in page.jobs])
    if not page.jobs:
        none = (
            _NO_MATCH
            if any(filtered_by.values())
            else "No jobs yet. `penstock submit echo hello` submits one."
        )
        session.stderr.print(f"[dim]{none}[/]")
    if page.next is not None:
        session.stderr.print(f"[dim]The first {limit}; -n shows more.[/]")


#: The column with the reason is kept longest in a narrow terminal.
JOB_COLUMNS: Final = (
    Column("job"), Column("state"), Column("what"), Column("addon", keep=100),
    Column("units", True, 120), Column("prio", True, 120), Column("attempts", True, 130),
    Column("age", True, 70), Column("why", wrap=True),
)  # fmt: skip


def job_row(job: wire.JobSummary, now: datetime) -> tuple[object, ...]:
    """The cells of `JOB_COLUMNS`."""
    return (
        short(job.job_id), state_text(job.state), job.title, job.addon_id, job.cost_units, job.priority,
        job.attempts, age(job.created_at, now), job.why,
    )  # fmt: skip


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
    explained = session.client.explain(info.job_id)
    console = session.console
    console.print(state_text(info.state), f"{info.job_type} of {info.addon_id}", info.job_id)
    facts = {
        "what": info.title,
        "cost": f"{info.cost_units} units",
        "priority": info.priority,
        "preemptible": "" if info.preemptible else "no",
        "after": ", ".join(info.after) + (f" (waits for {info.unmet})" if info.unmet else ""),
        "if unmet": info.if_unmet if info.after else "",
        "run when": info.run_when + (f", quiet for {span(info.quiet_for_sec)}" if info.quiet_for_sec else ""),
        "created": f"{_moment(info.created_at)} ({age(info.created_at)} ago)",
        "not before": _moment(info.next_earliest_start_at) if info.ended_at is None else "",
        "deadline": _moment(info.deadline_at),
        "ended": _moment(info.ended_at),
        "why": explained.text,
        "attempts": info.attempts,
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
    print_facts(console, facts)


def _moment(moment: object) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S %z}" if isinstance(moment, datetime) else ""


def _json(raw: Raw | None) -> str:
    text = bytes(raw).decode() if raw is not None else ""
    return "" if text in ("", "null") else text


@click.command()
@click.argument("job", type=JOB)
@passes
def explain(session: CliSession, job: str) -> None:
    """
    Explain why a job is in its state, what must happen next, and which command would change that.

    With --json: all reasons that apply, the last failure, the jobs that hold the units it waits for, and how
    long it waited for each reason.
    """
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
    help="Kill a command or function at once, instead of asking it to stop first.",
)
@click.argument("jobs", nargs=-1, type=JOB, metavar="[JOB...]")
@filtered
@click.option("-y", "--yes", is_flag=True, help="Do not ask before changing the jobs that match a filter.")
@passes
def cancel(session: CliSession, /, jobs: tuple[str, ...], now: bool, yes: bool, **options: Any) -> None:
    """
    Cancel jobs: the named ones, or all that match a filter. A running job is told to stop, and killed if it
    does not.
    """
    if now and not jobs:
        raise click.UsageError("--now needs the jobs by name")
    _change(
        session, "cancel", jobs, options, yes,
        lambda job_id: session.client.cancel(job_id, now=now), session.client.cancel_all,
    )  # fmt: skip


@click.command()
@click.argument("jobs", nargs=-1, type=JOB, metavar="[JOB...]")
@filtered
@click.option("-y", "--yes", is_flag=True, help="Do not ask before changing the jobs that match a filter.")
@passes
def retry(session: CliSession, /, jobs: tuple[str, ...], yes: bool, **options: Any) -> None:
    """
    Queue FAILED or BLOCKED jobs again, with new attempts and limits: the named ones, or all that match a
    filter.
    """
    _change(session, "retry", jobs, options, yes, session.client.retry, session.client.retry_all)


@click.command()
@click.argument("job", type=JOB)
@click.option("--payload", help="Another payload: JSON, @FILE, or - for standard input.")
@click.option("-p", "--priority", type=PRIORITY, help="Another priority.")
@click.option("-c", "--cost", "cost_units", type=Whole(1, 100), metavar="UNITS", help="Another cost.")
@click.option("--when", "run_when", type=LOADS, help="Another highest load of the machine.")
@passes
def rerun(session: CliSession, /, job: str, payload: str | None, **options: Any) -> None:
    """Submit a new job with the request of JOB, for example to repeat one that is DONE or CANCELED."""
    fields = {name: value for name, value in options.items() if value is not None}
    if payload is not None:
        fields["payload"] = read_payload(payload)
    answer = session.client.rerun(session.job_id(job), **fields)
    session.print_answer(answer, answer.job_id)


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
@click.option("--when", "run_when", type=LOADS, help="Another load; not quiet ends --quiet-for.")
@click.option(
    "--quiet-for",
    "quiet_for_sec",
    type=WHOLE_SECONDS,
    help="With --when quiet: how long the machine must have been quiet; 0s: no longer.",
)
@passes
def edit(
    session: CliSession,
    /,
    job: str,
    priority: int | str | None,
    run_when: str | None,
    quiet_for_sec: int | None,
    **times: Any,
) -> None:
    """Change the priority, the times and the load of a queued job."""
    others = {"priority": priority, "run_when": run_when, "quiet_for_sec": quiet_for_sec}
    fields: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
    for name in ("earliest_start_at", "deadline_at"):
        if times[name] is not None or times[f"no_{name}"]:
            fields[name] = None if times[f"no_{name}"] else times[name]
    if not fields:
        raise click.UsageError(
            "nothing to change: give --priority, --not-before, --deadline, --when or --quiet-for"
        )
    _print_changed(session, [session.client.edit(session.job_id(job), **fields)])


#: By verb: the states that it can change, and its past tense.
_ABLE: Final = {
    "cancel": ({"QUEUED", "DISPATCHING", "RUNNING", "BLOCKED"}, "Canceled"),
    "retry": ({"FAILED", "BLOCKED"}, "Retried"),
}


def _change(
    session: CliSession,
    verb: str,
    jobs: tuple[str, ...],
    options: dict[str, Any],
    yes: bool,
    one: Callable[[str], wire.JobInfo],
    every: Callable[..., wire.BulkChanged],
) -> None:
    """Change the named jobs, or all that match the filter."""
    job_filter = _job_filter(options)
    if bool(jobs) == bool(job_filter):
        raise click.UsageError(
            "name the jobs, or choose them with --state, --addon, --type, --tag, --older ..."
        )
    if jobs:
        _each(session, jobs, one)
        return
    able, past = _ABLE[verb]
    chosen = set(job_filter.get("state", "").split(",")) - {""} or set(_STATES)
    counts = session.client.count(**{name: value for name, value in job_filter.items() if name != "state"})
    matching = {state: n for state, n in counts.items() if state in chosen and n}
    number = sum(n for state, n in matching.items() if state in able)
    if number and not yes:
        _ask_first(f"{verb.capitalize()} {_many(number)}?")
    changed = every(**job_filter) if number else _nothing_changed()
    if not session.print_json(changed):
        if matching:
            echo(f"{past} {_many(changed.changed)}.")
        else:
            session.stderr.print(f"[dim]{_NO_MATCH}[/]")
        for refused in changed.refused:
            echo(f"{short(refused.job_id)}  {refused.problem}", err=True)
    if changed.refused:
        raise click.exceptions.Exit(REFUSED)


def _ask_first(question: str) -> None:
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():  # Ctrl-C
            raise
        raise click.UsageError("the standard input ended without an answer; `--yes` does not ask") from None
    if not agreed:
        echo("Nothing changed.", err=True)
        raise click.exceptions.Exit(INTERRUPTED)


def _many(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _nothing_changed() -> wire.BulkChanged:
    from penstock import wire

    return wire.BulkChanged(0, [], None)


def _each(session: CliSession, jobs: tuple[str, ...], act: Callable[[str], wire.JobInfo]) -> None:
    """Change each job, even after a failure. The exit code is that of the first failure."""
    from penstock.core.errors import AccessDenied, Refused

    done: list[wire.JobInfo] = []
    failures: list[tuple[str, CliFailure]] = []
    for job in jobs:
        try:
            done.append(act(session.job_id(job)))
        except CliFailure as failure:
            failures.append((job, failure))
        except AccessDenied:  # the token is refused for every job
            raise
        except Refused as error:
            failures.append((job, failure_of(error)))
    if len(jobs) == 1 and failures:
        raise failures[0][1]
    if session.as_json:
        errors = [{"job": job, "error": reason.message} for job, reason in failures]
        session.print_json([*done, *errors])
    else:
        _print_changed(session, done)
        for job, reason in failures:
            echo(f"{job}  {reason.message}", err=True)
    if failures:
        raise click.exceptions.Exit(failures[0][1].exit_code)


def _print_changed(session: CliSession, jobs: list[wire.JobInfo]) -> None:
    if session.print_json(jobs):
        return
    for job in jobs:
        stopping = " (told to stop)" if job.state == "RUNNING" else ""
        echo(f"{short(job.job_id)}  {job.state}{stopping}")


def _help() -> str:
    """The docstring of the module; `\\b` keeps click from wrapping the paragraph that is a table."""
    paragraphs = (usage or "").strip().split("\n\n")
    return "\n\n".join(f"\b\n{text}" if text.startswith(" ") else text for text in paragraphs)


@click.command(context_settings={"ignore_unknown_options": True}, help=_help())
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def job(words: tuple[str, ...]) -> None:
    raise click.exceptions.Exit(main(words))
