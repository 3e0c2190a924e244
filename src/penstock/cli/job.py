"""`penstock job`: what a running command reports about itself. `penstock.runner.job` does the work."""

from __future__ import annotations

import click

from penstock.runner.job import __doc__ as usage
from penstock.runner.job import main


def _help() -> str:
    """The module's docstring; `\\b` keeps click from filling the paragraph that is a table."""
    paragraphs = (usage or "").strip().split("\n\n")
    return "\n\n".join(f"\b\n{text}" if text.startswith(" ") else text for text in paragraphs)


@click.command(context_settings={"ignore_unknown_options": True}, help=_help())
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def job(words: tuple[str, ...]) -> None:
    raise click.exceptions.Exit(main(words))
