"""
The order of queued jobs, and the place of a job in the queue.

All jobs age alike, so the order within an addon never changes: a job's `order_key` is fixed when it becomes
ready. Between addons, the heads of the ready queues are compared by band, then urgency, then fair share
(`head_key`).
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from penstock.core.jobs.admission import AdmissionClass, FairShare, admission_class_of
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import MINUTE, SECOND, JobId, Moment, Span

#: The band of priority 90 and up, in which only fair share decides.
TOP_BAND: Final = 9


class Aging(Struct, frozen=True):
    """How fast a waiting job gains priority: by default one point a minute from the moment it is ready."""

    per_point: Span = 1 * MINUTE


class Ordering(Struct, frozen=True):
    """The parameters of the order."""

    aging: Aging = Aging()
    #: The round keeps units free for a job that was passed over for this long.
    patience: Span = 30 * SECOND
    #: A time-sensitive job is urgent from its deadline minus its expected duration minus this.
    slack: Span = 10 * MINUTE
    sharing: FairShare = field(default_factory=FairShare)


def order_key(priority: int, ready_at: Moment, aging: Aging) -> Moment:
    """
    Orders the jobs of an addon at any moment, because all of them age alike: the smallest key goes first.
    """
    return ready_at - priority * aging.per_point


def ready_at(turn: Moment, priority: int, aging: Aging) -> Moment:
    """The inverse of `order_key`."""
    return turn + priority * aging.per_point


def effective(turn: Moment, now: Moment, aging: Aging) -> int:
    return (now - turn) // aging.per_point


class QueuedJob(Struct, frozen=True, gc=False):
    """The part of a queued job that a round needs. It is small, because a round reads many."""

    no: int
    job_id: JobId
    priority: int
    turn: Moment
    fence: int
    expected_sec: float | None = None
    passed_at: Moment | None = None
    denied: str = ""  # the code of its last recorded denial

    def ends_at(self, now: Moment) -> Moment | None:
        """When the job is expected to end if it starts now."""
        return None if self.expected_sec is None else now + int(self.expected_sec * SECOND)


def head_key(
    waiting: QueuedJob,
    urgent: bool,
    share: float,
    now: Moment,
    aging: Aging,
) -> tuple[int, bool, float, Moment, int]:
    """The order of heads, the smallest first: band, urgency, fair share, turn, number."""
    turn = waiting.turn
    points = (now - turn) // aging.per_point  # as `effective`; a call would take longer than the rest
    band = points // 10 if points < 10 * TOP_BAND else TOP_BAND
    return -band, not urgent, share, turn, waiting.no


def band_ends_at(turn: Moment, now: Moment, aging: Aging) -> Moment | None:
    """When a waiting job enters the next band; None: it is in the top band."""
    following = effective(turn, now, aging) // 10 + 1
    return turn + 10 * following * aging.per_point if following <= TOP_BAND else None


def urgent_from(intent: Intent, ordering: Ordering) -> Moment | None:
    """When a time-sensitive job becomes urgent; None for other jobs."""
    if intent.deadline_at is None or not intent.time_sensitive:
        return None
    return intent.deadline_at - int((intent.expected_duration_sec or 0) * SECOND) - ordering.slack


#: The line of a job that waits for its parents: such a job is in no ready queue.
WAITS_FOR_PARENTS: Final = -1


class Place(Struct, frozen=True, gc=False):
    """Where a queued job stands: the columns of its row in the queue."""

    priority: int
    earliest_start_at: Moment | None
    not_before: Moment | None
    deadline_at: Moment | None
    ready_at: Moment
    urgent_at: Moment | None
    turn: Moment
    admission_class: AdmissionClass

    def line(self, now: Moment) -> int:
        """0: the job is not ready yet; 1: it is in the ready queue; 2: in the urgent one."""
        if self.ready_at > now:
            return 0
        return 2 if self.urgent_at is not None and self.urgent_at <= now else 1


def place(
    intent: Intent,
    since: Moment,
    not_before: Moment | None,
    ordering: Ordering,
    admission_class: AdmissionClass | None = None,
) -> Place:
    """
    The place of a job in the queue. `since`: the moment from which it counts as waiting; after a requeue that
    is not its fault this is the old moment, so the job keeps its age. `admission_class`: the intent's, if the
    caller has it.
    """
    ready_at = max(since, not_before or 0, intent.earliest_start_at or 0)
    return Place(
        priority=intent.priority,
        earliest_start_at=intent.earliest_start_at,
        not_before=not_before,
        deadline_at=intent.deadline_at,
        ready_at=ready_at,
        urgent_at=urgent_from(intent, ordering),
        turn=order_key(intent.priority, ready_at, ordering.aging),
        admission_class=admission_class or admission_class_of(intent),
    )


def released_place(place: Place, now: Moment, aging: Aging) -> Place:
    """The place of a job whose last parent has ended: from now on the job counts as waiting, and ages."""
    ready_at = max(place.ready_at, now)
    return replace(place, ready_at=ready_at, turn=order_key(place.priority, ready_at, aging))


def shift_place(place: Place, by: Span, *, in_line: bool) -> Place:
    """
    The place after the wall clock was set by `by`. Spans that Penstock measures move with the clock: how long
    the job has waited, and the delay of a retry (`not_before`). Moments that a user gave
    (`earliest_start_at`, `deadline_at`) refer to the wall clock, and stay.
    """
    earliest = place.earliest_start_at or 0
    not_before = None if place.not_before is None else place.not_before + by
    if not in_line and place.ready_at == place.earliest_start_at:
        ready_at = max(earliest, not_before or 0)
    else:
        ready_at = max(place.ready_at + by, earliest)
    turn = place.turn + ready_at - place.ready_at
    return replace(place, not_before=not_before, ready_at=ready_at, turn=turn)
