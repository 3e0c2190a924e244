"""Tokens: make, list, revoke."""

from __future__ import annotations

from datetime import datetime

import click

from penstock.cli.parsers import WHEN, age
from penstock.cli.printing import echo
from penstock.cli.session import CliSession, passes
from penstock.cli.tables import Column, table
from penstock.wire import Scope

SCOPES = tuple(str(scope) for scope in Scope)


@click.group()
def token() -> None:
    """Make, list and revoke tokens."""


@token.command("make")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(SCOPES),
    metavar="SCOPE",
    help=f"{', '.join(SCOPES)}. May be repeated.",
)
@click.option(
    "--worker", is_flag=True, help="The scopes of an addon's worker: submit, read, cancel, lease, signals."
)
@click.option("--addon", help="Bind the token: it sees and changes only this addon's jobs.")
@click.option("--max-cost", "max_cost_units", type=click.IntRange(1, 100), help="The most units of a job.")
@click.option("--max-priority", type=click.IntRange(1, 100), help="The highest priority of a job.")
@click.option("--expires", "expires_at", type=WHEN, help="When the token ends.")
@passes
def make(
    session: CliSession,
    name: str,
    scopes: tuple[str, ...],
    worker: bool,
    addon: str | None,
    max_cost_units: int | None,
    max_priority: int | None,
    expires_at: datetime | None,
) -> None:
    """Make a token. Its secret is printed only now, on standard output."""
    if worker:
        scopes = (
            *scopes,
            "jobs:read",
            "jobs:submit:registered",
            "jobs:cancel",
            "worker:lease",
            "signals:report",
        )
    if not scopes:
        raise click.UsageError("give --scope, or --worker for the scopes of an addon's worker")
    made = session.client.make_token(
        name,
        scopes,
        addon_id=addon,
        max_cost_units=max_cost_units,
        max_priority=max_priority,
        expires_at=expires_at,
    )
    if not session.print_json(made):
        echo(made.secret)
        session.aside.print(f"[dim]{made.token.token_id}: {', '.join(made.token.scopes)}[/]")


@token.command("ls")
@passes
def listing(session: CliSession) -> None:
    """List the tokens, without their secrets."""
    tokens = session.client.tokens()
    if not session.print_json(tokens):
        columns = [
            Column("id"),
            Column("name"),
            Column("addon"),
            Column("age", True),
            Column("expires", True),
            Column("scopes", keep=100),
        ]
        rows = [
            (
                t.token_id,
                t.name,
                t.addon_id or "any",
                age(t.created_at),
                age(t.expires_at),
                " ".join(t.scopes),
            )
            for t in tokens
        ]
        table(session.console, columns, rows)


@token.command("revoke")
@click.argument("token_id")
@passes
def revoke(session: CliSession, token_id: str) -> None:
    """End a token at once."""
    session.client.revoke_token(token_id)
    if not session.print_json({"revoked": token_id}):
        echo(f"Revoked {token_id}.")
