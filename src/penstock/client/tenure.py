"""
How long a worker may believe that a lease is its own.

By its own clock alone, and counted from the moment it SENT the last request that was answered well: the scheduler counts from when
that request arrived, which was later, so a worker that keeps to this has always let go before its lease can go to another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

__all__ = ["AT_RISK", "BEAT", "LeaseTimer", "monotonic"]

#: Of the lease: after so much without a renewal the run is told to stop, so that it is gone when the lease is over.
AT_RISK: Final = 0.66
#: Of the lease: so often it is renewed. One beat may be lost without anybody noticing.
BEAT: Final = 0.3


@dataclass(frozen=True, slots=True)
class LeaseTimer:
    sent_at: float
    ttl: float

    def renewed(self, sent_at: float, ttl: float) -> LeaseTimer:
        """Answers may overtake each other: the latest to be sent counts."""
        return LeaseTimer(sent_at, ttl) if sent_at > self.sent_at else self

    @property
    def beat_at(self) -> float:
        return self.sent_at + self.ttl * BEAT

    @property
    def at_risk_at(self) -> float:
        return self.sent_at + self.ttl * AT_RISK

    @property
    def over_at(self) -> float:
        return self.sent_at + self.ttl


def monotonic() -> float:
    """Counts through a suspended machine too: its leases went on expiring elsewhere."""
    return time.clock_gettime(_CLOCK)


_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
