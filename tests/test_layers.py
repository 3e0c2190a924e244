"""The architecture as a test: which part may import which, and what deciding must do without."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent

# A new part of the package says here what it builds on. Nothing builds on the demo, nor on the package's own lazy names,
# behind which any import could hide.
MAY_IMPORT = {
    "core": {"core"},
    "local": {"core", "local"},
    "stores": {"core", "stores"},
    "engine": {"core", "stores", "engine"},
    "runner": {"core", "stores", "engine", "runner"},
    "alerts": {"core", "stores", "engine", "alerts"},
    "http": {"core", "stores", "engine", "runner", "http"},
    "client": {"core", "client", "local"},
    "jobs": {"core", "stores", "engine", "local", "jobs"},
    "simulation": {"core", "stores", "engine", "simulation"},
    "chaos": {"core", "stores", "engine", "client", "chaos"},
    "testing": {"core", "stores", "engine", "jobs", "testing"},
    "settings": {"core", "stores", "engine", "client", "settings"},
    "daemon": {
        "penstock",
        "daemon",
        "core",
        "stores",
        "engine",
        "alerts",
        "runner",
        "http",
        "settings",
        "web",
        "client",
    },
    "cli": {"penstock", "core", "client", "cli", "settings", "daemon", "stores", "simulation", "chaos"},
    "web": {"web"},
    "demo": {"penstock", "core", "local", "client", "demo"},
    "penstock": {"core", "local", "stores", "engine", "jobs", "client"},
}
# Types that two parts share without either building on the other.
ALSO = {
    "client": ("penstock.http.wire",),
    "demo": ("penstock.http.wire",),
    "cli": ("penstock.http.wire", "penstock.http", "penstock.runner.job"),
}
IMPURE = {
    "asyncio", "contextvars", "ctypes", "fcntl", "glob", "io", "logging", "mmap", "multiprocessing", "os", "pathlib",
    "platform", "psutil", "queue", "random", "resource", "sched", "secrets", "select", "selectors", "shelve", "shutil",
    "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid", "zoneinfo",
}  # fmt: skip
# A class to inherit from, and nothing that runs.
PURE_ENOUGH = {"concurrent.futures.CancelledError"}
CLOCKS = {"now", "utcnow", "today"}
DOERS = {"open", "print", "input", "exec", "eval"}
# It writes out constructors from the names of our own fields, once, when it is imported, as dataclasses does.
WRITES_CODE = {"core/quick.py": ["calls exec"]}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "penstock" if first == "__init__.py" else first.removesuffix(".py")


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_part_imports_what_it_may_and_nothing_else(path):
    assert list(forbidden_parts(part_of(path), path.read_text("utf-8"))) == []


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) == "core"], ids=name_of)
def test_deciding_is_pure(path):
    assert list(impurities(path.read_text("utf-8"))) == WRITES_CODE.get(name_of(path), [])


def test_every_part_has_its_rule():
    assert {part_of(path) for path in FILES} <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", "import penstock.local.gate"),
        ("core", "from penstock.stores import memory"),
        ("core", "from penstock import local"),
        ("core", "from ..local import gate"),
        ("local", "from penstock.engine.desk import Desk"),
        ("local", "from penstock import WorkerPool"),
        ("local", "import penstock"),
        ("local", "def later():\n    from penstock.demo import main"),
        ("stores", "import penstock.core.states, penstock.engine"),
        ("engine", "if TYPE_CHECKING:\n    from penstock.local.pool import WorkerPool"),
        ("engine", "import penstock.demo"),
        ("penstock", "import penstock.demo"),
        ("client", "from penstock.http.wires import Submit"),
        ("client", "from penstock.http.app import Api"),
        ("unheard-of", "import penstock.core"),
    ],
)
def test_the_rules_see_an_import_wherever_it_stands(part, source):
    assert list(forbidden_parts(part, source)) != []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from threading import Lock",
        "def later():\n    import asyncio",
        "import concurrent.futures",
        "from concurrent.futures import ThreadPoolExecutor",
        "import msgspec",
        "moment = datetime.now(UTC)",
        "day = date.today()",
        "print('here')",
        "text = open('file').read()",
    ],
)
def test_the_rules_see_a_clock_and_a_file_wherever_they_stand(source):
    assert list(impurities(source)) != []


def test_the_rules_let_pass_what_is_fine():
    source = "from penstock.core.words import Moment\nfrom concurrent.futures import CancelledError\nimport math\nlimit = self.now()"

    assert list(forbidden_parts("core", source)) == []
    assert list(forbidden_parts("client", "from penstock.http.wire import Submit")) == []
    assert list(impurities(source)) == []


def forbidden_parts(part: str, source: str) -> Iterator[str]:
    known = set(MAY_IMPORT)
    for name in imported(source):
        package, *rest = name.split(".")
        if package != "penstock":
            continue
        target = rest[0] if rest and (rest[0] in known or (PACKAGE / rest[0]).exists()) else "penstock"
        if f"{name}.".startswith(tuple(f"{shared}." for shared in ALSO.get(part, ()))):
            continue
        if target not in MAY_IMPORT.get(part, ()):
            yield f"{part} must not import {name}"


def impurities(source: str) -> Iterator[str]:
    for name in imported(source):
        package = name.split(".")[0]
        if package in IMPURE or (package == "concurrent" and name not in PURE_ENOUGH):
            yield f"imports {name}"
        elif package != "penstock" and package not in sys.stdlib_module_names:
            yield f"imports {name}, which is not of the standard library"
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name("datetime" | "date"), attr=attr) if attr in CLOCKS:
                yield f"asks {ast.unparse(node)} for the time"
            case ast.Call(func=ast.Name(called)) if called in DOERS:
                yield f"calls {called}"


def imported(source: str) -> Iterator[str]:
    """The full name of everything imported: at the top, in a function, or for the type checker only."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                # Relative imports do not occur; whatever they mean, they are taken for the worst.
                home = "penstock" if level else module
                yield from (f"{home}.{alias.name}" for alias in names)
