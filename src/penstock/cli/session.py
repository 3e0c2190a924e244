"""
The state that all verbs share: the client and the output; and the exit code of an error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from penstock.cli.printing import echo, printed

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.client.client import Client
    from penstock.core.errors import PenstockError, Refused

T = TypeVar("T")

FAILED: Final = 1
WRONG: Final = 2
EXITS: Final = {"DONE": 0, "FAILED": 1, "CANCELED": 6, "BLOCKED": 7}
UNREACHABLE: Final = 3
NOT_FOUND: Final = 4
REFUSED: Final = 5
INTERRUPTED: Final = 130


class CliSession:
    def __init__(self) -> None:
        self.url: str | None = None
        self.as_json = False

    @cached_property
    def client(self) -> Client:
        from penstock.client.client import Client

        try:
            return Client(self.url, retry_for=1.0)
        except ValueError as wrong:
            raise click.UsageError(f"{'--url' if self.url else 'PENSTOCK_URL'}: {wrong}") from None

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()

    @cached_property
    def console(self) -> Console:
        return _console(soft_wrap=not sys.stdout.isatty())

    @cached_property
    def stderr(self) -> Console:
        """A console on standard error, for progress and advice: a pipe gets only the answer."""
        return _console(stderr=True)

    def print_json(self, answer: Any) -> bool:
        """Print the answer as JSON if --json was given; returns whether it was."""
        if self.as_json:
            import msgspec

            echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
        return self.as_json

    def print_answer(self, answer: Any, text: str) -> None:
        """Print the text; with --json the answer."""
        if not self.print_json(answer):
            echo(text)

    def job_id(self, part: str) -> str:
        """The id of a job, from its whole id, a unique part of it, or `last` (the newest job)."""
        if part == "last":
            newest = self.client.jobs(limit=1, newest_first=True).jobs
            if not newest:
                fail("there are no jobs yet", NOT_FOUND)
            return newest[0].job_id
        if len(part) == 36 or (len(part) > 37 and part[36] == "_"):  # of an array: its id and the index
            return part
        if not re.fullmatch("[0-9a-f_-]+", part):
            fail(f"{part!r} is not a part of an id: ids consist of 0-9, a-f, - and _", NOT_FOUND)
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

    class SafeConsole(Console):
        """A console that replaces control codes in texts."""

        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*map(printed, objects), **how)

    return SafeConsole(highlight=False, **options)


def passes(verb: Callable[..., T]) -> Callable[..., T]:
    """Pass the session to a verb. A refusal of its fields names the options and arguments of the verb instead."""

    @wraps(verb)
    def run(session: CliSession, /, *args: Any, **options: Any) -> T:
        from penstock.core.errors import Refused

        try:
            return verb(session, *args, **options)
        except Refused as bad:
            if bad.code not in ("bad_intent", "bad_fields"):
                raise
            raise wrong_options(bad) from None

    return click.make_pass_decorator(CliSession)(run)


class CliFailure(click.ClickException):
    """The error of a command: why it fails, what to do about it, and the exit code."""

    def __init__(self, message: str, code: int, advice: Sequence[str] = (), **data: Any) -> None:
        super().__init__(message)
        self.advice, self.data = advice, data
        self.code = code

    @property
    def exit_code(self) -> int:  # type: ignore[override]  # click has one per class
        return self.code

    def show(self, file: IO[Any] | None = None) -> None:
        del file
        echo(f"penstock: {self.message}", err=True)
        for line in self.advice:
            echo(f"          {line}", err=True)


def fail(message: str, code: int = FAILED) -> NoReturn:
    raise CliFailure(message, code)


def show_failure(failure: click.ClickException, *, as_json: bool) -> int:
    """Print why the command failed; returns the exit code."""
    if as_json:
        import msgspec

        data = failure.data if isinstance(failure, CliFailure) else {}
        error = {"message": failure.format_message(), "exit_code": failure.exit_code, **data}
        echo(msgspec.json.format(msgspec.json.encode({"error": error}), indent=2).decode())
    else:
        failure.show()
    return failure.exit_code


def failure_of(error: Exception) -> CliFailure:
    """An error as a failure with advice. Only an unexpected error keeps its traceback."""
    from penstock.core.errors import AccessDenied, NotFound, PenstockError, Unreachable

    if isinstance(error, OSError) and error.filename is not None:
        return CliFailure(f"{error.filename}: {error.strerror}", FAILED)
    if not isinstance(error, PenstockError):
        raise error
    problems = getattr(error, "problems", None) or []
    advice = [_problem(problem) for problem in problems[1:]]
    match error:
        case Unreachable():
            advice.append("--url or PENSTOCK_URL names a scheduler elsewhere")
            code = UNREACHABLE
        case NotFound():
            code = NOT_FOUND
        case AccessDenied():
            advice.append(_whose_token())
            code = REFUSED
        case _:
            code = REFUSED
            if hint := _hint(error):
                advice.append(hint)
    return CliFailure(str(error), code, advice, kind=error.code, problems=problems)


#: Fields of a job whose option or argument has another name.
_SET_BY: Final = {"addon_id": "addon", "tags": "tag", "labels": "label", "payload.cwd": "cwd", "payload.env": "env", "payload.argv": "command",
                  "payload.script": "command", "job_type": "job_type"}  # fmt: skip


def wrong_options(error: Refused) -> CliFailure:
    """A refusal of the scheduler, with the names of the command's options."""
    context, options = click.get_current_context(), dict[str, str]()
    set_by = _SET_BY | ({"payload": "command"} if context.params.get("command") else {})
    for parameter in context.command.params:
        name = str(parameter.name)
        if isinstance(parameter, click.Argument):
            options[name] = "CMD" if name == "command" else name.upper()
        else:
            options[name] = max(parameter.opts, key=len)

    arguments = {each.name for each in context.command.params if isinstance(each, click.Argument)}

    def option(word: re.Match[str]) -> str:
        if word.start() and word[0] in arguments:  # "cannot name a batch"
            return word[0]
        if word.string[word.end() : word.end() + 1] == ":":  # "batch:nightly"
            return word[0]
        return options.get(set_by.get(word[0], word[0])) or options.get(word[0], word[0])

    def named(text: str) -> str:
        return re.sub(r"[a-z_]+(\.[a-z_]+)?", option, text.removeprefix("job."))

    first, *others = [named(_problem(problem)) for problem in error.problems] or [str(error)]
    return CliFailure(first, WRONG, others, kind=error.code, problems=error.problems)


def _whose_token() -> str:
    file = os.environ.get("PENSTOCK_TOKEN_FILE")
    # pathlib is slow to import.
    if file and not os.environ.get("PENSTOCK_TOKEN") and not os.path.exists(file):  # noqa: PTH110
        return f"PENSTOCK_TOKEN_FILE names {file}, which does not exist"
    return "PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE names the token to use; `penstock token make` makes one"


#: Their hints mention fields of the HTTP answer, which are in the message of the command.
_TOLD_ALREADY: Final = frozenset({"bad_intent", "bad_fields", "illegal_move"})


def _hint(error: PenstockError) -> str:
    if error.data.get("field") == "name":  # the name of a schedule exists: the hint is about keys
        return ""
    if error.code == "queue_full":
        return f"Try again in {error.data.get('retry_after_sec') or 1:g} s."
    if error.data.get("move") == "retry" and error.data.get("state") in ("DONE", "CANCELED"):
        return "`penstock rerun JOB` submits a new job with the same request."
    return "" if error.code in _TOLD_ALREADY else getattr(error, "hint", "")


def _problem(problem: Any) -> str:
    return f"{problem['field']} {problem['message']}" if isinstance(problem, dict) else str(problem)
