"""`penstock submit`: submits a command for the runner, or a job for an addon's worker."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from penstock.cli.parsers import ADDON, DURATION, PRIORITY, WHEN, WHOLE_SECONDS, Amount, Whole, short
from penstock.cli.printing import echo
from penstock.cli.session import CliSession, passes
from penstock.core.jobs.arrays import parse_array
from penstock.core.jobs.dependencies import ParentCondition
from penstock.core.jobs.types import BATCH_NAME, BATCH_NAME_WORDS, BATCH_TAG
from penstock.core.text import parsed

if TYPE_CHECKING:
    from penstock import wire

F = TypeVar("F", bound=Callable[..., Any])
LOADS = click.Choice(["any", "normal", "quiet"])

#: Most options set the field of the same name in the job's intent.
_OPTIONS = (
    click.option("-a", "--addon", type=ADDON, default="cli", help="The addon that the job counts for."),
    click.option("-c", "--cost", "cost_units", type=Whole(1, 100), metavar="UNITS",
                 default=10, help="Units that the job takes of the machine's 100."),
    click.option("-p", "--priority", type=PRIORITY, default="50",
                 help="1..100, or low, normal, high, urgent; higher goes first. A job may stop a running one "
                      "with a priority that is at least 20 lower: see --no-preempt."),
    click.option("--when", "run_when", type=LOADS, default="normal",
                 help="The highest load of the machine at which the job may start."),
    click.option("--quiet-for", "quiet_for_sec", type=WHOLE_SECONDS,
                 help="With --when quiet: how long the machine must have been quiet."),
    click.option("--not-before", "earliest_start_at", type=WHEN,
                 help="The earliest start: +10m, 22:30, 2026-12-24 18:00."),
    click.option("--deadline", "deadline_at", type=WHEN,
                 help="The latest start; a job that has not started by then is FAILED."),
    click.option("--max-runtime", "max_runtime_sec", type=WHOLE_SECONDS,
                 help="How long one attempt may take."),
    click.option("--max-active", "max_active_sec", type=WHOLE_SECONDS,
                 help="How long all attempts together may take; then the job is FAILED."),
    click.option("--cost-limit", type=Amount(min=0, min_open=True), metavar="AMOUNT",
                 help="How much the job may spend, in its unit; then it is BLOCKED, until `penstock retry` grants "
                      "as much again."),
    click.option("--expect", "expected_duration_sec", type=DURATION,
                 help="How long the job will likely take; shorter jobs can then run before it."),
    click.option("--retry", "retry_delays_sec", type=WHOLE_SECONDS, multiple=True,
                 help="The delay before another attempt after an error; may be repeated."),
    click.option("--tag", "tags", multiple=True, help="A word by which to find the job; may be repeated."),
    click.option("--label", "labels", multiple=True,
                 help="Only a host with this label runs the job; may be repeated."),
    click.option("--no-preempt", "preemptible", is_flag=True, flag_value=False, default=True, show_default=False,
                 help="Never stop the running job in favor of one of higher priority."),
    click.option("--after", multiple=True, metavar="JOB[:ok|:done|:failed]",
                 help="Start after this job: when it is DONE (the default, or :ok), has ended in any way (:done), or is "
                      "FAILED (:failed). A part of its id or `last` will do; an array is named by its id too, a "
                      "batch by batch:NAME. May be repeated."),
    click.option("--if-unmet", type=click.Choice(["cancel", "fail", "wait", "any"]), default="cancel",
                 help="What happens to the job if a job of --after ends otherwise: canceled, failed, it waits "
                      "for a retry, or any other job of --after is enough."),
    click.option("--key", "idempotency_key", help="Idempotency key: two submits with one key make one job."),
    click.option("--cwd", type=click.Path(exists=True, file_okay=False, resolve_path=True),
                 help="The directory in which the command starts; by default the current one."),
    click.option("--env", multiple=True, metavar="NAME=VALUE",
                 help="A variable for the command; may be repeated."),
    click.option("--shell", is_flag=True, help="Run the command as a line of /bin/sh."),
    click.option("--json", is_flag=True, expose_value=False, help="JSON instead of text.",
                 callback=lambda context, _, given: setattr(
                     context.find_object(CliSession), "as_json", given or context.find_object(CliSession).as_json)),
)  # fmt: skip


#: The options that become a part of a command's payload.
OF_COMMAND: Final = ("env", "shell", "cwd")


def described(command: F) -> F:
    """Add the options that describe a job."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


#: The first word that is no option begins the command, so `penstock run make -j2` needs no `--`.
COMMAND_LINE: Final = {"allow_interspersed_args": False}


@click.command(context_settings=COMMAND_LINE)
@click.option("-t", "--type", "job_type", help="Submit a job for an addon's worker instead of a command.")
@click.option("--payload", help="The payload of the job: JSON, @FILE, or - for standard input.")
@click.option(
    "--array",
    metavar="INDICES[%N]",
    help="A job for each index, N at once: 1-1000%8. Commands see it as PENSTOCK_ARRAY_INDEX.",
)
@click.option(
    "--batch",
    metavar="NAME",
    help="Add the job to this batch, which is open (`penstock batch open`) or has a job that lives.",
)
@click.argument("command", nargs=-1, metavar="[CMD...]")
@described
@passes
def submit(
    session: CliSession,
    /,
    job_type: str | None,
    payload: str | None,
    array: str | None,
    batch: str | None,
    command: tuple[str, ...],
    **options: Any,
) -> None:
    """Submit a command, or with --type a job for an addon. Prints the id of the job or array once it is durable."""
    if (job_type is None) == (not command):
        raise click.UsageError("give a command, or --type for an addon's worker")
    if array is not None:
        if batch is not None:
            raise click.UsageError("--batch cannot be given with --array, which is addressed as one itself")
        _submit_array(session, array, job_type, payload, command, **options)
        return
    options["batch"] = batch
    job_type, content = job_payload(job_type, payload, command, options)
    answer = _submit(session, job_type, content, **options)
    if session.print_json(answer):
        return
    echo(answer.job_id)
    if not answer.created:
        session.stderr.print(f"[dim]A job with this key exists already; it is {answer.state}.[/]")
    elif answer.deadline_reachable is False:
        session.stderr.print("[yellow]This job is not expected to start before its deadline.[/]")
    else:
        session.stderr.print(f"[dim]penstock explain {short(answer.job_id)}[/]")


def _submit_array(
    session: CliSession,
    array: str,
    job_type: str | None,
    payload: str | None,
    command: tuple[str, ...],
    *,
    addon: str,
    **fields: Any,
) -> None:
    from penstock.client.client import job_of

    job_type, content = job_payload(job_type, payload, command, fields)
    given = {name: value for name, value in fields.items() if value is not None}
    if given.get("after"):
        raise click.UsageError(
            "--after cannot be given with --array: submit the array when the parents have ended"
        )
    try:
        parse_array(array)
    except ValueError as wrong:
        raise click.UsageError(f"--array {wrong}") from None
    answer = session.client.submit_array(array, job_of(addon, job_type, content, **given))
    if not session.print_json(answer):
        echo(answer.array_id)
        session.stderr.print(f"[dim]penstock array wait {short(answer.array_id)}[/]")


def submit_command(
    session: CliSession,
    command: tuple[str, ...],
    *,
    env: tuple[str, ...],
    shell: bool,
    cwd: str | None,
    **options: Any,
) -> wire.Submitted:
    """Submit a command. It starts in --cwd or the current directory, with the variables of --env."""
    job_type, payload = command_payload(command, env=env, shell=shell, cwd=cwd)
    return _submit(session, job_type, payload, **options)


def job_payload(
    job_type: str | None, payload: str | None, command: tuple[str, ...], options: dict[str, Any]
) -> tuple[str, Any]:
    """
    The job type and the payload of a command or of a job with --type. Takes --env, --shell and --cwd out of the
    options.
    """
    of_command = {name: options.pop(name) for name in OF_COMMAND}
    if job_type is None:
        if payload is not None:
            raise click.UsageError("--payload is for a job with --type, not for a command")
        return command_payload(command, **of_command)
    if any(of_command.values()):
        raise click.UsageError("--env, --shell and --cwd are for a command, not for a job with --type")
    return job_type, read_payload(payload)


def command_payload(
    command: tuple[str, ...], *, env: tuple[str, ...], shell: bool, cwd: str | None
) -> tuple[str, dict[str, Any]]:
    """The job type and the payload of a command."""
    place: dict[str, Any] = {"cwd": cwd or os.getcwd()}  # noqa: PTH109 - a text is sent
    if env:
        place["env"] = dict(_variable(word) for word in env)
    if shell:
        return "penstock.shell", {"script": " ".join(command), **place}
    return "penstock.command", {"argv": list(command), **place}


def _submit(session: CliSession, job_type: str, payload: Any, *, addon: str, **fields: Any) -> wire.Submitted:
    given = {name: value for name, value in fields.items() if value is not None}
    given["after"] = tuple(_parent(session, word) for word in given.get("after", ()))
    return session.client.submit(addon, job_type, payload, **given)


def _parent(session: CliSession, word: str) -> str:
    """A value of --after, with the full id of the job or array, or the name of the batch."""
    prefix = BATCH_TAG if word.startswith(BATCH_TAG) else ""
    part, colon, condition = word.removeprefix(prefix).partition(":")
    if colon and condition not in list(ParentCondition):
        raise click.UsageError(f"--after {word}: the condition must be one of {', '.join(ParentCondition)}")
    if prefix and not BATCH_NAME.fullmatch(part):
        raise click.UsageError(f"--after {word}: the name of a batch {BATCH_NAME_WORDS}")
    if not prefix and part != "last" and not re.fullmatch("[0-9a-f_-]+", part):
        raise click.UsageError(f"--after {word}: {part!r} is no part of an id; a batch is named batch:{part}")
    job_id = prefix + part if prefix else _job_or_array(session, part)
    if "_" in job_id and not prefix:
        raise click.UsageError(
            f"--after {word}: {job_id} is a job of an array, and no job can wait for those; "
            f"--after {job_id.partition('_')[0]} waits for the array"
        )
    return f"{job_id}{colon}{condition}"


def _job_or_array(session: CliSession, part: str) -> str:
    """
    The id of a job or an array. The ids of an array's jobs contain its own, so a part of it means the array, and so
    does `last` behind the submit of an array.
    """
    if part == "last":
        return session.job_id(part).partition("_")[0]
    if not re.fullmatch("[0-9a-f-]{4,35}", part):
        return session.job_id(part)
    ids = session.client.find(part, limit=6)
    of_arrays = {job_id.partition("_")[0] for job_id in ids if "_" in job_id}
    of_arrays |= {array.array_id for array in session.client.arrays(limit=500) if part in array.array_id}
    jobs = {job_id for job_id in ids if "_" not in job_id}
    return of_arrays.pop() if len(of_arrays) == 1 and not jobs else session.job_id(part)


def _variable(word: str) -> tuple[str, str]:
    name, separator, value = word.partition("=")
    if not separator:
        if name not in os.environ:
            raise click.UsageError(f"--env {name}: this variable is not set here; write {name}=VALUE")
        return name, os.environ[name]
    return name, value


def read_payload(argument: str | None) -> Any:
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
