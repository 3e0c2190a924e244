"""
Preemption (SPEC TR-7): a running job gives its units to a job of clearly higher priority.

Only a job that could start then may preempt: it is ready, and only a slot or units are missing. There is one
victim at a time, whose units alone suffice: the lowest priority, and among equals the latest started, which
loses least. The victim is asked, asked again, and then forced; a cycle ends before another begins, so two
jobs cannot take turns at evicting each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.ordering import QueuedJob, ReadyQueue, RoundInputs
from penstock.core.jobs.types import SECOND, DispatchId, JobId, Moment, Span


class Preemption(Struct, frozen=True):
    #: By how much the priority must be higher. None: no preemption.
    threshold: int | None = 20
    #: How long the victim may take after each of the two requests.
    patience: Span = 60 * SECOND


class InFlight(Struct, frozen=True):
    dispatch_id: DispatchId
    job_id: JobId
    priority: int
    started_at: Moment
    admission_class: AdmissionClass
    ending: bool  # its room comes back by itself


class Want(Struct, frozen=True):
    """
    A queued job that cannot start now. Why does not matter here: `choose` looks only for a victim whose end
    lets it start.
    """

    job_id: JobId
    priority: int
    admission_class: AdmissionClass
    #: Whether it would be admitted if these had ended.
    fits_without: Callable[[Sequence[AdmissionClass]], bool]


def wanted(inputs: RoundInputs) -> list[Want]:
    """
    Heads of ready queues, highest priority first: the priority itself and not its age, because a long wait is
    no reason to evict.
    """
    heads = [
        (waiting, line)
        for line in inputs.admission_view.lines()
        if (waiting := next(line.jobs, None)) is not None
    ]
    heads.sort(key=lambda head: (-head[0].priority, head[0].turn, head[0].no))
    return [want for waiting, line in heads if (want := _want(inputs, waiting, line)) is not None]


def _want(inputs: RoundInputs, waiting: QueuedJob, line: ReadyQueue) -> Want | None:
    ledger, admission_class = inputs.admission_view.ledger, line.admission_class

    def fits(ended: Sequence[AdmissionClass]) -> bool:
        left = ledger.without(ended)
        return inputs.decide(admission_class, ledger=left, urgent=line.urgent) is None

    if fits(()):
        return None  # it starts by itself
    return Want(waiting.job_id, waiting.priority, admission_class, fits)


def choose(want: Want, running: Sequence[InFlight], preemption: Preemption) -> InFlight | None:
    """The victim; None if there is none, or if units come free without one."""
    ending = [flight.admission_class for flight in running if flight.ending]
    if preemption.threshold is None or (ending and want.fits_without(ending)):
        return None
    lower = [
        flight
        for flight in running
        if not flight.ending and want.priority - flight.priority >= preemption.threshold
    ]
    lower.sort(key=lambda flight: (flight.priority, -flight.started_at))
    return next((flight for flight in lower if want.fits_without([*ending, flight.admission_class])), None)


class Act(Enum):
    ASK = "ask"
    FORCE = "force"


class Cycle(Struct, frozen=True):
    victim: DispatchId
    wanted_by: JobId
    asked: int
    due: Moment


def begin(victim: DispatchId, wanted_by: JobId, now: Moment, preemption: Preemption) -> Cycle:
    """Begin a cycle with the first request."""
    return Cycle(victim, wanted_by, 1, now + preemption.patience)


def advance(
    cycle: Cycle, *, victim_runs: bool, still_wanted: bool, now: Moment, preemption: Preemption
) -> tuple[Cycle | None, Act | None]:
    """
    The cycle after this moment (None: it is over) and what to do. It ends when the victim ended or the job
    needs the units no longer.
    """
    if not victim_runs or not still_wanted:
        return None, None
    if cycle.due > now + preemption.patience:  # the clock was set back since: the victim has its time again
        return replace(cycle, due=now + preemption.patience), None
    if now < cycle.due:
        return cycle, None
    if cycle.asked == 1:
        return Cycle(cycle.victim, cycle.wanted_by, 2, now + preemption.patience), Act.ASK
    return None, Act.FORCE
