"""
Metrics: shows the plain counters of pools and graphs to OpenTelemetry when it collects.

Adding to a counter of the SDK takes about 20 us, as long as ten calls; the pool's own counters cost a
fiftieth. So all counters and gauges here are observable ones, which are read at collection. OpenTelemetry has
no observable histograms, so these are recorded call by call.

A counter must never fall, but pools are freed. So the small object with a pool's counts outlives the pool,
and then its counts are added to those of other pools with the same labels.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation

from penstock.pools.call_queue import CallQueue
from penstock.pools.future import Call
from penstock.telemetry.hooks import QueueHooks
from penstock.telemetry.registry import labels_of, task_name

if TYPE_CHECKING:
    from penstock.pools.calling import PoolInternals

#: Each is a field of QueueState.
_GAUGES: Final = {
    "in_flight": "calls handed to a worker",
    "pending": "calls accepted and not started",
    "waiting": "callers paused until there is room",
}

#: Each is a sum of fields of CallTotals. A timeout is one of the ways to be canceled (DQ-5).
_COUNTERS: Final = {
    "task.dispatch.total": (("dispatched",), "{call}", "attempts handed to a worker"),
    "task.success.total": (("succeeded",), "{call}", "calls that returned"),
    "task.failure.total": (("failed",), "{call}", "calls that raised, or whose worker died"),
    "task.canceled.total": (
        ("canceled", "timed_out"), "{call}", "calls ended by a cancel, their timeout or a closed pool",
    ),
    "task.rejected.total": (("rejected",), "{call}", "calls that a load-shedding policy refused or evicted"),
    "task.requeue.total": (("requeued",), "{call}", "calls that went back to the queue from a lost worker"),
    "worker.spawn.total": (("spawned",), "{worker}", "workers started"),
    "worker.crash.total": (("crashed",), "{worker}", "workers that died unexpectedly"),
    "worker.terminate.total": (("terminated",), "{worker}", "workers ended for a call that did not stop"),
}  # fmt: skip

#: In ms. The SDK's own begin at 5, where a call is slow already.
_BUCKETS: Final = (
    0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000,
)  # fmt: skip

Labels = tuple[tuple[str, str], ...]
T = TypeVar("T")


def meters_for(provider: MeterProvider | None) -> Meters:
    """
    The instruments of this provider, made once: OpenTelemetry would never read a second set of the same
    names.
    """
    given = provider or metrics.get_meter_provider()
    key = _GLOBAL if given is metrics.get_meter_provider() else given
    with _lock:
        existing = _meters.get(key)
        meters = existing() if existing is not None else None
        if meters is None:
            meters = Meters(given.get_meter("penstock"))
            _meters[key] = weakref.ref(meters)  # the provider's instruments hold it, through their callbacks
        return meters


class _GlobalProvider:
    """A key for the global provider, whose identity changes when it is set."""


_GLOBAL: Final = _GlobalProvider()
_lock = threading.Lock()
_meters: weakref.WeakKeyDictionary[Any, weakref.ref[Meters]] = weakref.WeakKeyDictionary()


class Totals(Protocol):
    """Counters that only grow."""

    def as_dict(self) -> dict[str, int]: ...


class _Followed(NamedTuple):
    source: weakref.ref[Any]
    read: Callable[[Any], Any]
    totals: Totals
    labels: Labels


class Meters:
    """The instruments of one provider."""

    def __init__(self, meter: Meter) -> None:
        self._lock = threading.Lock()
        self._followed: list[_Followed] = []
        self._gone: dict[Labels, Counter[str]] = {}
        for field, meaning in _GAUGES.items():
            meter.create_observable_gauge(f"queue.{field}", [partial(self._gauge, field)], "{call}", meaning)
        for name, (fields, unit, meaning) in _COUNTERS.items():
            meter.create_observable_counter(name, [partial(self._count, fields)], unit, meaning)

        def histogram(name: str, meaning: str) -> Histogram:
            return meter.create_histogram(name, "ms", meaning, explicit_bucket_boundaries_advisory=_BUCKETS)

        self.wait = histogram("queue.wait_ms", "from the call to its dispatch")
        self.waiting = histogram("queue.waiting_ms", "from the call to its acceptance")
        self.pending = histogram("queue.pending_ms", "from its acceptance to its dispatch")
        self.duration = histogram("task.duration_ms", "how long the function ran")

    def watch(self, pool: PoolInternals, *, histograms: bool) -> None:
        labels = labels_of(pool)
        call_queue = pool.call_queue
        if self.follow(call_queue, CallQueue.state, call_queue.totals, labels) and histograms:
            call_queue.hooks.add(_CallHistograms(self, labels, pool.options.target))

    def follow(self, source: T, read: Callable[[T], Any], totals: Totals, labels: dict[str, str]) -> bool:
        """
        Show the gauges of `read(source)` while the source lives, and its totals for ever. False: the source
        is shown already.
        """
        with self._lock:
            if any(followed.totals is totals for followed in self._followed):
                return False
            self._followed.append(_Followed(weakref.ref(source), read, totals, tuple(labels.items())))
        return True

    # Called by OpenTelemetry, on a thread of its own

    def _gauge(self, field: str, _: CallbackOptions) -> Iterable[Observation]:
        sums: Counter[Labels] = Counter()
        for source, followed in self._living():
            sums[followed.labels] += getattr(followed.read(source), field)
        return _observations(sums)

    def _count(self, fields: tuple[str, ...], _: CallbackOptions) -> Iterable[Observation]:
        sums: Counter[Labels] = Counter()
        for _source, followed in self._living():
            totals = followed.totals.as_dict()
            sums[followed.labels] += sum(totals[field] for field in fields)
        with self._lock:
            for labels, gone in self._gone.items():
                sums[labels] += sum(gone[field] for field in fields)
        return _observations(sums)

    def _living(self) -> Iterator[tuple[Any, _Followed]]:
        """
        The sources that are alive. A call queue outlives its pool while it has calls.
        """
        with self._lock:
            pairs = [(followed.source(), followed) for followed in self._followed]
            self._followed = [followed for source, followed in pairs if source is not None]
            for source, followed in pairs:
                if source is None:
                    self._gone.setdefault(followed.labels, Counter()).update(followed.totals.as_dict())
        return ((source, followed) for source, followed in pairs if source is not None)


def _observations(sums: Counter[Labels]) -> list[Observation]:
    return [Observation(value, dict(labels)) for labels, value in sums.items()]


class _CallHistograms(QueueHooks):
    """The histograms of one pool."""

    def __init__(self, meters: Meters, labels: dict[str, str], target: Callable[..., object] | None) -> None:
        self._meters = meters
        self._labels = labels
        self._target = target
        self._by_task: dict[str, dict[str, str]] = {}

    def on_dispatch(self, call: Call[Any]) -> None:
        """Record the wait of an attempt. Only the first attempt can have waited outside of the queue."""
        labels, meters = self._labels_for(call), self._meters
        outside = call.waiting_for if call.attempt == 1 else 0.0
        meters.wait.record(call.last_wait * 1000, labels)
        meters.waiting.record(outside * 1000, labels)
        meters.pending.record((call.last_wait - outside) * 1000, labels)

    def on_settle(self, call: Call[Any]) -> None:
        if call.ran_for:  # unknown for a call whose worker died
            self._meters.duration.record(call.ran_for * 1000, self._labels_for(call))

    def _labels_for(self, call: Call[Any]) -> dict[str, str]:
        task = task_name(call.fn, self._target)
        labels = self._by_task.get(task)
        if labels is None:
            labels = self._by_task[task] = {"task": task, **self._labels}
        return labels
