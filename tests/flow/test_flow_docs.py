from __future__ import annotations

from pathlib import Path

import pytest
from tests.pages import run_examples

PAGE = Path(__file__).parents[2] / "docs" / "flow-control.md"


def test_the_examples_of_the_page_run_as_they_stand():
    assert run_examples(PAGE) > 5


@pytest.mark.parametrize("needed", ["A queue gives no backpressure", "Reserve, then build"])
def test_the_page_says_plainly_what_it_must(needed):
    assert f"## {needed}\n" in PAGE.read_text("utf-8")
