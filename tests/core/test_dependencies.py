"""The tables of dependencies: what the state of a parent means, and what becomes of the child."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import BadIntent
from penstock.core.jobs.dependencies import (
    FATES,
    VERDICTS,
    Dependency,
    Fate,
    IfUnmet,
    ParentCondition,
    Verdict,
    fate,
    parse,
    position,
    submit_order,
)
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.states import ENDED, FINAL, JobState


def verdict_table():
    """The rows of `docs/dependencies.md`; a test fails when they differ."""
    head = "| the parent is | " + " | ".join(f"`:{condition}`" for condition in ParentCondition) + " |"
    rows = [
        f"| {state} | " + " | ".join(str(VERDICTS[condition][state]) for condition in ParentCondition) + " |"
        for state in JobState
    ]
    return "\n".join([head, "|---|---|---|---|", *rows])


WORDS = {
    Fate.WAIT: "goes on waiting",
    Fate.MEET: "one parent less to wait for",
    Fate.CANCEL: "is CANCELED",
    Fate.FAIL: "is FAILED",
    Fate.DROP: "one parent less to hope for; CANCELED without any",
}


def fate_table():
    head = "| the condition is | " + " | ".join(f"`{if_unmet}`" for if_unmet in IfUnmet) + " |"
    rows = [
        f"| {verdict} | " + " | ".join(WORDS[FATES[verdict][if_unmet]] for if_unmet in IfUnmet) + " |"
        for verdict in Verdict
    ]
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def test_the_page_about_dependencies_is_made_from_the_tables():
    page = (Path(__file__).parents[2] / "docs" / "dependencies.md").read_text("utf-8")

    assert verdict_table() in page
    assert fate_table() in page


def test_the_tables_are_total():
    for condition in ParentCondition:
        assert set(VERDICTS[condition]) == set(JobState)
    assert set(FATES) == set(Verdict)
    assert all(set(row) == set(IfUnmet) for row in FATES.values())


@pytest.mark.parametrize("condition", ParentCondition)
@pytest.mark.parametrize("if_unmet", IfUnmet)
def test_no_child_waits_for_a_parent_that_stays_as_it_is(condition, if_unmet):
    assert not [state for state in FINAL if fate(condition, state, if_unmet) is Fate.WAIT]


@pytest.mark.parametrize("condition", ParentCondition)
@pytest.mark.parametrize("if_unmet", IfUnmet)
def test_a_child_waits_while_its_parent_has_not_ended(condition, if_unmet):
    running = set(JobState) - ENDED

    assert {fate(condition, state, if_unmet) for state in running} == {Fate.WAIT}


def test_a_job_is_named_with_its_condition():
    assert parse("x") == Dependency("x", ParentCondition.OK)
    assert parse("x:failed") == Dependency("x", ParentCondition.FAILED)
    assert str(parse("x:done")) == "x:done"
    for text in ("x:", "x:ended", "x:OK"):
        with pytest.raises(ValueError, match="ok, done, failed"):
            parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("#0", 0), ("#12", 12), ("12", None), ("#", None), ("#-1", None), ("#1x", None), ("#9999999999", None)],
)
def test_a_position_in_the_same_submit(text, expected):
    assert position(text) == expected


def intents(*parents):
    return [Intent("a", "t", after=tuple(Dependency(p) for p in names.split())) for names in parents]


def test_parents_come_before_their_children():
    assert list(submit_order(intents("", "x", ""))) == [0, 1, 2]
    assert list(submit_order(intents("#1 #2", "#3", "x #3", ""))) == [3, 1, 2, 0]
    assert list(submit_order(intents("x", "", "#0 #1", "x #0", ""))) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("family", "words"),
    [
        (("#0",), "#0 -> #0"),
        (("", "#2", "#3", "#1"), "wait for each other"),
        (("#5", ""), "of job #0 names #5, but the submit has 2 jobs"),
    ],
)
def test_a_cycle_and_a_position_outside_are_refused_by_name(family, words):
    with pytest.raises(BadIntent, match=words):
        submit_order(intents(*family))
