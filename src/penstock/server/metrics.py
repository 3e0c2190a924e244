"""
`/metrics` for Prometheus: sums from the trail, and gauges that are read at each request.

Labels are bounded. Addons are named by users, so only the fifty with most jobs have a name of their own; the
rest are `other`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from penstock.core.jobs.admission import EVERYTHING
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.load import QuietState
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import seconds
from penstock.scheduler.stats import Histogram
from penstock.server.app_state import AppState
from penstock.server.request import Request
from penstock.stores.api import Addon, Query

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_NAMED_ADDONS: Final = 50


def metrics(call: Request[None, None]) -> bytes:
    call.check_unbound(", and metrics show all addons")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(call.app_state))
    return generate_latest(registry)


class MetricsCollector(Collector):
    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._jobs()
        yield from self._machine()
        yield from self._sums()

    def _jobs(self) -> Iterator[Metric]:
        store, now = self._app_state.store, self._app_state.store.now()
        addons = [addon for addon in store.addons() if addon.addon_id != EVERYTHING]
        jobs = GaugeMetricFamily("penstock_jobs", "Jobs by state.", labels=["state"])
        for state in JobState:
            jobs.add_metric([state], sum(addon.jobs.get(state, 0) for addon in addons))
        yield jobs
        per_addon = GaugeMetricFamily(
            "penstock_addon_jobs", "Jobs of an addon, queued and running.", labels=["addon", "state"]
        )
        units = GaugeMetricFamily("penstock_addon_units", "Units an addon holds.", labels=["addon"])
        for name, shown in _bounded(addons).items():
            for state in (JobState.QUEUED, JobState.RUNNING):
                per_addon.add_metric([name, state], sum(addon.jobs.get(state, 0) for addon in shown))
            units.add_metric([name], sum(addon.units for addon in shown))
        yield per_addon
        yield units
        oldest = store.find(Query(states=[JobState.QUEUED], limit=1))
        age = seconds(max(0, now - oldest[0].created_at)) if oldest else 0.0
        yield GaugeMetricFamily(
            "penstock_oldest_queued_seconds", "Age of the job that has been queued longest.", age
        )
        yield GaugeMetricFamily(
            "penstock_waiting_submits",
            "Submits that wait for room.",
            self._app_state.service.waitlist.waiting,
        )

    def _machine(self) -> Iterator[Metric]:
        service = self._app_state.service
        now = service.store.now()
        conditions, ledger = service.machine.conditions(now), service.store.ledger(service.rules.host)
        yield GaugeMetricFamily("penstock_capacity_units", "Units that may be used now.", conditions.capacity)
        yield GaugeMetricFamily("penstock_units_in_use", "Units reserved and leased.", ledger.units)
        yield GaugeMetricFamily("penstock_leases", "Dispatches that hold units.", ledger.running)
        yield GaugeMetricFamily(
            "penstock_busy_score", "How busy other programs keep the machine, 0 to 10.", conditions.busy.score
        )
        quiet = GaugeMetricFamily("penstock_quiet", "1 for the present quiet state.", labels=["state"])
        for state in QuietState:
            quiet.add_metric([state], float(conditions.quiet is state))
        yield quiet
        spent = GaugeMetricFamily(
            "penstock_spent",
            "What an addon's jobs spent in the present day and month.",
            labels=["addon", "window"],
        )
        for addon_id, windows in list(ledger.spent.items())[:_NAMED_ADDONS]:
            for window, amount in windows.items():
                spent.add_metric([addon_id, window], amount / 1e6)
        yield spent

    def _sums(self) -> Iterator[Metric]:
        tallies = self._app_state.stats.live.tallies
        yield _counter(
            "penstock_events",
            "Events of the trail, by kind.",
            "kind",
            {str(k): n for k, n in tallies.events.items()},
        )
        yield _counter(
            "penstock_denials", "Refusals that were recorded, by reason.", "reason", tallies.denials
        )
        yield _counter(
            "penstock_requeues", "Runs that went back to the queue, by reason.", "reason", tallies.requeues
        )
        yield CounterMetricFamily(
            "penstock_leases_expired", "Leases that were not renewed in time.", tallies.leases_expired
        )
        yield CounterMetricFamily(
            "penstock_fenced_calls", "Calls of workers whose dispatch was over.", tallies.fenced
        )
        yield CounterMetricFamily(
            "penstock_preemptions",
            "Runs that were asked to yield.",
            tallies.events[EventKind.PREEMPT_REQUESTED],
        )
        yield CounterMetricFamily("penstock_alerts", "Alerts to owners.", tallies.events[EventKind.ALERT])
        yield _histogram("penstock_wait_seconds", "From ready to running.", tallies.waits)
        yield _histogram("penstock_run_seconds", "From running to the end of the attempt.", tallies.runs)


def _bounded(addons: list[Addon]) -> dict[str, list[Addon]]:
    ranked = sorted(addons, key=lambda addon: -sum(addon.jobs.values()))
    named = {str(addon.addon_id): [addon] for addon in ranked[:_NAMED_ADDONS]}
    return named | ({"other": ranked[_NAMED_ADDONS:]} if len(ranked) > _NAMED_ADDONS else {})


def _counter(name: str, doc: str, label: str, counts: Counter[str] | dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, doc, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _histogram(name: str, doc: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, doc)
    family.add_metric([], histogram.cumulative(), histogram.sum)
    return family
