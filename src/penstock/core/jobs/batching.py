"""
When a worker reports what has ended, and how many jobs it claims: one commit, or one request, for many jobs.

A pure machine. The library, the SDK worker and the runner each own one. The owner counts (free places, claimed attempts
that wait, ended ones that are not reported), teaches the machine how long functions run, and carries the plan out.

While functions are short, more is claimed than places are free: else they would stand still during every commit. Ended
attempts are reported when half of what is in flight has ended, so that one half runs while the other is written. Very
short functions on threads would only take the interpreter away from the writer, and where a commit is expensive there
should be few: then the whole batch is reported together.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from penstock.core.jobs.types import MILLISECOND, Moment, Span

#: This much work may wait for a free place: longer than a commit takes, shorter than a person notices.
AHEAD: Final[Span] = 20 * MILLISECOND
MOST_AHEAD: Final = 200
MOST_AT_ONCE: Final = 500
#: A smaller report is not worth a commit of its own while others are about to end.
FEW: Final = 32
#: A function below this has ended before a second thread is awake.
BRIEF: Final[Span] = MILLISECOND // 2
#: The longest that an ended attempt waits for the other half of its batch.
SOON: Final[Span] = 5 * MILLISECOND
#: The same where a commit is expensive and functions are brief.
HELD: Final[Span] = 20 * MILLISECOND
#: One duration changes the mean by this fraction.
_WEIGHT: Final = 16


class BatchPlan(Struct, frozen=True):
    """
    `report`: this many ended attempts, now. `claim`: this many jobs in the same commit. `wake`: attempts have waited for a
    while, so sleeping threads should take them. `again_at`: the moment of the next plan if nothing ends before; None: when
    something ends.
    """

    report: int = 0
    claim: int = 0
    wake: bool = False
    again_at: Moment | None = None


class Batching(Struct):
    """
    The rules of one worker. `places`: how many attempts run at once. `ahead`: how much work may wait for a place; 0 where
    handing an attempt over is expensive. `prefetch`: how many attempts may wait, where the user says so. `expensive`: a
    commit takes round trips to a server. `threads`: functions run on threads of the process that writes.
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
        `free`: places without an attempt that is not reported (negative: more are in flight than there are places).
        `taken_at`: when attempts were last given to the executor; 0: the plan does not wait for the rest of their batch.
        `stuck`: places whose attempt turns out to be long: nothing is claimed ahead for them.
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
            claim = 0  # a commit for each place that becomes free would be one for each job
        return BatchPlan(report, claim, wake, now + SOON if waiting else None)

    @property
    def brief(self) -> bool:
        return self.threads and self.mean_run is not None and self.mean_run < BRIEF

    @property
    def in_one(self) -> bool:
        """Whether all that is in flight is reported together."""
        return self.expensive or self.brief

    def claim_ahead(self, stuck: int = 0) -> int:
        """How many more attempts than places may be claimed."""
        if self.prefetch is not None:
            return self.prefetch
        if self.mean_run is None or self.mean_run >= self.ahead:
            return 0
        return min(MOST_AHEAD, (self.places - stuck) * self.ahead // max(self.mean_run, 1))

    def is_full(self, waiting: int, ended: int) -> bool:
        """Whether an attempt that has just ended fills a batch, so that its owner should plan now."""
        return not waiting if self.in_one else ended >= waiting
