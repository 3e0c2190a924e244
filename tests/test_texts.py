"""Every sentence that a user can meet reads plainly: `make texts` writes them to one page, and this checks that page."""

from __future__ import annotations

import re

import pytest

from penstock.cli.main import VERBS
from tests import texts
from tests.test_vocabulary import RETIRED


@pytest.fixture(scope="module")
def page():
    return texts.page()


def test_the_page_has_the_help_of_every_verb(page):
    assert [verb for verb in VERBS if f"### penstock {verb}\n" not in page] == []


def test_the_page_has_errors_of_every_kind_and_the_words_of_the_web_page(page):
    for title in [*(f"## Errors of {name}" for name in texts.WITH_ERRORS), "## Explain", "## The page"]:
        section = page.partition(f"{title}\n")[2].partition("\n## ")[0]

        assert section.count("\n- ") > 0, title


def test_no_line_is_longer_than_a_terminal_of_110_columns(page):
    assert [line for line in page.splitlines() if len(line) > 110 and " " in line[2:]] == []


def test_no_sentence_uses_a_retired_word(page):
    found = re.findall(rf".*\b(?:{'|'.join(RETIRED)})s?\b.*", page, re.IGNORECASE)

    assert found == []


def test_sentences_name_the_actor(page):
    """`test_nobody` is a user of this machine in an example; "who" and its like say nothing about which program it is."""
    found = re.findall(
        r".*\b(?:who|whom|whoever|whose|somebody|nobody|anybody|everybody)\b.*", page, re.IGNORECASE
    )

    assert found == []
