"""The page about the promises names tests and planted bugs that exist."""

from __future__ import annotations

import re
import runpy

from tests import ROOT

PAGE = (ROOT / "docs" / "why" / "promises.md").read_text("utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| (\d+ )?\| [^a-z]", line)]


def test_each_promise_has_tests_and_each_of_them_exists():
    missing = []
    for row in ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)`(?: \(([^)]*)\))?", row[-2])
        assert named, row
        for path, parts in named:
            tests = re.findall(r"^(?:async )?def (test_\w+)", (ROOT / path).read_text("utf-8"), re.MULTILINE)
            wanted = re.findall(r"`(\w+)`", parts) or ["test_"]
            missing += [(path, part) for part in wanted if not any(part in name for name in tests)]

    assert len(ROWS) > 40
    assert missing == []


def test_each_planted_bug_of_a_promise_exists():
    lists = (ROOT / "tests" / "mutants").glob("*_mutants.py")
    planted = {mutant.name for path in lists for mutant in runpy.run_path(str(path))["MUTANTS"]}
    named = [name for row in ROWS for name in re.findall(r'"([^"]+)"', row[-1])]

    assert len(named) > 30
    assert [name for name in named if name not in planted] == []
