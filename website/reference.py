"""The reference that is made from the code: public names, command line, HTTP routes, events, metrics, exit codes."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import click
import msgspec

import penstock
from penstock.cli import main as cli_main
from penstock.core.jobs.job import EventKind
from penstock.server.metrics import MetricsCollector
from penstock.server.routes import OPEN, ROUTES, Route
from penstock.wire import PREFIX

#: Groups of public names: the title, and the packages whose names it has.
GROUPS = {
    "Pools": ("penstock.pools",),
    "Flow control": ("penstock.flow",),
    "Graphs": ("penstock.graphs", "penstock.core.calls"),
    "Durable jobs in a program": ("penstock.library", "penstock.core.jobs"),
    "Inside a job function": ("penstock.work",),
    "A daemon's client and workers": ("penstock.client",),
    "Clusters": ("penstock.cluster",),
    "Telemetry": ("penstock.telemetry",),
    "Errors": ("penstock.core.errors",),
}


def pages() -> dict[str, str]:
    return {
        "reference/python.md": python(),
        "reference/cli.md": command_line(),
        "reference/http.md": http(),
        "reference/events.md": events(),
        "reference/metrics.md": metrics(),
        "reference/exit-codes.md": exit_codes(),
    }


def python() -> str:
    """Every public name with its docstring. A name without a group fails the build."""
    homes = penstock._home_of  # noqa: SLF001 - the one list of public names
    grouped: dict[str, list[str]] = defaultdict(list)
    for name in sorted(homes, key=str.lower):
        [title] = [title for title, packages in GROUPS.items() if homes[name].startswith(packages)]
        grouped[title].append(name)
    parts = ["# Python\n\nEvery public name, imported from `penstock`.\n"]
    for title in GROUPS:
        parts.append(f"## {title}\n")
        parts += [f"::: {homes[name]}.{name}\n" for name in grouped[title]]
    parts.append("## Tests of your own jobs\n")
    parts += [f"::: penstock.testing.virtual.{name}\n" for name in ("VirtualScheduler", "VirtualClock")]
    return "\n".join(parts)


def command_line() -> str:
    parts = [
        "# Command line\n\n`penstock VERB --help` prints the same. [The guide](../cli.md) has the rules for all verbs.\n"
    ]
    context = click.Context(cli_main.cli, info_name="penstock")
    for verb in cli_main.VERBS:
        command = cli_main.cli.get_command(context, verb)
        assert command is not None
        parts.extend(_command(command, click.Context(command, info_name=verb, parent=context), "##"))
    return "\n".join(parts)


def _command(command: click.Command, context: click.Context, heading: str) -> Iterator[str]:
    yield f"{heading} {context.command_path.removeprefix('penstock ')}\n"
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{context.command_path} {usage}\n```\n"
    if command.help:
        yield inspect.cleandoc(command.help).replace("\b", "") + "\n"
    rows = [
        record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))
    ]
    if rows:
        yield "| option | meaning |\n|---|---|"
        yield "".join(
            f"| <code>{_cell(option)}</code> | {_cell(about)} |\n" for option, about in rows if about
        )
    if command.epilog:
        examples = inspect.cleandoc(command.epilog.replace("\b\nExamples:\n", "\n"))
        yield f"```text\n{examples}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=name, parent=context), heading + "#")


def _cell(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "&#124;").replace("\n", " ")


def http() -> str:
    intro = (
        "Every route with the fields of its query, body and answer. [The guide](../http.md) shows how a job goes "
        f"through them; `GET {PREFIX}/openapi.json` is the same for programs. All paths but the last two are below "
        f"`{PREFIX}`."
    )
    parts = [f"# HTTP\n\n{intro}\n"]
    for route in ROUTES:
        scope = "no token" if route.scope is OPEN else f"`{route.scope}`"
        parts.append(
            f"## {route.verb} {route.path.removeprefix(PREFIX)}\n\n{route.summary}. Needs {scope}.\n"
        )
        parts += [_fields(what, kind) for what, kind in _types(route)]
    return "\n".join(parts)


def _types(route: Route) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for what, kind in (("Query", route.query), ("Body", route.body), ("Answer", route.answer)):
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield what, kind


def _fields(what: str, kind: type[msgspec.Struct]) -> str:
    rows = [f"**{what}**: `{kind.__name__}`\n\n| field | type | default |\n|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        default = "required" if field.required else _default(field.default)
        rows.append(f"| `{field.encode_name}` | <code>{_cell(_type(field.type))}</code> | {default} |")
    return "\n".join(rows) + "\n"


def _default(value: Any) -> str:
    if value is msgspec.NODEFAULT or isinstance(value, msgspec.UnsetType):
        return ""
    return f"<code>{_cell(msgspec.json.encode(value).decode())}</code>"


def _type(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    text = re.sub(r",? ?msgspec\.Meta\([^()]*\)", "", text)
    text = re.sub(r"typing\.Annotated\[([\w.]+)\]", r"\1", text)
    return re.sub(r"\b(?:[a-z_]+\.)+([A-Za-z])", r"\1", text)


#: Where the class has no comment, because the name says it to a reader of the code.
EVENTS = {
    "SUBMITTED": "the job is on disk",
    "ARRAY_SUBMITTED": "an array of jobs is on disk",
    "DENIED": "the job may not start now; the reason says why",
    "DISPATCHING": "an attempt has its units and waits for its worker",
    "RUNNING": "the worker has started",
    "CHECKPOINT": "a checkpoint was saved",
    "STOP_REQUESTED": "the attempt was asked to stop",
    "PREEMPT_REQUESTED": "the attempt was asked to yield to a job of higher priority",
    "REQUEUED": "the attempt ended and the job waits again; the reason says why",
    "TIMEOUT": "a limit of time has passed",
    "DONE": "the job is done",
    "FAILED": "the job has failed for good",
    "CANCELED": "the job was canceled",
    "BLOCKED": "the job waits for a person",
    "RETRIED": "a person queued the job again",
    "EDITED": "a person changed the job's priority or times",
    "ALERT": "an alert for the owner",
    "ADDON_SET": "an operator set weight or budget of an addon, or paused or resumed it",
    "CLOCK_SHIFTED": "the wall clock was set; leases and delays moved with it",
    "PRUNED": "old jobs were deleted",
    "TOKEN_MADE": "a token was made",
    "TOKEN_REVOKED": "a token was revoked",
}


def events() -> str:
    rows = [
        "# Events\n\nEvery kind of event in the trail: `penstock events`, `GET /events`, `job.events()`.\n"
    ]
    rows.append("| kind | meaning |\n|---|---|")
    comments = _comments(inspect.getsource(EventKind))
    for kind in EventKind:
        meaning = EVENTS.get(kind.name) or comments.get(kind.name)
        if not meaning:
            raise LookupError(f"EventKind.{kind.name} needs a comment in core/jobs/job.py: what happened?")
        rows.append(f"| `{kind}` | {_cell(meaning)} |")
    return "\n".join(rows) + "\n"


def _comments(source: str) -> dict[str, str]:
    """The comment of each member, on its line or inside of its parentheses."""
    found = re.findall(r'^    ([A-Z_]+) = \(?\s*"[A-Z_]+"[ ]*(?:# (.*))?$', source, re.MULTILINE)
    return {name: comment for name, comment in found if comment and not comment.startswith("noqa")}


def metrics() -> str:
    """From the source of the collector: a metric has a name and a sentence there, side by side."""
    source = inspect.getsource(inspect.getmodule(MetricsCollector))  # type: ignore[arg-type]
    names = sorted(set(re.findall(r'"(penstock_\w+)"', source)))
    intro = (
        "`GET /metrics`, with a token that has `metrics:read`. [Telemetry](../telemetry.md#the-daemon) has a board "
        "and alert rules for them; [Autoscale](../how-to/autoscale.md) scales workers by them."
    )
    rows = [f"# Metrics\n\n{intro}\n"]
    rows.append("| metric | meaning |\n|---|---|")
    rows += [f"| `{name}` | {_cell(about)} |" for name, about in _descriptions(source, names)]
    return "\n".join(rows) + "\n"


def _descriptions(source: str, names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        at = source.index(f'"{name}"')
        direct = re.match(rf'"{name}",\s*"([^"]+)"', source[at:])
        before = re.findall(r'about = \(?\s*f?"([^"]+)"(?:\s*f?"([^"]+)")?', source[:at])
        yield name, direct[1] if direct else "".join(before[-1]) if before else ""


def exit_codes() -> str:
    table = inspect.cleandoc(cli_main.__doc__ or "")
    return f"# Exit codes\n\n```text\n{table}\n```\n\n[The command line](../cli.md#exit-codes) says more.\n"
