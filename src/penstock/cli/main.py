"""
The command `penstock`: its verbs and its exit codes.

    0    success                             5    refused: by the token's scopes or the job's state
    1    the job FAILED                      6    the job was CANCELED
    2    the command line is wrong           7    the job is BLOCKED
    3    the scheduler does not answer       124  not settled within --timeout
    4    no such job                         130  interrupted
    75   `up`: the scheduler could not start

`penstock run` exits with the code of the command that it ran.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

import click

from penstock.cli.examples import add_examples
from penstock.cli.session import INTERRUPTED, CliSession, failure_of, show_failure

#: By section of `--help` and by verb: the module of the verb, and its line.
_SECTIONS: Final = {
    "Scheduler": {
        "up": ("daemon", "start the scheduler: daemon, HTTP API and page"),
        "stop": ("daemon", "stop the scheduler; running jobs are asked to yield, then killed"),
        "login": ("daemon", "print a link that opens the page"),
        "doctor": ("doctor", "find what is wrong on this machine, and say how to fix it"),
        "service": ("service", "run the scheduler as a service of systemd: install, status, remove"),
        "settings": ("daemon", "list every setting, its value and its source"),
    },
    "Jobs": {
        "run": ("follow", "submit a command, follow its output, and exit with its code"),
        "submit": ("submit", "submit a command or a job, and return at once"),
        "ls": ("job_commands", "list jobs"),
        "show": ("job_commands", "show everything about a job"),
        "explain": ("job_commands", "say why a job is in its state, and when it will start"),
        "logs": ("follow", "print the output of a job; -f follows it"),
        "wait": ("follow", "wait until jobs have ended; the exit code says how"),
        "cancel": ("job_commands", "cancel jobs"),
        "retry": ("job_commands", "queue FAILED or BLOCKED jobs again"),
        "rerun": ("job_commands", "submit a new job with the request of an old one"),
        "edit": ("job_commands", "change the priority and the times of a queued job"),
        "job": (
            "job_commands",
            "report from inside a command: checkpoint, progress, spend, log, should-yield",
        ),
    },
    "Many jobs": {
        "array": (
            "arrays",
            "look at arrays of jobs: ls, show, wait, cancel, retry; `submit --array` makes one",
        ),
        "batch": ("batches", "a named set of jobs with callbacks: submit, open, show, wait, cancel, retry"),
        "schedule": (
            "schedules",
            "submit jobs by the clock: add, ls, show, edit, pause, resume, run, rm, import",
        ),
    },
    "Watch": {
        "top": ("top", "watch everything live, full screen"),
        "events": ("follow", "print the audit trail; -f follows it"),
        "stats": ("admin", "show what was learned about job types, and how good predictions were"),
        "capacity": ("admin", "show how much may run now, and what limits it"),
    },
    "Addons, hosts and rights": {
        "addons": ("admin", "list the addons: weights, shares, budgets"),
        "pause": ("admin", "start no more jobs, of one addon or of all"),
        "resume": ("admin", "start jobs again after a pause"),
        "hosts": ("admin", "list the machines that share the jobs: alive, lost, drained"),
        "drain": ("admin", "start no more jobs on a host; running jobs continue"),
        "undrain": ("admin", "start jobs on a drained host again"),
        "token": ("admin", "make, list and revoke tokens"),
    },
    "Data and trials": {
        "db": ("db", "check, back up, restore, migrate and copy the database"),
        "simulate": ("simulate", "replay the jobs with other settings and compare, or try a made-up load"),
        "chaos": ("trials", "kill a scheduler of its own and prove that nothing is lost"),
        "bench": ("trials", "measure this machine and this disk, on a temporary database"),
    },
}
VERBS: Final = {verb: entry for section in _SECTIONS.values() for verb, entry in section.items()}

#: Verbs of other programs, which no spelling leads to ours.
_OTHER_NAMES: Final = {
    "start": "up", "serve": "up", "status": "ls", "jobs": "ls", "ps": "ls", "info": "show", "tail": "logs",
    "enqueue": "submit", "add": "submit", "kill": "cancel", "rm": "cancel", "cron": "schedule", "backup": "db",
    "workers": "hosts",
}  # fmt: skip

#: Options of other programs, which no spelling leads to ours.
_OTHER_OPTIONS: Final = {
    "--timeout": "--max-runtime", "--time-limit": "--max-runtime", "--depends-on": "--after",
    "--dependency": "--after", "--delay": "--not-before", "--idempotency-key": "--key",
}  # fmt: skip


class Verbs(click.Group):
    """Imports a verb only when it is called, so that the command starts quickly."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command = getattr(importlib.import_module(f"penstock.cli.{VERBS[name][0]}"), name)
        assert isinstance(command, click.Command)
        add_examples(command, name)
        return command

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(context, args)
        except click.UsageError:
            import difflib

            near = _OTHER_NAMES.get(args[0]) or next(iter(difflib.get_close_matches(args[0], VERBS, 1)), "")
            hint = f" Did you mean {near}?" if near else " `penstock --help` lists them."
            raise click.UsageError(f"There is no verb {args[0]!r}.{hint}", context) from None

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs from the table, so that help imports none."""
        width = max(map(len, VERBS))
        for title, verbs in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summary) for name, (_, summary) in verbs.items()])


_HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(cls=Verbs, context_settings=_HELP, subcommand_metavar="VERB [ARGS]...")
@click.option("--url", metavar="URL", help="The scheduler to use; else PENSTOCK_URL, else this user's own.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text, on every verb.")
@click.version_option(package_name="penstock", prog_name="penstock")
@click.pass_context
def cli(context: click.Context, url: str | None, as_json: bool) -> None:
    """
    Penstock admits, queues and dispatches work.

    Begin with `penstock up` in one terminal and `penstock run -- echo hello` in another. `penstock VERB --help`
    explains a verb and has examples.
    """
    session = context.ensure_object(CliSession)
    session.url, session.as_json = url, as_json
    context.call_on_close(session.close)


def main() -> None:
    session = CliSession()
    try:
        words = _help_as_option(_json_anywhere(sys.argv[1:]))
        session.as_json = words[:1] == ["--json"]  # also for a command line that cannot be read
        code = cli.main(words, prog_name="penstock", standalone_mode=False, obj=session)
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        code = INTERRUPTED
    except click.NoSuchOption as unknown:
        code = show_failure(_with_our_option(unknown), as_json=session.as_json)
    except click.ClickException as wrong:
        code = show_failure(wrong, as_json=session.as_json)
    except BrokenPipeError:
        # The reader has closed the pipe: `penstock ls | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001 - explained in a line, or raised again
        code = show_failure(failure_of(error), as_json=session.as_json)
    sys.exit(code if isinstance(code, int) else 0)


def _with_our_option(unknown: click.NoSuchOption) -> click.NoSuchOption:
    """The failure, naming the command's own option for an option of another program."""
    ours = _OTHER_OPTIONS.get(unknown.option_name)
    command = None if unknown.ctx is None else unknown.ctx.command
    if command is None or not any(ours in parameter.opts for parameter in command.params):
        return unknown
    message = f"{unknown.message} Did you mean {ours!r}?"
    return click.NoSuchOption(unknown.option_name, message, ctx=unknown.ctx)


def _help_as_option(words: list[str]) -> list[str]:
    """Accept `penstock help submit` as well as `penstock submit --help`."""
    options = words[: words[:1] == ["--json"]]
    verb = words[len(options) :]
    return [*options, *verb[1:], "--help"] if verb[:1] == ["help"] else words


def _json_anywhere(words: list[str]) -> list[str]:
    """
    Accept `penstock ls --json` as well as `penstock --json ls`. `run` and `submit` have the option
    themselves, because words after their options belong to the submitted command.
    """
    verb = next((word for word in words if word in ("run", "submit", "schedule", "batch")), "")
    # `schedule run NAME` and `batch submit NAME FILE` take no command.
    own = ("--",) if verb in ("schedule", "batch") else ("run", "submit", "--")
    end = next((at for at, word in enumerate(words) if word in own), len(words))
    if "--json" in words[:end]:
        words = ["--json", *(word for word in words[:end] if word != "--json"), *words[end:]]
    return words


if __name__ == "__main__":
    main()
