"""
Explain: why a job has not started, which jobs go first and when it will likely start, in words and as JSON.

`outlook` uses the same `decide` and the same order as a round, on the same view of the store, and changes
nothing. The round itself may hold a job back: others go first and take the units, or the round keeps units
for one of them. So where no gate refuses, `outlook` tries a round out.

For the head of a ready queue the reason is the one that the last round recorded; for a job behind it `decide`
runs anew, and `recorded` says which. The words are made last, from the same fields as the JSON, so both say
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict, replace

from penstock.core.jobs.admission import AdmissionLimits, Admitted, Conditions, Denied, decide
from penstock.core.jobs.end_rules import DispatchPhase
from penstock.core.jobs.forecast import MOST_COUNTED, forecast, try_round
from penstock.core.jobs.intent import AdmissionClass, Intent
from penstock.core.jobs.job import DEADLINE_PASSED, Dispatch, Job, outcome_of
from penstock.core.jobs.ordering import AdmissionView, Ordering, Placement, QueuedJob, RunningJob, band
from penstock.core.jobs.reasons import (
    BudgetSpent,
    NotEnoughUnits,
    NotQuietLongEnough,
    NotReady,
    QueuedAhead,
    Reason,
    UnitsKept,
    as_json,
    due_in,
    named,
    retry_after_sec,
    words,
)
from penstock.core.jobs.states import SETTLED, JobState, allowed
from penstock.core.jobs.types import SECOND, AddonId, EndReason, JobId, Moment, seconds, spelled
from penstock.core.jobs.viewer import Viewer

MOST_NAMED: Final = 5


class Outlook(Struct, frozen=True):
    """
    How a queued job stands. `head`: it is the first of its ready queue, so rounds decide about it and record
    denials.
    """

    reason: Reason | None
    ahead: tuple[Ahead, ...]
    line_ahead: int
    likely_start_at: Moment | None
    head: bool


class View(NamedTuple):
    """The inputs of a round."""

    admission_view: AdmissionView
    conditions: Conditions
    limits: AdmissionLimits
    ordering: Ordering
    offer: Callable[[AdmissionClass], Placement]


def outlook(view: View, *, job_id: JobId, admission_class: AdmissionClass, ready_at: Moment) -> Outlook:
    """How this job stands now. For a job that is not ready yet, `ready_at` alone decides."""
    admission_view, conditions = view.admission_view, view.conditions
    found, urgent, before = _find(admission_view, job_id, admission_class)
    decision = decide(
        admission_class,
        admission_view.ledger,
        conditions,
        view.limits,
        admission_view.now,
        ready_at=ready_at,
        urgent=urgent,
    )
    reason = None if isinstance(decision, Admitted) else decision.reason
    if reason is None and found is not None and view.offer(admission_class) is not Placement.NOBODY:
        reason = _held_by_others(view, found, admission_class, urgent=urgent)
    if isinstance(reason, NotEnoughUnits):
        reason = replace(reason, until=_room_at(admission_view, conditions, admission_class.cost_units))
    starts = forecast(admission_view, conditions, view.ordering) if _known_from_the_order(reason) else {}
    return Outlook(
        reason,
        () if found is None else _ahead(admission_view, view.ordering, found, admission_class, urgent=urgent),
        before,
        _likely(reason, admission_view.now, starts.get(job_id)),
        found is not None and not before,
    )


def likely_starts(
    view: View, jobs: Sequence[tuple[JobId, AdmissionClass, Moment]]
) -> dict[JobId, Moment | None]:
    """
    The likely starts of many jobs, each given as id, class and the moment it is ready. The order is computed
    once for all.
    """
    admission_view, conditions = view.admission_view, view.conditions
    starts = forecast(admission_view, conditions, view.ordering)
    likely: dict[JobId, Moment | None] = {}
    for job_id, admission_class, ready_at in jobs:
        decision = decide(
            admission_class,
            admission_view.ledger,
            conditions,
            view.limits,
            admission_view.now,
            ready_at=ready_at,
        )
        reason = decision.reason if isinstance(decision, Denied) else None
        likely[job_id] = _likely(reason, admission_view.now, starts.get(job_id))
    return likely


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
    for line in admission_view.lines():
        if line.admission_class == admission_class:
            position = -1
            for position, waiting in enumerate(islice(line.jobs, MOST_COUNTED)):
                if waiting.job_id == job_id:
                    return waiting, line.urgent, position
            longest = max(longest, position + 1)
    # Further back than MOST_COUNTED, or not ready yet.
    return None, False, longest if longest == MOST_COUNTED else 0


def _held_by_others(
    view: View, me: QueuedJob, admission_class: AdmissionClass, *, urgent: bool
) -> Reason | None:
    admission_view, conditions, limits, ordering, offer = view
    verdict, ledger = try_round(admission_view, conditions, limits, ordering, offer)
    if any(pick.waiting.job_id == me.job_id for pick in verdict.picks):
        return None
    ends_at = None if me.expected_sec is None else admission_view.now + int(me.expected_sec * SECOND)
    after = decide(
        admission_class,
        ledger,
        conditions,
        limits,
        admission_view.now,
        urgent=urgent,
        kept=verdict.kept,
        ends_at=ends_at,
    )
    if isinstance(after, Denied) and isinstance(after.reason, UnitsKept):
        return after.reason
    first = next(iter(verdict.picks), None)
    return None if first is None else QueuedAhead(first.waiting.job_id, first.waiting.priority)


def _ahead(
    admission_view: AdmissionView,
    ordering: Ordering,
    me: QueuedJob,
    admission_class: AdmissionClass,
    *,
    urgent: bool,
) -> tuple[Ahead, ...]:
    mine = _key(admission_view, ordering, me, admission_class, urgent=urgent)
    keys = []
    for line in admission_view.lines():
        head = next(line.jobs, None)
        if head is not None and line.admission_class != admission_class:
            key = _key(admission_view, ordering, head, line.admission_class, urgent=line.urgent)
            if key < mine:
                keys.append((key, head, line.admission_class))
    keys.sort(key=lambda item: item[0])
    return tuple(
        Ahead(head.job_id, other.addon_id, _why(key, mine)) for key, head, other in keys[:MOST_NAMED]
    )


def _key(
    admission_view: AdmissionView,
    ordering: Ordering,
    waiting: QueuedJob,
    admission_class: AdmissionClass,
    *,
    urgent: bool,
) -> tuple[float, ...]:
    share = admission_view.ledger.share(admission_class.addon_id, admission_view.now, ordering.sharing)
    return (
        -band(waiting.turn, admission_view.now, ordering.aging),
        not urgent,
        share,
        waiting.turn,
        waiting.no,
    )


def _why(theirs: Sequence[float], mine: Sequence[float]) -> str:
    """The first part of the keys that differs; beyond the share it is the turn."""
    names = ("band", "urgent", "share")
    return next((name for name, a, b in zip(names, theirs, mine, strict=False) if a != b), "turn")


def _room_at(admission_view: AdmissionView, conditions: Conditions, cost: int) -> Moment | None:
    """When enough runs are expected to have ended, if no other job took their units."""
    if cost > conditions.capacity:
        return None
    free = conditions.capacity - admission_view.ledger.units
    known: list[RunningJob] = [run for run in admission_view.running() if run.ends_at is not None]
    for run in sorted(known, key=lambda run: run.ends_at or 0):
        free += run.cost
        if free >= cost:
            return max(admission_view.now, run.ends_at or 0)
    return None


def _known_from_the_order(reason: Reason | None) -> bool:
    return reason is None or isinstance(reason, NotEnoughUnits | UnitsKept | QueuedAhead)


def _likely(reason: Reason | None, now: Moment, in_order: Moment | None) -> Moment | None:
    """The likely start, only where it follows from known moments."""
    match reason:
        case NotReady(until) | BudgetSpent(until=until):
            return until
        case NotQuietLongEnough(streak, wants):
            return now + int((wants - streak) * SECOND)
        case None | NotEnoughUnits() | UnitsKept() | QueuedAhead():
            return in_order
        case _:
            return None


class Ahead(Struct, frozen=True):
    """A head that goes first. `why`: band, urgent, share or turn, whichever decided."""

    job_id: JobId | None  # None: a job that the reader may not know
    addon_id: AddonId | None
    why: str


class Explanation(Struct, frozen=True, kw_only=True):
    job_id: JobId
    state: JobState
    text: str
    waiting_sec: float | None = None
    reason: str = ""
    reason_data: dict[str, Any] | None = None
    retry_after_sec: float | None = None
    recorded: bool = True
    ahead: tuple[Ahead, ...] = ()
    line_ahead: int = 0  # jobs before it in its own line
    likely_start_at: Moment | None = None
    next_when_ends: JobId | None = None  # the running job whose end is expected to make the room
    allowed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"job {self.job_id[-8:]}: {self.text}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ahead": [asdict(head) for head in self.ahead]}


def explain(
    job: Job,
    now: Moment,
    *,
    dispatch: Dispatch | None = None,
    reason: Reason | None = None,
    recorded: bool = True,
    ahead: Sequence[Ahead] = (),
    line_ahead: int = 0,
    likely_start_at: Moment | None = None,
    next_when_ends: JobId | None = None,
    viewer: Viewer | None = None,
) -> Explanation:
    """
    `dispatch`: the last one. `reason`: what holds a queued job; None: nothing, and the next round starts it.
    `viewer`: an addon that must not learn the names of other addons' jobs; they are removed before any words
    are made.
    """
    ways = tuple(str(move) for move in allowed(job.state))
    if job.state in SETTLED:
        return _settled(job, dispatch, now, ways)
    if job.state is not JobState.QUEUED:
        text = _beyond_the_queue(job, dispatch, now)
        return Explanation(job_id=job.job_id, state=job.state, text=text, allowed=ways)
    waiting = max(0, now - job.ready_at)
    some_end = next_when_ends is not None
    if viewer is not None:
        reason = None if reason is None else viewer.reason(reason)
        ahead = [head if viewer.job(head.job_id) else Ahead(None, None, head.why) for head in ahead]
        next_when_ends = viewer.job(next_when_ends)
    sentences = list[str]()
    if isinstance(reason, NotReady) and dispatch is not None and dispatch.end is not None:
        sentences.append(_retry_words(job, dispatch, reason.until, now))
    elif reason is not None:
        sentences.append(words(reason, now))
    sentences += _line_words(ahead, line_ahead)
    if likely_start_at is not None and likely_start_at > now and not isinstance(reason, NotReady):
        when = f", when {named(next_when_ends)} ends" if some_end else ""
        sentences.append(f"Likely start {due_in(likely_start_at, now)}{when}.")
    lead = [f"Waiting for {spelled(waiting)}."] if job.ready_at <= now else []
    return Explanation(
        job_id=job.job_id,
        state=job.state,
        text=" ".join([*lead, *(sentences or ["Nothing is in its way: it starts with the next round."])]),
        waiting_sec=seconds(waiting),
        reason="" if reason is None else reason.code,
        reason_data=None if reason is None else as_json(reason),
        retry_after_sec=None if reason is None else retry_after_sec(reason, now),
        recorded=recorded,
        ahead=tuple(ahead),
        line_ahead=line_ahead,
        likely_start_at=likely_start_at,
        next_when_ends=next_when_ends,
        allowed=ways,
    )


def _retry_words(job: Job, last: Dispatch, until: Moment, now: Moment) -> str:
    """An own error of the job has a known number of attempts; other failures have schedules of their own."""
    number, of = last.fence, ""
    if last.end is EndReason.JOB_ERROR:
        number, of = job.counters.error, f" of {len(job.intent.retry_delays_sec) + 1}"
    why = _last_line(last.error) or str(last.end).replace("_", " ")
    return f"Attempt {number}{of} failed ({why}). Next attempt {due_in(until, now)}."


_WHY = {
    "band": "higher priority",
    "urgent": "near its deadline",
    "share": "its addon is further below its fair share",
    "turn": "queued before",
}


def _line_words(ahead: Sequence[Ahead], line_ahead: int) -> list[str]:
    sentences = []
    if line_ahead:
        sentences.append(
            f"{line_ahead} {'job' if line_ahead == 1 else 'jobs'} of the same kind "
            f"{'is' if line_ahead == 1 else 'are'} before it."
        )
    if ahead:
        first = ahead[0]
        more = f"; then {len(ahead) - 1} more" if len(ahead) > 1 else ""
        addon = "" if first.addon_id is None else f" of {first.addon_id}"
        sentences.append(f"{named(first.job_id).capitalize()}{addon} goes first ({_WHY[first.why]}){more}.")
    return sentences


def _settled(job: Job, last: Dispatch | None, now: Moment, ways: tuple[str, ...]) -> Explanation:
    """
    How the last run ended, or how the job was settled without one: by a deadline in the queue, or a cancel.
    """
    ended = "" if job.ended_at is None else f" {spelled(now - job.ended_at)} ago"
    end, text = outcome_of(job, last)
    code, error = end or "", ""
    if text and code != DEADLINE_PASSED:  # its text says no more than the code
        error = _last_line(text)
    says_more = code not in ("", EndReason.COMPLETED, EndReason.CANCELED)  # those say no more than the state
    return Explanation(
        job_id=job.job_id,
        state=job.state,
        text=f"{job.state}{ended}{' (' + code.replace('_', ' ') + ')' if says_more else ''}{': ' + error if error else ''}",
        reason=code,
        reason_data={"error": error} if error else None,
        allowed=ways,
    )


def _last_line(text: str | None) -> str:
    return ((text or "").strip().splitlines() or [""])[-1]


def _beyond_the_queue(job: Job, dispatch: Dispatch | None, now: Moment) -> str:
    if dispatch is None:
        return str(job.state)
    if dispatch.phase is DispatchPhase.RESERVED:
        rest = spelled(dispatch.expires_at - now)
        return f"{dispatch.admission_class.cost_units} units are reserved; its worker has {rest} to ask for the lease."
    since = spelled(now - (dispatch.started_at or dispatch.admitted_at))
    if dispatch.phase is DispatchPhase.ENDING:
        rest = spelled(dispatch.expires_at - now)
        why = str(dispatch.reason).replace("_", " ")
        return f"Running for {since} and told to stop ({why}); given up in {rest} at the latest."
    expected = ""
    if dispatch.ends_at is not None:
        expected = f", expected to end in {spelled(dispatch.ends_at - now)}"
    return f"Running for {since}{expected}."
