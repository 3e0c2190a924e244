"""The architecture as a test: which part may import which, and what deciding must do without."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from bench.walks import TARGETS

import penstock

PACKAGE = Path(penstock.__file__).parent

# Bounded calls inside one program. They may build on each other, and on nothing outside of the standard library.
IN_PROCESS = {"pools", "flow", "graphs", "telemetry", "cluster"}
# A new package says here what it builds on. No package imports the top-level lazy names, behind which any import could hide.
MAY_IMPORT = {
    "core": {"core"},
    "pools": {"core", "pools", "telemetry", "cluster"},
    "flow": {"core", "flow", "pools"},
    "graphs": {"core", *IN_PROCESS},
    "telemetry": {"core", *IN_PROCESS},
    "cluster": {"core", "cluster", "pools", "telemetry"},
    "stores": {"core", "stores"},
    "scheduler": {"core", "stores", "scheduler"},
    "work": {"core", "work", "pools"},
    "runner": {"core", "stores", "scheduler", "work", "runner"},
    "alerts": {"core", "stores", "scheduler", "settings", "alerts"},
    "wire": {"core", "wire"},
    "server": {"core", "stores", "scheduler", "runner", "wire", "server"},
    "client": {"core", "work", "client", "wire", *IN_PROCESS},
    "library": {"core", "stores", "scheduler", "work", "library", *IN_PROCESS},
    "simulation": {"core", "stores", "scheduler", "simulation"},
    "chaos": {"core", "stores", "scheduler", "client", "wire", "work", "chaos"},
    "testing": {"core", "stores", "scheduler", "work", "library", "testing"},
    "settings": {"core", "stores", "scheduler", "client", "settings"},
    "daemon": {
        "penstock",
        "daemon",
        "core",
        "stores",
        "scheduler",
        "alerts",
        "runner",
        "server",
        "settings",
        "web",
        "client",
        "wire",
    },
    "cli": {
        "penstock",
        "core",
        "client",
        "cli",
        "settings",
        "daemon",
        "stores",
        "simulation",
        "chaos",
        "wire",
        "server",
        "web",
    },
    "web": {"web"},
    "__main__": {"cli"},
    "penstock": {"core", "stores", "scheduler", "work", "library", "client", *IN_PROCESS},
}
# Types that two packages share without either building on the other.
ALSO = {"cli": ("penstock.runner.job",)}
IMPURE = {
    "asyncio", "contextvars", "ctypes", "fcntl", "glob", "io", "logging", "mmap", "multiprocessing", "os", "pathlib",
    "platform", "psutil", "queue", "random", "resource", "sched", "secrets", "select", "selectors", "shelve", "shutil",
    "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid", "zoneinfo",
}  # fmt: skip
# A class to inherit from, and nothing that runs.
PURE_ENOUGH = {"concurrent.futures.CancelledError"}
CLOCKS = {"now", "utcnow", "today"}
DOERS = {"open", "print", "input", "exec", "eval"}
# The values of the jobs half are msgspec Structs. Pools, graphs and flow control must run on the standard library alone.
JOBS_HALF = "core/jobs/"
# Cron lines and time zones are tables that never change while a process runs: the same question has the same answer.
TABLES_OF_TIME = {"core/jobs/moments.py": {"cronsim", "zoneinfo"}}

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
    allowed = {"msgspec"} if name_of(path).startswith(JOBS_HALF) else set()
    allowed |= TABLES_OF_TIME.get(name_of(path), set())

    assert list(impurities(path.read_text("utf-8"), allowed)) == []


@pytest.mark.parametrize("module", ["launcher", "worker"])
def test_the_processes_of_the_runner_need_the_standard_library_alone(module):
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import penstock.runner.{module}"

    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)  # without site-packages


@pytest.mark.parametrize(
    "module",
    [
        "daemon.lifecycle",
        "cli.main",
        "cli.submit",
        "server.app",
        "library.scheduler",
        "client",
        "runner.runner",
    ],
)
def test_jobs_load_without_the_other_extras(module):
    """`pip install penstock[jobs]` brings no OpenTelemetry, psycopg, Ray, cloudpickle or pygraphviz."""
    extras = ["opentelemetry", "psycopg", "ray", "cloudpickle", "setproctitle", "pygraphviz"]
    code = f"import sys; sys.modules.update(dict.fromkeys({extras})); import penstock.{module}"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_part_has_its_rule():
    assert {part_of(path) for path in FILES} <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", "import penstock.pools.call_queue"),
        ("core", "from penstock.stores import memory"),
        ("core", "from penstock import pools"),
        ("core", "from ..pools import call_queue"),
        ("pools", "from penstock.scheduler.job_service import JobService"),
        ("pools", "from penstock import WorkerPool"),
        ("pools", "import penstock"),
        ("flow", "def later():\n    from penstock.graphs import builder"),
        ("stores", "import penstock.core.jobs.states, penstock.scheduler"),
        ("scheduler", "if TYPE_CHECKING:\n    from penstock.pools.pool import WorkerPool"),
        ("client", "from penstock.server.app import Api"),
        ("work", "from penstock.library.scheduler import Scheduler"),
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
    source = "from penstock.core.jobs.types import Moment\nfrom concurrent.futures import CancelledError\nimport math\nlimit = self.now()"

    assert list(forbidden_parts("core", source)) == []
    assert list(forbidden_parts("client", "from penstock.wire import Submit")) == []
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


def impurities(source: str, allowed: Collection[str] = ()) -> Iterator[str]:
    for name in imported(source):
        package = name.split(".")[0]
        if (package in IMPURE and package not in allowed) or (
            package == "concurrent" and name not in PURE_ENOUGH
        ):
            yield f"imports {name}"
        elif package not in {"penstock", *sys.stdlib_module_names, *allowed}:
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


ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"


def walks() -> dict[str, str]:
    """The text of each walk, by its title."""
    section = ARCHITECTURE.read_text().split("\n## The walks\n")[1].split("\n## ")[0]
    return {text.splitlines()[0]: text for text in section.split("\n### ")[1:]}


@pytest.mark.parametrize("walk", walks())
def test_a_walk_has_at_most_ten_hops_and_each_link_leads_to_its_function(walk):
    text = walks()[walk]
    links = re.findall(r"\[([^\]]+)\]\((src/[^)]+)\)", text)

    assert [int(number) for number in re.findall(r"(?m)^(\d+)\. ", text)][-1] <= 10
    assert [link for link in links if not _defines(ARCHITECTURE.parent / link[1], link[0])] == []


def test_a_job_over_http_goes_through_no_more_files_than_a_reader_can_follow():
    """`make walks` shows which. Housekeeping that falls into a walk adds files, so the shortest of ten counts."""
    most, _ = TARGETS["http"]
    code = "from bench.walks import *; print(min(len(walk.files) for walk in repeated(Tracer(), 'http', 10)))"

    # In a process of its own: the tracer takes the place of any other profiler.
    traced = subprocess.run(
        [sys.executable, "-c", code], cwd=ARCHITECTURE.parent, stdout=subprocess.PIPE, check=True
    )

    assert int(traced.stdout) <= most


def _defines(file: Path, name: str) -> bool:
    """Whether the file exists and defines `Class.method`, a class or a function; a name in words needs the file only."""
    if not file.exists() or " " in name:
        return file.exists()
    scope = ast.parse(file.read_text()).body
    for part in name.split("."):
        found = [node for node in scope if getattr(node, "name", None) == part]
        if not found:
            return False
        scope = found[0].body
    return True
