"""What OpenTelemetry sees of graphs, with the real SDK on the other side."""

import threading

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

import penstock
from penstock.core.calls.graph_plan import Const
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor
from penstock.telemetry.meters import meters_for


class Sdk:
    def __init__(self, **tracing):
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(shutdown_on_exit=False, **tracing)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))

    def watch(self, executor, *, histograms=True, spans=True):
        executor.attach_telemetry(meters_for(self.meters), self.tracers, histograms=histograms, spans=spans)

    def points(self, name):
        data = self.reader.get_metrics_data()
        scopes = (
            [] if data is None else [scope for one in data.resource_metrics for scope in one.scope_metrics]
        )
        return [
            p
            for scope in scopes
            for metric in scope.metrics
            if metric.name == name
            for p in metric.data.data_points
        ]

    def value(self, name):
        [point] = self.points(name)
        return point.value

    def attributes(self, span_name, attribute):
        spans: list = [span for span in self.exporter.get_finished_spans() if span.name == span_name]
        return sorted(span.attributes[attribute] for span in spans)

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def named():
    with GraphExecutor(compute=2, io=2, name="reports") as executor:
        yield executor


def work():
    graph = Graph("work")
    graph.add(lambda: 1, name="a")
    graph.add(lambda a: 1 / 0, name="b", on_error="skip_dependents")
    graph.add(lambda b: b, name="c")

    async def d(a):
        return a

    graph.add(d, name="d")
    return graph.compile()


def test_counters_count_nodes_and_gauges_show_the_moment(named):
    sdk = Sdk()
    sdk.watch(named)
    graph, entered, leave = Graph("held"), threading.Event(), threading.Event()

    def held():
        entered.set()
        assert leave.wait(60)

    graph.add(held, name="held")
    for _ in range(3):
        named.run(work())
    run = named.submit(graph.compile())
    entered.wait(60)
    during = {name: sdk.value(f"queue.{name}") for name in ("in_flight", "pending", "waiting")}
    leave.set()
    run.result()

    assert during == {"in_flight": 1, "pending": 0, "waiting": 0}
    assert sdk.value("task.success.total") == 3 * 2 + 1
    assert sdk.value("task.failure.total") == 3
    assert sdk.value("task.dispatch.total") == 3 * 3 + 1
    [point] = sdk.points("queue.in_flight")
    assert dict(point.attributes) == {"pool": "reports", "kind": "graph", "policy": "turns"}


def test_counters_outlive_their_executor():
    sdk = Sdk()
    with GraphExecutor(compute=1, name="short") as executor:
        sdk.watch(executor)
        executor.run(work())
    del executor

    assert sdk.value("task.success.total") == 2


def test_a_run_is_a_span_of_its_caller_and_its_nodes_are_spans_of_the_run(named):
    sdk = Sdk()
    sdk.watch(named)
    tracer = sdk.tracers.get_tracer("app")
    with tracer.start_as_current_span("caller"):
        named.run(work())
    spans = sdk.spans()

    run = spans["penstock.graph work"]
    assert run.parent.span_id == spans["caller"].context.span_id
    assert (run.attributes["graph"], run.attributes["outcome"]) == ("work", "ok")
    nodes = {name: span for name, span in spans.items() if name.startswith("penstock.node")}
    assert set(nodes) == {f"penstock.node {name}" for name in "abd"}
    for span in nodes.values():
        assert span.parent.span_id == run.context.span_id
        assert run.start_time <= span.start_time <= span.end_time <= run.end_time
    assert nodes["penstock.node b"].status.status_code is StatusCode.ERROR
    assert nodes["penstock.node d"].attributes["lane"] == "io"


def test_what_a_node_does_belongs_to_its_span(named):
    sdk = Sdk()
    sdk.watch(named)
    tracer = sdk.tracers.get_tracer("app")
    graph = Graph("inner")

    def inside():
        with tracer.start_as_current_span("in the thread"):
            pass

    async def inside_async():
        with tracer.start_as_current_span("on the loop"):
            pass

    graph.add(inside, name="thread")
    graph.add(inside_async, name="loop")
    named.run(graph.compile())
    spans = sdk.spans()

    assert spans["in the thread"].parent.span_id == spans["penstock.node thread"].context.span_id
    assert spans["on the loop"].parent.span_id == spans["penstock.node loop"].context.span_id
    assert not trace.get_current_span().get_span_context().is_valid


def test_retries_and_items_are_told_apart(named):
    sdk, calls = Sdk(), []
    sdk.watch(named)
    graph = Graph("many")

    def flaky():
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("once")

    graph.add(flaky, name="flaky", retries=1)
    graph.add(lambda item: item, name="each", over=Const([7, 8]))
    named.run(graph.compile())

    assert sdk.attributes("penstock.node flaky", "attempt") == [1, 2]
    assert sdk.attributes("penstock.node each", "item") == [0, 1]


def test_a_run_that_fails_or_is_late_is_an_error_and_one_that_was_cancelled_is_not(named):
    sdk = Sdk()
    sdk.watch(named)
    bad, late, canceled = Graph("bad"), Graph("late"), Graph("canceled")
    bad.add(lambda: 1 / 0, name="bad")
    late.add(lambda: 1, name="late")
    canceled.add(lambda: threading.Event().wait(60), name="canceled")
    named.run(bad.compile(), check=False)
    named.run(late.compile(), timeout=0, check=False)
    named.submit(late.compile()).cancel()
    spans = sdk.spans()

    assert spans["penstock.graph bad"].status.status_code is StatusCode.ERROR
    late_spans = [span for span in sdk.exporter.get_finished_spans() if span.name == "penstock.graph late"]
    outcomes = [(dict(span.attributes or {})["outcome"], span.status.status_code) for span in late_spans]
    assert outcomes[0] == ("deadline", StatusCode.ERROR)
    assert outcomes[1] in [("canceled", StatusCode.UNSET), ("ok", StatusCode.UNSET)]


def test_a_run_that_is_not_sampled_keeps_its_fast_path(named):
    sdk = Sdk(sampler=ALWAYS_OFF)
    sdk.watch(named)
    graph = Graph()
    graph.add(lambda: 1, name="a")
    plan = graph.compile()
    run = named.submit(plan)

    assert run.result().trace is None
    assert run.steps is plan.steps
    assert sdk.spans() == {}


def test_histograms_are_filled_from_recorded_runs(named):
    sdk = Sdk()
    sdk.watch(named, spans=False)
    named.run(work())
    named.run(work(), trace=True)

    assert sum(point.count for point in sdk.points("task.duration_ms")) == 3
    assert sum(point.count for point in sdk.points("queue.wait_ms")) == 3
    assert any("test_telemetry" in point.attributes["task"] for point in sdk.points("task.duration_ms"))


def test_a_processor_that_fails_changes_nothing_for_the_run(named, caplog):
    class Broken(SpanProcessor):
        def on_end(self, span):
            raise ValueError("no room for spans")

    sdk = Sdk()
    sdk.tracers.add_span_processor(Broken())
    sdk.watch(named)

    assert named.run(work())["d"] == 1
    assert "telemetry of a graph failed" in caplog.text


def test_the_public_switch_reaches_graphs_as_it_reaches_pools(named):
    sdk = Sdk()
    penstock.instrument(named, meter_provider=sdk.meters, tracer_provider=sdk.tracers)
    named.run(work())

    assert sdk.value("task.success.total") == 2
    assert "penstock.graph work" in sdk.spans()


def test_graphs_are_in_the_snapshot_of_the_process(named):
    named.run(work())

    mine = named.snapshot()
    assert mine in penstock.snapshot()
    assert (mine.kind, mine.totals["runs_ok"]) == ("graph", 1)
    assert mine.last_crash == "node 'b' of 'work': ZeroDivisionError: division by zero"
