"""The reference that `make docs` makes from the code can be made, and lacks nothing. The site itself is built in CI."""

from __future__ import annotations

import re

import pytest

import penstock

pytest.importorskip("click")
from website import reference

from penstock.cli.main import VERBS
from penstock.core.jobs.job import EventKind
from penstock.server.routes import ROUTES
from penstock.wire import PREFIX


def test_every_public_name_is_in_the_reference():
    page = reference.python()

    assert set(re.findall(r"^::: penstock\.[\w.]+\.(\w+)$", page, re.MULTILINE)) >= set(penstock.__all__) - {
        "__version__"
    }


def test_every_verb_route_and_event_is_in_the_reference():
    cli, http, events = reference.command_line(), reference.http(), reference.events()

    assert [verb for verb in VERBS if f"\n## {verb}\n" not in cli] == []
    assert [r.path for r in ROUTES if f"## {r.verb} {r.path.removeprefix(PREFIX)}\n" not in http] == []
    assert [kind for kind in EventKind if f"| `{kind}` | " not in events] == []


def test_every_metric_of_the_reference_has_a_meaning():
    rows = re.findall(r"^\| `(penstock_\w+)` \| (.*) \|$", reference.metrics(), re.MULTILINE)

    assert len(rows) > 15
    assert [name for name, meaning in rows if not meaning] == []
