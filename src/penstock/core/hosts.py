"""
A host as the others see it: one scheduler with a capacity of its own, on jobs that it may share with others.

It is there for as long as it says so: each word of it holds until `until`. What a lost host had in flight comes back by its leases, not by
this; whether somebody is `alive` decides only who may bear a name, and what people are shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.quiet import QuietState
from penstock.core.words import HostId, Moment

__all__ = ["Host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    host: HostId
    #: Who bears the name. The same after a restart in the same place, so that it need not wait for itself to be lost.
    instance: str
    capacity: int = 0
    quiet: QuietState = QuietState.QUIET
    labels: tuple[str, ...] = ()
    version: str = ""
    url: str = ""
    started_at: Moment = 0
    seen_at: Moment = 0
    until: Moment = 0
    #: Somebody's wish, which outlives the host: it starts nothing more.
    draining: bool = False
    #: What its dispatches hold.
    units: int = 0

    def alive(self, now: Moment) -> bool:
        return now < self.until
