"""
What every verb uses: the client, the output, and the exit code of an error.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from penstock.cli.printing import echo, printed

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.client.client import Client
    from penstock.core.errors import PenstockError


FAILED: Final = 1
EXITS: Final = {"DONE": 0, "FAILED": 1, "CANCELED": 6, "BLOCKED": 7}
UNREACHABLE: Final = 3
NOT_FOUND: Final = 4
REFUSED: Final = 5


class CliSession:
    def __init__(self, url: str | None, *, as_json: bool) -> None:
        self._url, self.as_json = url, as_json

    @cached_property
    def client(self) -> Client:
        from penstock.client.client import Client

        try:
            return Client(self._url, retry_for=1.0)
        except ValueError as wrong:
            raise click.UsageError(f"{'--url' if self._url else 'PENSTOCK_URL'}: {wrong}") from None

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()

    @cached_property
    def console(self) -> Console:
        return _console(soft_wrap=not sys.stdout.isatty())

    @cached_property
    def aside(self) -> Console:
        """For progress and advice, on standard error: a pipe gets the answer only."""
        return _console(stderr=True)

    def print_json(self, answer: Any) -> bool:
        """Print the answer as JSON if --json was given; returns whether it was."""
        if self.as_json:
            import msgspec

            echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
        return self.as_json

    def say(self, answer: Any, text: str) -> None:
        """Print the text, or with --json the answer."""
        if not self.print_json(answer):
            echo(text)

    def job_id(self, part: str) -> str:
        """A whole id, any part of one that is unique, or `last`: the newest job there is."""
        if part == "last":
            newest = self.client.jobs(limit=1, newest_first=True).jobs
            if not newest:
                fail("there are no jobs yet", NOT_FOUND)
            return newest[0].job_id
        if len(part) == 36:
            return part
        if not re.fullmatch("[0-9a-f-]+", part):
            fail(f"{part!r} is not a part of an id: ids consist of 0-9, a-f and -", NOT_FOUND)
        if len(part) < 4:
            fail(f"{part!r} is too short: give at least four characters of the id", NOT_FOUND)
        ids = self.client.find(part, limit=6)
        if not ids:
            fail(f"there is no job with {part!r} in its id", NOT_FOUND)
        if len(ids) > 1:
            shown = ", ".join(one[-8:] for one in ids[:5]) + (" ..." if len(ids) > 5 else "")
            fail(f"{part!r} matches several jobs ({shown}): give more of the id", NOT_FOUND)
        return ids[0]


def _console(**options: Any) -> Console:
    from rich.console import Console

    class Printing(Console):
        """Prints texts without the control codes in them."""

        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*map(printed, objects), **how)

    return Printing(highlight=False, **options)


passes = click.make_pass_decorator(CliSession)


def fail(message: str, code: int = FAILED) -> NoReturn:
    echo(f"penstock: {message}", err=True)
    raise click.exceptions.Exit(code)


def explain_error(error: Exception) -> int:
    """Print what happened and what to do. Only an unforeseen error keeps its traceback."""
    from penstock.core.errors import AccessDenied, NotFound, PenstockError, Unreachable

    if isinstance(error, OSError) and error.filename is not None:
        echo(f"penstock: {error.filename}: {error.strerror}", err=True)
        return FAILED
    if not isinstance(error, PenstockError):
        raise error
    echo(f"penstock: {error}", err=True)
    problems = getattr(error, "problems", None) or []
    for problem in problems[1:] if len(problems) > 1 else []:
        echo(f"          {_problem(problem)}", err=True)
    match error:
        case Unreachable():
            echo("          --url or PENSTOCK_URL names a scheduler elsewhere", err=True)
            return UNREACHABLE
        case NotFound():
            return NOT_FOUND
        case AccessDenied():
            echo(f"          {_whose_token()}", err=True)
            return REFUSED
        case _:
            if hint := _hint(error):
                echo(f"          {hint}", err=True)
            return REFUSED


def _whose_token() -> str:
    file = os.environ.get("PENSTOCK_TOKEN_FILE")
    # Not by pathlib, which is slow to load.
    if file and not os.environ.get("PENSTOCK_TOKEN") and not os.path.exists(file):  # noqa: PTH110
        return f"PENSTOCK_TOKEN_FILE names {file}, which does not exist"
    return "PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE names the token to use; `penstock token make` makes one"


#: Their hints speak of fields of the HTTP answer, which the command has put into the message.
_TOLD_ALREADY: Final = frozenset({"bad_intent", "bad_fields", "illegal_move"})


def _hint(error: PenstockError) -> str:
    if error.code == "queue_full":
        return f"Try again in {error.data.get('retry_after_sec') or 1:g} s."
    return "" if error.code in _TOLD_ALREADY else getattr(error, "hint", "")


def _problem(problem: Any) -> str:
    return f"{problem['field']} {problem['message']}" if isinstance(problem, dict) else str(problem)
