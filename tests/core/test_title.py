"""What a job is, in one line."""

from __future__ import annotations

import json

import pytest

from penstock.core.jobs.intent import MAX_TITLE, Intent, title_of


@pytest.mark.parametrize(
    ("job_type", "payload", "title"),
    [
        ("penstock.command", {"argv": ["make", "-j2", "all the things"]}, "make -j2 'all the things'"),
        ("penstock.shell", {"script": "cd /tmp\nls | wc -l\n"}, "cd /tmp ls | wc -l"),
        ("penstock.function", {"function": "shop.jobs:index", "args": [1, "a"], "kwargs": {"deep": True}},
         "shop.jobs:index(1, 'a', deep=True)"),
        ("index", {"path": "/data", "depth": 2}, "index(path='/data', depth=2)"),
        ("index", {}, "index()"),
        ("index", None, "index"),
        ("index", [1, 2], "index [1, 2]"),
        ("shop.command", {"argv": ["rm"]}, "shop.command(argv=['rm'])"),
        ("penstock.command", {"argv": "no list"}, "penstock.command(argv='no list')"),
    ],
)  # fmt: skip
def test_a_title_says_what_the_job_is(job_type, payload, title):
    assert title_of(Intent("a", job_type, payload=json.dumps(payload))) == title


def test_a_title_is_one_line_of_bounded_length_whatever_the_payload():
    for payload in ['"' + "long " * 10_000 + '"', json.dumps(["x\n" * 500]), "[" * 5_000, "no JSON"]:
        title = title_of(Intent("a", "t", payload=payload))

        assert len(title) <= MAX_TITLE
        assert "\n" not in title
