from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import IllegalMove
from penstock.core.jobs.states import (
    END_RULES,
    FINAL,
    IN_FLIGHT,
    MOVES,
    PRUNABLE,
    SETTLED,
    JobState,
    Move,
    allowed,
    step,
)

# SPEC JB-2, written out once more by hand: the table in the code must not drift from it.
JB_2 = {
    "QUEUED": {"DISPATCHING", "CANCELED", "FAILED"},
    "DISPATCHING": {"RUNNING", "QUEUED", "CANCELED", "FAILED"},
    "RUNNING": {"DONE", "FAILED", "CANCELED", "BLOCKED", "QUEUED"},
    "BLOCKED": {"CANCELED", "QUEUED"},
    "FAILED": {"QUEUED"},
    "DONE": set(),
    "CANCELED": set(),
}


def test_the_moves_are_those_of_the_specification_and_no_others():
    moves = {str(state): {str(MOVES[state, move]) for move in allowed(state)} for state in JobState}

    assert moves == JB_2


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("move", Move)
def test_every_other_move_is_refused_by_name(state, move):
    if (state, move) in MOVES:
        assert step(state, move) is MOVES[state, move]
        return

    with pytest.raises(IllegalMove) as refusal:
        step(state, move)

    assert str(state) in str(refusal.value)
    assert f"cannot be {str(move).removesuffix('y')}" in str(refusal.value)
    assert refusal.value.data["allowed"] == [str(m) for m in allowed(state)]


def test_only_retry_leads_out_of_failed_and_blocked_to_the_queue():
    assert {m for (s, m), t in MOVES.items() if s in SETTLED and t is JobState.QUEUED} == {Move.RETRY}


def test_the_groups_of_states_follow_from_the_table():
    assert {JobState.DONE, JobState.CANCELED} == FINAL
    assert {JobState.DONE, JobState.FAILED, JobState.CANCELED} == PRUNABLE
    assert IN_FLIGHT.isdisjoint(SETTLED)


def mermaid():
    """`docs/states.md` holds this string; a test fails when they differ."""
    lines = [f"    {source} --> {target}: {move}" for (source, move), target in MOVES.items()]
    ends = [f"    {state} --> [*]" for state in JobState if state in FINAL]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {JobState.QUEUED}: submit", *lines, *ends])


def table():
    """The rows of `docs/states.md`; a test fails when they differ."""
    rows = [
        f"| {end} | {_cell(reserved, JobState.DISPATCHING)} | {_cell(leased, JobState.RUNNING)} |"
        for end, (reserved, leased) in END_RULES.items()
    ]
    return "\n".join(["| end | while reserved | while leased |", "|---|---|---|", *rows])


def _cell(end_rule, state):
    if end_rule is None:
        return "refused"
    target = step(state, end_rule.move)
    words = f"QUEUED by {end_rule.retry} schedule" if end_rule.retry else str(target)
    if end_rule.retry and target is not JobState.QUEUED:
        words += f", then {target}"
    return words + (" + alert" if end_rule.alert else "")


def test_the_page_about_states_is_made_from_the_tables():
    page = (Path(__file__).parents[2] / "docs" / "states.md").read_text("utf-8")

    assert mermaid() in page
    assert table() in page
