"""
Every sentence that a user can meet, on one page for reading: `make texts` writes build/texts.md.

The page has the help of every verb, the errors (read from the sources: the text of each `raise`, `fail` and `echo(err=True)`), the
hints of HTTP problems, the sentences of explain, and the strings of the web page. `{...}` stands for a value.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from penstock.cli.main import VERBS, cli
from penstock.server.problems import HINTS
from penstock.settings.reading import table
from tests import ROOT, SOURCES

PACKAGE = SOURCES / "penstock"
WIDTH = 100
#: Packages whose errors a user of the daemon, the command or the library can see.
WITH_ERRORS = ["cli", "server", "settings", "core", "scheduler", "client", "library", "runner", "stores", "daemon", "alerts"]  # fmt: skip
#: Functions whose first argument is an error text.
ERROR_CALLS = {"fail", "UsageError", "BadParameter", "ClickException", "_refuse", "_gave_up"}
EXPLAIN = ["core/jobs/explain.py", "core/jobs/reasons.py"]


def help_pages() -> dict[str, str]:
    """`penstock run`: its help. Groups have a page, and so has each verb in them."""
    pages = {}

    def add(command: click.Command, name: str, parent: click.Context | None) -> None:
        context = click.Context(
            command, parent, info_name=name.rsplit(maxsplit=1)[-1], max_content_width=WIDTH, show_default=True
        )
        context.terminal_width = WIDTH
        pages[name] = command.get_help(context)
        if isinstance(command, click.Group):
            for verb in command.list_commands(context):
                inner = command.get_command(context, verb)
                assert inner is not None
                add(inner, f"{name} {verb}", context)

    add(cli, "penstock", None)
    return pages


def error_texts(package: str) -> list[tuple[str, str]]:
    """(file, text) of each error that the package raises or prints."""
    texts = []
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(call, ast.Call) and (isinstance(node, ast.Raise) or _is_error(call)):
                name = str(path.relative_to(PACKAGE))
                texts += [(name, text) for argument in call.args for text in _sentences(argument)]
    return list(dict.fromkeys(texts))


def _is_error(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ERROR_CALLS or (name == "echo" and any(word.arg == "err" for word in call.keywords))


def explain_texts() -> list[tuple[str, str]]:
    texts = []
    for name in EXPLAIN:
        tree = ast.parse((PACKAGE / name).read_text("utf-8"))
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and isinstance(node.body[0], ast.Expr)
        }
        inner = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        texts += [
            (name, text)
            for node in ast.walk(tree)
            if id(node) not in docstrings | inner and isinstance(node, ast.Constant | ast.JoinedStr)
            for text in _sentences(node)
        ]
    return list(dict.fromkeys(texts))


def _sentences(node: ast.expr) -> Iterator[str]:
    text = _text(node)
    if len(re.findall(r"[a-z]{2,}", text)) > 1 and " " in text:
        yield " ".join(text.split())


def _text(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(_text(part) if isinstance(part, ast.Constant) else "{...}" for part in parts)
        case ast.BinOp(left, ast.Add(), right):
            return _text(left) + _text(right)
        case ast.IfExp(_, body, orelse):
            return _text(body) or _text(orelse)
        case _:
            return "{...}" if node is not None else ""


_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`', re.DOTALL)
_BETWEEN_TAGS = re.compile(r">([^<>{}`$]*[A-Za-z]{2,}[^<>{}`$]*)<")
_ATTRIBUTE = re.compile(r'(?:title|placeholder|label|aria-label|empty|text)="([^"$]*[a-z]{2,}[^"$]*)"')


def page_texts() -> list[tuple[str, str]]:
    """(file, text): text between tags, attributes that are shown, and strings that read like a sentence."""
    texts = []
    static = PACKAGE / "web" / "static"
    for path in [static / "index.html", *sorted((static / "js").rglob("*.js"))]:
        source = re.sub(r"^\s*//.*$|(?<=[;{},]) //.*$", "", path.read_text("utf-8"), flags=re.MULTILINE)
        name = str(path.relative_to(static))
        texts += [(name, found[1]) for found in _BETWEEN_TAGS.finditer(source) if "=>" not in found[1]]
        texts += [(name, found[1]) for found in _ATTRIBUTE.finditer(source)]
        for found in _STRING.finditer(source):
            text = re.sub(r"\$\{[^{}]*\}", "{...}", found[1] or found[2] or "")
            if re.match(r"[A-Z{]?[a-z0-9.}]*[,:]? [A-Za-z{(]", text) and not re.search(
                r"[<>=;]|\bvar\(|\d+px", text
            ):
                texts.append((name, text))
    return [(name, " ".join(text.split())) for name, text in dict.fromkeys(texts)]


def page() -> str:
    lines = ["# Every sentence that a user can meet", "", "## Help", ""]
    for name, text in help_pages().items():
        lines += [f"### {name}", "", "```", *(line.rstrip() for line in text.splitlines()), "```", ""]
    lines += ["## Problems of the HTTP API", ""]
    for code, (title, hint) in HINTS.items():
        lines += _bullet(f"{code}: {title}. {hint}")
    for package in WITH_ERRORS:
        lines += _listed(f"## Errors of {package}", error_texts(package))
    lines += _listed("## Explain", explain_texts())
    lines += ["## Settings", ""]
    for row in table().splitlines()[2:]:
        key, _, may_be, doc = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:5])
        lines += _bullet(f"{key}: {doc}. Must be {may_be}.")
    lines += _listed("## The page", page_texts())
    return "\n".join(lines).rstrip() + "\n"


def _listed(title: str, texts: list[tuple[str, str]]) -> list[str]:
    lines = ["", title]
    last = ""
    for name, text in texts:
        if name != last:
            lines += ["", f"`{name}`", ""]
        last = name
        lines += _bullet(text)
    return [*lines, ""]


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(
        text, 108, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "texts.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(), "utf-8")
    sys.stdout.write(f"{file}: {len(VERBS)} verbs\n")


if __name__ == "__main__":
    main()
