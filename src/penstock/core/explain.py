"""
Why a job is where it is, in words and as JSON.

For a head of a line the reason is the one that the last round recorded; for a job behind it the same decision is made anew, and
`recorded` says which. The words are made last, from the same fields that the JSON has: they cannot tell another story.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from penstock.core.job import Dispatch, Job
from penstock.core.landing import DispatchPhase, EndReason
from penstock.core.outcome import DEADLINE_PASSED, outcome_of
from penstock.core.reasons import Reason, as_json, named, retry_after_sec, words
from penstock.core.states import SETTLED, JobState, allowed
from penstock.core.viewer import Viewer
from penstock.core.words import AddonId, JobId, Moment, seconds, spelled

__all__ = ["Ahead", "Explanation", "explain"]


class Ahead(NamedTuple):
    """A head that would be weighed first. `why`: band, urgent, share or turn, whichever decided."""

    job_id: JobId | None  # None: a job that the reader may not know
    addon_id: AddonId | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
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
        return asdict(self) | {"ahead": [head._asdict() for head in self.ahead]}


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
    `dispatch`: the last one. `reason`: what holds a queued job. None: nothing does, and it starts with the next tick. `viewer`: an addon that
    must not learn the names of others' jobs; they are taken out before anything is put into words.
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
    parts = [words(reason, now)] if reason is not None else []
    parts += _line_words(ahead, line_ahead)
    if likely_start_at is not None and likely_start_at > now:
        when = f", when {named(next_when_ends)} ends" if some_end else ""
        parts.append(f"likely to start in {spelled(likely_start_at - now)}{when}")
    lead = f"waiting {spelled(waiting)}" if job.ready_at <= now else "not in line yet"
    return Explanation(
        job_id=job.job_id,
        state=job.state,
        text=f"{lead}: " + ("; ".join(parts) or "nothing is in its way, it starts with the next tick"),
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


_WHY = {
    "band": "of a higher band",
    "urgent": "near its deadline",
    "share": "whose addon is further below its share",
    "turn": "in line before it",
}


def _line_words(ahead: Sequence[Ahead], line_ahead: int) -> list[str]:
    parts = []
    if line_ahead:
        parts.append(f"{line_ahead} of its own kind {'is' if line_ahead == 1 else 'are'} before it")
    if ahead:
        first = ahead[0]
        rest = f" and {len(ahead) - 1} more are next" if len(ahead) > 1 else " is next"
        whose = "" if first.addon_id is None else f" of {first.addon_id}"
        parts.append(f"{named(first.job_id)}{whose}, {_WHY[first.why]},{rest}")
    return parts


def _settled(job: Job, last: Dispatch | None, now: Moment, ways: tuple[str, ...]) -> Explanation:
    """How its last run ended, unless it was settled without one: by a deadline in the queue, or a cancel."""
    ended = "" if job.ended_at is None else f" {spelled(now - job.ended_at)} ago"
    end, text = outcome_of(job, last)
    code, error = end or "", ""
    if text and code != DEADLINE_PASSED:  # whose text says no more than the code
        error = (text.strip().splitlines() or [""])[-1]
    told = code not in ("", EndReason.COMPLETED, EndReason.CANCELED)  # those say no more than the state
    return Explanation(
        job_id=job.job_id,
        state=job.state,
        text=f"{job.state}{ended}{' (' + code.replace('_', ' ') + ')' if told else ''}{': ' + error if error else ''}",
        reason=code,
        reason_data={"error": error} if error else None,
        allowed=ways,
    )


def _beyond_the_queue(job: Job, dispatch: Dispatch | None, now: Moment) -> str:
    if dispatch is None:
        return str(job.state)
    if dispatch.phase is DispatchPhase.RESERVED:
        left = spelled(dispatch.expires_at - now)
        return f"{dispatch.admission_class.cost_units} units are reserved; its worker has {left} left to ask for the lease"
    since = spelled(now - (dispatch.started_at or dispatch.admitted_at))
    if dispatch.phase is DispatchPhase.ENDING:
        left = spelled(dispatch.expires_at - now)
        return f"running for {since} and told to stop ({dispatch.reason}); given up in {left} at the latest"
    expected = ""
    if dispatch.ends_at is not None:
        expected = f", expected to end in {spelled(dispatch.ends_at - now)}"
    return f"running for {since}{expected}"
