"""A beginner finishes every tutorial: each is followed as it is written."""

from __future__ import annotations

import socket

import pytest

from tests import ROOT
from tests.tutorials import follow, steps

PAGES = sorted(page for page in (ROOT / "docs" / "tutorials").glob("*.md") if page.name != "README.md")
#: The tutorials whose commands and outputs all are in titled blocks; the others have tests of their own.
FOLLOWED = [page for page in PAGES if any(step.kind == "console" for step in steps(page))]


def test_the_tutorials_are_found():
    assert {"web-service.md", "agent-budget.md"} <= {page.name for page in FOLLOWED}


@pytest.mark.long
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.stem)
def test_a_tutorial_can_be_followed_as_it_is_written(page, tmp_path, monkeypatch):
    if "--port 8000" in page.read_text("utf-8") and taken(8000):
        pytest.skip("another program listens on port 8000, which the tutorial uses")

    saved, typed = follow(page, tmp_path)

    assert saved
    assert typed


def taken(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False
