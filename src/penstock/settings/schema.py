"""
The schema of the settings, read from the annotations and docstrings of `Settings`: keys, their kinds, and
what they are for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_type_hints

from msgspec import Struct

from penstock.settings.kinds import Kind, kind_of
from penstock.settings.settings import AddonSettings, KeyPath, Settings


class Key(NamedTuple):
    """One setting: its type, what the type says about values, and what the setting is for."""

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
    """The path as `KEYS` has it: any addon is `*`."""
    return (path[0], "*", *path[2:]) if path[0] == "addons" and len(path) > 1 else path


def key_at(path: KeyPath) -> Key:
    return KEYS[general(path)]


def dotted(path: KeyPath) -> str:
    return ".".join(
        part if part.replace("_", "").replace("-", "").isalnum() else f'"{part}"' for part in path
    )


class Setting(NamedTuple):
    """One line of the listing. `value` is written as a file would have it."""

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
