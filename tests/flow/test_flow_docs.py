from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "flow-control.md"


def test_the_examples_of_the_page_run_as_they_stand():
    text = PAGE.read_text("utf-8")
    names: dict[str, object] = {"__name__": "flow_control"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))

    assert len(blocks) > 5
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], PAGE, "exec")  # a failure names the line of the page
        exec(code, names)


@pytest.mark.parametrize("needed", ["A queue gives no backpressure", "Reserve, then build"])
def test_the_page_says_plainly_what_it_must(needed):
    assert f"## {needed}\n" in PAGE.read_text("utf-8")
