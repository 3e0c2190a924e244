"""What a type checker knows of a pool: words are Literals, no private parameter is public, a Task has its function's types."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import assert_type, get_args, get_type_hints

import pytest

import penstock
from penstock.core.calls.ticket import Policy
from penstock.pools.options import CrashPolicy, CrashPolicyName, Kind, PolicyName, Requeue, Start


def double(n: int) -> int:
    return 2 * n


def test_a_task_has_the_types_of_its_function() -> None:
    with penstock.WorkerPool(1, kind="thread", policy="reject", start="eager") as pool:
        task = pool.task(double)
        assert_type(task(1), int)
        assert_type(pool.submit(double, 1).result(), int)

        assert task(2) == 4


def test_a_wrong_word_is_refused_by_type_checkers_and_at_run_time() -> None:
    with pytest.raises(ValueError, match="policy"):
        penstock.WorkerPool(1, policy="blok")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_the_literals_are_the_words_that_are_accepted() -> None:
    assert set(get_args(PolicyName)) == set(map(str, Policy))
    assert set(get_args(CrashPolicyName)) == set(map(str, CrashPolicy))
    hints = get_type_hints(
        penstock.WorkerPool.__init__,
        localns={"Cluster": object},
    )
    assert {name: hints[name] for name in ("kind", "policy", "start", "requeue", "crash_policy")} == {
        "kind": Kind,
        "policy": PolicyName,
        "start": Start,
        "requeue": Requeue,
        "crash_policy": CrashPolicyName,
    }


@pytest.mark.parametrize("name", penstock.__all__)
def test_no_private_parameter_is_in_a_public_signature(name: str) -> None:
    value = getattr(penstock, name)
    functions = [value] if inspect.isfunction(value) else []
    if inspect.isclass(value):
        functions = [
            function
            for member, function in vars(value).items()
            if inspect.isfunction(function) and (member == "__init__" or not member.startswith("_"))
        ]
    private = [
        (function.__qualname__, parameter)
        for function in functions
        for parameter in inspect.signature(function).parameters
        if parameter.startswith("_")
    ]

    assert private == []


@pytest.mark.parametrize("name", sorted(set(penstock.__all__) - {"__version__"}))
def test_every_public_name_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(penstock, name))


def example_of(name: str) -> str:
    """The indented code in a docstring."""
    lines = (inspect.getdoc(getattr(penstock, name)) or "").splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    ") or not line.strip()).strip()


@pytest.mark.parametrize("name", sorted(set(penstock.__all__) - {"__version__"}))
def test_every_public_name_has_an_example_and_the_example_uses_names_that_exist(name: str) -> None:
    code = example_of(name)
    tree = compile(code, name, "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    used = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "penstock"
    ]

    assert code
    assert set(used) <= set(penstock.__all__)


def test_the_page_about_pools_has_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pools.md").read_text("utf-8")
    table = page.partition("## All options and their defaults")[2]
    shown: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`[^|]+`) \|[^|]*\| (.*) \|$", table, re.MULTILINE):
        options, values = re.findall(r"`(\w+)`", names), re.findall(r"`([^`]*)`", default)
        shown |= dict(zip(options, values, strict=False)) | dict.fromkeys(options[len(values) :], "")
    parameters = dict(inspect.signature(penstock.WorkerPool).parameters)
    defaults = {name: repr(parameter.default).replace("'", '"') for name, parameter in parameters.items()}

    assert shown.keys() == defaults.keys()
    assert {name: value for name, value in shown.items() if name != "workers"} == {
        name: value for name, value in defaults.items() if name != "workers"
    }
