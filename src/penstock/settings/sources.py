"""
Where values come from: a TOML file, then the environment, then flags; the later one wins. Here they are gathered as they are
written, each with its origin. Whether they are right is judged in one place, whatever their origin.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

__all__ = ["KeyPath", "SourceValue", "from_environ", "from_file", "from_flags"]

#: A tuple rather than words with dots between: the name of an addon may have a dot in it.
KeyPath: TypeAlias = tuple[str, ...]

PREFIX = "PENSTOCK_"


class SourceValue(NamedTuple):
    """A value as somebody wrote it, and where."""

    path: KeyPath
    value: Any
    source: str


def from_file(file: Path) -> Iterator[SourceValue]:
    """Every table and every value in it, outermost first; whoever knows the keys decides where to stop. OSError, ValueError."""
    raw = file.read_text("utf-8")
    lines = _lines(raw)
    yield from _walk(tomllib.loads(raw), (), file, lines)


def _walk(
    table: dict[str, Any], above: KeyPath, file: Path, lines: Mapping[KeyPath, int]
) -> Iterator[SourceValue]:
    for name, value in table.items():
        path = (*above, name)
        line = lines.get(path)
        yield SourceValue(path, value, f"{file}:{line}" if line else str(file))
        if isinstance(value, dict):
            yield from _walk(value, path, file, lines)


_HEADER = re.compile(r"\s*(\[[^\[\]]+\])\s*(?:#.*)?")
_LINE = re.compile(r"\s*([^=#]+?)\s*=")


def _lines(raw: str) -> dict[KeyPath, int]:
    """On which line each key stands. The parser knows and does not tell, so it is asked about each line by itself."""
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(raw.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            table = _key(header[1]) or table
            found.setdefault(table, number)
        elif assignment := _LINE.match(line):
            path = (*table, *_key(f"{assignment[1]} = 0"))
            for depth in range(len(table) + 1, len(path) + 1):
                found.setdefault(path[:depth], number)
    return found


def _key(line: str) -> KeyPath:
    try:
        inner: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    path: list[str] = []
    while isinstance(inner, dict) and inner:
        [(name, inner)] = inner.items()
        path.append(name)
    return tuple(path)


def from_environ(environ: Mapping[str, str], known: Mapping[str, KeyPath]) -> Iterator[SourceValue]:
    """
    `known`: what each variable sets. One that looks like a mistyped setting is passed on under its own name, to be refused;
    any other that begins like ours is somebody else's (the client's, the test suite's).
    """
    sections = {path[0] for path in known.values() if len(path) > 1}
    for name, value in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name in known:
            yield SourceValue(known[name], written(value), name)
            continue
        words = name.removeprefix(PREFIX).lower()
        head, _, rest = words.partition("_")
        if head in sections and rest:
            yield SourceValue((head, rest), value, name)


def from_flags(flags: Mapping[str, Any], known: Mapping[str, KeyPath]) -> Iterator[SourceValue]:
    """`{"leases.ttl": "10s"}`; text is read as in the environment, anything else is taken as it is."""
    for name, value in flags.items():
        path = known.get(name, tuple(name.split(".")))
        yield SourceValue(path, written(value) if isinstance(value, str) else value, f"--{name}")


def written(value: str) -> Any:
    """Text outside a file is a TOML value if it can be (4, true, [1, 2]), else the text itself (30s, 127.0.0.1:0)."""
    try:
        return tomllib.loads(f"it = {value}")["it"]
    except tomllib.TOMLDecodeError:
        return value
