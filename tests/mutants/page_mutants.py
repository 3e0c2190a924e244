"""Bugs that somebody could write into the page, found by driving it."""

from __future__ import annotations

PAGES = "tests/web/test_pages.py"


def mutant(
    name: str, file: str, old: str, new: str, tests: str, test: str
) -> tuple[str, str, str, str, tuple[str, ...]]:
    """With the one test that is there for it: a browser is started for each."""
    return f"page: {name}", f"penstock/{file}", old, new, (f"{tests}::test_{test}",)


JS = "web/static/js"
MUTANTS = [
    mutant("control codes stay in output", f"{JS}/output.js", "${plain(part.text)}</span>", "${part.text}</span>", PAGES, "output_comes_without_the_control_codes_of_a_terminal"),
    mutant("output is asked for once", f"{JS}/output.js", "if (answer.over && !moved) return;", "return;", PAGES, "output_is_shown_while_the_job_still_runs"),
]  # fmt: skip
