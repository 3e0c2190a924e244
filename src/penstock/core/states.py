"""
A job's life, as a table.

The refusals, the buttons of the page, the hints of the CLI and `docs/states.md` are all made from it. State says
what may happen next; the reason, on the event, says why we got here. So there is no "retrying" and no "scheduled"
state: both are QUEUED with a later start.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from penstock.core.refusals import IllegalMove

__all__ = [
    "FINAL",
    "IN_FLIGHT",
    "MOVES",
    "PRUNABLE",
    "SETTLED",
    "Move",
    "State",
    "allowed",
    "mermaid",
    "step",
]


class State(StrEnum):
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


MOVES: Final[dict[tuple[State, Move], State]] = {
    (State.QUEUED, Move.ADMIT): State.DISPATCHING,
    (State.QUEUED, Move.CANCEL): State.CANCELED,
    (State.QUEUED, Move.FAIL): State.FAILED,  # its deadline passed
    (State.DISPATCHING, Move.START): State.RUNNING,
    (State.DISPATCHING, Move.REQUEUE): State.QUEUED,
    (State.DISPATCHING, Move.CANCEL): State.CANCELED,
    (State.DISPATCHING, Move.FAIL): State.FAILED,
    (State.RUNNING, Move.COMPLETE): State.DONE,
    (State.RUNNING, Move.FAIL): State.FAILED,
    (State.RUNNING, Move.CANCEL): State.CANCELED,
    (State.RUNNING, Move.BLOCK): State.BLOCKED,
    (State.RUNNING, Move.REQUEUE): State.QUEUED,
    (State.BLOCKED, Move.CANCEL): State.CANCELED,
    (State.BLOCKED, Move.RETRY): State.QUEUED,
    (State.FAILED, Move.RETRY): State.QUEUED,
}

#: A dispatch lives exactly in these.
IN_FLIGHT: Final = frozenset({State.DISPATCHING, State.RUNNING})
#: Nothing happens by itself any more.
SETTLED: Final = frozenset({State.DONE, State.FAILED, State.CANCELED, State.BLOCKED})
#: Nothing can happen any more.
FINAL: Final = frozenset(State) - frozenset(source for source, _ in MOVES)
#: BLOCKED waits for a person, however long that takes.
PRUNABLE: Final = SETTLED - {State.BLOCKED}


def step(state: State, move: Move) -> State:
    try:
        return MOVES[state, move]
    except KeyError:
        ways = [str(way) for way in allowed(state)]
        hint = f"it can be {', '.join(_DONE_TO_IT[way] for way in ways)}" if ways else "that state is final"
        said = f"a {state} job cannot be {_DONE_TO_IT[move]}; {hint}"
        raise IllegalMove(said, state=str(state), move=str(move), allowed=ways) from None


_DONE_TO_IT: Final = {
    "admit": "admitted", "start": "started", "complete": "completed", "fail": "failed",
    "cancel": "canceled", "block": "blocked", "requeue": "requeued", "retry": "retried",
}  # fmt: skip


def allowed(state: State) -> tuple[Move, ...]:
    return tuple(move for source, move in MOVES if source is state)


def mermaid() -> str:
    """`docs/states.md` holds this string; a test fails when they differ."""
    lines = [f"    {source} --> {target}: {move}" for (source, move), target in MOVES.items()]
    ends = [f"    {state} --> [*]" for state in State if state in FINAL]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {State.QUEUED}: submit", *lines, *ends])
