"""
What has happened since this daemon started, as sums that only grow: behind `/metrics`.

They are made from the trail, like everything that is shown, so a metric cannot say something that the audit does not. Plain
integers, because an increment of a metrics library costs thirty times as much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from penstock.core.job import Event, EventKind
from penstock.core.landing import EndReason
from penstock.core.words import DispatchId, Moment, Span, seconds

__all__ = ["ENDS", "Histogram", "StatCounters"]

ENDS: Final = frozenset(
    {EventKind.DONE, EventKind.FAILED, EventKind.REQUEUED, EventKind.CANCELED, EventKind.BLOCKED}
)
_BOUNDS: Final = (
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.5,
    1,
    5,
    15,
    60,
    300,
    900,
    3_600,
    14_400,
    86_400,
)  # seconds


class Histogram:
    def __init__(self, bounds: Sequence[float] = _BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, span: Span) -> None:
        value = seconds(span)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, int]]:
        """As Prometheus wants it: how many were at most so long."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


class StatCounters:
    def __init__(self) -> None:
        self.events: Counter[EventKind] = Counter()
        self.denials: Counter[str] = Counter()
        self.requeues: Counter[str] = Counter()
        self.waits, self.runs = Histogram(), Histogram()
        #: Calls of workers whose dispatch had ended or been replaced. Told by whoever refuses one: nothing happened, so the
        #: trail does not know.
        self.fenced = 0
        self._began: dict[DispatchId, Moment] = {}

    @property
    def leases_expired(self) -> int:
        return self.requeues[EndReason.LEASE_EXPIRED]

    def take(self, events: Iterable[Event]) -> tuple[list[Span], list[Span]]:
        """Counts them, and answers how long their starts had waited and their ends had run."""
        waits, runs = [], []
        for event in events:
            self.events[event.kind] += 1
            if event.kind is EventKind.DENIED:
                self.denials[event.reason] += 1
            elif event.kind is EventKind.RUNNING and event.dispatch_id is not None:
                self._began[event.dispatch_id] = event.at
                if "waited" in event.data:
                    waits.append(event.data["waited"])
            elif event.kind in ENDS and event.dispatch_id is not None:
                if event.kind is EventKind.REQUEUED:
                    self.requeues[event.reason] += 1
                began = self._began.pop(event.dispatch_id, None)
                if began is not None:
                    runs.append(event.at - began)
        for span in waits:
            self.waits.observe(span)
        for span in runs:
            self.runs.observe(span)
        return waits, runs
