"""
`penstock doctor`: checks this machine for known problems and says how to fix them.

Each check is a function that yields findings and changes nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
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


_ok, _note, _bad = (partial(Finding, level) for level in ("ok", "note", "bad"))


@click.command()
@passes
def doctor(session: CliSession) -> None:
    """
    Find what is wrong on this machine, and say how to fix it. Exits with 1 when something must be fixed.
    """
    findings = list(check(session))
    if not session.print_json([finding._asdict() for finding in findings]):
        marks = {"ok": "[green]ok  [/]", "note": "[yellow]note[/]", "bad": "[red]BAD [/]"}
        for finding in findings:
            session.console.print(marks[finding.level], end=" ")
            session.console.print(_wrapped(session, finding.what, 5), markup=False)
            if finding.fix:
                fix = _wrapped(session, finding.fix, 7)
                session.console.print(f"       {fix}", markup=False, style="dim")
    raise click.exceptions.Exit(1 if any(finding.level == "bad" for finding in findings) else 0)


def _wrapped(session: CliSession, text: str, indent: int) -> str:
    """Wrap a text to the terminal, with all lines indented alike. In a pipe it stays one line."""
    width = session.console.width - indent
    lines = textwrap.wrap(text, width, break_on_hyphens=False) if session.console.is_terminal else [text]
    return ("\n" + " " * indent).join(lines)


def check(session: CliSession) -> Iterator[Finding]:
    import apsw

    import penstock
    from penstock.settings import BadSettings, describe, load

    python, sqlite = sys.version.split()[0], apsw.sqlite_lib_version()
    yield _ok(f"penstock {penstock.__version__}, Python {python}, SQLite {sqlite}")
    try:
        settings = load()
    except BadSettings as bad:
        for problem in bad.problems:
            yield _bad(f"setting {problem.key} ({problem.source}): {problem.message}", problem.fix)
        return
    changed = sum(one.source != "default" for one in describe(settings))
    yield _ok(f"settings: {changed} changed from the default")
    yield from _directory(settings)
    yield from _database(settings)
    yield from _clock()
    yield from _page(settings)
    yield from _exposure(settings)
    yield from _daemon(session, settings)


def _directory(settings: Settings) -> Iterator[Finding]:
    where = settings.data_dir
    if not where.exists():
        yield _note(f"{where} does not exist yet", "`penstock up` makes it")
        return
    if mode := _mode_of_others(where):
        yield _bad(f"others on this machine can enter {where} (mode {mode:o})", f"chmod 700 {where}")
    if not os.access(where, os.W_OK):
        fix = "choose another directory with data_dir, or correct its owner"
        yield _bad(f"{where} cannot be written to", fix)
    room = shutil.disk_usage(where)
    if room.free < 200 * 2**20:
        fix = "free some space: a full disk stops every submit"
        yield _bad(f"only {room.free // 2**20} MB are free at {where}", fix)
    else:
        yield _ok(f"data in {where}, {room.free // 2**30} GB free")
    for file in (where / "token", where / "tokens.json"):
        if file.exists() and _mode_of_others(file):
            fix = f"chmod 600 {file}, and make a new token: another user may have read this one"
            yield _bad(f"others can read {file}", fix)


def _mode_of_others(path: Path) -> int:
    """The mode of a path that group or others can access; else 0."""
    mode = stat.S_IMODE(path.stat().st_mode)
    return mode if mode & 0o077 else 0


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
        yield _bad(str(error), "restore a backup: `penstock db backup` makes them")
        return
    if problems:
        fix = "stop the scheduler and restore a backup; `penstock db check` says more"
        yield _bad(f"{file} is damaged: {problems[0]}", fix)
    else:
        yield _ok(f"{file}: {file.stat().st_size / 2**20:.1f} MB, intact")
    wal = Path(f"{file}-wal")
    if wal.exists() and (size := wal.stat().st_size) > 256 * 2**20:
        fix = "a program keeps the database open for long: end it"
        yield _note(f"the write-ahead log of the database has {size // 2**20} MB", fix)


def _server(settings: Settings) -> Iterator[Finding]:
    from penstock.core.errors import PenstockError
    from penstock.stores.opening import server_time, shown

    name = shown(settings.jobs_at)
    try:
        ahead = server_time(settings.jobs_at, settings.sharing) - time.time_ns() // 1_000
    except PenstockError as error:
        yield _bad(f"{name}: {error}", "check the setting `database`, and whether the server runs")
    else:
        clock = f"its clock, which all hosts use, is {ahead / 1e6:+.1f} s from this machine's"
        yield _ok(f"{name} answers; {clock}")


def _clock() -> Iterator[Finding]:
    up = time.monotonic()
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) - up
    if time.time() < 1_700_000_000:
        yield _bad("this machine's clock is years behind", "set it: the times of jobs depend on it")
    else:
        asleep = f", and asleep for {slept:.0f} s" if slept > 60 else ""
        yield _ok(f"clock {time.strftime('%Y-%m-%d %H:%M:%S %Z')}; up {up / 3600:.0f} h{asleep}")


def _page(settings: Settings) -> Iterator[Finding]:
    from penstock import web

    if settings.server.listen is None:
        return
    if names := web.missing():
        fix = (
            "install Penstock again from a wheel, or in a checkout run `python -m penstock.web.vendor`; "
            "then restart the scheduler"
        )
        yield _bad(f"the scheduler serves no page: its libraries are missing ({', '.join(names)})", fix)
    else:
        yield _ok("the page and its libraries are here")


def _exposure(settings: Settings) -> Iterator[Finding]:
    address = settings.server.listen
    if address is None:
        yield _ok("settings: only the Unix socket is served")
    elif address.local:
        yield _ok(f"settings: served on {address} and a Unix socket, to this machine alone")
    else:
        fix = "the settings require TLS or a proxy, tokens and allowed hosts"
        yield _note(f"settings: other machines can reach the scheduler on {address}", fix)
    users = settings.runner.users
    if os.geteuid() == 0 and "*" not in users:
        fix = "run the scheduler as another user, or set runner.users"
        yield _note("you are root, so jobs would run as root too", fix)
    for addon, user in users.items():
        group = "all other addons" if addon == "*" else f"addon {addon}"
        yield _ok(f"commands and functions of {group} run as the user {user}")


def _daemon(session: CliSession, settings: Settings) -> Iterator[Finding]:
    import penstock
    from penstock.core.errors import AccessDenied, Unreachable

    try:
        host, hosts = session.client.health(), session.client.hosts()
    except Unreachable:
        yield _note("no scheduler is running", "`penstock up` starts one")
        yield from _port(settings)
        return
    except AccessDenied as denied:
        fix = "PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE names the token to use"
        yield _bad(f"the scheduler refuses the token: {denied}", fix)
        return
    for problem in host.problems:
        yield _bad(f"the scheduler reports: {problem}")
    if host.version != penstock.__version__:
        versions = f"the scheduler is version {host.version}, this command {penstock.__version__}"
        yield _note(versions, "restart it: `penstock stop`, `penstock up`")
    # The scheduler's own answer: an option of `penstock up` may override the settings.
    url = next((one.url for one in hosts.hosts if one.host == hosts.here), None)
    listens = "it listens on its Unix socket alone" if url is None else f"it listens on {url}"
    since = f"up since {host.started_at.astimezone():%Y-%m-%d %H:%M}"
    yield _ok(f"the scheduler at {session.client.url} answers, {since}; {listens}")


def _port(settings: Settings) -> Iterator[Finding]:
    """Only while no scheduler runs: a running one has the port itself."""
    address = settings.server.listen
    if address is None or not address.port:
        return
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        other = "choose another port: `penstock up --port 0`, or the setting server.listen"
        fix = f"end the program that listens there, or {other}"
        yield _bad(f"`penstock up` cannot listen on {address}: {error.strerror}", fix)
    else:
        yield _ok(f"{address} is free")
