"""Bugs that somebody could write into the page, found by driving it."""

from __future__ import annotations

from tests.mutants.planting import planter_for_one

PAGES = "tests/web/test_pages.py"


mutant = planter_for_one("page", "penstock/{}")

JS = "web/static/js"
MUTANTS = [
    mutant("control codes stay in output", f"{JS}/output.js", "${plain(part.text)}</span>", "${part.text}</span>", PAGES, "output_comes_without_the_control_codes_of_a_terminal"),
    mutant("output is asked for once", f"{JS}/output.js", "if (answer.over && !moved) return;", "return;", PAGES, "output_is_shown_while_the_job_still_runs"),
]  # fmt: skip
