"""
How long a job waited, by reason, from its trail.

A denial is recorded for the head of a ready queue, and only when its reason changes (SPEC JB-3). So the time
between two events counts for the reason that was recorded last. Before the first denial a job waits for its
turn behind jobs of its own kind, or for a worker or a host with its labels: rounds record no lack of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.jobs.job import DEPENDENCY_UNMET, Event, EventKind, Job
from penstock.core.jobs.reasons import REASONS
from penstock.core.jobs.types import SECOND, EndReason, Moment, Span, seconds, spelled

#: Parts of a wait that are no reasons of denials, with the words that follow a duration.
PARTS: Final = {
    "turn": "for its turn or a worker",
    "retry_delay": "for the delay before a retry",
    "start_delay": "because no worker took it up",
    "reserved": "for its worker to start it",
}


class Waited(Struct, frozen=True):
    """How long a job waited for one reason. `reason`: the code of a reason, or a name of `PARTS`."""

    reason: str
    sec: float

    @property
    def words(self) -> str:
        kind = REASONS.get(self.reason)
        what = PARTS.get(self.reason, self.reason.replace("_", " ")) if kind is None else kind.waited
        return f"{spelled(int(self.sec * SECOND))} {what}"


def waits_of(job: Job, events: Iterable[Event], now: Moment) -> tuple[Waited, ...]:
    """
    How long the job waited for each reason, the longest first. `now`: ends the wait of a job that still
    waits.
    """
    totals: dict[str, Span] = {}
    for part, following in pairwise([*_parts(job, events), _Part(now, "")]):
        if part.why:
            totals[part.why] = totals.get(part.why, 0) + max(0, min(following.at, now) - part.at)
    waits = [Waited(why, seconds(span)) for why, span in totals.items() if span > 0]
    return tuple(sorted(waits, key=lambda wait: -wait.sec))


def wait_words(waits: tuple[Waited, ...]) -> str:
    """The waits as one sentence; empty if the job did not wait for a second."""
    shown = [wait for wait in waits if wait.sec >= 1]
    if not shown:
        return ""
    if len(shown) == 1:
        return f"It waited {shown[0].words}."
    total = spelled(int(sum(wait.sec for wait in waits) * SECOND))
    return f"It waited {total}: {', '.join(wait.words for wait in shown)}."


class _Part(NamedTuple):
    """From this moment on the job waits for `why`; empty: it does not wait."""

    at: Moment
    why: str


_OVER: Final = frozenset(
    {EventKind.RUNNING, EventKind.DONE, EventKind.FAILED, EventKind.CANCELED, EventKind.BLOCKED}
)


def _parts(job: Job, events: Iterable[Event]) -> Iterator[_Part]:
    """The parts of the wait in order of time. A foreseen part is dropped if another event comes before it."""
    foreseen: _Part | None = None
    events = list(events)
    if not _waited_for_parents(job, events):
        job = replace(job, intent=replace(job.intent, after=()))
    for event in events:
        if foreseen is not None and foreseen.at < event.at:
            yield foreseen
            foreseen = None
        parts = _begun_by(event, job)
        if parts:
            first, *later = parts
            yield first
            foreseen = later[0] if later else None
    if foreseen is not None:
        yield foreseen


def _waited_for_parents(job: Job, events: Iterable[Event]) -> bool:
    """Whether the job had unmet parents. No event says that all of its parents had ended before its submit."""
    if job.unmet or job.denied == DEPENDENCY_UNMET:
        return True
    return any(event.kind is EventKind.READY for event in events)


def _begun_by(event: Event, job: Job) -> list[_Part]:
    """The parts that this event begins: one now, and perhaps one at a later moment."""
    match event.kind:
        case EventKind.SUBMITTED | EventKind.READY:
            if event.kind is EventKind.SUBMITTED and job.intent.after:
                parts = [_Part(event.at, "waits_for_parents")]
            else:
                parts = _until(event.at, "not_ready", job.intent.earliest_start_at)
            return parts
        case EventKind.RETRIED:
            return [_Part(event.at, "turn")]
        case EventKind.EDITED if "earliest_start_at" in event.data:
            return _until(event.at, "not_ready", event.data["earliest_start_at"])
        case EventKind.REQUEUED:
            late = event.reason == EndReason.START_TIMEOUT
            return _until(event.at, "start_delay" if late else "retry_delay", event.data.get("not_before"))
        case EventKind.DENIED:
            return [_Part(event.at, event.reason)]
        case EventKind.DISPATCHING:
            return [_Part(event.at, "reserved")]
        case kind if kind in _OVER:
            return [_Part(event.at, "")]
        case _:
            return []


def _until(now: Moment, why: str, until: Moment | None) -> list[_Part]:
    if until is None or until <= now:
        return [_Part(now, "turn")]
    return [_Part(now, why), _Part(until, "turn")]
