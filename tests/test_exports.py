"""What `import penstock` gives and what it costs, seen from fresh interpreters."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[1]
SOURCES = Path(penstock.__file__).parents[1]
HEAVY = {
    "asyncio", "concurrent.futures", "inspect", "logging", "multiprocessing", "pickle", "selectors", "socket",
    "sqlite3", "subprocess", "tempfile", "threading",
}  # fmt: skip
USE_A_POOL = """
with penstock.WorkerPool(workers=1, kind={kind!r}) as pool:
    assert pool.submit(abs, -3).result() == 3
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Runs a program in an interpreter of its own and returns what it prints as JSON."""
    cache = tmp_path_factory.mktemp("pycache")
    # Compiled once and kept, as in an installed package: or else we would measure the compiler.
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache), "PYTHONPATH": str(SOURCES)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)

    def run(program):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def modules_after(program):
    return (
        f"import sys\nbefore = set(sys.modules)\n{program}\n"
        "import json\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    )


def foreign(modules):
    return {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"penstock"}


# What it gives


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_is_there(name):
    assert getattr(penstock, name) is not None


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'WorkerPol'"):
        _ = penstock.WorkerPol


def test_dir_lists_the_public_names_before_any_of_them_was_used(fresh):
    listed = fresh("import json, penstock; print(json.dumps(dir(penstock)))")

    assert set(penstock.__all__) <= set(listed)


def test_a_star_import_gives_them_all(fresh):
    given = fresh("from penstock import *\nimport json\nprint(json.dumps(sorted(globals())))")

    assert set(penstock.__all__) <= set(given)


def test_type_checkers_see_the_same_names_as_the_interpreter():
    tree = ast.parse(Path(penstock.__file__).read_text("utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    for_checkers = {
        (alias.asname, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert for_checkers == set(penstock._home_of.items())  # noqa: SLF001  # the one list that __getattr__ reads
    assert set(penstock.__all__) == {name for name, _ in for_checkers} | {"__version__"}


def test_the_wheel_says_that_it_is_typed(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True, timeout=60)
    [wheel] = tmp_path.glob("*.whl")

    shipped = zipfile.ZipFile(wheel).namelist()

    assert "penstock/py.typed" in shipped
    assert "penstock/core/calls/queue.py" in shipped
    assert not [name for name in shipped if name.startswith(("tests/", "bench/"))]


# What it costs


def test_the_import_alone_loads_nothing_heavy(fresh):
    loaded = set(fresh(modules_after("import penstock")))

    assert not loaded & HEAVY
    assert not foreign(loaded)
    assert {name for name in loaded if name.startswith("penstock")} == {"penstock"}


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_using_a_pool_loads_no_package_that_is_not_of_the_standard_library(fresh, kind):
    """cloudpickle is for what pickle cannot do, and only if it is there."""
    loaded = fresh(modules_after(f"import penstock\n{USE_A_POOL.format(kind=kind)}"))

    assert foreign(loaded) <= {"cloudpickle"}


def test_a_worker_process_loads_none_either_but_the_two_that_are_optional(fresh):
    names = "sorted(__import__('sys').modules)"
    bare = fresh(f"import json; print(json.dumps({names}))")

    loaded = fresh(
        "import json, penstock\n"
        "with penstock.WorkerPool(workers=1) as pool:\n"
        f'    print(json.dumps(pool.submit(eval, "{names}").result()))'
    )

    assert foreign(loaded) - foreign(bare) <= {"cloudpickle", "setproctitle"}


def test_threads_and_plain_errors_load_no_event_loop(fresh):
    loaded = fresh(
        modules_after(f"import penstock\npenstock.CallTimeout\n{USE_A_POOL.format(kind='thread')}")
    )

    assert "asyncio" not in loaded


def test_a_pool_loads_fewer_modules_than_what_the_standard_library_has(fresh):
    ours = fresh(modules_after("import penstock; penstock.WorkerPool"))
    theirs = fresh(modules_after("import concurrent.futures.process, asyncio"))

    assert len(ours) < len(theirs), (len(ours), len(theirs))


WITHOUT_PACKAGES = """
import sys

class OnlyTheStandardLibrary:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "penstock"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, OnlyTheStandardLibrary())
import penstock

graph = penstock.Graph()
graph.node(lambda: 1, name="one")
with penstock.GraphExecutor() as executor, penstock.WorkerPool(1, kind="thread") as pool:
    assert executor.run(graph.compile())["one"] == 1
    assert pool.submit(int).result() == 0
print(list(penstock.parallel_limit_sync([1], 1, str)))
"""


def test_pools_graphs_and_flow_control_need_the_standard_library_only():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES], capture_output=True, text=True, check=False
    )

    assert (done.stdout, done.stderr) == ("['1']\n", "")
