"""
Workers: which jobs a worker can run, how many it claims at once, and when it reports those that have ended.

Each host that shares a database registers the kinds of jobs that its present workers ask for. A host without
a worker for a job leaves it in the queue while another host has one: a reservation would only keep the job
from that worker (SPEC OR-7).

`Batching` is a pure machine; the library, the SDK worker and the runner each have one. The owner counts (free
places, claimed attempts that wait, ended ones that are not reported), records how long functions run, and
carries out the plan.

While functions are short, a worker claims more jobs than it has free places, because the places would be idle
during every commit. It reports ended attempts when half of those in flight have ended, so that one half runs
while the other is written. Two cases are reported as a whole batch: very short functions on threads, which
would take the interpreter from the writer, and commits that are expensive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from penstock.core.jobs.types import MILLISECOND, OWN_TYPES, AddonId, HostId, Moment, Span

if TYPE_CHECKING:
    from penstock.core.jobs.admission import AdmissionClass
    from penstock.core.jobs.load import Host


class WorkerKinds(NamedTuple):
    """
    The kinds of jobs that a worker can run. Without an addon: of any. Without types: of any type; the
    runner's own types only with `own`.
    """

    addon_id: AddonId | None = None
    job_types: frozenset[str] = frozenset()
    own: bool = False

    def fits(self, admission_class: AdmissionClass) -> bool:
        if self.addon_id not in (None, admission_class.addon_id):
            return False
        if self.job_types:
            return admission_class.job_type in self.job_types
        return self.own or not admission_class.job_type.startswith(OWN_TYPES)

    @property
    def narrowness(self) -> int:
        """How many filters the worker names."""
        return (self.addon_id is not None) + bool(self.job_types)


def hosts_with_worker(
    hosts: Iterable[Host], here: HostId, admission_class: AdmissionClass, now: Moment
) -> tuple[HostId, ...]:
    """
    The other living hosts with a worker for such jobs. A host without the labels of the job can never start
    it, so its workers do not count.
    """
    return tuple(
        host.host
        for host in hosts
        if host.host != here
        and host.alive(now)
        and set(admission_class.labels) <= set(host.labels)
        and any(kinds.fits(admission_class) for kinds in host.workers)
    )


# how much is claimed and reported at a time

#: How much work may wait for a free place: longer than a commit takes, shorter than a person notices.
AHEAD: Final[Span] = 20 * MILLISECOND
MOST_AHEAD: Final = 200
MOST_AT_ONCE: Final = 500
#: A smaller report is not worth a commit while other attempts are about to end.
FEW: Final = 32
#: A shorter function ends before a second thread is awake.
BRIEF: Final[Span] = MILLISECOND // 2
#: How long an ended attempt waits at most for the rest of its batch.
SOON: Final[Span] = 5 * MILLISECOND
#: The same if commits are expensive and functions are brief.
HELD: Final[Span] = 20 * MILLISECOND
#: One duration changes the mean by this fraction.
_WEIGHT: Final = 16


class BatchPlan(Struct, frozen=True):
    """
    What to do now. `report`: how many ended attempts to report. `claim`: how many jobs to claim in the same
    commit. `wake`: wake sleeping threads, because attempts have waited for a while. `again_at`: when to plan
    again if no attempt ends before; None: when one ends.
    """

    report: int = 0
    claim: int = 0
    wake: bool = False
    again_at: Moment | None = None


class Batching(Struct):
    """
    The planner of one worker. `places`: how many attempts run at once. `ahead`: how much work may wait for a
    place; 0 if handing over an attempt is expensive. `prefetch`: how many attempts may wait, if the user set
    that. `expensive`: a commit takes round trips to a server. `threads`: functions run on threads of the
    process that writes.
    """

    places: int
    ahead: Span = AHEAD
    prefetch: int | None = None
    expensive: bool = False
    threads: bool = True
    #: The mean duration of a function; None until the first has ended.
    mean_run: Span | None = None

    def learn(self, ran: Span) -> None:
        mean = self.mean_run
        self.mean_run = ran if mean is None else mean + (ran - mean) // _WEIGHT

    def plan(
        self, now: Moment, *, free: int, waiting: int, ended: int, taken_at: Moment = 0, stuck: int = 0
    ) -> BatchPlan:
        """
        The plan. `free`: places minus unreported attempts, which may be negative. `taken_at`: when the
        executor last got attempts; 0: do not wait for the rest of their batch. `stuck`: places whose attempt
        runs long: claim nothing ahead for them.
        """
        wake = waiting > 0 and now >= taken_at + SOON
        if waiting and self.in_one:
            until = taken_at + (HELD if self.expensive and self.brief else SOON)
            if now < until:
                return BatchPlan(wake=wake, again_at=min(now + SOON, until))
        in_flight = self.places - free
        report = min(ended, MOST_AT_ONCE, max(FEW, in_flight if self.in_one else in_flight // 2))
        ahead = self.claim_ahead(stuck)
        claim = min(MOST_AT_ONCE, max(0, free + report + ahead))
        if not report and claim < ahead // 2:
            claim = 0  # a claim for each place that becomes free would be a commit for each job
        return BatchPlan(report, claim, wake, now + SOON if waiting else None)

    @property
    def brief(self) -> bool:
        return self.threads and self.mean_run is not None and self.mean_run < BRIEF

    @property
    def in_one(self) -> bool:
        """Whether all attempts in flight are reported together."""
        return self.expensive or self.brief

    def claim_ahead(self, stuck: int = 0) -> int:
        """How many attempts may be claimed beyond the places."""
        if self.prefetch is not None:
            return self.prefetch
        if self.mean_run is None or self.mean_run >= self.ahead:
            return 0
        return min(MOST_AHEAD, (self.places - stuck) * self.ahead // max(self.mean_run, 1))

    def is_full(self, waiting: int, ended: int) -> bool:
        """Whether an attempt that has just ended fills a batch, so that its owner should plan now."""
        return not waiting if self.in_one else ended >= waiting
