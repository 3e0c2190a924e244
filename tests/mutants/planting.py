"""How a list plants its bugs: all under one group and in one folder, each with the tests that are to find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def planter(group: str, files: str) -> Callable[[str, str, str, str, tuple[str, ...]], Mutant]:
    """`files`: where they lie below src, with {} for what the list names."""

    def plant(name: str, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
        return Mutant(f"{group}: {name}", files.format(file), old, new, tests)

    return plant


def planter_for_one(group: str, files: str) -> Callable[[str, str, str, str, str, str], Mutant]:
    """With the one test that is there for it: where a server or a browser is started for each, all of a file take too long."""
    plant = planter(group, files)

    def plant_for_one(name: str, file: str, old: str, new: str, tests: str, test: str) -> Mutant:
        return plant(name, file, old, new, (f"{tests}::test_{test}",))

    return plant_for_one
