"""The daemon's metrics for OpenTelemetry: the same numbers as `/metrics`, sent to a collector that may be away."""

from __future__ import annotations

import gzip
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from http_kit import ServerKit

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.metrics.export import Histogram, MetricExporter, MetricExportResult, Sum
from tests.waiting import until

from penstock.daemon.telemetry import OtlpExport

LONG = 30


class MemoryExporter(MetricExporter):
    """Keeps the metrics that the SDK hands over, in memory."""

    def __init__(self, *results):
        super().__init__()
        self.results, self.exported, self.closed = list(results), [], False

    def export(self, metrics_data, timeout_millis=10_000, **_):
        self.exported.append(metrics_data)
        return self.results.pop(0) if self.results else MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=10_000):
        return True

    def shutdown(self, timeout_millis=30_000, **_):
        self.closed = True


@pytest.fixture
def kit(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    made = ServerKit(home)
    yield made
    made.close()


def worked(kit):
    """A job that ran, and one that waits."""
    job = kit.client.submit()
    [taken] = kit.client.claim(wait_sec=20)
    kit.client.post(f"/queue/jobs/{job}/complete", {"lease_id": taken["lease_id"], "state": "DONE"})
    kit.client.post("/pause", {})
    kit.client.submit(addon_id="mail")
    until(lambda: 'penstock_events_total{kind="DONE"} 1.0' in exposed(kit))


def exposed(kit):
    return kit.client.send("GET", "/metrics", prefix="").content.decode()


def sent(kit, exporter):
    """By a stop: then the last word is sent at once."""
    OtlpExport(
        kit.server.families, exporter, every=3_600, attributes={"service.instance.id": "here"}
    ).start().stop()
    [resource] = exporter.exported[-1].resource_metrics
    return resource.resource.attributes, {metric.name: metric for metric in resource.scope_metrics[0].metrics}


def test_it_tells_what_metrics_tell(kit):
    worked(kit)
    exporter = MemoryExporter()
    attributes, metrics = sent(kit, exporter)
    shown = re.findall(
        r"^(penstock_\w+?)(?:_total|_bucket|_count|_sum)?(\{.*\})? (\S+)$", exposed(kit), re.MULTILINE
    )
    names = {name.replace("_", ".", 1).removesuffix("_seconds") for name, _, _ in shown}
    jobs = {point.attributes["state"]: point.value for point in metrics["penstock.jobs"].data.data_points}
    events = metrics["penstock.events"].data

    assert {name for name, metric in metrics.items() if metric.data.data_points} == names
    assert (jobs["DONE"], jobs["QUEUED"]) == (1, 1)
    assert isinstance(events, Sum)
    assert events.is_monotonic
    assert {point.attributes["kind"]: point.value for point in events.data_points}["SUBMITTED"] == 2
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("penstock", "here")
    assert exporter.closed


def test_a_histogram_says_how_many_lay_between_two_bounds(kit):
    worked(kit)
    _, metrics = sent(kit, MemoryExporter())
    [point] = metrics["penstock.attempt"].data.data_points

    assert isinstance(metrics["penstock.attempt"].data, Histogram)
    assert metrics["penstock.attempt"].unit == "s"
    assert (point.count, sum(point.bucket_counts)) == (1, 1)
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert 0 < point.sum < LONG


def test_a_collector_that_is_away_is_told_of_once_and_so_is_its_return(kit, caplog):
    failed = MetricExportResult.FAILURE
    exporter = MemoryExporter(failed, failed, failed)
    with caplog.at_level(logging.INFO, "penstock.telemetry"):
        telemetry = OtlpExport(kit.server.families, exporter, every=0.01, attributes={}).start()
        until(lambda: len(exporter.exported) >= 6)
        telemetry.stop()

    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


class Sink(BaseHTTPRequestHandler):
    """A collector: keeps what it gets."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        unpacked = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        self.server.exported.append((self.path, unpacked))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_the_daemon_sends_to_a_collector_as_its_setting_says(tmp_path):
    proto = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    sink = HTTPServer(("127.0.0.1", 0), Sink)
    sink.exported = []
    collector = threading.Thread(target=sink.serve_forever)
    collector.start()
    tmp_path.chmod(0o700)
    settings = [
        f"data_dir={tmp_path}",
        "server.listen=none",
        f"telemetry.otlp=http://127.0.0.1:{sink.server_port}",
    ]
    daemon = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "penstock.daemon",
            *(f"--set={one}" for one in (*settings, "telemetry.every=1s")),
        ],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OTEL_SERVICE_NAME": "ours"},
    )
    try:
        until(lambda: sink.exported)
    finally:
        daemon.send_signal(signal.SIGTERM)
        code = daemon.wait(LONG)
        sink.shutdown()
        collector.join()
        sink.server_close()
    path, body = sink.exported[0]
    [received] = proto.ExportMetricsServiceRequest.FromString(body).resource_metrics
    names = {metric.name for metric in received.scope_metrics[0].metrics}

    assert (code, path) == (0, "/v1/metrics")
    assert {"penstock.jobs", "penstock.capacity_units", "penstock.wait", "penstock.events"} <= names
    assert {one.key: one.value.string_value for one in received.resource.attributes}["service.name"] == "ours"
