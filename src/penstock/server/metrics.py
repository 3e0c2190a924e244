"""
`/metrics` for Prometheus: counters from the trail, and gauges that are read at each request.

The number of label values is limited, because users name addons and job types. The fifty addons with most
jobs have a label of their own, and the others share `other`. Of job types, the fifty with most attempts are
shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from penstock.core.jobs.admission import EVERYTHING
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.learning import TypeStats
from penstock.core.jobs.load import QuietState
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import EndReason
from penstock.scheduler.stats import Histogram
from penstock.server.app_state import AppState
from penstock.server.event_hub import oldest_queued_sec
from penstock.server.request import Request
from penstock.stores.api import Addon, WaitingWork

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_NAMED_ADDONS: Final = 50
_NAMED_LABELS: Final = 50
_NAMED_TYPES: Final = 50


def metrics(call: Request[None, None]) -> bytes:
    call.check_unbound(", and metrics show all addons")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(call.app_state))
    return generate_latest(registry)


class MetricsCollector(Collector):
    """Makes all metric families anew at each request."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state

    def collect(self) -> Iterator[Metric]:
        service, store = self._app_state.service, self._app_state.store
        now = store.now()
        conditions, ledger = service.machine.conditions(now), store.ledger(service.rules.host)
        counters = self._app_state.stats.live.counters
        addons = [addon for addon in store.addons() if addon.addon_id != EVERYTHING]
        age = oldest_queued_sec(store, now) or 0.0

        yield _gauge("penstock_jobs", "Jobs by state.", _by_state(addons, JobState), "state")
        named = _bounded(addons)
        queued_and_running = {
            (name, *state): count
            for name, group in named.items()
            for state, count in _by_state(group, (JobState.QUEUED, JobState.RUNNING)).items()
        }
        about = "Jobs of an addon, queued and running."
        yield _gauge("penstock_addon_jobs", about, queued_and_running, "addon", "state")
        units = {(name,): sum(addon.units for addon in group) for name, group in named.items()}
        yield _gauge("penstock_addon_units", "Units an addon holds.", units, "addon")
        waiting = _bounded_labels(store.waiting_by_labels())
        about = "Units that ready jobs wait for, by the labels that a host must have."
        yield _gauge(
            "penstock_waiting_units", about, {key: work.units for key, work in waiting.items()}, "labels"
        )
        about = "Ready jobs that wait for units, by the labels that a host must have."
        yield _gauge(
            "penstock_waiting_jobs", about, {key: work.jobs for key, work in waiting.items()}, "labels"
        )
        yield _gauge("penstock_oldest_queued_seconds", "Age of the job that has been queued longest.", age)
        yield _gauge("penstock_waiting_submits", "Submits that wait for room.", len(service.waitlist.waiters))

        yield _gauge("penstock_capacity_units", "Units that may be used now.", conditions.capacity)
        yield _gauge("penstock_units_in_use", "Units reserved and leased.", ledger.units)
        yield _gauge("penstock_leases", "Dispatches that hold units.", ledger.running)
        busy = conditions.busy.score
        yield _gauge("penstock_busy_score", "How busy other programs keep the machine, 0 to 10.", busy)
        quiet = {(state,): float(conditions.quiet is state) for state in QuietState}
        yield _gauge("penstock_quiet", "1 for the present quiet state.", quiet, "state")
        spent = {
            (addon_id, window): amount / 1e6
            for addon_id, windows in list(ledger.spent.items())[:_NAMED_ADDONS]
            for window, amount in windows.items()
        }
        about = "What an addon's jobs spent in the present day and month."
        yield _gauge("penstock_spent", about, spent, "addon", "window")

        yield from _type_gauges(service.job_service.type_stats())

        yield _counters("penstock_events", "Events of the trail, by kind.", "kind", counters.events)
        yield _counters("penstock_denials", "Recorded refusals, by reason.", "reason", counters.denials)
        about = "Attempts that went back to the queue, by reason."
        yield _counters("penstock_requeues", about, "reason", counters.requeues)
        about = "Leases that were not renewed in time."
        yield CounterMetricFamily(
            "penstock_leases_expired", about, counters.requeues[EndReason.LEASE_EXPIRED]
        )
        about = "Calls of workers whose dispatch was over."
        yield CounterMetricFamily("penstock_fenced_calls", about, counters.fenced)
        preempted = counters.events[EventKind.PREEMPT_REQUESTED]
        yield CounterMetricFamily("penstock_preemptions", "Attempts that were asked to yield.", preempted)
        yield CounterMetricFamily("penstock_alerts", "Alerts to owners.", counters.events[EventKind.ALERT])
        yield _histogram("penstock_wait_seconds", "From ready to running.", counters.waits)
        yield _histogram(
            "penstock_attempt_seconds", "From running to the end of the attempt.", counters.attempts
        )


def _type_gauges(stats: list[TypeStats]) -> Iterator[Metric]:
    """
    Gauges of the fifty types with most attempts; their sizes are left out, because users name these too.
    """
    ranked = sorted((one for one in stats if not one.size), key=lambda one: -one.attempts)[:_NAMED_TYPES]
    for name, about, field in (
        ("penstock_type_duration_seconds", "Median duration of a job type, learned.", "duration_sec"),
        ("penstock_type_memory_bytes", "Median peak memory of a job type, learned.", "memory_bytes"),
        ("penstock_type_arrivals_per_hour", "Recent arrivals of a job type.", "arrivals_per_hour"),
        ("penstock_prediction_coverage", "Part of the starts within their predicted range.", "coverage"),
        ("penstock_prediction_error_seconds", "Median error of predicted starts.", "error_sec"),
        ("penstock_prediction_error_ratio", "Median error, as a part of the wait.", "error_share"),
        ("penstock_predictions", "Predicted starts that were scored.", "predictions"),
    ):
        values = {
            (one.addon_id, one.job_type): value
            for one in ranked
            if (value := getattr(one, field)) is not None
        }
        yield _gauge(name, about, values, "addon", "type")


def _by_state(addons: Iterable[Addon], states: Iterable[JobState]) -> dict[tuple[str], int]:
    return {(state,): sum(addon.jobs.get(state, 0) for addon in addons) for state in states}


def _bounded(addons: list[Addon]) -> dict[str, list[Addon]]:
    ranked = sorted(addons, key=lambda addon: -sum(addon.jobs.values()))
    named = {str(addon.addon_id): [addon] for addon in ranked[:_NAMED_ADDONS]}
    return named | ({"other": ranked[_NAMED_ADDONS:]} if len(ranked) > _NAMED_ADDONS else {})


def _bounded_labels(waiting: Mapping[tuple[str, ...], WaitingWork]) -> dict[tuple[str], WaitingWork]:
    """
    The label sets with the most waiting units; the others share `other`. Jobs without labels are always
    included, so that an autoscaler gets a number.
    """
    ranked = sorted(waiting.items(), key=lambda item: -item[1].units)
    named = {("",): WaitingWork(0, 0)} | {
        (" ".join(labels),): work for labels, work in ranked[:_NAMED_LABELS]
    }
    others = [work for _, work in ranked[_NAMED_LABELS:]]
    if others:
        named["other",] = WaitingWork(sum(work.jobs for work in others), sum(work.units for work in others))
    return named


def _gauge(name: str, about: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
    """A gauge: one value without labels, or one value for each tuple of label values."""
    family = GaugeMetricFamily(name, about, labels=labels)
    for label_values, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric(label_values, value)
    return family


def _counters(name: str, about: str, label: str, counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _histogram(name: str, about: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, about)
    family.add_metric([], histogram.cumulative(), histogram.sum)
    return family
