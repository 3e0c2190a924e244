"""Where values come from: a TOML file, then the environment, then flags; the later one wins. Here they are gathered as they are
written, each with its origin. Whether they are right is judged in one place, whatever their origin.

Settings, read and checked as a whole: either all of them are right, or every problem is told at once with its key, its
origin and what to write instead.
"""

#: A tuple rather than words with dots between: the name of an addon may have a dot in it.
from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from penstock.client.transport import config_file, data_dir
from penstock.core.errors import PenstockError
from penstock.core.jobs.outbound import refusal
from penstock.scheduler.users import account, missing_capabilities
from penstock.settings.kinds import SettingKind
from penstock.settings.sections import AddonSettings
from penstock.settings.tree import Tree
from penstock.stores.opening import shown

__all__ = [
    "BadSettings",
    "KeyPath",
    "Setting",
    "SettingProblem",
    "Settings",
    "SourceValue",
    "from_environ",
    "from_file",
    "from_flags",
    "load",
    "table",
]

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


class SettingProblem(NamedTuple):
    key: str
    source: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key} ({self.source}): {self.message}; {self.fix}"


class BadSettings(PenstockError, ValueError):
    """`problems`: all of them, so that one more start is enough."""

    code = "bad_settings"


class Setting(NamedTuple):
    """One line of the listing. `value` is written as a file would have it."""

    key: str
    value: str
    source: str
    doc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Tree):
    #: Where each value that is not a default came from.
    sources: Mapping[KeyPath, str]

    def describe(self) -> list[Setting]:
        names: list[KeyPath] = list(_SCHEMA)
        for path in _SCHEMA:
            if "*" in path:
                names.remove(path)
                names += [(path[0], name, *path[2:]) for name in self.addons]
        return [
            Setting(_dotted(path), _shown(self, path), self.sources.get(path, "default"), _schema(path).doc)
            for path in names
        ]


def load(
    file: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """
    `file`: a TOML file that must be there. Without one PENSTOCK_CONFIG names it, and without that the file in the XDG
    configuration directory is read if it exists.
    """
    environ = os.environ if environ is None else environ
    reader = _Reader(environ)
    reader.take_file(file)
    reader.take(from_environ(environ, _VARIABLES))
    reader.take(from_flags(flags or {}, _DOTTED))
    return reader.settings()


class Key(NamedTuple):
    kind: SettingKind[Any]
    doc: str


def _keys(tree: type, above: KeyPath = ()) -> Iterator[tuple[KeyPath, Key]]:
    for field in fields(tree):
        told, path = field.metadata, (*above, field.name)
        if "kind" in told:
            yield path, Key(told["kind"], told["doc"])
        elif "section" in told:
            yield from _keys(told["section"], path)
        elif "each" in told:
            yield from _keys(told["each"], (*path, "*"))


_SCHEMA: dict[KeyPath, Key] = dict(_keys(Tree))
_PLAIN = [path for path in _SCHEMA if "*" not in path]
_DOTTED: dict[str, KeyPath] = {".".join(path): path for path in _PLAIN}
_VARIABLES: dict[str, KeyPath] = {PREFIX + "_".join(path).upper(): path for path in _PLAIN}
_SECTIONS = {path[:depth] for path in _SCHEMA for depth in range(1, len(path))}


def _general(path: KeyPath) -> KeyPath:
    """The path as the schema has it: the name of an addon is any name."""
    return (path[0], "*", *path[2:]) if path[0] == "addons" and len(path) > 1 else path


def _schema(path: KeyPath) -> Key:
    return _SCHEMA[_general(path)]


def _dotted(path: KeyPath) -> str:
    return ".".join(
        part if part.replace("_", "").replace("-", "").isalnum() else f'"{part}"' for part in path
    )


def _shown(settings: Tree, path: KeyPath) -> str:
    value: Any = settings
    for part in path:
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return _schema(path).kind.show(value)


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._values: dict[KeyPath, Any] = {}
        self._sources: dict[KeyPath, str] = {}
        self._addons: dict[str, None] = {}
        self._problems: list[SettingProblem] = []

    def take_file(self, file: Path | str | None) -> None:
        named = file or self._environ.get(f"{PREFIX}CONFIG")
        path = Path(named) if named else config_file(self._environ)
        if named is None and not path.exists():
            return
        try:
            self.take(list(from_file(path)))
        except OSError as error:
            self._problem(
                "config", str(path), f"cannot be read ({error.strerror})", "name a file that can be read"
            )
        except ValueError as error:
            self._problem("config", str(path), f"is not TOML: {error}", "mend that line")

    def take(self, given: Iterator[SourceValue] | list[SourceValue]) -> None:
        """A key is a key, or leads to one: what lies below a table that holds one value is that value's business."""
        stop: KeyPath | None = None
        for path, value, source in given:
            if stop is not None and path[: len(stop)] == stop:
                continue
            stop, general = None, _general(path)
            # A flag names its key at once, without the table that a file has above it.
            if general != path and general in (*_SCHEMA, *_SECTIONS):
                self._addons[path[1]] = None
            if general in _SCHEMA:
                stop = path
                self._read(path, value, source)
            elif general not in _SECTIONS:
                stop = path
                self._problem(_dotted(path), source, "is not a setting", _nearest(path, source))
            elif not isinstance(value, dict):
                self._problem(_dotted(path), source, f"is {value!r}", "must be a table of settings")

    def _read(self, path: KeyPath, value: Any, source: str) -> None:
        kind = _schema(path).kind
        try:
            self._values[path] = kind.read(value)
        except (ValueError, TypeError, OverflowError):
            self._problem(_dotted(path), source, f"is {_brief(value)}", f"must be {kind.words}")
        else:
            self._sources[path] = source

    def settings(self) -> Settings:
        if ("data_dir",) not in self._values:
            self._values["data_dir",] = data_dir(self._environ)
        tree = self._build(Tree, ())
        settings = Settings(**tree, sources=self._sources)
        for keys, message, fix in contradictions(settings):
            # Of keys that do not go together the one that somebody wrote is the one to change.
            key = next((key for key in keys if key in self._sources), keys[0])
            self._problem(_dotted(key), self._sources.get(key, "default"), message, fix)
        if self._problems:
            lines = "\n".join(f"  {problem}" for problem in self._problems)
            count = f"{len(self._problems)} problem" + ("s" if len(self._problems) > 1 else "")
            raise BadSettings(f"{count} in the settings:\n{lines}", problems=self._problems)
        return settings

    def _build(self, tree: type, above: KeyPath) -> dict[str, Any]:
        """Only what was given: the rest are the defaults of the tree."""
        built: dict[str, Any] = {}
        for field in fields(tree):
            told, path = field.metadata, (*above, field.name)
            if "section" in told:
                built[field.name] = told["section"](**self._build(told["section"], path))
            elif "each" in told:
                built[field.name] = {
                    name: told["each"](**self._build(told["each"], (*path, name))) for name in self._addons
                }
            elif path in self._values:
                built[field.name] = self._values[path]
        return built

    def _problem(self, key: str, source: str, message: str, fix: str) -> None:
        self._problems.append(SettingProblem(key, source, message, fix))


def _nearest(path: KeyPath, source: str) -> str:
    names = [".".join(known) for known in (*_SCHEMA, *_SECTIONS)]
    near = difflib.get_close_matches(".".join(_general(path)), names, n=1, cutoff=0.5)
    if not near:
        return "remove it; `docs/settings.md` lists what there is"
    name = near[0].replace("*", path[1] if len(path) > 1 else "NAME")
    if source.startswith(PREFIX):
        name = PREFIX + name.replace(".", "_").upper()
    return f"did you mean {name}?"


def _brief(value: object, most: int = 80) -> str:
    words = shown(repr(value))  # what is not an address that we know may be meant as one
    return words if len(words) <= most else words[: most - 3] + "..."


def _users(users: Mapping[str, str]) -> Iterator[tuple[tuple[KeyPath, ...], str, str]]:
    """Refused before anything runs: a job that ran as the wrong user could not be undone."""
    others = False
    for addon, name in users.items():
        try:
            others |= account(name).uid != os.geteuid()
        except KeyError:
            message = f"names the user {name!r} for addon {addon!r}, which this machine does not have"
            yield (("runner", "users"),), message, f"create it (`useradd --system {name}`) or name another"
    if others and (missing := missing_capabilities()):
        message = f"needs to switch users, which this process may not: it lacks {', '.join(missing)}"
        fix = "run the daemon as root, or by the systemd unit with the drop-in for runner.users (ops/)"
        yield (("runner", "users"),), message, fix


def contradictions(settings: Tree) -> Iterator[tuple[tuple[KeyPath, ...], str, str]]:
    """What no value shows alone: (keys, message, fix)."""
    capacity, quiet, server = settings.capacity, settings.quiet, settings.server
    if capacity.reserve >= capacity.total:
        keys: tuple[KeyPath, ...] = (("capacity", "reserve"), ("capacity", "total"))
        yield keys, "leaves no units for jobs", "let capacity.reserve be below capacity.total"
    if not quiet.quiet < quiet.normal < quiet.busy:
        keys = (("quiet", "quiet"), ("quiet", "normal"), ("quiet", "busy"))
        yield keys, "does not rise", "let quiet.quiet be below quiet.normal, and that below quiet.busy"
    if quiet.fresh_for < quiet.every:
        keys = (("quiet", "fresh_for"), ("quiet", "every"))
        yield keys, "is stale before the next one is taken", "let quiet.fresh_for be at least quiet.every"
    runner, leases = settings.runner, settings.leases
    if runner.enabled and leases.grace < runner.cancel_grace + runner.term_grace:
        keys = (("leases", "grace"), ("runner", "cancel_grace"), ("runner", "term_grace"))
        yield (
            keys,
            "gives a run up, and its job to others, before it would be killed",
            "let leases.grace be at least runner.cancel_grace and runner.term_grace together",
        )
    yield from _users(runner.users if runner.enabled else {})
    if (server.tls_cert is None) != (server.tls_key is None):
        keys = (("server", "tls_cert"), ("server", "tls_key"))
        yield keys, "is given without the other", "give server.tls_cert and server.tls_key, or neither"
    for name, file in (("tls_cert", server.tls_cert), ("tls_key", server.tls_key)):
        if file is not None and not file.is_file():
            yield (("server", name),), f"there is no file {file}", "name a file that exists"
    if server.listen is not None and not server.listen.local:
        yield from _exposed(settings, str(server.listen))
    if settings.telemetry.otlp is not None and not _has_otlp():
        yield (("telemetry", "otlp"),), "needs OpenTelemetry", "pip install 'penstock[otlp]', or leave it out"
    yield from _unreachable(settings)


def _has_otlp() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # not even its parents
        return False


def _unreachable(settings: Tree) -> Iterator[tuple[tuple[KeyPath, ...], str, str]]:
    """What would fail at the first alert, which is the worst moment to hear of it. Names are looked up then; numbers can be judged now."""
    alerts = settings.alerts
    if alerts.command and shutil.which(alerts.command[0]) is None:
        yield (("alerts", "command"),), f"there is no program {alerts.command[0]}", "name one that can be run"
    for path, address in settings.webhooks():
        host = urlsplit(address).hostname or ""
        with suppress(ValueError):
            if why := refusal(host, private=alerts.allow_private):
                fix = "name a receiver elsewhere" + (
                    "" if alerts.allow_private else ", or set alerts.allow_private"
                )
                yield (path,), f"is not called: {why}", fix


def _exposed(settings: Tree, address: str) -> Iterator[tuple[tuple[KeyPath, ...], str, str]]:
    """Submitting a command is a shell on this host: nobody gets to offer that to a network by leaving something out."""
    server = settings.server
    if server.tls_cert is None and not server.trusted_proxies:
        yield (
            (("server", "listen"),),
            f"{address} can be reached from other machines, and tokens would travel in the clear",
            "give server.tls_cert and server.tls_key, or server.trusted_proxies if a proxy does TLS, or listen on 127.0.0.1",
        )
    if not server.allowed_hosts:
        yield (
            (("server", "allowed_hosts"),),
            f"is empty, and {address} can be reached from other machines",
            "list the host names under which it is meant to be reached",
        )


def table() -> str:
    """The rows of `docs/settings.md`; a test fails when they differ."""
    defaults = Settings(sources={}, addons={"NAME": AddonSettings()})
    rows = []
    for path, key in _SCHEMA.items():
        shown = path if "*" not in path else (path[0], "NAME", *path[2:])
        default = _shown(defaults, shown) if path != ("data_dir",) else "XDG"
        rows.append(
            f"| `{'.'.join(shown)}` | {_cell(default)} | {_cell(key.kind.words)} | {_cell(key.doc)} |"
        )
    return "\n".join(["| setting | default | may be | what it is for |", "|---|---|---|---|", *rows])


def _cell(words: str) -> str:
    return words.replace("|", "\\|")
