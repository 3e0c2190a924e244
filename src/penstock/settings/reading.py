"""
Reads settings (`load`) from a TOML file, the environment and flags, where the later one wins; lists them
(`describe`, `table`).

The keys, their kinds and their descriptions come from the annotations and docstrings of `Settings`. Settings
are checked as a whole: `BadSettings` has every problem with its key, its origin (file and line, variable or
flag) and a correction.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from penstock.client.transport import config_file, data_dir
from penstock.core.errors import PenstockError
from penstock.settings.checks import contradictions
from penstock.settings.kinds import Kind, convert, kind_of
from penstock.settings.settings import AddonSettings, KeyPath, Settings
from penstock.stores.opening import shown


class Key(NamedTuple):
    """One setting: its type, the kind of its values, and its description."""

    hint: Any
    kind: Kind
    doc: str


def _keys(section: type, above: KeyPath = ()) -> Iterator[tuple[KeyPath, Key]]:
    docs = dict(re.findall(r"^(\w+): (.+(?:\n    .+)*)", inspect.getdoc(section) or "", re.MULTILINE))
    for name, hint in get_type_hints(section, include_extras=True).items():
        path = (*above, name)
        if name == "addons":
            yield from _keys(AddonSettings, (*path, "*"))
        elif isinstance(hint, type) and issubclass(hint, Struct):
            yield from _keys(hint, path)
        elif name != "sources":
            yield path, Key(hint, kind_of(hint), " ".join(docs.get(name, "").split()))


#: Every key, in the order of the documentation. `*` stands for the name of an addon.
KEYS: dict[KeyPath, Key] = dict(_keys(Settings))


def general(path: KeyPath) -> KeyPath:
    """The path with `*` in place of an addon, as in `KEYS`."""
    return (path[0], "*", *path[2:]) if path[0] == "addons" and len(path) > 1 else path


def key_at(path: KeyPath) -> Key:
    return KEYS[general(path)]


def dotted(path: KeyPath) -> str:
    return ".".join(
        part if part.replace("_", "").replace("-", "").isalnum() else f'"{part}"' for part in path
    )


class Setting(NamedTuple):
    """One line of the listing. `value`: as in a file."""

    key: str
    value: str
    source: str
    doc: str


def describe(settings: Settings) -> list[Setting]:
    """Every setting with its value and its source, in the order of the documentation."""
    paths = [path for path in KEYS if "*" not in path]
    paths += [(path[0], name, *path[2:]) for path in KEYS if "*" in path for name in settings.addons]
    return [
        Setting(dotted(path), _shown(settings, path), settings.sources.get(path, "default"), key_at(path).doc)
        for path in paths
    ]


def _shown(settings: Settings, path: KeyPath) -> str:
    value: Any = settings
    for part in path:
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return key_at(path).kind.show(value)


def table() -> str:
    """The rows of `docs/settings.md`; a test fails when they differ."""
    defaults = Settings(addons={"NAME": AddonSettings()})
    rows = ["| setting | default | may be | what it is for |", "|---|---|---|---|"]
    for path, key in KEYS.items():
        named = tuple("NAME" if part == "*" else part for part in path)
        default = "XDG" if path == ("data_dir",) else _shown(defaults, named)
        cells = [f"`{'.'.join(named)}`", default, key.kind.words, key.doc]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


_PREFIX = "PENSTOCK_"
_PLAIN = [path for path in KEYS if "*" not in path]
_DOTTED: dict[str, KeyPath] = {".".join(path): path for path in _PLAIN}
_VARIABLES: dict[str, KeyPath] = {_PREFIX + "_".join(path).upper(): path for path in _PLAIN}
#: Settings that are tables. A flag may also set one entry of them: `caps.types.mail/send=2`.
_TABLES = {path for path in _PLAIN if get_origin(KEYS[path].hint) is Mapping}
_SECTIONS = {path[:depth] for path in KEYS for depth in range(1, len(path))}


class SettingProblem(NamedTuple):
    key: str
    source: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key} ({self.source}): {self.message}; {self.fix}"


class BadSettings(PenstockError, ValueError):
    """Settings are wrong. `problems` has all problems, so that all can be corrected before the next start."""

    code = "bad_settings"


def load(
    file: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """
    `file`: a TOML file that must exist. Without it PENSTOCK_CONFIG names the file, and without that the file
    in the XDG configuration directory is read if it exists.
    """
    environ = os.environ if environ is None else environ
    reader = _Reader(environ)
    reader.take_file(file)
    reader.take(_from_environ(environ))
    reader.take(_from_flags(flags or {}))
    return reader.settings()


class _Written(NamedTuple):
    """A value as it was written, and its origin."""

    path: KeyPath
    value: Any
    source: str


def _from_file(file: Path) -> Iterator[_Written]:
    """The tables and values of a file, outermost first. Raises OSError or ValueError."""
    raw = file.read_text("utf-8")
    lines = _lines(raw)

    def walk(table: dict[str, Any], above: KeyPath) -> Iterator[_Written]:
        for name, value in table.items():
            path = (*above, name)
            yield _Written(path, value, f"{file}:{lines[path]}" if path in lines else str(file))
            if isinstance(value, dict):
                yield from walk(value, path)

    yield from walk(tomllib.loads(raw), ())


_HEADER = re.compile(r"\s*(\[[^\[\]]+\])\s*(?:#.*)?")
_LINE = re.compile(r"\s*([^=#]+?)\s*=")


def _lines(raw: str) -> dict[KeyPath, int]:
    """The line of each key. tomllib reports no lines, so each line's key is parsed by itself."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(raw.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            table = _key(header[1]) or table
            lines.setdefault(table, number)
        elif assignment := _LINE.match(line):
            path = (*table, *_key(f"{assignment[1]} = 0"))
            for depth in range(len(table) + 1, len(path) + 1):
                lines.setdefault(path[:depth], number)
    return lines


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


def _from_environ(environ: Mapping[str, str]) -> Iterator[_Written]:
    """
    The settings in the environment. A variable that looks like a misspelt setting is included, so that it is
    refused; all others belong to the client or the tests.
    """
    for name, value in environ.items():
        if name in _VARIABLES:
            yield _Written(_VARIABLES[name], _parsed(value), name)
        elif name.startswith(_PREFIX):
            section, _, rest = name.removeprefix(_PREFIX).lower().partition("_")
            if (section,) in _SECTIONS and rest:
                yield _Written((section, rest), value, name)


def _from_flags(flags: Mapping[str, Any]) -> Iterator[_Written]:
    """The settings in flags, such as `{"leases.ttl": "10s"}`. Text is parsed as in the environment."""
    for name, value in flags.items():
        yield _Written(_flag_path(name), _parsed(value) if isinstance(value, str) else value, "--set")


def _flag_path(name: str) -> KeyPath:
    """The path of a key in a flag. The name of an addon, and that of an entry of a table, may contain dots."""
    parts = tuple(name.split("."))
    if name in _DOTTED:
        return _DOTTED[name]
    if parts[0] == "addons" and len(parts) > 3:
        return ("addons", ".".join(parts[1:-1]).strip('"'), parts[-1])
    if parts[:2] in _TABLES and len(parts) > 2:
        return (*parts[:2], ".".join(parts[2:]).strip('"'))
    return parts


def _parsed(value: str) -> Any:
    """
    Parse a text outside a file: as a TOML value if possible (4, true, [1, 2]), else it is the text itself
    (30s, 127.0.0.1:0).
    """
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        #: The values, prepared for msgspec and nested like `Settings`.
        self._values: dict[str, Any] = {"data_dir": str(data_dir(environ))}
        self._sources: dict[KeyPath, str] = {}
        self._problems: list[SettingProblem] = []

    def take_file(self, file: Path | str | None) -> None:
        named = file or self._environ.get(f"{_PREFIX}CONFIG")
        path = Path(named) if named else config_file(self._environ)
        if named is None and not path.exists():
            return
        try:
            self.take(list(_from_file(path)))
        except OSError as error:
            self._refuse("config", str(path), f"cannot be read ({error.strerror})", "name a readable file")
        except ValueError as error:
            self._refuse("config", str(path), f"is not TOML: {error}", "correct that line")

    def take(self, written: Iterable[_Written]) -> None:
        done: KeyPath | None = None
        for path, value, source in written:
            if done is not None and path[: len(done)] == done:
                continue  # inside a table that counts as one value, or was refused as a whole
            done = None
            if general(path) in KEYS:
                done = path
                self._read(path, value, source)
            elif path[:2] in _TABLES:
                entries = self._table(path[:1]).get(path[1], {})
                self._read(path[:2], {**entries, path[2]: value}, source)
            elif general(path) not in _SECTIONS:
                done = path
                self._refuse(dotted(path), source, "is not a setting", _nearest(path, source))
            elif not isinstance(value, dict):
                self._refuse(dotted(path), source, f"is {value!r}", "must be a table of settings")
            else:
                self._table(path)

    def _read(self, path: KeyPath, value: Any, source: str) -> None:
        key = key_at(path)
        # A flag names its key directly; a file has tables above it.
        table = self._table(path[:-1])
        try:
            prepared = key.kind.prepare(value)
            convert(prepared, key.hint)
        except (msgspec.ValidationError, ValueError, TypeError, AttributeError, LookupError, OverflowError):
            self._refuse(dotted(path), source, f"is {_brief(value)}", f"must be {key.kind.words}")
        else:
            table[path[-1]] = prepared
            self._sources[path] = source

    def _table(self, path: KeyPath) -> dict[str, Any]:
        table = self._values
        for part in path:
            table = table.setdefault(part, {})
        return table

    def settings(self) -> Settings:
        settings: Settings = msgspec.structs.replace(convert(self._values, Settings), sources=self._sources)
        for paths, message, fix in contradictions(settings):
            # Of contradicting keys report one that was set: the others are defaults.
            path = next((path for path in paths if path in self._sources), paths[0])
            self._refuse(dotted(path), self._sources.get(path, "default"), message, fix)
        if self._problems:
            lines = "\n".join(f"  {problem}" for problem in self._problems)
            count = f"{len(self._problems)} problem" + ("s" if len(self._problems) > 1 else "")
            raise BadSettings(f"{count} in the settings:\n{lines}", problems=self._problems)
        return settings

    def _refuse(self, key: str, source: str, message: str, fix: str) -> None:
        self._problems.append(SettingProblem(key, source, message, fix))


def _nearest(path: KeyPath, source: str) -> str:
    names = [".".join(path) for path in (*KEYS, *_SECTIONS)]
    near = difflib.get_close_matches(".".join(general(path)), names, n=1, cutoff=0.5)
    if near and general(path)[: near[0].count(".") + 1] == tuple(near[0].split(".")):
        return f"{near[0]} has: {', '.join(key[-1] for key in KEYS if '.'.join(key[:-1]) == near[0])}"
    if not near:
        return "remove it; `penstock settings` lists all settings"
    name = near[0].replace("*", path[1] if len(path) > 1 else "NAME")
    if source.startswith(_PREFIX):
        name = _PREFIX + name.replace(".", "_").upper()
    return f"did you mean {name}?"


def _brief(value: object, most: int = 80) -> str:
    words = shown(repr(value))  # a mistyped address may hold a password too
    return words if len(words) <= most else words[: most - 3] + "..."
