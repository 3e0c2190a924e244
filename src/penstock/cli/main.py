"""
The command itself: which verbs there are, and what an exit code means.

    0    it went well                        5    refused: the token may not, or the job's state does not allow it
    1    the job FAILED                      6    the job was CANCELED
    2    the command line is wrong           7    the job is BLOCKED
    3    the scheduler does not answer       124  not settled within --timeout
    4    there is no such job                130  interrupted
    75   `up`: not started, because something is in the way

`penstock run` exits with the code of the command that it ran.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

import click

from penstock.cli.session import CliSession, explain_error

__all__ = ["VERBS", "cli", "main"]

#: verb: where it is, and what `--help` says before anything is loaded.
VERBS: Final = {
    "up": ("daemon", "start the scheduler: daemon, HTTP API and page"),
    "stop": ("daemon", "stop it; what runs is asked to yield, then ended"),
    "login": ("daemon", "a link that opens the page without typing"),
    "doctor": ("doctor", "look for what is wrong, and say how to mend it"),
    "settings": ("daemon", "every setting, its value and where that came from"),
    "run": ("follow", "submit a command, follow its output, exit with its code"),
    "submit": ("submit", "submit a command or a job, and go on"),
    "ls": ("jobs", "list jobs"),
    "show": ("jobs", "everything about a job"),
    "explain": ("jobs", "why a job is where it is"),
    "logs": ("follow", "what a job printed; -f follows it"),
    "wait": ("follow", "until a job is settled; exits by how it ended"),
    "cancel": ("change", "cancel jobs"),
    "retry": ("change", "queue FAILED or BLOCKED jobs again"),
    "edit": ("change", "priority and times of a queued job"),
    "job": ("job", "for a command that the scheduler runs: checkpoint, progress, spend, log, should-yield"),
    "events": ("follow", "the audit trail; -f follows it"),
    "top": ("top", "everything live, full screen"),
    "capacity": ("host", "what may be used now, and why no more"),
    "addons": ("host", "who uses it: weights, shares, budgets"),
    "pause": ("host", "start nothing more, of an addon or at all"),
    "resume": ("host", "take it up again"),
    "hosts": ("host", "the machines that share the jobs: alive, lost, drained"),
    "drain": ("host", "start nothing more on a host; what runs there goes on"),
    "undrain": ("host", "start jobs on a host again"),
    "token": ("tokens", "make, list and revoke tokens"),
    "db": ("db", "check, back up, migrate and copy the database"),
    "simulate": ("simulate", "what other settings would have done with this load, or with a made-up one"),
    "chaos": ("chaos", "kill a scheduler of its own and prove that nothing is lost"),
    "bench": ("bench", "what this machine and this disk can do, on a database that is thrown away"),
}


class Verbs(click.Group):
    """Loads a verb when it is asked for: a command line that takes a second to answer is not used."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command = getattr(importlib.import_module(f"penstock.cli.{VERBS[name][0]}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(context, args)
        except click.UsageError:
            import difflib

            near = difflib.get_close_matches(args[0], VERBS, 1)
            hint = f" Did you mean {near[0]}?" if near else " `penstock --help` lists them."
            raise click.UsageError(f"There is no verb {args[0]!r}.{hint}", context) from None

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table: help must not load what it only names."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, summary) for name, (_, summary) in VERBS.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--url", metavar="URL", help="The scheduler; else PENSTOCK_URL, else this user's own.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text, on every verb.")
@click.version_option(package_name="penstock", prog_name="penstock")
@click.pass_context
def cli(context: click.Context, url: str | None, as_json: bool) -> None:
    """Penstock admits, queues and dispatches work."""
    context.obj = session = CliSession(url, as_json=as_json)
    context.call_on_close(session.close)


def main() -> None:
    try:
        code = cli.main(_json_anywhere(sys.argv[1:]), prog_name="penstock", standalone_mode=False)
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        code = 130
    except click.ClickException as wrong:
        wrong.show()
        code = wrong.exit_code
    except BrokenPipeError:
        # Whoever read our output has had enough: `penstock ls | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # noqa: BLE001 - told as a person would want it, or raised again
        code = explain_error(error)
    sys.exit(code if isinstance(code, int) else 0)


def _json_anywhere(words: list[str]) -> list[str]:
    """`penstock ls --json` reads better than `penstock --json ls`; behind `--` the words are somebody else's."""
    end = words.index("--") if "--" in words else len(words)
    if "--json" in words[:end]:
        words = ["--json", *(word for word in words[:end] if word != "--json"), *words[end:]]
    return words
