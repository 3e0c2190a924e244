"""
Forecast: what holds a queued job back, which jobs go first, and when it will likely start.

`outlook` uses the same gates and the same order as a round, on the same view of the store, and changes
nothing. A job that no gate refuses may still be held back: others go first and take the units, or the round
keeps units for one of them. So if no gate refuses, `outlook` tries a round.

`forecast` gets the order from a round on a host with endless capacity. Then each job starts, in that order,
when its units are free on the real host. A run without an expected duration never returns its units here, so
jobs that need them get no moment: no moment is better than a guess. Jobs that could run in kept units are
ignored, so a moment is rather too late than too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionClass, AdmissionLimits, Conditions, Ledger
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import QueuedJob, head_key
from penstock.core.jobs.reasons import (
    BudgetSpent,
    NotEnoughUnits,
    NotQuietLongEnough,
    NotReady,
    QueuedAhead,
    Reason,
    UnitsKept,
)
from penstock.core.jobs.round import (
    LEFT,
    MOST_START_TIMEOUTS,
    AdmissionView,
    Pick,
    Placement,
    ReadyQueue,
    RoundInputs,
    RoundResult,
    RunningJob,
    run_round,
)
from penstock.core.jobs.start_ranges import StartRange
from penstock.core.jobs.types import SECOND, AddonId, JobId, Moment

#: How many jobs of a queue are looked at: a queue of a million must not be counted for one sentence.
MOST_COUNTED: Final = 1_000
_ENDLESS: Final = 1 << 40
MOST_NAMED: Final = 5


class Ahead(Struct, frozen=True):
    """A head that goes first. `why`: what decided that: band, urgent, share or turn."""

    job_id: JobId | None  # None: a job that the reader may not know
    addon_id: AddonId | None
    why: str


class Outlook(Struct, frozen=True):
    """
    The outlook of a queued job. `reason`: why it does not start; None: the next round starts it. `head`:
    whether it is the first of its ready queue, so that rounds decide about it and record denials.
    """

    reason: Reason | None = None
    ahead: tuple[Ahead, ...] = ()
    line_ahead: int = 0  # jobs before it in its own ready queue
    likely_start_at: Moment | None = None
    head: bool = False
    next_when_ends: JobId | None = None  # the running job whose end is expected to free the units
    #: The range around the likely start; None: too little was learned.
    start_range: StartRange | None = None


NOTHING_HOLDS: Final = Outlook()


def outlook(inputs: RoundInputs, job_id: JobId, admission_class: AdmissionClass, ready_at: Moment) -> Outlook:
    """The outlook of a job. For a job that is not ready yet, `ready_at` alone decides."""
    view, conditions = inputs.view, inputs.conditions
    waiting, urgent, before = _find(view, job_id, admission_class)
    reason = inputs.gates(admission_class, ready_at=ready_at, urgent=urgent).refusal()
    if reason is None and waiting is not None and inputs.offer(admission_class) not in LEFT:
        reason = _held_by_others(inputs, waiting, admission_class, urgent=urgent)
    if isinstance(reason, NotEnoughUnits):
        reason = replace(reason, until=_room_at(view, conditions, admission_class.cost_units))
    likely = _likely(reason, view.now, lambda: forecast(inputs).get(job_id))
    return Outlook(
        reason,
        () if waiting is None else _ahead(inputs, waiting, admission_class, urgent=urgent),
        before,
        likely,
        waiting is not None and not before,
    )


def likely_starts(
    inputs: RoundInputs, jobs: Sequence[tuple[JobId, AdmissionClass, Moment]]
) -> dict[JobId, Moment | None]:
    """
    The likely starts of many jobs, each given as id, class and the moment it is ready. The order is computed
    once for all.
    """
    view = inputs.view
    starts = forecast(inputs)
    return {
        job_id: _likely(
            inputs.gates(admission_class, ready_at=ready_at).refusal(), view.now, partial(starts.get, job_id)
        )
        for job_id, admission_class, ready_at in jobs
    }


def reachable(intent: Intent, likely_start_at: Moment | None) -> bool | None:
    """
    Whether the job would end by its deadline, or start by it if it has no expected duration. None: unknown.
    """
    if intent.deadline_at is None or likely_start_at is None:
        return None
    return likely_start_at + int((intent.expected_duration_sec or 0) * SECOND) <= intent.deadline_at


def _find(
    admission_view: AdmissionView, job_id: JobId, admission_class: AdmissionClass
) -> tuple[QueuedJob | None, bool, int]:
    """The job, whether it is urgent, and how many jobs of its ready queue are before it."""
    longest = 0
    for queue in admission_view.ready_queues():
        if queue.admission_class == admission_class:
            position = -1
            for position, waiting in enumerate(islice(queue.jobs, MOST_COUNTED)):
                if waiting.job_id == job_id:
                    return waiting, queue.urgent, position
            longest = max(longest, position + 1)
    # It is further back than MOST_COUNTED, or not ready yet.
    return None, False, longest if longest == MOST_COUNTED else 0


def _held_by_others(
    inputs: RoundInputs, waiting: QueuedJob, admission_class: AdmissionClass, *, urgent: bool
) -> Reason | None:
    round_result, ledger = try_round(inputs)
    started = [*round_result.picks, *round_result.set_aside]
    if any(pick.waiting.job_id == waiting.job_id for pick in started):
        return None
    gates = inputs.gates(admission_class, ledger=ledger, urgent=urgent)
    after = gates.refusal(round_result.kept, waiting.ends_at(inputs.view.now))
    if isinstance(after, UnitsKept):
        return after
    first = next(iter(started), None)
    return None if first is None else QueuedAhead(first.waiting.job_id, first.waiting.priority)


def _ahead(
    inputs: RoundInputs, waiting: QueuedJob, admission_class: AdmissionClass, *, urgent: bool
) -> tuple[Ahead, ...]:
    view, ordering = inputs.view, inputs.ordering

    def key(waiting: QueuedJob, addon_id: AddonId, urgent: bool) -> tuple[float, ...]:
        share = view.ledger.share(addon_id, view.now, ordering.sharing)
        return head_key(waiting, urgent, share, view.now, ordering.aging)

    mine = key(waiting, admission_class.addon_id, urgent)
    heads = [
        (key(head, queue.admission_class.addon_id, queue.urgent), head.job_id, queue.admission_class.addon_id)
        for queue in view.ready_queues()
        if queue.admission_class != admission_class
        and (head := next(queue.jobs, None)) is not None
        and _needs_units_alone(inputs, queue, head)
    ]
    ahead = sorted(head for head in heads if head[0] < mine)
    return tuple(
        Ahead(job_id, addon_id, _why(theirs, mine)) for theirs, job_id, addon_id in ahead[:MOST_NAMED]
    )


def _needs_units_alone(inputs: RoundInputs, queue: ReadyQueue, head: QueuedJob) -> bool:
    """
    Whether the head only needs units to start. A job that waits for anything else is not ahead of others.
    """
    offer = inputs.offer(queue.admission_class)
    if offer in LEFT:
        return False
    if (
        offer is Placement.RESERVE and head.fence >= MOST_START_TIMEOUTS
    ):  # each start timeout raised the fence
        late = inputs.view.start_timeouts(head) >= MOST_START_TIMEOUTS
        if late and not inputs.take_place(queue.admission_class):
            return False  # no worker takes it up, so rounds do not reserve it
    reason = inputs.gates(queue.admission_class, urgent=queue.urgent).refusal()
    if isinstance(reason, NotEnoughUnits):
        return reason.needs <= reason.capacity  # otherwise the load of the machine must fall
    return reason is None


def _why(theirs: Sequence[float], mine: Sequence[float]) -> str:
    """The name of the first part in which the keys differ; after the share it is the turn."""
    names = ("band", "urgent", "share")
    return next((name for name, a, b in zip(names, theirs, mine, strict=False) if a != b), "turn")


def _room_at(admission_view: AdmissionView, conditions: Conditions, cost: int) -> Moment | None:
    """When enough runs are expected to have ended, if no other job takes their units."""
    if cost > conditions.capacity:
        return None
    free = conditions.capacity - admission_view.ledger.units
    expected = [run for run in admission_view.running() if run.ends_at is not None]
    for run in sorted(expected, key=lambda run: run.ends_at or 0):
        free += run.cost
        if free >= cost:
            return max(admission_view.now, run.ends_at or 0)
    return None


def _likely(reason: Reason | None, now: Moment, in_order: Callable[[], Moment | None]) -> Moment | None:
    """The likely start, if it follows from known moments. `in_order`: computes it from the order of jobs."""
    match reason:
        case NotReady(until) | BudgetSpent(until=until):
            return until
        case NotQuietLongEnough(streak, wants):
            return now + int((wants - streak) * SECOND)
        case None | NotEnoughUnits() | UnitsKept() | QueuedAhead():
            return in_order()
        case _:
            return None


def try_round(inputs: RoundInputs) -> tuple[RoundResult, Ledger]:
    """The result of a round that is not written, and the ledger after it."""
    trial = Trial(inputs.view)
    round_result = run_round(inputs._replace(view=trial), most_picks=MOST_COUNTED)
    return round_result, trial.ledger


def forecast(inputs: RoundInputs) -> dict[JobId, Moment | None]:
    """
    The likely starts of the first thousand jobs in order, whatever kind of worker runs them. None: unknown.
    """
    view, ordering = inputs.view, inputs.ordering
    endless = replace(inputs.conditions, capacity=_ENDLESS)
    trial = RoundInputs(Trial(view), endless, AdmissionLimits(), ordering, lambda _: Placement.LEASE)
    order = run_round(trial, most_picks=MOST_COUNTED).picks
    free = inputs.conditions.capacity - view.ledger.units
    return dict(_starts(order, free, view.running(), view.now))


def _starts(
    order: Iterable[Pick], free: int, running: Sequence[RunningJob], now: Moment
) -> Iterator[tuple[JobId, Moment | None]]:
    ends = [(max(now, run.ends_at), run.cost) for run in running if run.ends_at is not None]
    heapify(ends)
    moment: Moment | None = now
    for pick in order:
        cost = pick.admission_class.cost_units
        while free < cost and ends:
            ended, units = heappop(ends)
            free, moment = free + units, ended
        if free < cost:
            moment = None
        yield pick.waiting.job_id, moment
        if moment is None:
            continue
        free -= cost
        if (ends_at := pick.waiting.ends_at(moment)) is not None:
            heappush(ends, (ends_at, cost))


class Trial:
    """A view of the store with a copy of the ledger, for a round that is not written."""

    def __init__(self, admission_view: AdmissionView) -> None:
        self._admission_view, self.now = admission_view, admission_view.now
        ledger = admission_view.ledger
        accounts = {addon_id: replace(account) for addon_id, account in ledger.accounts.items()}
        self.ledger = replace(ledger, counts=dict(ledger.counts), accounts=accounts)

    def ready_queues(self) -> Iterable[ReadyQueue]:
        return self._admission_view.ready_queues()

    def running(self) -> Sequence[RunningJob]:
        return self._admission_view.running()

    def start_timeouts(self, waiting: QueuedJob) -> int:
        return self._admission_view.start_timeouts(waiting)
