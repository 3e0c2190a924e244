"""A planted bug whose place has moved guards nothing, and would be noticed only by whoever runs `make mutants`."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from tests.mutants.planting import Mutant
from tests.mutants.run import batched

HERE = Path(__file__).parent
SOURCES = HERE.parent / "src"


def planted():
    for path in sorted((HERE / "mutants").glob("*_mutants.py")):
        for name, file, old, new, _ in runpy.run_path(str(path))["MUTANTS"]:
            yield pytest.param(SOURCES / file, old, new, id=name)


@pytest.mark.parametrize(("file", "old", "new"), list(planted()))
def test_a_planted_bug_still_has_its_place(file, old, new):
    text = file.read_text("utf-8")

    assert text.count(old) == 1
    assert old != new
    if file.suffix == ".py":
        ast.parse(text.replace(old, new))  # what cannot be imported is found by anything


def test_what_one_planted_bug_leaves_out_is_not_left_out_for_another():
    one = Mutant("one", "a.py", "a", "b", ("tests/http/test_a.py", "-k", "not daemon"))
    two = Mutant("two", "a.py", "a", "b", ("tests/http/test_a.py", "tests/core/test_b.py::test_c"))

    assert list(batched([one, two]).values()) == [
        ("tests/http/test_a.py", "-k", "not daemon"),
        ("tests/http/test_a.py",),
        ("tests/core/test_b.py::test_c",),
    ]
