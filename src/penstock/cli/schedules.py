"""`penstock schedule`: add, ls, show, edit, pause, resume, run, rm, import."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from penstock.cli.parsers import ADDON, SCHEDULE, WHOLE_SECONDS, Whole, age, short, span
from penstock.cli.printing import Column, echo, print_facts, state_text, table
from penstock.cli.session import WRONG, CliFailure, CliSession, passes
from penstock.cli.submit import OF_COMMAND, described, job_payload, read_payload
from penstock.core.errors import PenstockError
from penstock.core.jobs.moments import local_moment, zone_problem
from penstock.core.jobs.schedules import MISSED_LIMIT, MOST_PENDING
from penstock.core.jobs.types import when

if TYPE_CHECKING:
    from penstock import wire

F = TypeVar("F", bound=Callable[..., Any])

_HOUR: Final = re.compile(r"([01]?\d|2[0-3]):[0-5]\d")
#: Options of a submit that make no sense for all jobs of a schedule.
_NOT_OF_A_SCHEDULE: Final = {"earliest_start_at", "deadline_at", "idempotency_key", "after", "if_unmet"}

_TIME_FIELDS: Final = (
    *("cron", "every_sec", "at", "quietest_hour_before", "zone", "overlap", "missed", "missed_limit"),
)
_TIMES = (
    click.option("--cron", metavar="LINE", help="Five fields as in a crontab, or @daily and the like."),
    click.option("--every", "every_sec", type=WHOLE_SECONDS, help="At intervals from now on: 15m, 6h."),
    click.option("--at", metavar="TIME", help='Once: "2026-12-01 06:00", on the clocks of --zone.'),
    click.option("--in-quietest-hour-before", "quietest_hour_before", metavar="HH:MM",
                 help="Daily, in the quietest of the twelve hours before, by the recorded load."),
    click.option("--zone", help="The time zone of --cron and --at; by default this machine's."),
    click.option("--overlap", type=click.Choice(["skip", "queue", "cancel-running"]),
                 help="If an earlier job has not ended at a moment: drop the moment (default), run it "
                      "afterwards, or cancel the earlier job."),
    click.option("--missed", type=click.Choice(["skip", "latest", "all"]),
                 help="Which moments to make up for if no scheduler ran: none, the latest (default), or all."),
    click.option("--missed-limit", type=Whole(1, MOST_PENDING),
                 help=f"With --missed all: for at most this many; by default {MISSED_LIMIT}."),
)  # fmt: skip


def timed(command: F) -> F:
    """Add the options for the times of a schedule."""
    for option in reversed(_TIMES):
        command = option(command)
    return command


@click.group()
def schedule() -> None:
    """Submit jobs at the moments of a cron line, at intervals, or once."""


@schedule.command("add")
@click.argument("name")
@timed
@click.option("-t", "--type", "job_type", help="A job for an addon's worker instead of a command.")
@click.option("--payload", help="The payload of the job: JSON, @FILE, or - for standard input.")
@described
@click.argument("command", nargs=-1, metavar="[-- CMD...]")
@passes
def add(
    session: CliSession,
    /,
    name: str,
    job_type: str | None,
    payload: str | None,
    command: tuple[str, ...],
    **options: Any,
) -> None:
    """Add a schedule and print its next five moments."""
    times = _times(options, local_zone())
    if not times.keys() & {"cron", "every_sec", "at", "quietest_hour_before"}:
        raise click.UsageError("say when: --cron, --every, --at or --in-quietest-hour-before")
    job = _job(job_type, payload, command, options)
    info = session.client.add_schedule(name, job, **times)
    if not session.print_json(info):
        echo(f"Added {info.name}: {_when(info)}")
        _print_next(info)


@schedule.command("ls")
@click.option("-a", "--addon", "addon_id", type=ADDON, help="Only schedules of this addon.")
@passes
def listing(session: CliSession, addon_id: str | None) -> None:
    """List the schedules with their next and last moments."""
    schedules = session.client.schedules(addon_id=addon_id)
    if session.print_json(schedules):
        return
    if not schedules:
        echo("No schedules. `penstock schedule add` adds one.")
        return
    columns = [
        Column("schedule"), Column("when"), Column("next"), Column("in", True, 70), Column("last", keep=80),
        Column("result", keep=80), Column("addon", keep=110), Column("job", keep=120),
    ]  # fmt: skip
    table(session.console, columns, [_row(info) for info in schedules])


def _row(info: wire.ScheduleInfo) -> tuple[object, ...]:
    upcoming = info.next[0] if info.next else None
    last = info.last[0] if info.last else None
    waiting = f"{len(info.waiting)} waiting" if info.waiting else ""
    return (
        info.name,
        _when(info),
        "paused"
        if info.paused
        else "stuck"
        if info.problem
        else waiting or _moment(upcoming) or "never again",
        age(upcoming).removeprefix("in ") if upcoming else "",
        _moment(last.moment) if last else "",
        "" if last is None else state_text(str(last.state or "pruned")),
        info.addon_id,
        info.title,
    )


@schedule.command("show")
@click.argument("name", type=SCHEDULE)
@passes
def show(session: CliSession, name: str) -> None:
    """Show a schedule: when it fires, its next moments, and its last jobs."""
    info = session.client.schedule(name)
    if session.print_json(info):
        return
    payload = bytes(info.job.payload).decode()
    facts: dict[str, object] = {
        "schedule": info.name + (" (paused)" if info.paused else ""),
        "when": _when(info),
        "problem": info.problem or "",
        "job": info.title,
        "addon": info.addon_id,
        "overlap": info.overlap,
        "missed": info.missed + (f", at most {info.missed_limit}" if info.missed == "all" else ""),
        "cost": info.job.cost_units,
        "priority": info.job.priority,
        "payload": "" if payload == "null" else payload,
        "added": f"{_moment(info.created_at.astimezone())} by {info.created_by or 'unknown'}",
        "edited": f"{_moment(info.edited_at.astimezone())} by {info.edited_by or 'unknown'}"
        if info.edited_at != info.created_at
        else "",
        "waiting": ", ".join(map(_moment, info.waiting)),
    }
    print_facts(session.console, facts)
    if info.next:
        echo("next:")
        _print_next(info)
    if info.last:
        echo("last:")
        columns = [Column(""), Column("moment"), Column("job"), Column("state"), Column("")]
        rows = [
            ("", _moment(each.moment), short(each.job_id), state_text(str(each.state or "pruned")),
             f"run by {each.by}" if each.by else "")
            for each in info.last
        ]  # fmt: skip
        table(session.console, columns, rows)


@schedule.command("edit")
@click.argument("name", type=SCHEDULE)
@timed
@click.option("-t", "--type", "job_type", help="Another job, for an addon's worker.")
@click.option("--payload", help="The payload of the other job: JSON, @FILE, or - for standard input.")
@described
@click.argument("command", nargs=-1, metavar="[-- CMD...]")
@passes
def edit(
    session: CliSession,
    /,
    name: str,
    job_type: str | None,
    payload: str | None,
    command: tuple[str, ...],
    **options: Any,
) -> None:
    """
    Change the times of a schedule, its policies, its command, or options of its jobs. What is not given stays as it
    is.
    """
    fields = _times(options, None)
    if fields.get("at") is not None and "zone" not in fields:
        fields["at"] = _local(options["at"], session.client.schedule(name).zone)
    job = _edited_job(session, name, job_type, payload, command, options)
    if job is not None:
        fields["job"] = job
    if not fields:
        raise click.UsageError(
            "nothing to change: give a time, a policy, another command, or options of a job"
        )
    info = session.client.edit_schedule(name, **fields)
    if not session.print_json(info):
        echo(f"Edited {info.name}: {_when(info)}")
        _print_next(info)


@schedule.command("pause")
@click.argument("name", type=SCHEDULE)
@passes
def pause(session: CliSession, name: str) -> None:
    """Submit no more jobs for NAME. Moments that pass meanwhile are not made up for."""
    info = session.client.pause_schedule(name)
    session.print_answer(info, f"Paused {name}. `penstock schedule resume {name}` ends that.")


@schedule.command("resume")
@click.argument("name", type=SCHEDULE)
@passes
def resume(session: CliSession, name: str) -> None:
    """Submit jobs for NAME again, from the next moment on."""
    info = session.client.resume_schedule(name)
    if not session.print_json(info):
        echo(f"Resumed {info.name}: {_when(info)}")
        _print_next(info)


@schedule.command("run")
@click.argument("name", type=SCHEDULE)
@passes
def run(session: CliSession, name: str) -> None:
    """Submit a job of the schedule now, whatever its overlap says and even while it is paused."""
    answer = session.client.run_schedule(name)
    session.print_answer(answer, answer.job_id)


@schedule.command("rm")
@click.argument("name", type=SCHEDULE)
@passes
def remove(session: CliSession, name: str) -> None:
    """Remove a schedule. Its jobs stay."""
    session.client.remove_schedule(name)
    session.print_answer({"removed": name}, f"Removed {name}.")


@schedule.command("import")
@click.argument("file", type=click.File(encoding="utf-8"))
@click.option("-a", "--addon", type=ADDON, default="cli", help="The addon that the jobs count for.")
@click.option("--prefix", default="", help="The beginning of the names, before program and line number.")
@click.option("--zone", help="The time zone of lines before a CRON_TZ; by default this machine's.")
@click.option("--dry-run", is_flag=True, help="Show what would be added, and add nothing.")
@passes
def import_file(
    session: CliSession, /, file: Any, addon: str, prefix: str, zone: str | None, dry_run: bool
) -> None:
    """
    Add a schedule for each line of a crontab file.

    `crontab -l | penstock schedule import -` adds those of this user. If a line cannot be converted, it is
    reported with its number, and nothing is added.
    """
    from penstock.cli.crontab import read_crontab, shell_payload
    from penstock.client.client import job_of

    crontab = read_crontab(file.read())
    taken_names = {info.name for info in session.client.schedules()}
    for entry in crontab.entries:
        if entry.name(prefix) in taken_names:
            crontab.problems.append((entry.line, f"there is a schedule {entry.name(prefix)!r}: use --prefix"))
    if crontab.problems:
        first, *rest = [f"line {line}: {why}" for line, why in sorted(crontab.problems)]
        raise CliFailure(f"{first}; nothing was added", WRONG, rest)
    added: list[wire.ScheduleInfo] = []
    planned: list[dict[str, str]] = []
    for entry in crontab.entries:
        job_type, payload = shell_payload(entry, os.path.expanduser("~"))  # noqa: PTH111 - a text is sent
        place = entry.zone or zone or local_zone()
        if dry_run:
            plan = {"name": entry.name(prefix), "cron": entry.cron, "zone": place, "command": entry.command}
            planned.append(plan)
            continue
        try:
            job = job_of(addon, job_type, payload)
            added.append(session.client.add_schedule(entry.name(prefix), job, cron=entry.cron, zone=place))
        except BaseException as error:
            for info in added:
                session.client.remove_schedule(info.name)
            if isinstance(error, PenstockError):
                raise CliFailure(f"line {entry.line}: {error}; nothing was added", WRONG) from None
            raise
    for line, note in crontab.notes:
        session.stderr.print(f"line {line}: {note}", markup=False)
    if not session.print_json(planned if dry_run else added):
        for plan in planned:
            echo("{name}: {cron} in {zone}: {command}".format_map(plan))
        for info in added:
            echo(f"Added {info.name}: {_when(info)}; next {_moment(info.next[0])}")


for _verb in (add, edit):
    _verb.params = [each for each in _verb.params if each.name not in _NOT_OF_A_SCHEDULE]


def _times(options: dict[str, Any], zone: str | None) -> dict[str, Any]:
    """Move the options for times out of `options`, as fields of the request. `zone`: the default."""
    fields = {name: value for name in _TIME_FIELDS if (value := options.get(name)) is not None}
    if "zone" in fields and (problem := zone_problem(fields["zone"])) is not None:
        raise click.UsageError(f"--zone {problem}, not {fields['zone']!r}")
    if zone is not None and fields.keys() & {"cron", "at", "quietest_hour_before"}:
        fields.setdefault("zone", zone)
    if "at" in fields:
        fields["at"] = _local(fields["at"], fields.get("zone", "UTC"))
    if "quietest_hour_before" in fields:
        if not _HOUR.fullmatch(fields["quietest_hour_before"]):
            raise click.UsageError("--in-quietest-hour-before must be a time like 06:00")
        fields["quietest_hour_before"] = fields["quietest_hour_before"].zfill(5)
    return fields


def _local(text: str, zone: str) -> datetime:
    try:
        return when(local_moment(text, zone))
    except (ValueError, OverflowError):
        raise click.UsageError(f'--at {text!r} is not a time: write "2026-12-01 06:00"') from None


def _job(
    job_type: str | None, payload: str | None, command: tuple[str, ...], options: dict[str, Any]
) -> wire.SubmitBody:
    from penstock.client.client import job_of

    if (job_type is None) == (not command):
        raise click.UsageError("give a command behind --, or --type for an addon's worker")
    job_type, content = job_payload(job_type, payload, command, options)
    fields = {
        name: value
        for name, value in options.items()
        if value is not None and name not in {*_TIME_FIELDS, "addon"}
    }
    return job_of(options["addon"], job_type, content, **fields)


def _edited_job(
    session: CliSession,
    name: str,
    job_type: str | None,
    payload: str | None,
    command: tuple[str, ...],
    options: dict[str, Any],
) -> wire.SubmitBody | None:
    """The job of the schedule with the options that are given; None: none is."""
    from msgspec.json import decode

    from penstock.client.client import job_of

    context = click.get_current_context()
    given = {
        option: options[option]
        for option in options.keys() - {*_TIME_FIELDS}
        if context.get_parameter_source(option) is not ParameterSource.DEFAULT
    }
    if not (given or command or job_type is not None or payload is not None):
        return None
    if command and job_type is not None:
        raise click.UsageError("give a command behind --, or --type for an addon's worker")
    job = session.client.schedule(name).job
    fields: dict[str, Any] = {field: getattr(job, field) for field in job.__struct_fields__}
    addon, present = fields.pop("addon_id"), (fields.pop("job_type"), decode(fields.pop("payload")))
    if command or job_type is not None:
        job_type, content = job_payload(job_type, payload, command, options)
    elif given.keys() & OF_COMMAND:
        raise click.UsageError("--env, --shell and --cwd need the command, behind --")
    else:
        job_type, content = present
        if payload is not None:
            content = read_payload(payload)
    addon = given.pop("addon", addon)
    fields |= {option: value for option, value in given.items() if option not in OF_COMMAND}
    return job_of(addon, job_type, content, **fields)


def local_zone() -> str:
    """The name of this machine's time zone; UTC if it has none."""
    variable = os.environ.get("TZ", "").removeprefix(":")
    if variable and zone_problem(variable) is None:
        return variable
    link = os.path.realpath("/etc/localtime")  # pathlib is slow to import
    name = link.partition("/zoneinfo/")[2]
    return name if name and zone_problem(name) is None else "UTC"


def _when(info: wire.ScheduleInfo) -> str:
    if info.cron is not None:
        return f"{info.cron} in {info.zone}"
    if info.every_sec is not None:
        return f"every {span(info.every_sec)}"
    return f"once, {_moment(info.at)} in {info.zone}"


def _moment(moment: datetime | None) -> str:
    """A moment as text, with seconds only if they are not 0 (as for `--every 5s`)."""
    if moment is None:
        return ""
    return f"{moment:%a %Y-%m-%d %H:%M:%S}" if moment.second else f"{moment:%a %Y-%m-%d %H:%M}"


def _print_next(info: wire.ScheduleInfo) -> None:
    for moment in info.next:
        echo(f"  {_moment(moment)} {moment:%z}  {age(moment)}")
    if not info.next:
        echo(
            "  no next moment"
            + (": it is paused" if info.paused else f": {info.problem}" if info.problem else "")
        )
