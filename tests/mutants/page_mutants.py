"""Bugs that somebody could write into the page, found by driving it."""

from __future__ import annotations

from tests.mutants.planting import Mutant

MUTANTS = [
    Mutant(
        "page: control codes stay in output",
        "penstock/web/static/js/output.js",
        "",
        "${plain(part.text)}</span>",
        "${part.text}</span>",
        ("tests/web/test_pages.py::test_output_comes_without_the_control_codes_of_a_terminal",),
    ),
    Mutant(
        "page: output is asked for once",
        "penstock/web/static/js/output.js",
        "",
        "if (answer.over && !moved) return;",
        "return;",
        ("tests/web/test_pages.py::test_output_is_shown_while_the_job_still_runs",),
    ),
    Mutant(
        "page: every session sees the buttons of an operator",
        "penstock/web/static/js/live.js",
        "",
        "Object.keys(rights).filter((right) => scopes.includes(rights[right]))",
        "Object.keys(rights)",
        ("tests/web/test_pages.py::test_a_session_sees_the_controls_of_its_own_rights_alone",),
    ),
]
