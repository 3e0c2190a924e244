"""The demo of the in-process part."""

from __future__ import annotations

import click

__all__ = ["demo"]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def demo(options: tuple[str, ...]) -> None:
    """A bounded pipeline under load, live in the terminal."""
    import subprocess
    import sys

    # A program of its own: its workers are started from its own main module.
    raise click.exceptions.Exit(
        subprocess.run(  # noqa: S603 - ourselves
            [sys.executable, "-m", "penstock.demo", *options], check=False
        ).returncode
    )
