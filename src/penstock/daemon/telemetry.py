"""
Sends the metrics of `/metrics` to an OpenTelemetry collector (OTLP over HTTP) at regular intervals.

The metric families of `/metrics` are converted, so Prometheus and the collector get the same numbers, and no
event is counted twice. OpenTelemetry's SDK provides only the data types and the exporter, which handles
headers, certificates and retries. While the collector is away this module logs one line; the next sums
contain what the collector missed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Self

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

import penstock

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family
    from prometheus_client.samples import Sample


log = logging.getLogger("penstock.telemetry")

_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
#: The time limit of the last export before a stop.
_LAST_EXPORT_MS: Final = 1_000
_TIMEOUT_MS: Final = 10_000


def otlp(address: str) -> MetricExporter:
    """
    The exporter for an address. Headers, certificates and compression come from OpenTelemetry's own
    variables, OTEL_EXPORTER_OTLP_...
    """
    # Imported only if metrics are sent.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415

    exporter: MetricExporter = OTLPMetricExporter(endpoint=f"{address.rstrip('/')}/v1/metrics")
    return exporter


class OtlpExport:
    """A thread that sends the metrics every `every` seconds, and once more when it is stopped."""

    def __init__(
        self,
        families: Callable[[], Iterable[Family]],
        exporter: MetricExporter,
        *,
        every: float,
        attributes: Mapping[str, str],
    ) -> None:
        self._families, self._exporter, self._every = families, exporter, every
        resource = {"service.name": "penstock", "service.version": penstock.__version__, **attributes}
        self._resource = Resource(resource).merge(
            OTELResourceDetector().detect()
        )  # adds those of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        self._began_ns = time.time_ns()
        self._over, self._refused = threading.Event(), False
        self._refusals = _RefusalLog()
        self._thread = threading.Thread(target=self._run, name="penstock-telemetry", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._over.set()
        self._thread.join(2 * _LAST_EXPORT_MS / 1e3)
        self._exporter.shutdown(_LAST_EXPORT_MS)

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self._send(_TIMEOUT_MS)
        self._send(_LAST_EXPORT_MS)

    def _send(self, timeout_ms: float) -> None:
        try:
            data = measured(self._families(), self._resource, self._began_ns, time.time_ns())
            sent = self._exporter.export(data, timeout_millis=timeout_ms) is MetricExportResult.SUCCESS
        except Exception:  # an exporter may raise anything; other parts report errors of the store
            log.debug("metrics were not sent", exc_info=True)
            sent = False
        if sent and self._refused:
            log.info("the OpenTelemetry collector takes metrics again")
        elif not sent and not self._refused:
            log.warning(
                "the OpenTelemetry collector does not take metrics; trying on: %s", self._refusals.last
            )
        self._refused = not sent


class _RefusalLog(logging.Handler):
    """
    Keeps the last error that the exporter logged, in place of its log line for each try: this module logs one
    line.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = "the exporter gave no reason"
        exporters = logging.getLogger("opentelemetry.exporter")
        exporters.propagate = False
        exporters.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def measured(families: Iterable[Family], resource: Resource, began_ns: int, now_ns: int) -> MetricsData:
    metrics = [_metric(family, began_ns, now_ns) for family in families]
    scope = ScopeMetrics(InstrumentationScope("penstock", penstock.__version__), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(family: Family, began_ns: int, now_ns: int) -> Metric:
    """One metric. If a collector passes it on to Prometheus, it gets the name of `/metrics` again."""
    name, unit = family.name.replace("_", ".", 1), ""
    if name.endswith("_seconds"):
        name, unit = name.removesuffix("_seconds"), "s"
    if family.type == "histogram":
        points = _distributions(family.samples, began_ns, now_ns)
        return Metric(name, family.documentation, unit, Histogram(list(points), _CUMULATIVE))
    numbers = [
        NumberDataPoint(sample.labels, began_ns, now_ns, sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    if family.type == "counter":
        return Metric(name, family.documentation, unit, Sum(numbers, _CUMULATIVE, is_monotonic=True))
    return Metric(name, family.documentation, unit, Gauge(numbers))


def _distributions(samples: list[Sample], began_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """
    The data points of a histogram. Prometheus counts the values up to each bound, OpenTelemetry those between
    two.
    """
    rising = [
        (float(sample.labels["le"]), int(sample.value))
        for sample in samples
        if sample.name.endswith("_bucket")
    ]
    if not rising:
        return
    total = next(sample.value for sample in samples if sample.name.endswith("_sum"))
    counts = [here - below for (_, here), (_, below) in zip(rising, [(0.0, 0), *rising], strict=False)]
    yield HistogramDataPoint(
        attributes={},
        start_time_unix_nano=began_ns,
        time_unix_nano=now_ns,
        count=rising[-1][1],
        sum=total,
        bucket_counts=counts,
        explicit_bounds=[bound for bound, _ in rising[:-1]],
        min=None,  # type: ignore[arg-type]  # Prometheus keeps none, and the message may omit it
        max=None,  # type: ignore[arg-type]  # likewise
    )
