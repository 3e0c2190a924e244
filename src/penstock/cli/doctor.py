"""
`penstock doctor`: checks everything that can be wrong on this machine and says how to fix it.

Each check is a function that yields findings and changes nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from penstock.cli.session import CliSession, passes

if TYPE_CHECKING:
    from penstock.settings import Settings


class Finding(NamedTuple):
    """`level`: ok, note (worth knowing), bad (must be fixed)."""

    level: str
    what: str
    fix: str = ""


@click.command()
@passes
def doctor(session: CliSession) -> None:
    """
    Find what is wrong on this machine, and say how to fix it. Exits with 1 when something must be fixed.
    """
    findings = list(look(session))
    if not session.print_json([finding._asdict() for finding in findings]):
        marks = {"ok": "[green]ok  [/]", "note": "[yellow]note[/]", "bad": "[red]BAD [/]"}
        for finding in findings:
            session.console.print(marks[finding.level], end=" ")
            session.console.print(finding.what, markup=False)
            if finding.fix:
                session.console.print(f"       {finding.fix}", markup=False, style="dim")
    raise click.exceptions.Exit(1 if any(finding.level == "bad" for finding in findings) else 0)


def look(session: CliSession) -> Iterator[Finding]:
    from penstock.settings import BadSettings, describe, load

    yield from _versions()
    try:
        settings = load()
    except BadSettings as bad:
        for problem in bad.problems:
            yield Finding("bad", f"setting {problem.key} ({problem.source}): {problem.message}", problem.fix)
        return
    yield Finding(
        "ok",
        f"settings: {sum(one.source != 'default' for one in describe(settings))} changed from the default",
    )
    yield from _directory(settings)
    yield from _database(settings)
    yield from _clock()
    yield from _exposure(settings)
    yield from _daemon(session, settings)


def _versions() -> Iterator[Finding]:
    import apsw

    import penstock

    yield Finding(
        "ok",
        f"penstock {penstock.__version__}, Python {sys.version.split()[0]}, SQLite {apsw.sqlite_lib_version()}",
    )


def _directory(settings: Settings) -> Iterator[Finding]:
    where = settings.data_dir
    if not where.exists():
        yield Finding("note", f"{where} does not exist yet", "`penstock up` makes it")
        return
    mode = stat.S_IMODE(where.stat().st_mode)
    if mode & 0o077:
        yield Finding(
            "bad", f"others on this machine can enter {where} (mode {mode:o})", f"chmod 700 {where}"
        )
    if not os.access(where, os.W_OK):
        yield Finding(
            "bad",
            f"{where} cannot be written to",
            "choose another directory with data_dir, or correct its owner",
        )
    room = shutil.disk_usage(where)
    if room.free < 200 * 2**20:
        yield Finding(
            "bad",
            f"only {room.free // 2**20} MB are free at {where}",
            "free some space: a full disk stops every submit",
        )
    else:
        yield Finding("ok", f"data in {where}, {room.free // 2**30} GB free")
    for name in ("token", "tokens.json"):
        file = where / name
        if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
            yield Finding(
                "bad",
                f"others can read {file}",
                f"chmod 600 {file}, and make a new token: another user may have read this one",
            )


def _database(settings: Settings) -> Iterator[Finding]:
    from penstock.core.errors import PenstockError
    from penstock.stores.sqlite.connection import integrity
    from penstock.stores.sqlite.guard import refuse_lost

    if settings.shared:
        yield from _server(settings)
        return
    file = Path(settings.jobs_at)
    try:
        refuse_lost(file)
        if not file.exists():
            return
        problems = integrity(file, quick=True)
    except PenstockError as error:
        yield Finding("bad", str(error), "restore a backup: `penstock db backup` makes them")
        return
    if problems:
        yield Finding(
            "bad",
            f"{file} is damaged: {problems[0]}",
            "stop the scheduler and restore a backup; `penstock db check` says more",
        )
    else:
        yield Finding("ok", f"{file}: {file.stat().st_size / 2**20:.1f} MB, intact")
    wal = Path(f"{file}-wal")
    if wal.exists() and wal.stat().st_size > 256 * 2**20:
        yield Finding(
            "note",
            f"its write-ahead log has {wal.stat().st_size // 2**20} MB",
            "a program keeps the database open for long: end it",
        )


def _server(settings: Settings) -> Iterator[Finding]:
    from penstock.core.errors import PenstockError
    from penstock.stores.opening import server_time, shown

    name = shown(settings.jobs_at)
    try:
        ahead = server_time(settings.jobs_at, settings.sharing) - time.time_ns() // 1_000
    except PenstockError as error:
        yield Finding("bad", f"{name}: {error}", "check the setting `database`, and whether the server runs")
        return
    yield Finding(
        "ok", f"{name} answers; its clock, which all hosts use, is {ahead / 1e6:+.1f} s from this machine's"
    )


def _clock() -> Iterator[Finding]:
    drift = abs((time.time() - time.monotonic()) - (time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)))
    if time.time() < 1_700_000_000:
        yield Finding("bad", "this machine's clock is years behind", "set it: the times of jobs depend on it")
    else:
        slept = f", of which it slept {drift:.0f} s" if drift > 60 else ""
        yield Finding(
            "ok", f"clock {time.strftime('%Y-%m-%d %H:%M:%S %Z')}; up {time.monotonic() / 3600:.0f} h{slept}"
        )


def _exposure(settings: Settings) -> Iterator[Finding]:
    address = settings.server.listen
    if address is None:
        yield Finding("ok", "settings: only the Unix socket is served")
    elif not address.local:
        yield Finding(
            "note",
            f"settings: other machines can reach the scheduler on {address}",
            "the settings require TLS or a proxy, tokens and allowed hosts",
        )
    else:
        yield Finding("ok", f"settings: served on {address} and a Unix socket, to this machine alone")
    users = settings.runner.users
    if os.geteuid() == 0 and "*" not in users:
        yield Finding(
            "note",
            "you are root, so jobs would run as root too",
            "run the scheduler as another user, or set runner.users",
        )
    for addon, user in users.items():
        group = "all other addons" if addon == "*" else f"addon {addon}"
        yield Finding("ok", f"commands and functions of {group} run as the user {user}")


def _daemon(session: CliSession, settings: Settings) -> Iterator[Finding]:
    from penstock.core.errors import AccessDenied, Unreachable

    try:
        host = session.client.health()
    except Unreachable:
        yield Finding("note", "no scheduler is running", "`penstock up` starts one")
        yield from _port(settings)
        return
    except AccessDenied as denied:
        yield Finding(
            "bad",
            f"the scheduler refuses the token: {denied}",
            "PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE names the token to use",
        )
        return
    for problem in host.problems:
        yield Finding("bad", f"the scheduler reports: {problem}")
    import penstock

    if host.version != penstock.__version__:
        yield Finding(
            "note",
            f"the scheduler is version {host.version}, this command {penstock.__version__}",
            "restart it: `penstock stop`, `penstock up`",
        )
    yield Finding(
        "ok",
        f"the scheduler at {session.client.url} answers, up since {host.started_at.astimezone():%Y-%m-%d %H:%M}; "
        f"it listens {_listening(session)}",
    )


def _listening(session: CliSession) -> str:
    """Where the scheduler listens: an option of `penstock up` may override the settings."""
    answer = session.client.hosts()
    url = next((one.url for one in answer.hosts if one.host == answer.here), None)
    return "on its Unix socket alone" if url is None else f"on {url}"


def _port(settings: Settings) -> Iterator[Finding]:
    """Only while no scheduler runs: a running one has the port itself."""
    address = settings.server.listen
    if address is None or not address.port:
        return
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        yield Finding(
            "bad",
            f"`penstock up` cannot listen on {address}: {error.strerror}",
            "end the program that listens there, or choose another port: `penstock up --port 0`, or the setting server.listen",
        )
    else:
        yield Finding("ok", f"{address} is free")
