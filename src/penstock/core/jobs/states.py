"""
A job's life, as a table.

Refusals, the buttons of the page, the hints of the CLI and `docs/states.md` are made from it. The state says
what may happen next; the reason, on the event, says why the job got there. So there is no "retrying" and no
"scheduled" state: both are QUEUED with a later start.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from penstock.core.errors import IllegalMove


class JobState(StrEnum):
    QUEUED = "QUEUED"  # accepted, not started
    DISPATCHING = "DISPATCHING"  # its units are reserved; a worker is being found or started
    RUNNING = "RUNNING"  # a worker holds its lease
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELED = "CANCELED"
    BLOCKED = "BLOCKED"  # stopped until a person decides: retry or cancel


class Move(StrEnum):
    ADMIT = "admit"
    START = "start"
    COMPLETE = "complete"
    FAIL = "fail"
    CANCEL = "cancel"
    BLOCK = "block"
    REQUEUE = "requeue"
    RETRY = "retry"


MOVES: Final[dict[tuple[JobState, Move], JobState]] = {
    (JobState.QUEUED, Move.ADMIT): JobState.DISPATCHING,
    (JobState.QUEUED, Move.CANCEL): JobState.CANCELED,
    (JobState.QUEUED, Move.FAIL): JobState.FAILED,  # its deadline passed
    (JobState.DISPATCHING, Move.START): JobState.RUNNING,
    (JobState.DISPATCHING, Move.REQUEUE): JobState.QUEUED,
    (JobState.DISPATCHING, Move.CANCEL): JobState.CANCELED,
    (JobState.DISPATCHING, Move.FAIL): JobState.FAILED,
    (JobState.RUNNING, Move.COMPLETE): JobState.DONE,
    (JobState.RUNNING, Move.FAIL): JobState.FAILED,
    (JobState.RUNNING, Move.CANCEL): JobState.CANCELED,
    (JobState.RUNNING, Move.BLOCK): JobState.BLOCKED,
    (JobState.RUNNING, Move.REQUEUE): JobState.QUEUED,
    (JobState.BLOCKED, Move.CANCEL): JobState.CANCELED,
    (JobState.BLOCKED, Move.RETRY): JobState.QUEUED,
    (JobState.FAILED, Move.RETRY): JobState.QUEUED,
}

#: A dispatch lives exactly in these.
IN_FLIGHT: Final = frozenset({JobState.DISPATCHING, JobState.RUNNING})
#: Nothing happens by itself any more.
SETTLED: Final = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELED, JobState.BLOCKED})
#: Nothing can happen any more.
FINAL: Final = frozenset(JobState) - frozenset(source for source, _ in MOVES)
#: BLOCKED waits for a person, however long that takes.
PRUNABLE: Final = SETTLED - {JobState.BLOCKED}


def step(state: JobState, move: Move) -> JobState:
    try:
        return MOVES[state, move]
    except KeyError:
        ways = [str(way) for way in allowed(state)]
        hint = f"it can be {', '.join(_DONE_TO_IT[way] for way in ways)}" if ways else "that state is final"
        text = f"a {state} job cannot be {_DONE_TO_IT[move]}; {hint}"
        raise IllegalMove(text, state=str(state), move=str(move), allowed=ways) from None


_DONE_TO_IT: Final = {
    "admit": "admitted", "start": "started", "complete": "completed", "fail": "failed",
    "cancel": "canceled", "block": "blocked", "requeue": "requeued", "retry": "retried",
}  # fmt: skip


def allowed(state: JobState) -> tuple[Move, ...]:
    return tuple(move for source, move in MOVES if source is state)


def mermaid() -> str:
    """`docs/states.md` holds this string; a test fails when they differ."""
    lines = [f"    {source} --> {target}: {move}" for (source, move), target in MOVES.items()]
    ends = [f"    {state} --> [*]" for state in JobState if state in FINAL]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {JobState.QUEUED}: submit", *lines, *ends])
