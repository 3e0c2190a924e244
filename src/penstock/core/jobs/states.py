"""
A job's life, as two tables: the moves between its states, and the end rules.

Refusals, the buttons of the page, the hints of the CLI and `docs/states.md` are made from the moves. The
state says what may happen next; the reason, on the event, says why the job got there. So there is no
"retrying" and no "scheduled" state: both are QUEUED with a later start.

The end rules say what becomes of a job when its dispatch ends (SPEC TR-5), for every end reason, before and
after a worker has its lease. A reserved dispatch has not run yet, so it cannot complete. A dispatch that is
ending has a first reason, which wins over the report of an attempt that stops.

A retry schedule is a list of delays, and all of them are used: the failure after the last delay is final.
Counters are per category, so a machine that was unavailable does not use up the retries for crashes, and a
graceful stop counts nowhere.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import IllegalMove
from penstock.core.jobs.types import MINUTE, SECOND, EndReason, Span


class JobState(StrEnum):
    """
    The state of a job, as a string: QUEUED, DISPATCHING, RUNNING, DONE, FAILED, CANCELED or BLOCKED.

    For example:

        if job.state == penstock.JobState.DONE:
            print(job.result())
    """

    QUEUED = "QUEUED"  # accepted, not started
    DISPATCHING = "DISPATCHING"  # its units are reserved; a worker is being found or started
    RUNNING = "RUNNING"  # a worker holds its lease
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELED = "CANCELED"
    BLOCKED = "BLOCKED"  # stopped until a person decides: retry or cancel


class Move(StrEnum):
    """A change of a job's state."""

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
    (JobState.QUEUED, Move.FAIL): JobState.FAILED,  # its deadline passed, or a dependency is unmet
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

#: A job has a live dispatch exactly in these states.
IN_FLIGHT: Final = frozenset({JobState.DISPATCHING, JobState.RUNNING})
#: The scheduler does nothing more with a job in these states; a user may retry or cancel some of them.
SETTLED: Final = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELED, JobState.BLOCKED})
#: No move leaves these states.
FINAL: Final = frozenset(JobState) - frozenset(source for source, _ in MOVES)
#: The job has ended, so its dependents and its batch go on. A BLOCKED job has not: a user must decide first.
ENDED: Final = SETTLED - {JobState.BLOCKED}
PRUNABLE: Final = ENDED


def step(state: JobState, move: Move) -> JobState:
    """The state after the move. IllegalMove says which moves a user can make instead."""
    try:
        return MOVES[state, move]
    except KeyError:
        ways = allowed(state)
        by_users = [_DONE_TO_IT[way] for way in ways if way in (Move.CANCEL, Move.RETRY)]
        hint = f"it can be {' or '.join(by_users)}" if by_users else "that state is final"
        text = f"a {state} job cannot be {_DONE_TO_IT[move]}; {hint}"
        raise IllegalMove(
            text, state=str(state), move=str(move), allowed=[str(way) for way in ways]
        ) from None


_DONE_TO_IT: Final = {
    "admit": "admitted", "start": "started", "complete": "completed", "fail": "failed",
    "cancel": "canceled", "block": "blocked", "requeue": "requeued", "retry": "retried",
}  # fmt: skip


def allowed(state: JobState) -> tuple[Move, ...]:
    return tuple(move for source, move in MOVES if source is state)


class Category(StrEnum):
    """
    The category of a failure. `Counters` has a field for each, `Schedules` for each but ERROR: a job brings
    the delays for its own errors.
    """

    CRASH = "crash"  # worker, lease or time limit was lost: what the job did is unknown
    UNAVAILABLE = "unavailable"  # the job reported that something it needs is unavailable
    ERROR = "error"  # the job's own error
    START = "start"  # no worker took the reservation in time


class Counters(Struct, frozen=True, gc=False):
    """A job's failures so far, by category. A completion resets them."""

    crash: int = 0
    unavailable: int = 0
    error: int = 0
    start: int = 0


NONE_YET = Counters()


class Schedules(Struct, frozen=True):
    """The delays before the next attempt, by category of failure."""

    crash: tuple[Span, ...] = (1 * MINUTE, 5 * MINUTE, 15 * MINUTE, 30 * MINUTE, 30 * MINUTE)
    unavailable: tuple[Span, ...] = (2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 15 * MINUTE)
    #: The last delay repeats for ever: a job does not fail because its worker is away. Without a delay the
    #: job would be reserved again before others, and hold the units of jobs whose workers are present.
    start: tuple[Span, ...] = (30 * SECOND, 1 * MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE)


DEFAULT = Schedules()


def after_failure(
    category: Category, counters: Counters, schedules: Schedules, own_delays_sec: tuple[int, ...]
) -> tuple[Counters, Span | None]:
    """The counters after this failure, and the delay until the next attempt. None: no attempt is left."""
    if category is Category.ERROR:
        delays: tuple[Span, ...] = tuple(d * SECOND for d in own_delays_sec)
    else:
        delays = getattr(schedules, category)
    failures: int = getattr(counters, category)
    counters = replace(counters, **{category: failures + 1})
    if category is Category.START:
        failures = min(failures, len(delays) - 1)
    return counters, delays[failures] if failures < len(delays) else None


class DispatchPhase(StrEnum):
    """How far a dispatch has come."""

    RESERVED = "reserved"  # units held, no run
    LEASED = "leased"  # a worker starts or runs it
    ENDING = "ending"  # told to stop; units held until it is gone
    ENDED = "ended"


class EndRule(Struct, frozen=True):
    """
    What one end reason does to the job. `retry`: while the schedule of that category has a delay left, the
    job is requeued instead of making `move`.
    """

    move: Move
    retry: Category | None = None
    alert: bool = False
    #: The kind of an event that is written besides the event of the move, for readers that look for it.
    mark: str | None = None


_BACK: Final = EndRule(Move.REQUEUE)
_LATER: Final = EndRule(Move.REQUEUE, retry=Category.START)
_CRASH: Final = EndRule(Move.FAIL, retry=Category.CRASH)

#: The rules for a reserved and for a leased dispatch. None: an attempt that never started cannot report
#: this end; the report is refused and changes nothing.
END_RULES: Final[dict[EndReason, tuple[EndRule | None, EndRule]]] = {
    #                          reserved                             leased
    EndReason.COMPLETED: (None, EndRule(Move.COMPLETE)),
    EndReason.JOB_ERROR: (None, EndRule(Move.FAIL, retry=Category.ERROR)),
    EndReason.UNAVAILABLE: (
        EndRule(Move.FAIL, retry=Category.UNAVAILABLE),
        EndRule(Move.BLOCK, retry=Category.UNAVAILABLE),
    ),
    EndReason.WORKER_CRASHED: (_CRASH, _CRASH),
    EndReason.LEASE_EXPIRED: (_BACK, _CRASH),
    EndReason.HOST_LOST: (_BACK, _CRASH),
    EndReason.SCHEDULER_RESTARTED: (_CRASH, _CRASH),
    EndReason.START_TIMEOUT: (_LATER, _LATER),
    EndReason.RELEASED: (_BACK, _BACK),
    EndReason.MAX_RUNTIME_EXCEEDED: (_BACK, EndRule(Move.FAIL, retry=Category.CRASH, mark="TIMEOUT")),
    EndReason.HARD_CAP_EXCEEDED: (EndRule(Move.FAIL, alert=True), EndRule(Move.FAIL, alert=True)),
    # The owner got an alert when the limit was reached; a budget that ends many runs must not send one for
    # each.
    EndReason.COST_LIMIT_REACHED: (_BACK, EndRule(Move.BLOCK)),
    EndReason.COOPERATIVE_PREEMPTION: (_BACK, _BACK),
    EndReason.PREEMPTION_TIMEOUT: (_BACK, _BACK),
    EndReason.GRACEFUL_SHUTDOWN: (_BACK, _BACK),
    EndReason.CANCELED: (EndRule(Move.CANCEL), EndRule(Move.CANCEL)),
}


def replaces(reason: EndReason, first: EndReason) -> bool:
    """
    Whether `reason` replaces the first reason of an ending dispatch (SPEC TR-3). Only a cancel does, and only
    where the first reason would requeue the job: a confirmed cancel means that the job does not run again.
    """
    _, leased = END_RULES[first]
    return reason is EndReason.CANCELED and (leased.move is Move.REQUEUE or leased.retry is not None)


class EndResult(Struct, frozen=True):
    """What the end rules decide about one dispatch. `delay`: until the next attempt of a requeued job."""

    end: EndReason
    move: Move
    target: JobState
    counters: Counters
    delay: Span
    rule: EndRule


def resolve_end(
    end: EndReason,
    phase: DispatchPhase,
    *,
    first_reason: EndReason | None = None,
    counters: Counters = NONE_YET,
    schedules: Schedules = DEFAULT,
    own_delays_sec: tuple[int, ...] = (),
) -> EndResult:
    """
    What becomes of the job when its dispatch ends. `first_reason`: why an ENDING dispatch ends; it decides,
    and the attempt's own report comes too late.
    """
    if phase is DispatchPhase.ENDED:
        raise IllegalMove(
            f"a dispatch that has ended cannot end again ({end})", phase=str(phase), end=str(end)
        )
    if phase is DispatchPhase.ENDING and first_reason is not None:
        end = first_reason
    reserved, leased = END_RULES[end]
    end_rule, state = (
        (reserved, JobState.DISPATCHING) if phase is DispatchPhase.RESERVED else (leased, JobState.RUNNING)
    )
    if end_rule is None:
        raise IllegalMove(
            f"a dispatch that is only reserved cannot be {end}: ask for its lease first",
            phase=str(phase),
            end=str(end),
        )
    move, delay = end_rule.move, 0
    if end_rule.retry is not None:
        counters, wait = after_failure(end_rule.retry, counters, schedules, own_delays_sec)
        if wait is not None:
            move, delay = Move.REQUEUE, wait
    if move is Move.COMPLETE:
        counters = Counters()
    return EndResult(end, move, step(state, move), counters, delay, end_rule)
