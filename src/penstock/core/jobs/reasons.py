"""
Reasons: why a job may not start now. A closed set of types, each with a retry hint and words.

The trail records the code and the fields of a reason, so explain can make its words long after, in a better
wording.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeAlias, assert_never, get_args

from msgspec import Struct, convert

from penstock.core.jobs.load import QuietState
from penstock.core.jobs.types import MINUTE, JobId, Moment, seconds, spelled


class Draining(Struct, frozen=True):
    """The host is stopping, or an operator drained it."""

    code: ClassVar = "draining"


class LabelMissing(Struct, frozen=True):
    labels: tuple[str, ...]
    hosts: tuple[str, ...] = ()  # that live and have all that the job asks for

    code: ClassVar = "label_missing"


class Paused(Struct, frozen=True):
    scope: str  # an addon, or "*" for everything

    code: ClassVar = "paused"


class NotReady(Struct, frozen=True):
    until: Moment

    code: ClassVar = "not_ready"


class NotQuiet(Struct, frozen=True):
    state: QuietState
    wants: QuietState
    busy: float
    by: str

    code: ClassVar = "not_quiet"


class NotQuietLongEnough(Struct, frozen=True):
    streak_sec: float
    wants_sec: int

    code: ClassVar = "not_quiet_long_enough"


class CapReached(Struct, frozen=True):
    scope: str  # concurrent, addon, type, constraint
    name: str
    limit: int

    code: ClassVar = "cap_reached"


class BudgetSpent(Struct, frozen=True):
    window: str  # day or month
    spent: int
    limit: int
    until: Moment

    code: ClassVar = "budget_spent"


class NotEnoughUnits(Struct, frozen=True):
    needs: int
    free: int
    capacity: int
    until: Moment | None = None  # when enough of what runs is expected to have ended

    code: ClassVar = "no_room"


class UnitsKept(Struct, frozen=True):
    kept_for: JobId | None  # None: a job that the reader may not know
    needs: int
    until: Moment | None = None

    code: ClassVar = "room_kept"


class QueuedAhead(Struct, frozen=True):
    """A queued job waits for the same units and goes first."""

    job_id: JobId | None  # None: a job that the reader may not know
    priority: int

    code: ClassVar = "queued_ahead"


class AwaitsWorker(Struct, frozen=True):
    """The job could start; pulling workers claim jobs of its kind."""

    last_came_at: Moment

    code: ClassVar = "awaits_worker"


Reason: TypeAlias = (
    Draining
    | LabelMissing
    | Paused
    | NotReady
    | NotQuiet
    | NotQuietLongEnough
    | CapReached
    | BudgetSpent
    | NotEnoughUnits
    | UnitsKept
    | QueuedAhead
    | AwaitsWorker
)

REASONS: Final[dict[str, type[Reason]]] = {kind.code: kind for kind in get_args(Reason)}


def retry_after_sec(reason: Reason, now: Moment) -> float:
    """After how long another request may help. Never 0: a denial is no invitation to spin."""
    match reason:
        case NotReady(until) | BudgetSpent(until=until):
            wait = seconds(until - now)
        case NotEnoughUnits(until=until) | UnitsKept(until=until):
            wait = min(seconds(until - now), 60.0) if until is not None else 5.0
        case NotQuietLongEnough(streak, wants):
            wait = wants - streak
        case NotQuiet():
            wait = 15.0
        case Paused() | Draining() | LabelMissing():
            wait = 30.0
        case CapReached() | QueuedAhead() | AwaitsWorker():
            wait = 5.0
        case _:
            assert_never(reason)
    return max(1.0, round(wait, 3))


def words(reason: Reason, now: Moment) -> str:
    """One or two sentences."""
    match reason:
        case NotReady(until):
            text = f"It starts {due_in(until, now)} at the earliest."
        case NotQuiet(state, wants, score, by):
            text = (
                f"The machine is {_LOAD[state]} (busy score {score:.1f} of 10, from {by}). "
                f"This job starts when the load drops to {wants}{_EARLIER[wants]}."
            )
        case NotQuietLongEnough(streak, wants_sec):
            text = (
                f"The machine has been quiet for {streak:.0f} s; this job waits for {wants_sec} s of quiet."
            )
        case BudgetSpent(window, spent, limit, until):
            text = (
                f"The budget of this {window} is spent ({spent / 1e6:.2f} of {limit / 1e6:.2f}). "
                f"The next {window} begins {due_in(until, now)}."
            )
        case NotEnoughUnits(needs, free, capacity, until):
            when = "" if until is None else f", and enough are expected {due_in(until, now)}"
            text = f"It needs {needs} units; {free} of {capacity} are free{when}."
        case UnitsKept(kept_for, needs, until):
            when = "" if until is None else f", which is to start {due_in(until, now)}"
            text = f"{needs} units are kept for {named(kept_for)}{when}."
        case QueuedAhead(job_id, priority):
            text = f"{named(job_id).capitalize()} of priority {priority} goes first and needs the same units."
        case AwaitsWorker(last_came_at):
            text = (
                "It waits for a worker to claim it. "
                f"A worker that may claim it last asked {spelled(now - last_came_at)} ago."
            )
        case _:
            text = _closed(reason)
    return text


_LOAD: Final = {
    QuietState.QUIET: "quiet",
    QuietState.NORMAL: "in normal use",
    QuietState.BUSY: "busy",
    QuietState.PANIC: "overloaded",
}
#: The option of a submit that would let the job start earlier.
_EARLIER: Final = {
    QuietState.QUIET: "; `--when normal` starts it earlier",
    QuietState.NORMAL: "; `--when any` starts it earlier",
    QuietState.BUSY: "",
    QuietState.PANIC: "",
}


def _closed(reason: Draining | LabelMissing | Paused | CapReached) -> str:
    match reason:
        case LabelMissing(labels, ()):
            return f"No running host has the label{'s' * (len(labels) > 1)} {' and '.join(labels)}."
        case LabelMissing(labels, hosts):
            return (
                f"This host lacks the label{'s' * (len(labels) > 1)} {' and '.join(labels)}; "
                f"{', '.join(hosts)} can run it."
            )
        case Draining():
            return "This host starts no more jobs: it is stopping or drained."
        case Paused("*"):
            return "Everything is paused; `penstock resume` ends that."
        case Paused(scope):
            return f"Addon {scope} is paused; `penstock resume {scope}` ends that."
        case CapReached("concurrent", _, limit):
            return f"All {limit} slots are taken."
        case CapReached(scope, name, limit):
            return f"{scope.capitalize()} {name} has {limit} in flight, its limit."
        case _:
            assert_never(reason)


def named(job_id: JobId | None) -> str:
    return "another job" if job_id is None else f"job {job_id[-8:]}"


def from_json(code: str, data: Mapping[str, Any]) -> Reason:
    """Unknown fields are dropped: an older program must be able to read a newer one's trail."""
    return convert(data, REASONS[code])


def due_in(moment: Moment, now: Moment) -> str:
    """A duration and not a clock time: the reader's time zone is unknown."""
    about = "about " if moment - now >= 2 * MINUTE else ""
    return f"in {about}{spelled(moment - now)}"
