"""What a running command says about itself. The work is the runner's; this is its name in the one command that people know."""

from __future__ import annotations

import click

from penstock.runner.job import __doc__ as said
from penstock.runner.job import main

__all__ = ["job"]


@click.command(context_settings={"ignore_unknown_options": True}, help=f"\b\n{said}")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def job(words: tuple[str, ...]) -> None:
    raise click.exceptions.Exit(main(words))
