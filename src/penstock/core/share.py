"""
Fair share: how much an addon has had of late, for its weight.

An account is the exponentially weighted average of the units that an addon holds, so cost-unit-seconds within a window
that slides without edges. Two numbers and a moment carry it: it is exact at any moment without looking at a single
dispatch, a job of ten hours counts while it runs, and an addon that was away comes back with the credit of one half-life and not of a week.
Virtual start times (SFQ) were weighed against it, on paper: with bands, one addon's start in a high band would wipe out the differences below it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.words import MINUTE, SECOND, Moment, Span

__all__ = ["Account", "FairShare"]


@dataclass(frozen=True, slots=True)
class FairShare:
    half_life: Span = 5 * MINUTE
    #: Accounts compare as they will stand this far ahead: two starts within one tick must already count.
    ahead: Span = 10 * SECOND


@dataclass(slots=True)
class Account:
    """`units` is the sum over live dispatches; only `average` has a past."""

    weight: int = 100
    paused: bool = False
    average: float = 0.0
    units: int = 0
    at: Moment = 0

    def key(self, now: Moment, sharing: FairShare) -> float:
        """The smaller, the further below its share."""
        return self._then(now + sharing.ahead, sharing) / self.weight

    def hold(self, units: int, now: Moment, sharing: FairShare) -> None:
        """Negative units give back."""
        self.average = self._then(now, sharing)
        self.at = max(self.at, now)
        self.units += units

    def _then(self, moment: Moment, sharing: FairShare) -> float:
        if moment <= self.at:
            return self.average
        gone: float = 0.5 ** ((moment - self.at) / sharing.half_life)
        return self.units + (self.average - self.units) * gone
