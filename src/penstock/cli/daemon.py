"""Verbs for the daemon: up, stop, login, settings."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from functools import partial
from typing import Any

import click

from penstock.cli.parsers import DURATION, Whole
from penstock.cli.printing import Column, echo, table
from penstock.cli.session import UNREACHABLE, WRONG, CliFailure, CliSession, fail, passes

_CONFIG = click.option(
    "-c", "--config", type=click.Path(dir_okay=False), help="A TOML file instead of the usual one."
)
#: The option `--set KEY=VALUE`, as a dictionary.
SET = click.option(
    "--set", "flags", multiple=True, metavar="KEY=VALUE",
    callback=lambda _, __, flags: dict(map(_pair, flags)),
    help="A setting by its name in `penstock settings`; may be repeated.",
)  # fmt: skip


@click.command()
@_CONFIG
@SET
@click.option("--data-dir", help="The directory of database, token and socket.")
@click.option("--port", type=Whole(0, 65_535), help="The port on loopback; 0 takes any free one.")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Start although the database file has lost acknowledged work; the trail records it.",
)
@passes
def up(
    session: CliSession,
    config: str | None,
    flags: dict[str, str],
    data_dir: str | None,
    port: int | None,
    accept_loss: bool,
) -> None:
    """
    Start the scheduler here: daemon, HTTP API and page. Ctrl-C stops it; a second Ctrl-C kills running jobs.
    """
    from penstock.daemon import run_program

    if data_dir is not None:
        flags["data_dir"] = data_dir
    if port is not None:
        flags["server.listen"] = f"127.0.0.1:{port}"
    settings = load_settings(config, flags)
    code = run_program(settings, on_ready=partial(_print_link, session), accept_loss=accept_loss)
    if code and session.as_json:
        fail("the scheduler has not started or has failed: its log, on standard error, says why", code)
    raise click.exceptions.Exit(code)


def _print_link(session: CliSession, server: Any) -> None:
    """
    Print the login link on standard output, not into the log: until it is used it is as good as a password.
    """
    link = server.login_url()
    if session.print_json({"url": server.url, "page": link}):
        return
    if link:
        echo(f"page  {link}")
    elif server.url is not None:
        echo("no page: `python -m penstock.web.vendor` fetches its libraries")
    echo("try   penstock run -- echo hello        penstock top        penstock --help")


def _pair(flag: str) -> tuple[str, str]:
    key, separator, value = flag.partition("=")
    if not separator:
        raise click.UsageError(f"--set {flag}: write KEY=VALUE")
    return key.strip(), value.strip()


def load_settings(config: str | None, flags: dict[str, str]) -> Any:
    from penstock.settings import BadSettings, load

    try:
        return load(config, flags=flags)
    except BadSettings as bad:
        first, *others = map(str, bad.problems)
        raise CliFailure(first, WRONG, others, problems=[one._asdict() for one in bad.problems]) from None


@click.command()
@click.option("--now", is_flag=True, help="Kill running jobs instead of asking them to yield.")
@click.option(
    "--timeout", type=DURATION, default="60s", help="How long to wait until the scheduler has ended."
)
@passes
def stop(session: CliSession, now: bool, timeout: float) -> None:
    """
    Stop this user's scheduler. Running jobs are asked to yield and go back to the queue; nothing is lost.
    """
    pid = _pid()
    try:
        gone = os.pidfd_open(pid)
    except ProcessLookupError:
        fail(
            f"the scheduler (process {pid}) was killed; `penstock up` starts it again and recovers its jobs",
            UNREACHABLE,
        )
    try:
        signal.pidfd_send_signal(gone, signal.SIGTERM)
        if now:
            time.sleep(0.1)  # so that the daemon sees two signals
            signal.pidfd_send_signal(gone, signal.SIGTERM)
        with session.stderr.status("waiting for running jobs to yield"):
            ended, _, _ = select.select([gone], [], [], timeout)
    finally:
        os.close(gone)
    if not ended:
        late = f"the scheduler (process {pid}) still runs after {timeout:.0f} s"
        fail(f"{late}; `penstock stop --now` kills its jobs")
    session.print_answer({"stopped": pid}, "Stopped.")


def _pid() -> int:
    """The process id of the daemon in this user's data directory."""
    from penstock.client.transport import data_dir

    file = data_dir(os.environ) / "daemon.json"
    try:
        return int(json.loads(file.read_text("utf-8"))["pid"])
    except (OSError, ValueError, KeyError):
        fail(f"no scheduler runs in {file.parent}; PENSTOCK_DATA_DIR names another directory", UNREACHABLE)


@click.command()
@click.option("--read-only", is_flag=True, help="The page can look at everything and change nothing.")
@passes
def login(session: CliSession, read_only: bool) -> None:
    """Print a link that opens the page. It works once, within ten minutes."""
    link = session.client.login(read_only=read_only)
    session.print_answer(link, link.url)


@click.command()
@_CONFIG
@SET
@click.option("--changed", is_flag=True, help="Only settings that differ from the default.")
@passes
def settings(session: CliSession, config: str | None, flags: dict[str, str], changed: bool) -> None:
    """List every setting, its value and its source. Exits with 2 when a setting is wrong."""
    from penstock.settings import describe

    listed = describe(load_settings(config, flags))
    shown = [one for one in listed if not changed or one.source != "default"]
    if session.print_json([one._asdict() for one in shown]):
        return
    if not shown:
        echo("Every setting has its default.")
        return
    columns = [Column("setting"), Column("value"), Column("from", keep=80), Column("", keep=130)]
    table(session.console, columns, [(one.key, one.value, one.source, one.doc) for one in shown])
