"""A planted bug whose place has moved guards nothing, and would be noticed only by whoever runs `make mutants`."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from tests.mutants.planting import Mutant, NotPlanted, plant
from tests.mutants.run import Run, batched, summary

HERE = Path(__file__).parent
SOURCES = HERE.parent / "src"


def planted():
    for path in sorted((HERE / "mutants").glob("*_mutants.py")):
        for mutant in runpy.run_path(str(path))["MUTANTS"]:
            yield pytest.param(mutant, id=mutant.name)


@pytest.mark.parametrize("mutant", list(planted()))
def test_a_planted_bug_still_has_its_place(mutant):
    text = (SOURCES / mutant.file).read_text("utf-8")

    changed = plant(text, mutant)

    assert changed != text
    if mutant.file.endswith(".py"):
        ast.parse(changed)  # what cannot be imported is found by anything


@pytest.mark.parametrize("mutant", list(planted()))
def test_the_tests_that_shall_find_a_planted_bug_exist(mutant):
    for path, _, name in (test.partition("::") for test in mutant.tests if test.startswith("tests/")):
        assert (HERE.parent / path).is_file()  # a whole folder takes minutes for each
        assert not name or f"def {name.partition('[')[0]}(" in (HERE.parent / path).read_text("utf-8")


CODE = """
class Queue:
    def take(self, limit):
        if limit > self.most:  # never more
            raise ValueError("too many")
        return limit

    def give(self, limit):
        if limit > self.most:
            return None
        return limit
"""


def in_take(old, new, function="Queue.take"):
    return Mutant("m", "a.py", function, old, new, ())


def test_a_bug_is_planted_in_its_function_only():
    changed = plant(CODE, in_take("if limit > self.most:", "if False:"))

    assert changed.count("if False:") == 1
    assert changed.index("if False:") < changed.index("def give")


def test_a_planted_bug_survives_a_rename_and_a_new_message():
    mutant = in_take(
        '    if count > self.bound:\n        raise ValueError("no")\n',
        '    if count >= self.bound:\n        raise ValueError("no")\n',
    )

    assert "if limit >= self.most:" in plant(CODE, mutant)
    assert '        if limit >= self.most:\n            raise ValueError("too many")' in plant(CODE, mutant)


@pytest.mark.parametrize(
    ("old", "function"),
    [
        ("if limit < self.most:", "Queue.take"),  # other code
        ("if limit > limit.most:", "Queue.take"),  # two names cannot become one
        ("limit", "Queue.give"),  # more than once
        ("return limit", "Queue.drop"),  # no such function
    ],
)
def test_a_planted_bug_without_one_place_is_an_error(old, function):
    with pytest.raises(NotPlanted):
        plant(CODE, in_take(old, "pass", function))


def test_what_one_planted_bug_leaves_out_is_not_left_out_for_another():
    one = Mutant("one", "a.py", "", "a", "b", ("tests/server/test_a.py", "-k", "not daemon"))
    two = Mutant("two", "a.py", "", "a", "b", ("tests/server/test_a.py", "tests/core/test_b.py::test_c"))

    assert list(batched([one, two]).values()) == [
        ("tests/server/test_a.py", "-k", "not daemon"),
        ("tests/server/test_a.py",),
        ("tests/core/test_b.py::test_c",),
    ]


def test_a_planted_bug_that_makes_the_tests_hang_does_not_count_as_found():
    mutants = [Mutant(name, "a.py", "", "a", "b", ()) for name in ("pool: one", "pool: two", "http: three")]
    runs = [Run(verdict, frozenset(), 1.6, "") for verdict in ("found", "hung", "survived")]

    _, *lines = summary(mutants, runs)
    assert [line.split() for line in lines] == [
        ["pool", "2", "1", "0", "1", "0", "0", "4"],
        ["http", "1", "0", "1", "0", "0", "0", "2"],
        ["all", "3", "1", "1", "1", "0", "0", "6"],
    ]
