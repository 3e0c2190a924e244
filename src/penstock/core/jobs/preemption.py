"""
Preemption (SPEC TR-7): a running job gives its units to a job of clearly higher priority.

A job preempts only if it can start then: it is ready, and only a slot or units are missing. One victim at a
time must be enough: the attempt with the lowest priority, and of equals the one that started last, which
loses least. A job that is not preemptible is never a victim. The victim is asked to yield, asked again, and
then stopped. A cycle ends before another begins, so two jobs cannot preempt each other in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionClass
from penstock.core.jobs.job import Dispatch
from penstock.core.jobs.ordering import QueuedJob
from penstock.core.jobs.reasons import NotEnoughUnits, Reason
from penstock.core.jobs.round import Placement, RoundInputs
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import SECOND, DispatchId, JobId, Moment, Span


class Preemption(Struct, frozen=True):
    """The rules of preemption."""

    #: By how much the priority must be higher. None: no preemption.
    threshold: int | None = 20
    #: How long the victim may take after each of the two requests.
    patience: Span = 60 * SECOND


class Want(Struct, frozen=True):
    """
    A queued job that cannot start now, for whatever reason: `choose` looks for a victim whose end lets it
    start.
    """

    inputs: RoundInputs
    waiting: QueuedJob
    admission_class: AdmissionClass
    urgent: bool

    def fits_without(self, ended: Sequence[AdmissionClass]) -> bool:
        """Whether the job would be admitted if these dispatches had ended."""
        ledger = self.inputs.view.ledger.without(ended) if ended else None
        return self.inputs.gates(self.admission_class, ledger=ledger, urgent=self.urgent).refusal() is None


def wanted(inputs: RoundInputs) -> list[Want]:
    """
    The heads of ready queues that may preempt, by priority without aging, because a long wait is no reason to
    preempt. Not among them: heads that can start now, and heads without a present worker of this host, for
    which an attempt might yield in vain.
    """
    wants = [
        Want(inputs, waiting, queue.admission_class, queue.urgent)
        for queue in inputs.view.ready_queues()
        if _has_worker(inputs, queue.admission_class) and (waiting := next(queue.jobs, None)) is not None
    ]
    wants.sort(key=lambda want: (-want.waiting.priority, want.waiting.turn, want.waiting.no))
    return [want for want in wants if not want.fits_without(())]


def _has_worker(inputs: RoundInputs, admission_class: AdmissionClass) -> bool:
    offer = inputs.offer(admission_class)
    if offer is Placement.RESERVE:
        return inputs.take_place(admission_class)
    return offer is not Placement.ELSEWHERE


class Candidate(NamedTuple):
    """An attempt that may have to yield, with the priority of its job."""

    priority: int
    dispatch: Dispatch
    preemptible: bool = True


def choose(want: Want, running: Sequence[Candidate], preemption: Preemption) -> Dispatch | None:
    """The victim among the attempts. None: there is none, or attempts that end already make enough room."""
    ending = [run.dispatch.admission_class for run in running if run.dispatch.phase is DispatchPhase.ENDING]
    if preemption.threshold is None or (ending and want.fits_without(ending)):
        return None
    most = want.waiting.priority - preemption.threshold
    lower = [
        run
        for run in running
        if run.preemptible and run.priority <= most and run.dispatch.phase is not DispatchPhase.ENDING
    ]
    lower.sort(key=lambda run: (run.priority, -(run.dispatch.started_at or 0)))
    return next(
        (run.dispatch for run in lower if want.fits_without([*ending, run.dispatch.admission_class])), None
    )


def still_wanted(
    inputs: RoundInputs,
    admission_class: AdmissionClass,
    victim: AdmissionClass,
    ending: Sequence[AdmissionClass],
    *,
    due: bool,
    urgent: bool = False,
    ready_at: Moment = 0,
) -> bool:
    """
    Whether a waiting job of this class would start if the victim ended, so that the victim does not stop in
    vain: the job or everything may have been paused since the last request. Units come and go between two
    rounds, so they count only when the next act is `due`. `ending`: attempts that end already.
    """

    def refusal(ended: Sequence[AdmissionClass]) -> Reason | None:
        ledger = inputs.view.ledger.without(ended)
        return inputs.gates(admission_class, ledger=ledger, urgent=urgent, ready_at=ready_at).refusal()

    reason = refusal([*ending, victim])
    if not due:
        return reason is None or isinstance(reason, NotEnoughUnits)
    return reason is None and refusal(ending) is not None and _has_worker(inputs, admission_class)


class Act(Enum):
    """What to do with the victim."""

    ASK = "ask"
    FORCE = "force"


class Cycle(Struct, frozen=True):
    """The requests to one victim. `asked`: how many so far. `due`: when the next act follows."""

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
    The cycle from now on (None: it is over), and what to do. It is over when the victim has ended or is
    stopped, or when the job no longer needs the units.
    """
    if not victim_runs or not still_wanted:
        return None, None
    if cycle.due > now + preemption.patience:  # the clock was set back: give the victim the whole time again
        return replace(cycle, due=now + preemption.patience), None
    if now < cycle.due:
        return cycle, None
    if cycle.asked == 1:
        return Cycle(cycle.victim, cycle.wanted_by, 2, now + preemption.patience), Act.ASK
    return None, Act.FORCE
