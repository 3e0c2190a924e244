"""
Verbs for the administrator: stats, capacity, addons, pause, resume, hosts, drain, undrain, token.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
from rich.text import Text

from penstock.cli.parsers import ADDON, HOST, WHEN, Whole, age, span
from penstock.cli.printing import LOAD_COLORS, Column, echo, table
from penstock.cli.session import NOT_FOUND, CliSession, fail, passes
from penstock.core.jobs.spending import SpendMark
from penstock.wire import AddonInfo, KnownHost, Scope, TypeInfo, TypeList


@click.command()
@passes
def capacity(session: CliSession) -> None:
    """Show how many units may be used now, how many are in use, and what limits them."""
    info = session.client.capacity()
    if session.print_json(info):
        return
    console = session.console
    color = LOAD_COLORS[info.quiet]
    if info.quiet_sec is None:
        console.print(
            f"[{color}]{info.quiet}[/]: the capacity is fixed by a setting; the machine is not measured"
        )
    else:
        lasting = f" for {span(info.quiet_sec)}"
        by = f", decided by {info.busy_by}" if info.busy_by else ""
        console.print(f"[{color}]{info.quiet}[/]{lasting}: busy {info.busy:.1f} of 10{by}")
    console.print(
        f"{info.capacity} of {info.most} units may be used, {info.in_use} are in use, {info.free} free"
    )
    if info.paused:
        _print_paused(session)
    if info.draining:
        console.print(
            f"[yellow]{info.host} starts no more jobs[/]: `penstock undrain {info.host}` ends that."
        )
    if info.readings:
        columns = [Column("signal"), Column("value", True), Column("taken", True), Column("")]
        rows = [
            (r.name, f"{r.value:.3g}", f"{age(r.at)} ago", "" if r.fresh else "stale") for r in info.readings
        ]
        table(console, columns, rows)
    if len(info.hosts) > 1:
        alive = [h for h in info.hosts if h.state == "alive"]
        units, may = sum(h.units for h in alive), sum(h.capacity for h in alive)
        console.print(
            f"\nThis is {info.host}, one of {len(alive)} hosts: {units} of {may} units in use on all of them"
        )
        _host_table(session, info.host, info.hosts)


def _print_paused(session: CliSession) -> None:
    session.console.print("[yellow]Everything is paused[/]: `penstock resume` ends that.")


@click.command()
@click.option("--addon", type=ADDON, help="Only the types of this addon.")
@passes
def stats(session: CliSession, addon: str | None) -> None:
    """
    Show what was learned about each job type: how long its jobs run, what they need and spend, how often
    they come, and how many of the predicted starts were right.

    A predicted range should hold for 80 % of the starts. Later jobs count more than earlier ones.
    """
    types = [one for one in session.client.types() if addon in (None, one.addon_id)]
    if session.print_json(TypeList(types=types)):
        return
    if not types:
        session.console.print("Nothing was learned yet: that begins with the first job that ends.")
        return
    columns = [
        Column("addon"), Column("type"), Column("size", False, 120), Column("attempts", True),
        Column("duration", True), Column("10..90 %", True, 80), Column("memory", True, 100),
        Column("spend", True, 110), Column("per hour", True, 90), Column("predicted", True, 80),
        Column("covered", True), Column("error", True),
    ]  # fmt: skip
    rows = [
        (
            t.addon_id, t.job_type, t.size, t.attempts, "" if t.duration_sec is None else span(t.duration_sec),
            _range(t.duration_low_sec, t.duration_high_sec), _megabytes(t.memory_bytes),
            "" if t.spend is None else f"{t.spend:.4g}", _rate(t.arrivals_per_hour), t.predictions,
            "" if t.coverage is None else f"{t.coverage:.0%}", _error(t),
        )
        for t in types
    ]  # fmt: skip
    table(session.console, columns, rows)


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{span(low)} .. {span(high)}"


def _rate(per_hour: float) -> str:
    """Three significant digits, without a power of ten."""
    return f"{per_hour:,.0f}" if per_hour >= 100 else f"{per_hour:.3g}"


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1_000_000:.3g} MB"


def _error(one: TypeInfo) -> str:
    if one.error_sec is None or one.error_share is None:
        return ""
    return f"{span(one.error_sec)} ({one.error_share:.0%} of the wait)"


@click.command()
@click.option(
    "--weight",
    type=Whole(1, 10_000),
    help="Set the fair share of ADDON; other addons have 100.",
)
@click.option("--create", is_flag=True, help="Accept an ADDON that has never had a job.")
@click.argument("addon", type=ADDON, required=False)
@passes
def addons(session: CliSession, addon: str | None, weight: int | None, create: bool) -> None:
    """List the addons: weights, shares, jobs, budgets. With ADDON and --weight: set its weight."""
    if weight is not None:
        if addon is None:
            raise click.UsageError("--weight needs an ADDON")
        session.client.set_addon(addon, weight=weight, create=create)
    info = session.client.addons()
    if addon is not None:
        info.addons = [one for one in info.addons if one.addon_id == addon]
        if not info.addons:
            fail(f"there is no addon {addon}", NOT_FOUND)
    if session.print_json(info):
        return
    if info.paused:
        _print_paused(session)
    columns = [
        Column("addon"), Column("weight", True), Column("units", True), Column("recent", True, 70),
        Column("queued", True), Column("running", True), Column("done", True, 80), Column("failed", True, 80),
        Column("today", True, 100), Column("this month", True, 110), Column(""),
    ]  # fmt: skip
    rows = [
        (
            a.addon_id, a.weight, a.units, f"{a.average:.1f}", a.jobs.get("QUEUED", 0),
            a.jobs.get("RUNNING", 0), a.jobs.get("DONE", 0),
            a.jobs.get("FAILED", 0) + a.jobs.get("BLOCKED", 0),
            _spent(a, "day"), _spent(a, "month"), "paused" if a.paused else "",
        )
        for a in info.addons
    ]  # fmt: skip
    table(session.console, columns, rows)


def _spent(addon: AddonInfo, window: str) -> Text:
    """The amount spent, and the limit if there is one. Yellow from the mark at which the owner is warned."""
    use = next((use for use in addon.budgets if use.window == window), None)
    if use is None:
        return Text("")
    limit = "" if use.limit is None else f" of {use.limit:.2f}"
    color = {None: "", SpendMark.WARNED: "yellow", SpendMark.REACHED: "red"}[use.mark]
    return Text(f"{use.spent:.2f}{limit}", style=color)


@click.command()
@click.option("--create", is_flag=True, help="Accept an ADDON that has never had a job.")
@click.argument("addon", type=ADDON, required=False)
@passes
def pause(session: CliSession, addon: str | None, create: bool) -> None:
    """Start no more jobs, of ADDON or of all. Running jobs continue, and new jobs are accepted."""
    session.client.pause(addon, create=create)
    resume = f"penstock resume {addon or ''}".rstrip()
    session.print_answer(
        {"paused": addon or "*"}, f"Paused {addon or 'everything'}. `{resume}` starts jobs again."
    )


@click.command()
@click.argument("addon", type=ADDON, required=False)
@passes
def resume(session: CliSession, addon: str | None) -> None:
    """Start jobs again after `penstock pause`."""
    session.client.resume(addon)
    session.print_answer({"resumed": addon or "*"}, f"Resumed {addon or 'everything'}.")


@click.command()
@passes
def hosts(session: CliSession) -> None:
    """List the machines that share the jobs. Jobs of a lost host come back when their leases expire."""
    info = session.client.hosts()
    if not session.print_json(info):
        _host_table(session, info.here, info.hosts)


def _host_table(session: CliSession, here: str, known: Sequence[KnownHost]) -> None:
    columns = [
        Column("host"), Column("state"), Column("units", True), Column("of", True), Column("machine"),
        Column("seen", True), Column("labels", keep=90), Column("version", keep=110), Column("url", keep=120),
    ]  # fmt: skip
    rows = [
        (
            h.host + (" (here)" if h.host == here else ""), h.state + (", draining" if h.draining else ""),
            h.units, h.capacity, h.quiet, _seen(h.seen_at), " ".join(h.labels), h.version, h.url or "",
        )
        for h in known
    ]  # fmt: skip
    table(session.console, columns, rows)


def _seen(moment: datetime) -> str:
    """The host that answers was seen just now; its milliseconds say nothing."""
    return "now" if (datetime.now(UTC) - moment).total_seconds() < 1 else f"{age(moment)} ago"


@click.command()
@click.argument("host", type=HOST)
@passes
def drain(session: CliSession, host: str) -> None:
    """Start no more jobs on HOST, also after a restart. Its running jobs continue."""
    session.client.drain(host)
    session.print_answer(
        {"draining": host}, f"{host} starts no more jobs. `penstock undrain {host}` ends that."
    )


@click.command()
@click.argument("host", type=HOST)
@passes
def undrain(session: CliSession, host: str) -> None:
    """Start jobs on HOST again."""
    session.client.undrain(host)
    session.print_answer({"undrained": host}, f"{host} starts jobs again.")


_SCOPES = tuple(str(scope) for scope in Scope)
_WORKER_SCOPES = ("jobs:read", "jobs:submit:registered", "jobs:cancel", "worker:lease", "signals:report")


@click.group()
def token() -> None:
    """Make, list and revoke tokens."""


@token.command("make")
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(_SCOPES), metavar="SCOPE",
    help=f"{', '.join(_SCOPES)}. May be repeated.",
)  # fmt: skip
@click.option(
    "--worker", is_flag=True, help="The scopes of an addon's worker: submit, read, cancel, lease, signals."
)
@click.option("--addon", "addon_id", help="Bind the token: it sees and changes only this addon's jobs.")
@click.option("--max-cost", "max_cost_units", type=Whole(1, 100), help="The most units of a job.")
@click.option("--max-priority", type=Whole(1, 100), help="The highest priority of a job.")
@click.option("--expires", "expires_at", type=WHEN, help="When the token ends.")
@passes
def make(session: CliSession, /, name: str, scopes: tuple[str, ...], worker: bool, **limits: Any) -> None:
    """Make a token. Its secret is printed only now, on standard output."""
    if worker:
        scopes = (*scopes, *_WORKER_SCOPES)
    if not scopes:
        raise click.UsageError("give --scope, or --worker for the scopes of an addon's worker")
    made = session.client.make_token(name, scopes, **limits)
    if not session.print_json(made):
        echo(made.secret)
        session.stderr.print(f"[dim]{made.token.token_id}: {', '.join(made.token.scopes)}[/]")


@token.command("ls")
@passes
def listing(session: CliSession) -> None:
    """List the tokens, without their secrets."""
    tokens = session.client.tokens()
    if session.print_json(tokens):
        return
    columns = [
        Column("id"), Column("name"), Column("addon"), Column("age", True), Column("expires", True),
        Column("scopes", keep=100),
    ]  # fmt: skip
    rows = [
        (t.token_id, t.name, t.addon_id or "any", age(t.created_at), age(t.expires_at), " ".join(t.scopes))
        for t in tokens
    ]
    table(session.console, columns, rows)


@token.command("revoke")
@click.argument("token_id")
@passes
def revoke(session: CliSession, token_id: str) -> None:
    """End a token at once."""
    session.client.revoke_token(token_id)
    session.print_answer({"revoked": token_id}, f"Revoked {token_id}.")
