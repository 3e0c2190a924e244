"""
Live stats: counters since the daemon started (for `/metrics`), and the last quarter of an hour by the second
(for the page's charts and `top`).

Both are made from the trail, so a metric cannot differ from it. The counters are plain integers: an increment
of a metrics library costs thirty times as much.

`LiveStats` reads the new events of the trail once a second and adds them up. Its cost depends on the number
of new events, not on the number of waiting jobs or of clients: every client gets the same frame.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Final, NamedTuple

from penstock.core.jobs.job import ENDS, Event, EventKind
from penstock.core.jobs.types import DispatchId, HostId, Moment, Span, seconds
from penstock.scheduler.hosts import HostLoad
from penstock.stores.api import Store

#: Seconds.
_BOUNDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3_600, 14_400, 86_400)


class Histogram:
    """Counts of time spans by bounds in seconds, and their sum."""

    def __init__(self, bounds: Sequence[float] = _BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, span: Span) -> None:
        value = seconds(span)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, int]]:
        """The buckets in Prometheus's form: for each bound, how many values were at most that."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


class StatCounters:
    """The counters since the daemon started, for `/metrics`."""

    def __init__(self) -> None:
        self.events: Counter[EventKind] = Counter()
        self.denials: Counter[str] = Counter()
        self.requeues: Counter[str] = Counter()
        self.waits, self.attempts = Histogram(), Histogram()
        #: Requests of workers whose dispatch had ended or been replaced. The server counts them: a refused
        #: request makes no event.
        self.fenced = 0
        self._began: dict[DispatchId, Moment] = {}

    def take(self, events: Iterable[Event]) -> tuple[list[Span], list[Span]]:
        """
        Count the events. Returns how long the started jobs had waited, and how long the ended attempts ran.
        """
        waits, attempts = [], []
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
                    attempts.append(event.at - began)
        for span in waits:
            self.waits.observe(span)
        for span in attempts:
            self.attempts.observe(span)
        return waits, attempts


_KEPT: Final = 900
_RECENT: Final = 60  # seconds that a percentile covers
_SHOWN: Final = 40  # newest events in a frame; a person cannot read more in a second
_CATCHING_UP: Final = 20_000  # the most events read in a step

_COUNTED: Final = {EventKind.RUNNING: "started"} | {
    kind: kind.lower() for kind in (EventKind.SUBMITTED, EventKind.DENIED, *ENDS)
}


class Second(NamedTuple):
    """What happened in one second, and how full the machine was at its end."""

    at: Moment
    counts: Counter[str]
    denials: Counter[str]  # by reason
    waits: Sequence[Span]
    attempts: Sequence[Span]
    in_use: int
    capacity: int
    busy: float
    queued: int


class Frame(NamedTuple):
    """The live figures at one moment: the newest second, the counts of jobs, and the newest events."""

    number: int
    second: Second
    jobs: dict[str, int]
    events: Sequence[Event]
    wait: tuple[Span, Span] | None  # p50 and p95 of the last minute
    attempt: tuple[Span, Span] | None
    denials: Counter[str]  # of all seconds that are kept


class LiveStats:
    """Measures once a second, and keeps the last quarter of an hour."""

    def __init__(self, store: Store, machine: HostLoad, host: HostId) -> None:
        self._store, self._machine, self._host = store, machine, host
        self.counters = StatCounters()
        self._seen = store.newest()
        self._seconds: deque[Second] = deque(maxlen=_KEPT)
        self._number = 0
        self._jobs: dict[str, int] = {}
        self._events: Sequence[Event] = ()
        self._lock = Lock()

    def measure(self, now: Moment, *, changed: bool = True) -> None:
        """Add the present second. `changed`: False if nothing was committed: then the store is not read."""
        jobs, events = self._jobs, list[Event]()
        in_use = self._seconds[-1].in_use if self._seconds else 0
        if changed or not self._seconds:
            events = self._unread()
            jobs = defaultdict(int)
            for addon in self._store.addons():
                for state, count in addon.jobs.items():
                    jobs[str(state)] += count
            in_use = self._store.ledger(self._host).units
        counts = Counter(_COUNTED[event.kind] for event in events if event.kind in _COUNTED)
        denials = Counter(event.reason for event in events if event.kind is EventKind.DENIED)
        waits, attempts = self.counters.take(events)
        conditions = self._machine.conditions(now)
        capacity, score = conditions.capacity, conditions.busy.score
        second = Second(now, counts, denials, waits, attempts, in_use, capacity, score, jobs.get("QUEUED", 0))
        with self._lock:
            self._seconds.append(second)
            self._number, self._jobs, self._events = self._number + 1, jobs, events[-_SHOWN:]

    def frame(self) -> Frame | None:
        """
        The newest frame; None: nothing was measured yet. Made only on request, because it goes through all
        seconds that are kept and mostly no client watches.
        """
        with self._lock:
            if not self._seconds:
                return None
            recent = list(self._seconds)[-_RECENT:]
            return Frame(
                self._number,
                self._seconds[-1],
                self._jobs,
                self._events,
                percentiles(span for one in recent for span in one.waits),
                percentiles(span for one in recent for span in one.attempts),
                sum((one.denials for one in self._seconds if one.denials), Counter()),
            )

    def newest(self) -> Second | None:
        with self._lock:
            return self._seconds[-1] if self._seconds else None

    def history(self) -> list[Second]:
        with self._lock:
            return list(self._seconds)

    def _unread(self) -> list[Event]:
        events = self._store.events(self._seen, _CATCHING_UP)
        self._seen = events[-1].seq if events else self._seen
        return events


def percentiles(spans: Iterable[Span]) -> tuple[Span, Span] | None:
    ordered = sorted(spans)
    if not ordered:
        return None
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]
