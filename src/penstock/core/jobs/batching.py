"""
When a worker reports what has ended, and how many jobs it claims: one commit for many jobs.

A pure machine. Its owner counts (free workers, claimed attempts that wait, ended ones that are not reported), measures
the mean duration of a function, knows the cost of a commit, and carries the plan out.

While functions are short, more is claimed than workers are free: else they would stand still during every commit.
Ended attempts are reported when half of what is in flight has ended, so that one half runs while the other is written.
Very short functions would only take the interpreter away from the writer, and where a commit is expensive there should
be few: then the whole batch is reported together.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from penstock.core.jobs.types import MILLISECOND, Moment, Span

#: This much work may wait for a worker: longer than a commit takes, shorter than a person notices.
AHEAD: Final[Span] = 20 * MILLISECOND
MOST_AHEAD: Final = 200
MOST_AT_ONCE: Final = 500
#: A smaller report is not worth a commit of its own while others are about to end.
FEW: Final = 32
#: A function below this has ended before a second thread is awake.
BRIEF: Final[Span] = MILLISECOND // 2
#: A commit above this costs round trips to a server.
EXPENSIVE: Final[Span] = MILLISECOND
#: The longest that an ended attempt waits for the other half of its batch.
SOON: Final[Span] = 5 * MILLISECOND
#: The same where a commit is expensive and functions are brief.
HELD: Final[Span] = 20 * MILLISECOND


class BatchPlan(Struct, frozen=True):
    """
    `report`: this many ended attempts, now. `claim`: this many jobs in the same commit. `wake`: this many sleeping workers,
    for attempts that have waited for a while. `again_at`: the moment of the next plan if nothing ends before; None: when
    something ends.
    """

    report: int = 0
    claim: int = 0
    wake: int = 0
    again_at: Moment | None = None


class Batching(Struct, frozen=True):
    """`ahead`: how many attempts may wait for each worker while functions are short; 0 where handing over is expensive."""

    workers: int
    ahead: int = 1

    def plan(
        self,
        now: Moment,
        *,
        free: int,
        waiting: int,
        ended: int,
        mean_run: Span,
        commit_cost: Span,
        taken_at: Moment = 0,
    ) -> BatchPlan:
        """
        `free`: workers without an attempt (negative: more wait than there are workers). `taken_at`: when the workers
        were last given attempts; 0: the plan does not wait for the rest of their batch.
        """
        wake = min(waiting, self.workers) if now >= taken_at + SOON else 0
        if waiting and self.in_one(mean_run, commit_cost):
            until = taken_at + self.held(mean_run, commit_cost)
            if now < until:
                return BatchPlan(wake=wake, again_at=min(now + SOON, until))
        in_flight = self.workers - free
        report = min(ended, self.batch(in_flight, mean_run, commit_cost))
        claim = max(0, free + report + self.claim_ahead(mean_run))
        return BatchPlan(report, claim, wake, now + SOON if waiting else None)

    def brief(self, mean_run: Span) -> bool:
        return mean_run < BRIEF

    def in_one(self, mean_run: Span, commit_cost: Span) -> bool:
        """Whether all that is in flight is reported together."""
        return commit_cost >= EXPENSIVE or self.brief(mean_run)

    def held(self, mean_run: Span, commit_cost: Span) -> Span:
        """How long a batch that is half through is not reported in two."""
        return HELD if commit_cost >= EXPENSIVE and self.brief(mean_run) else SOON

    def batch(self, in_flight: int, mean_run: Span, commit_cost: Span) -> int:
        """The most ended attempts that one commit reports."""
        most = in_flight if self.in_one(mean_run, commit_cost) else in_flight // 2
        return min(MOST_AT_ONCE, max(FEW, most))

    def claim_ahead(self, mean_run: Span) -> int:
        """How many more attempts than workers may be claimed."""
        if mean_run >= AHEAD:
            return 0
        return min(MOST_AHEAD, self.ahead * self.workers * AHEAD // max(mean_run, 1))

    def is_full(self, waiting: int, ended: int, mean_run: Span, commit_cost: Span) -> bool:
        """Whether an attempt that has just ended fills a batch, so that its owner should plan now."""
        return not waiting if self.in_one(mean_run, commit_cost) else ended >= waiting
