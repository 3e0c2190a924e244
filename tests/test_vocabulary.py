"""One word for one thing: no name in the source uses a word that `docs/glossary.md` has retired."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import SOURCES

PACKAGE = SOURCES / "penstock"
#: Words that no module, class, function, variable, table or statement has in its name.
RETIRED = frozenset(
    [
        "appetite",
        "bury",
        "census",
        "clapper",
        "courier",
        "crew",
        "desk",
        "elbow",
        "errand",
        "foresight",
        "havoc",
        "herald",
        "house",
        "husk",
        "lookout",
        "mailbox",
        "manners",
        "mortal",
        "office",
        "parcel",
        "purse",
        "spotlight",
        "tenure",
        "undertaker",
        "whereabouts",
    ]
)
FILES = sorted(PACKAGE.rglob("*.py"))


def words_of(name: str) -> set[str]:
    """`_makeCrew` and `MAKE_CREW` have the words make and crew."""
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_"))


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_name_uses_a_retired_word(path):
    found = [f"line {line}: {name}" for line, name in names_in(path) if words_of(name) & RETIRED]

    assert found == []
    assert not words_of(path.stem) & RETIRED


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.sql")), ids=lambda path: path.name)
def test_no_statement_is_named_with_a_retired_word(path):
    names = re.findall(r"^-- name: (\w+)", path.read_text("utf-8"), re.MULTILINE)

    assert [name for name in names if words_of(name) & RETIRED] == []


def test_no_public_class_name_is_defined_twice():
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text("utf-8"), re.MULTILINE):
            homes.setdefault(name, []).append(str(path.relative_to(PACKAGE)))

    assert {name: files for name, files in homes.items() if len(files) > 1} == KNOWN_TWICE


#: Each has one home when `work/` holds what every way to run a job function shares.
KNOWN_TWICE: dict[str, list[str]] = {}
