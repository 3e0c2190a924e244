"""
How a bug is planted: found by function and syntax, not by text.

A planted bug names a file, a function in it, and a piece of code (`old`). The code matches where its tokens stand in that
function, whatever the white space and the comments. If names or strings were changed since, the code still matches as long as
one consistent renaming explains all differences, most tokens are the same, and only one place in the function fits; the same
renaming is then applied to `new`. A part of a string is matched as text. So a planted bug survives a rename, a new layout and a reworded message, and a changed algorithm is an error.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Mutant", "NotPlanted", "function_span", "plant"]


class Mutant(NamedTuple):
    name: str
    file: str  # below src
    function: str  # qualified name in that file; empty: the whole file
    old: str
    new: str
    tests: tuple[str, ...]


class NotPlanted(Exception):
    """The code of a planted bug is not in its function, or more than once."""


class Token(NamedTuple):
    text: str
    start: int
    end: int


_TOKEN = re.compile(
    r'''(?P<string>[rbfuRBFU]{0,2}(?:"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'))'''
    r"""|(?P<comment>\#[^\n]*)|(?P<name>[A-Za-z_]\w*)|(?P<number>\d[\w.]*)|(?P<other>\S)""",
    re.DOTALL,
)
_FIXED = {*keyword.kwlist, "match", "case", "self", "cls", *dir(builtins)}


def tokens_of(text: str) -> list[Token]:
    """Without comments. Works on fragments of code, and well enough on SQL and JavaScript."""
    return [
        Token(found.group(), found.start(), found.end())
        for found in _TOKEN.finditer(text)
        if found.lastgroup != "comment"
    ]


def is_free(token: str) -> bool:
    """Whether a rename may have changed it: a name of our own, or a string."""
    return (token[0].isalpha() or token[0] in "_\"'") and token not in _FIXED


def function_span(source: str, function: str) -> tuple[int, int]:
    """Where the function (or class) begins and ends, decorators included; the whole source for an empty name."""
    if not function:
        return 0, len(source)
    scope: list[ast.stmt] = ast.parse(source).body
    node: ast.stmt | None = None
    for name in function.split("."):
        node = next((one for one in _named(scope) if one.name == name), None)
        if node is None:
            raise NotPlanted(f"there is no {function}")
        scope = node.body
    assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[: node.end_lineno]))


def _named(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _named([*node.body, *getattr(node, "orelse", [])])


def plant(source: str, mutant: Mutant) -> str:
    """The source with the bug in it."""
    begin, end = function_span(source, mutant.function)
    pattern, code = tokens_of(mutant.old), tokens_of(source[begin:end])
    exact = [at for at in range(len(code)) if _renaming(pattern, code[at : at + len(pattern)]) == {}]
    places = exact or [
        at for at in range(len(code)) if _renaming(pattern, code[at : at + len(pattern)]) is not None
    ]
    if not places and source.count(mutant.old, begin, end) == 1:  # a part of a string, which is one token
        return source[:begin] + source[begin:end].replace(mutant.old, mutant.new) + source[end:]
    if len(places) != 1:
        raise NotPlanted(f"its code is {len(places)} times in {mutant.function or mutant.file}")
    matched = code[places[0] : places[0] + len(pattern)]
    renaming = _renaming(pattern, matched) or {}
    start, stop = begin + matched[0].start, begin + matched[-1].end
    return source[:start] + _replacement(mutant, pattern, renaming, _indent_at(source, start)) + source[stop:]


def _renaming(pattern: list[Token], code: list[Token]) -> dict[str, str] | None:
    """The renaming that makes the pattern this code: empty if they are equal, None if there is none."""
    if len(pattern) != len(code):
        return None
    renaming: dict[str, str] = {}
    for expected, actual in zip(pattern, code, strict=True):
        if is_free(expected.text) and is_free(actual.text):
            if _is_string(expected.text) != _is_string(actual.text):
                return None
            if renaming.setdefault(expected.text, actual.text) != actual.text:
                return None
        elif expected.text != actual.text:
            return None
    changed = {old: new for old, new in renaming.items() if old != new}
    same = sum(expected.text == actual.text for expected, actual in zip(pattern, code, strict=True))
    is_renamed = len(set(renaming.values())) == len(renaming) and same * 2 > len(code)
    return changed if is_renamed else None


def _is_string(token: str) -> bool:
    return token[-1] in "\"'"


def _replacement(mutant: Mutant, pattern: list[Token], renaming: dict[str, str], indent: int) -> str:
    """The new code for the place: without the white space around the old, renamed, and indented as the place is."""
    lead, trail = mutant.old[: pattern[0].start], mutant.old[pattern[-1].end :]
    new = mutant.new.removeprefix(lead).removesuffix(trail)
    if renaming:
        pieces, last = [], 0
        for token in tokens_of(new):
            pieces += [new[last : token.start], renaming.get(token.text, token.text)]
            last = token.end
        new = "".join([*pieces, new[last:]])
    shift = (
        indent - len(lead.rpartition("\n")[2]) if lead else 0
    )  # code that begins within a line stands as it is
    first, *others = new.split("\n")
    moved = [
        " " * shift + line
        if shift > 0 and line.strip()
        else line[min(-shift, len(line)) :]
        if shift < 0
        else line
        for line in others
    ]
    return "\n".join([first, *moved])


def _indent_at(text: str, position: int) -> int:
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return len(line) - len(line.lstrip())
