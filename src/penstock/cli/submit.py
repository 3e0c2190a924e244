"""Submitting: a command for the scheduler's own runner, or a job for an addon's worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import click

from penstock.cli.parsers import ADDON, DURATION, PRIORITY, WHEN, short
from penstock.cli.printing import echo
from penstock.cli.session import CliSession, passes
from penstock.core.text import parsed

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "-a",
        "--addon",
        type=ADDON,
        default="cli",
        show_default=True,
        help="The addon that the job counts for.",
    ),
    click.option(
        "-c",
        "--cost",
        "cost_units",
        type=click.IntRange(1, 100),
        default=10,
        show_default=True,
        help="Units of the machine, which has 100.",
    ),
    click.option(
        "-p",
        "--priority",
        type=PRIORITY,
        default="50",
        show_default=True,
        help="1..100, or low, normal, high, urgent.",
    ),
    click.option(
        "--when",
        "run_when",
        type=click.Choice(["any", "normal", "quiet"]),
        default="normal",
        show_default=True,
        help="The highest load of the machine at which the job may start.",
    ),
    click.option(
        "--quiet-for",
        type=DURATION,
        default=0.0,
        help="With --when quiet: how long the machine must have been quiet.",
    ),
    click.option("--not-before", type=WHEN, help="The earliest start: +10m, 22:30, 2026-12-24 18:00."),
    click.option(
        "--deadline", type=WHEN, help="The latest start; a job that has not started by then is FAILED."
    ),
    click.option("--max-runtime", type=DURATION, help="How long one attempt may take."),
    click.option("--max-active", type=DURATION, help="How long all attempts together may take; then FAILED."),
    click.option(
        "--cost-limit",
        type=click.FloatRange(min=0, min_open=True),
        help="How much the job may spend, in its unit; then BLOCKED, until `penstock retry` grants as much again.",
    ),
    click.option(
        "--expect",
        type=DURATION,
        help="How long the job will likely take; shorter jobs can then run before it.",
    ),
    click.option(
        "--retry",
        "retry_delays",
        type=DURATION,
        multiple=True,
        help="The delay before another attempt after an error; may be repeated.",
    ),
    click.option("--tag", "tags", multiple=True, help="A word to find the job by; may be repeated."),
    click.option(
        "--label", "labels", multiple=True, help="Only a host with this label runs the job; may be repeated."
    ),
    click.option("--key", help="Idempotency key: two submits with one key make one job."),
    click.option(
        "--env",
        "env",
        multiple=True,
        metavar="NAME=VALUE",
        help="A variable for the command; may be repeated.",
    ),
    click.option("--shell", is_flag=True, help="Run the command as a line of /bin/sh."),
)


def described(command: F) -> F:
    """Add the options that describe a job."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(context_settings={"ignore_unknown_options": False})
@click.option("-t", "--type", "job_type", help="Submit a job for an addon's worker instead of a command.")
@click.option("--payload", help="The payload of the job: JSON, @FILE, or - for standard input.")
@click.argument("command", nargs=-1, metavar="[-- CMD...]")
@described
@passes
def submit(
    session: CliSession,
    /,
    job_type: str | None,
    payload: str | None,
    command: tuple[str, ...],
    **options: Any,
) -> None:
    """Submit a command, or with --type a job for an addon. Prints the id of the job once it is durable."""
    if (job_type is None) == (not command):
        raise click.UsageError("give a command after `--`, or --type for an addon's worker")
    fields = fields_of(options)
    if job_type is not None:
        answer = session.client.submit(options["addon"], job_type, _payload(payload), **fields)
    else:
        kind, what = command_of(command, options)
        answer = session.client.submit(options["addon"], kind, what, **fields)
    if session.print_json(answer):
        return
    echo(answer.job_id)
    if not answer.created:
        session.aside.print(f"[dim]A job with this key exists already; it is {answer.state}.[/]")
    elif answer.deadline_reachable is False:
        session.aside.print("[yellow]This job is not expected to start before its deadline.[/]")
    else:
        session.aside.print(f"[dim]penstock explain {short(answer.job_id)}[/]")


def command_of(command: tuple[str, ...], options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """
    The job type and payload for the runner: the command starts in the current directory, with the variables
    of --env.
    """
    place: dict[str, Any] = {"cwd": os.getcwd()}  # noqa: PTH109 - a text is what is sent
    env = dict(_variable(word) for word in options["env"])
    if env:
        place["env"] = env
    if options["shell"]:
        return "penstock.shell", {"script": " ".join(command), **place}
    return "penstock.command", {"argv": list(command), **place}


def _variable(word: str) -> tuple[str, str]:
    name, separator, value = word.partition("=")
    if not separator:
        if name not in os.environ:
            raise click.UsageError(f"--env {name}: this variable is not set here; write {name}=VALUE")
        return name, os.environ[name]
    return name, value


def _payload(argument: str | None) -> Any:
    if argument is None:
        return None
    try:
        text = (
            click.open_file(argument.removeprefix("@"), encoding="utf-8").read()
            if argument == "-" or argument.startswith("@")
            else argument
        )
        return parsed(text)
    except OSError as error:
        raise click.UsageError(f"--payload {argument}: {error.strerror}") from None
    except ValueError as error:
        raise click.UsageError(f"--payload is not JSON: {error}") from None


def fields_of(options: dict[str, Any]) -> dict[str, Any]:
    deadline: datetime | None = options["deadline"]
    fields = {
        "cost_units": options["cost_units"],
        "priority": options["priority"],
        "run_when": options["run_when"],
        "quiet_for_sec": int(options["quiet_for"]),
        "earliest_start_at": options["not_before"],
        "deadline_at": deadline,
        "max_runtime_sec": _whole(options["max_runtime"]),
        "max_active_sec": _whole(options["max_active"]),
        "cost_limit": options["cost_limit"],
        "expected_duration_sec": options["expect"],
        "retry_delays_sec": tuple(round(delay) for delay in options["retry_delays"]),
        "tags": options["tags"],
        "labels": options["labels"],
        "idempotency_key": options["key"],
    }
    return {name: value for name, value in fields.items() if value is not None}


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds))
