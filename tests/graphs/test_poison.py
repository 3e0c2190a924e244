"""Nodes that raise errors which cannot be formatted: the run ends all the same."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.core.calls.graph_plan import RunStatus
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor
from penstock.pools.pool import WorkerPool
from penstock.telemetry.meters import meters_for
from tests.poison import RAISING
from tests.waiting import LONG


def poisoned(name, lane, **options):
    """bad, and good beside it."""
    raises = RAISING[name]
    graph = Graph("poisoned")
    if lane == "async":

        async def bad():
            raises()

        graph.add(bad, name="bad", **options)
    else:
        graph.add(raises, name="bad", lane=lane, **options)
    graph.add(lambda: 1, name="good")
    return graph.compile()


@pytest.mark.parametrize("lane", ["compute", "io", "async"])
@pytest.mark.parametrize("trace", [False, True])
def test_a_run_ends_whatever_a_node_raises(executor, lane, trace):
    ended = {}
    for name in RAISING:
        plan = poisoned(name, lane, on_error="skip_dependents", retries=1)
        ended[name] = executor.submit(plan, trace=trace).result(LONG)

    assert dict.fromkeys(RAISING, RunStatus.OK) == {name: run.status for name, run in ended.items()}
    assert all(list(run.errors) == ["bad"] and run.values == {"good": 1} for run in ended.values())
    assert executor.snapshot().totals["failed"] == len(RAISING)


@pytest.mark.parametrize("lane", ["compute", "async"])
def test_a_run_fails_whatever_a_node_raises(executor, lane):
    for name in RAISING:
        run = executor.submit(poisoned(name, lane), timeout=LONG).result(LONG)

        assert (RunStatus.ERROR, "bad") == (run.status, run.cause), name
        with pytest.raises(BaseException):  # noqa: B017  # what it is differs; that it can be raised is the point
            run.check()


def test_a_process_may_raise_whatever_it_likes():
    with WorkerPool(2) as pool, GraphExecutor(compute=1, io=1, pool=pool, grace=0.2) as executor:
        runs = {name: executor.submit(poisoned(name, "process")) for name in RAISING}

        ended = {name: run.result(LONG).status for name, run in runs.items()}

    assert dict.fromkeys(RAISING, RunStatus.ERROR) == ended


def test_a_span_ends_whatever_a_node_raises(executor):
    exporter, tracers = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    executor.attach_telemetry(meters_for(None), tracers, histograms=True, spans=True)

    for name in RAISING:
        executor.submit(poisoned(name, "compute", on_error="skip_dependents")).result(LONG)

    nodes = [span for span in exporter.get_finished_spans() if span.name == "penstock.node bad"]
    assert len(RAISING) == len(nodes)
    assert all(span.events[0].attributes["exception.type"] for span in nodes)
