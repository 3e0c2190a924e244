"""
Where each end lands (SPEC TR-5): total over every way a dispatch can end in every phase of it.

A reserved dispatch has no run yet: it cannot complete, and what ends it early costs the job nothing. A dispatch that
is ending has a first reason, and that one wins over whatever the run reports on its way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from penstock.core.refusals import IllegalMove
from penstock.core.retry import DEFAULT, NONE_YET, Category, Counters, Schedules, after_failure
from penstock.core.states import Move, State, step
from penstock.core.words import Span

__all__ = ["LANDINGS", "End", "Landed", "Landing", "Phase", "land", "replaces", "table"]


class End(StrEnum):
    """Every way a dispatch can end. What a process did (a signal, an exit code) is turned into one of these."""

    COMPLETED = "completed"
    JOB_ERROR = "job_error"  # exit code, exception, a result that is too large, a function that is not there
    UNAVAILABLE = "unavailable"
    WORKER_CRASHED = "worker_crashed"  # a signal, out of memory, no room to log, it could not be started
    LEASE_EXPIRED = "lease_expired"
    HOST_LOST = "host_lost"
    SCHEDULER_RESTARTED = "scheduler_restarted"
    START_TIMEOUT = "start_timeout"
    RELEASED = "released"  # the worker gave the lease back without a result
    MAX_RUNTIME_EXCEEDED = "max_runtime_exceeded"
    HARD_CAP_EXCEEDED = "hard_cap_exceeded"
    COST_LIMIT_REACHED = "cost_limit_reached"
    COOPERATIVE_PREEMPTION = "cooperative_preemption"
    PREEMPTION_TIMEOUT = "preemption_timeout"
    GRACEFUL_SHUTDOWN = "graceful_shutdown"
    CANCELED = "canceled"


class Phase(StrEnum):
    RESERVED = "reserved"  # units held, no run
    LEASED = "leased"  # a worker starts or runs it
    ENDING = "ending"  # told to stop; units held until it is gone
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Landing:
    """`retry`: while that schedule has a delay left the job is requeued instead of making `move`."""

    move: Move
    retry: Category | None = None
    alert: bool = False
    #: Written besides the event of the move, for those who look for it by this name.
    mark: str | None = None


_BACK: Final = Landing(Move.REQUEUE)
_LATER: Final = Landing(Move.REQUEUE, retry=Category.START)
_CRASH: Final = Landing(Move.FAIL, retry=Category.CRASH)

#: None: a run that never started has nothing to report; the call is refused and changes nothing.
LANDINGS: Final[dict[End, tuple[Landing | None, Landing]]] = {
    #                          reserved                             leased
    End.COMPLETED: (None, Landing(Move.COMPLETE)),
    End.JOB_ERROR: (None, Landing(Move.FAIL, retry=Category.ERROR)),
    End.UNAVAILABLE: (
        Landing(Move.FAIL, retry=Category.UNAVAILABLE),
        Landing(Move.BLOCK, retry=Category.UNAVAILABLE),
    ),
    End.WORKER_CRASHED: (_CRASH, _CRASH),
    End.LEASE_EXPIRED: (_BACK, _CRASH),
    End.HOST_LOST: (_BACK, _CRASH),
    End.SCHEDULER_RESTARTED: (_CRASH, _CRASH),
    End.START_TIMEOUT: (_LATER, _LATER),
    End.RELEASED: (_BACK, _BACK),
    End.MAX_RUNTIME_EXCEEDED: (_BACK, Landing(Move.FAIL, retry=Category.CRASH, mark="TIMEOUT")),
    End.HARD_CAP_EXCEEDED: (Landing(Move.FAIL, alert=True), Landing(Move.FAIL, alert=True)),
    # Its owner was told when the limit was reached; a budget that ends many runs must not tell of each.
    End.COST_LIMIT_REACHED: (_BACK, Landing(Move.BLOCK)),
    End.COOPERATIVE_PREEMPTION: (_BACK, _BACK),
    End.PREEMPTION_TIMEOUT: (_BACK, _BACK),
    End.GRACEFUL_SHUTDOWN: (_BACK, _BACK),
    End.CANCELED: (Landing(Move.CANCEL), Landing(Move.CANCEL)),
}


def replaces(reason: End, first: End) -> bool:
    """
    Whether `reason` takes the place of the first reason that a dispatch was told to end for (SPEC TR-3). Only a cancel does, and only
    where the first reason puts the job back into the queue: an answered cancel means that the job does not run again.
    """
    _, leased = LANDINGS[first]
    return reason is End.CANCELED and (leased.move is Move.REQUEUE or leased.retry is not None)


@dataclass(frozen=True, slots=True)
class Landed:
    """`delay` until the next attempt, for a job that goes back to the queue."""

    end: End
    move: Move
    target: State
    counters: Counters
    delay: Span = 0
    alert: bool = False
    mark: str | None = None


def land(
    end: End,
    phase: Phase,
    *,
    first_reason: End | None = None,
    counters: Counters = NONE_YET,
    schedules: Schedules = DEFAULT,
    own_delays_sec: tuple[int, ...] = (),
) -> Landed:
    """`first_reason`: why an ENDING dispatch was told to end. It decides; what the run says now is too late."""
    if phase is Phase.ENDED:
        raise IllegalMove(
            f"a dispatch that has ended cannot end again ({end})", phase=str(phase), end=str(end)
        )
    if phase is Phase.ENDING and first_reason is not None:
        end = first_reason
    reserved, leased = LANDINGS[end]
    landing, state = (reserved, State.DISPATCHING) if phase is Phase.RESERVED else (leased, State.RUNNING)
    if landing is None:
        raise IllegalMove(
            f"a dispatch that is only reserved cannot be {end}: ask for its lease first",
            phase=str(phase),
            end=str(end),
        )
    move, delay = landing.move, 0
    if landing.retry is not None:
        counters, wait = after_failure(landing.retry, counters, schedules, own_delays_sec)
        if wait is not None:
            move, delay = Move.REQUEUE, wait
    if move is Move.COMPLETE:
        counters = Counters()
    return Landed(end, move, step(state, move), counters, delay, landing.alert, landing.mark)


def table() -> str:
    """The rows of `docs/states.md`; a test fails when they differ."""
    rows = [
        f"| {end} | {_cell(reserved, State.DISPATCHING)} | {_cell(leased, State.RUNNING)} |"
        for end, (reserved, leased) in LANDINGS.items()
    ]
    return "\n".join(["| end | while reserved | while leased |", "|---|---|---|", *rows])


def _cell(landing: Landing | None, state: State) -> str:
    if landing is None:
        return "refused"
    target = step(state, landing.move)
    words = f"QUEUED by {landing.retry} schedule" if landing.retry else str(target)
    if landing.retry and target is not State.QUEUED:
        words += f", then {target}"
    return words + (" + alert" if landing.alert else "")
