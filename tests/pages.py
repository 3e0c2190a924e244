"""The documentation, run as it stands."""

from __future__ import annotations

import re


def run_examples(page):
    """One after the other, as a reader would type them. How many there were."""
    text = page.read_text("utf-8")
    names: dict[str, object] = {"__name__": page.stem.replace("-", "_")}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], page, "exec"), names)  # a failure names the line of the page
    return len(blocks)
