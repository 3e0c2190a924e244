"""
Metrics: the plain counters of the pools, shown to OpenTelemetry when it asks.

A counter of the SDK takes about 20 us to add to, as long as ten calls; the pool counts anyway, for a fiftieth of
that. So all counters and gauges here are observable ones, read at collection. Histograms have no such form in
OpenTelemetry: they alone are recorded call by call.

A counter must never fall, and pools come and go. So the counts of a pool outlive it: what is left of it here is the
small object that holds them, and when the pool is gone they are added to those of its namesakes.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation

from penstock.pools.future import Call
from penstock.pools.options import labels_of, task_name
from penstock.telemetry.hooks import QueueHooks

if TYPE_CHECKING:
    from penstock.pools.pool import WorkerPool

#: Each is a field of QueueState.
_GAUGES: Final = {
    "in_flight": "calls handed to a worker",
    "pending": "calls accepted and not started",
    "waiting": "callers paused until there is room",
}

#: Each is a sum of fields of Totals. A timeout is one of the ways to be canceled (DQ-5).
_COUNTERS: Final = {
    "task.dispatch.total": (("dispatched",), "{call}", "attempts handed to a worker"),
    "task.success.total": (("succeeded",), "{call}", "calls that returned"),
    "task.failure.total": (("failed",), "{call}", "calls that raised, or whose worker died"),
    "task.canceled.total": (
        ("canceled", "timed_out"), "{call}", "calls ended by somebody, their timeout or a closed pool",
    ),
    "task.rejected.total": (("rejected",), "{call}", "calls that a load-shedding policy refused or evicted"),
    "task.requeue.total": (("requeued",), "{call}", "calls that went back to the queue from a lost worker"),
    "worker.spawn.total": (("spawned",), "{worker}", "workers started"),
    "worker.crash.total": (("crashed",), "{worker}", "workers that died unasked"),
    "worker.terminate.total": (("terminated",), "{worker}", "workers ended for a canceled call that did not stop"),
}  # fmt: skip

#: In ms. The SDK's own begin at 5, and a call that waits that long is a slow one here.
_BUCKETS: Final = (
    0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000,
)  # fmt: skip

Labels = tuple[tuple[str, str], ...]


def meters_for(provider: MeterProvider | None) -> Meters:
    """One set of instruments for each provider: a second of the same name would never be asked for its numbers."""
    given = provider or metrics.get_meter_provider()
    key = _the_global_one if given is metrics.get_meter_provider() else given
    with _lock:
        known = _meters.get(key)
        meters = known() if known is not None else None
        if meters is None:
            meters = Meters(given.get_meter("penstock"))
            _meters[key] = weakref.ref(meters)  # the provider's instruments hold it, through their callbacks
        return meters


class _Key:
    """Stands for the global provider, whose identity changes when it is set."""


_the_global_one = _Key()
_lock = threading.Lock()
_meters: weakref.WeakKeyDictionary[Any, weakref.ref[Meters]] = weakref.WeakKeyDictionary()


class Counted(Protocol):
    """Counters that only grow, as attributes and as a dict."""

    def as_dict(self) -> dict[str, int]: ...


class Stated(Protocol):
    def state(self) -> Any:
        """With a field for each of the gauges."""


class _Watched(NamedTuple):
    call_queue: weakref.ref[Stated]
    totals: Counted
    labels: Labels


class Meters:
    def __init__(self, meter: Meter) -> None:
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []
        self._gone: dict[Labels, Counter[str]] = {}
        for field, meaning in _GAUGES.items():
            meter.create_observable_gauge(f"queue.{field}", [partial(self._gauge, field)], "{call}", meaning)
        for name, (fields, unit, meaning) in _COUNTERS.items():
            meter.create_observable_counter(name, [partial(self._count, fields)], unit, meaning)

        def histogram(name: str, meaning: str) -> Histogram:
            return meter.create_histogram(name, "ms", meaning, explicit_bucket_boundaries_advisory=_BUCKETS)

        self.wait = histogram("queue.wait_ms", "from the call to its dispatch")
        self.waiting = histogram("queue.waiting_ms", "the part of it before the call was accepted")
        self.pending = histogram("queue.pending_ms", "the part of it after")
        self.duration = histogram("task.duration_ms", "how long the function ran")

    def watch(self, pool: WorkerPool, *, histograms: bool) -> None:
        labels = labels_of(pool)
        if self.follow(pool._call_queue, pool._call_queue.totals, labels) and histograms:
            pool.add_hooks(_Stopwatch(self, labels, pool._options.target))

    def follow(self, source: Stated, totals: Counted, labels: dict[str, str]) -> bool:
        """Show its state while it lives, and its totals for ever. False: it is followed already, and stays as it is."""
        with self._lock:
            if any(watched.totals is totals for watched in self._watched):
                return False
            self._watched.append(_Watched(weakref.ref(source), totals, tuple(labels.items())))
        return True

    # Asked by OpenTelemetry, on a thread of its own

    def _gauge(self, field: str, _: CallbackOptions) -> Iterable[Observation]:
        sums: Counter[Labels] = Counter()
        for call_queue, watched in self._living():
            sums[watched.labels] += getattr(call_queue.state(), field)
        return _observations(sums)

    def _count(self, fields: tuple[str, ...], _: CallbackOptions) -> Iterable[Observation]:
        sums: Counter[Labels] = Counter()
        for _call_queue, watched in self._living():
            sums[watched.labels] += sum(getattr(watched.totals, field) for field in fields)
        with self._lock:
            for labels, gone in self._gone.items():
                sums[labels] += sum(gone[field] for field in fields)
        return _observations(sums)

    def _living(self) -> Iterator[tuple[Stated, _Watched]]:
        """A gate lives as long as anything can still happen in it, longer than the pool that somebody held."""
        with self._lock:
            pairs = [(watched.call_queue(), watched) for watched in self._watched]
            self._watched = [watched for call_queue, watched in pairs if call_queue is not None]
            for call_queue, watched in pairs:
                if call_queue is None:
                    self._gone.setdefault(watched.labels, Counter()).update(watched.totals.as_dict())
        return ((call_queue, watched) for call_queue, watched in pairs if call_queue is not None)


def _observations(sums: Counter[Labels]) -> list[Observation]:
    return [Observation(value, dict(labels)) for labels, value in sums.items()]


class _Stopwatch(QueueHooks):
    """The histograms of one pool."""

    def __init__(self, meters: Meters, labels: dict[str, str], target: Callable[..., object] | None) -> None:
        self._meters = meters
        self._labels = labels
        self._target = target
        self._by_task: dict[str, dict[str, str]] = {}

    def on_dispatch(self, call: Call[Any]) -> None:
        """Each attempt has a wait of its own; only the first one can have begun outside of the queue."""
        labels, meters = self._labels_for(call), self._meters
        outside = call.waiting_for if call.attempt == 1 else 0.0
        meters.wait.record(call.last_wait * 1000, labels)
        meters.waiting.record(outside * 1000, labels)
        meters.pending.record((call.last_wait - outside) * 1000, labels)

    def on_settle(self, call: Call[Any]) -> None:
        if call.ran_for:  # a call that failed with its worker ran for nobody knows how long
            self._meters.duration.record(call.ran_for * 1000, self._labels_for(call))

    def _labels_for(self, call: Call[Any]) -> dict[str, str]:
        task = task_name(call.fn, self._target)
        labels = self._by_task.get(task)
        if labels is None:
            labels = self._by_task[task] = {"task": task, **self._labels}
        return labels
