"""
Explain: why a job has not started, which jobs go first and when it will likely start, in words and as JSON;
and what one addon may learn about the others.

For the head of a ready queue the reason is the one that the last round recorded; for a job behind it `decide`
runs anew, and `recorded` says which. The words are made last, from the same fields as the JSON, so both say
the same.

An addon may learn that other addons use the machine, and no name of their jobs, addons or workers. `Viewer`
removes names before words are made, so no text can contain them. An event shows the fields that are listed
here and no others. `core/jobs/reasons.py` is closed, and the type checker proves the match below complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, assert_never

from msgspec import Struct
from msgspec.structs import asdict, replace

from penstock.core.jobs.forecast import NOTHING_HOLDS, Ahead, Outlook
from penstock.core.jobs.job import DEADLINE_PASSED, Dispatch, Event, EventKind, Job, outcome_of
from penstock.core.jobs.reasons import (
    REASONS,
    AwaitsWorker,
    BudgetSpent,
    CapReached,
    Draining,
    LabelMissing,
    NotEnoughUnits,
    NotQuiet,
    NotQuietLongEnough,
    NotReady,
    Paused,
    QueuedAhead,
    Reason,
    UnitsKept,
    due_in,
    from_json,
    named,
    retry_after_sec,
    words,
)
from penstock.core.jobs.start_ranges import StartRange
from penstock.core.jobs.states import SETTLED, DispatchPhase, JobState, allowed
from penstock.core.jobs.types import SECOND, AddonId, EndReason, JobId, Moment, seconds, spelled


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
    #: In 8 cases of 10 the job starts between these two. None: not enough was learned to tell.
    likely_start_low_at: Moment | None = None
    likely_start_high_at: Moment | None = None
    next_when_ends: JobId | None = None  # the running job whose end is expected to make the room
    allowed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"job {self.job_id[-8:]}: {self.text}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ahead": [asdict(head) for head in self.ahead]}


def explain(
    job: Job,
    now: Moment,
    last: Dispatch | None = None,
    outlook: Outlook = NOTHING_HOLDS,
    viewer: Viewer | None = None,
) -> Explanation:
    """
    `last`: its last dispatch. `outlook`: how a queued job stands. `viewer`: an addon that must not learn the
    names of other addons' jobs; they are removed before any words are made.
    """
    ways = tuple(str(move) for move in allowed(job.state))
    if job.state in SETTLED:
        return _settled(job, last, now, ways)
    if job.state is not JobState.QUEUED:
        text = _beyond_the_queue(job, last, now)
        return Explanation(job_id=job.job_id, state=job.state, text=text, allowed=ways)
    shown = outlook if viewer is None else viewer.outlook(outlook)
    when = "" if outlook.next_when_ends is None else f", when {named(shown.next_when_ends)} ends"
    reason = shown.reason
    sentences = list(_waiting_words(job, last, shown, when, now))
    lead = [f"Waiting for {spelled(now - job.ready_at)}."] if job.ready_at <= now else []
    return Explanation(
        job_id=job.job_id,
        state=job.state,
        text=" ".join([*lead, *(sentences or ["Nothing is in its way: it starts with the next round."])]),
        waiting_sec=seconds(max(0, now - job.ready_at)),
        reason="" if reason is None else reason.code,
        reason_data=None if reason is None else asdict(reason),
        retry_after_sec=None if reason is None else retry_after_sec(reason, now),
        recorded=shown.head and reason is not None and reason.code == job.denied,
        ahead=shown.ahead,
        line_ahead=shown.line_ahead,
        likely_start_at=shown.likely_start_at,
        likely_start_low_at=None if shown.start_range is None else shown.start_range.low_at,
        likely_start_high_at=None if shown.start_range is None else shown.start_range.high_at,
        next_when_ends=shown.next_when_ends,
        allowed=ways,
    )


def _retry_words(job: Job, last: Dispatch, until: Moment, now: Moment) -> str:
    """An own error of the job has a known number of attempts; other failures have schedules of their own."""
    number, of = last.fence, ""
    if last.end is EndReason.JOB_ERROR:
        number, of = job.counters.error, f" of {len(job.intent.retry_delays_sec) + 1}"
    why = _last_line(last.error) or str(last.end).replace("_", " ")
    return f"Attempt {number}{of} failed ({why}). Next attempt {due_in(until, now)}."


#: Why another job goes first, by the code in `Ahead.why`.
GOES_FIRST: Final = {
    "band": "higher priority",
    "urgent": "near its deadline",
    "share": "its addon is further below its fair share",
    "turn": "queued before",
}


def _waiting_words(
    job: Job, last: Dispatch | None, outlook: Outlook, when: str, now: Moment
) -> Iterator[str]:
    reason, likely = outlook.reason, outlook.likely_start_at
    if isinstance(reason, NotReady) and last is not None and last.end is not None:
        yield _retry_words(job, last, reason.until, now)
    elif reason is not None:
        yield words(reason, now)
    if outlook.line_ahead == 1:
        yield "1 job of the same kind is before it."
    elif outlook.line_ahead:
        yield f"{outlook.line_ahead} jobs of the same kind are before it."
    if outlook.ahead:
        first, *others = outlook.ahead
        more = f"; then {len(others)} more" if others else ""
        addon = "" if first.addon_id is None else f" of {first.addon_id}"
        yield f"{named(first.job_id).capitalize()}{addon} goes first ({GOES_FIRST[first.why]}){more}."
    if outlook.start_range is not None:
        yield f"Likely start {due_between(outlook.start_range, now)}."
    elif likely is not None and likely > now and not isinstance(reason, NotReady):
        yield f"Likely start {due_in(likely, now)}{when}."


def due_between(start: StartRange, now: Moment) -> str:
    """`in 3 to 7 min`: the unit is said once where both ends have the same."""
    low, high = spelled(start.low_at - now), spelled(start.high_at - now)
    if low == high:
        return f"in about {low}" if start.high_at > now else "now"
    if start.low_at - now < SECOND:
        return f"within {high}"
    return f"in {low.split()[0] if low.split()[1] == high.split()[1] else low} to {high}"


def _settled(job: Job, last: Dispatch | None, now: Moment, ways: tuple[str, ...]) -> Explanation:
    """
    How the last run ended, or how the job was settled without one: by a deadline in the queue, or a cancel.
    """
    ended = "" if job.ended_at is None else f" {spelled(now - job.ended_at)} ago"
    end, raised = outcome_of(job, last)
    code, error = end or "", ""
    if raised and code != DEADLINE_PASSED:  # its text says no more than the code
        error = _last_line(raised)
    text = f"{job.state}{ended}"
    if code not in ("", EndReason.COMPLETED, EndReason.CANCELED):  # those say no more than the state
        text += f" ({code.replace('_', ' ')})"
    return Explanation(
        job_id=job.job_id,
        state=job.state,
        text=f"{text}: {error}" if error else text,
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
        units = dispatch.admission_class.cost_units
        return f"{units} units are reserved; its worker has {rest} to ask for the lease."
    since = spelled(now - (dispatch.started_at or dispatch.admitted_at))
    if dispatch.phase is DispatchPhase.ENDING:
        rest = spelled(dispatch.expires_at - now)
        why = str(dispatch.reason).replace("_", " ")
        return f"Running for {since} and told to stop ({why}); given up in {rest} at the latest."
    expected = ""
    if dispatch.ends_at is not None:
        expected = f", expected to end in {spelled(dispatch.ends_at - now)}"
    return f"Running for {since}{expected}."


#: Fields of an event's data that tell of the event's own job or addon, whatever its kind.
_OWN: Final = frozenset(
    {
        "addon_id", "after", "asked", "budget", "by", "deadline_at", "dispatch_id", "earliest_start_at", "error",
        "fence", "held_by", "instead_of", "key", "kind", "limit", "not_before", "overshoot", "paused", "pid",
        "priority", "spent", "text", "too_late_for", "until", "waited", "weight", "worker",
    }
)  # fmt: skip


class Viewer(Struct, frozen=True):
    """The addon that reads. `owns`: whether a job belongs to it."""

    addon_id: AddonId
    owns: Callable[[JobId], bool]

    def job(self, job_id: JobId | None) -> JobId | None:
        return job_id if job_id is not None and self.owns(job_id) else None

    def signal(self, by: str) -> str:
        """The name of a signal, `p95_ms of shop`, as `core/jobs/load.py` makes it."""
        name, of, source = by.partition(" of ")
        return f"{name} of another addon" if of and source != self.addon_id else by

    def outlook(self, outlook: Outlook) -> Outlook:
        heads = (head if self.job(head.job_id) else Ahead(None, None, head.why) for head in outlook.ahead)
        return replace(
            outlook,
            reason=None if outlook.reason is None else self.reason(outlook.reason),
            ahead=tuple(heads),
            next_when_ends=self.job(outlook.next_when_ends),
        )

    def reason(self, reason: Reason) -> Reason:
        match reason:
            case UnitsKept(kept_for):
                return replace(reason, kept_for=self.job(kept_for))
            case QueuedAhead(job_id):
                return replace(reason, job_id=self.job(job_id))
            case NotQuiet(by=by):
                return replace(reason, by=self.signal(by))
            case (
                Draining() | LabelMissing() | Paused() | NotReady() | NotQuietLongEnough() | CapReached()
                | BudgetSpent() | NotEnoughUnits() | AwaitsWorker()
            ):  # fmt: skip
                return reason
            case _:
                assert_never(reason)

    def event(self, event: Event) -> Event:
        """An event of this addon with the data that it may see."""
        return replace(event, data=self._data(event))

    def _data(self, event: Event) -> dict[str, Any]:
        match event.kind:
            case EventKind.DENIED if event.reason in REASONS:
                reason = asdict(self.reason(from_json(event.reason, event.data)))
                return reason | {name: event.data[name] for name in ("after",) if name in event.data}
            case EventKind.PREEMPT_REQUESTED:
                shown = {"for": self.job(event.data.get("for"))}
            case EventKind.SIGNALED:
                shown = {"for": event.data.get("for")}
            case _:
                shown = {}
        if "job_id" in event.data:
            shown["job_id"] = self.job(event.data["job_id"])
        return {name: value for name, value in event.data.items() if name in _OWN} | shown
