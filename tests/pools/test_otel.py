"""What OpenTelemetry sees of a pool, with the real SDK on both sides."""

import gc
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode, Tracer

from penstock import (
    CallCanceled,
    CallTimeout,
    NotPicklable,
    PoolClosedError,
    QueueDropError,
    SingletonWorker,
    WorkerPool,
)
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor
from penstock.telemetry import meters, registry
from penstock.telemetry.registry import instrument
from tests.waiting import until

SOON = 20.0


class Meter:
    """A meter provider, and a way to read what it has."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader], shutdown_on_exit=False)

    def points(self, name: str) -> list[Any]:
        data = self._reader.get_metrics_data()
        if data is None:
            return []
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        return [
            point
            for scope in scopes
            for metric in scope.metrics
            for point in metric.data.data_points
            if metric.name == name
        ]

    def value(self, name: str) -> Any:
        (point,) = self.points(name)
        return point.value


class Spans(SpanExporter):
    """Ended spans, with a way to wait for them: hooks are told after the caller has its result."""

    def __init__(self) -> None:
        self._ended: list[ReadableSpan] = []
        self._changed = threading.Condition()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._changed:
            self._ended += spans
            self._changed.notify_all()
        return SpanExportResult.SUCCESS

    def named(self, name: str, count: int = 1) -> list[Any]:
        def ended() -> list[Any]:
            return [span for span in self._ended if span.name.startswith(name)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(ended()) >= count, SOON), f"only {self._ended}"
        assert len(ended()) == count
        return ended()

    def one(self, name: str) -> Any:
        return self.named(name)[0]

    @property
    def tracer(self) -> Tracer:
        return self.provider.get_tracer("the test")


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return import_module("traced_work")  # found where the workers will find it


class Brake:
    """Calls that begin when they are handed out, and end when they are let go."""

    def __init__(self) -> None:
        self._iterated = threading.Semaphore(0)
        self._go = threading.Event()

    def __call__(self) -> None:
        self._iterated.release()
        assert self._go.wait(SOON)

    def begun(self) -> None:
        assert self._iterated.acquire(timeout=SOON)

    def let_go(self) -> None:
        self._go.set()


# Metrics


def test_the_gauges_say_how_many_are_in_flight_pending_and_waiting(meter: Meter) -> None:
    brake = Brake()
    with WorkerPool(1, kind="thread", max_queue_depth=2, name="photos") as pool:
        instrument(pool, meter_provider=meter.provider)
        for _ in range(3):
            pool.submit(brake)
        waiting = threading.Thread(target=pool.submit, args=(brake,))
        waiting.start()
        until(lambda: pool.state.waiting == 1)
        seen = {name: meter.value(f"queue.{name}") for name in ("in_flight", "pending", "waiting")}
        (point,) = meter.points("queue.pending")
        brake.let_go()
        waiting.join(SOON)

    assert seen == {"in_flight": 1, "pending": 2, "waiting": 1}
    assert point.attributes == {"pool": "photos", "kind": "thread", "policy": "block"}


def test_the_counters_say_how_calls_ended(meter: Meter) -> None:
    brake = Brake()
    with WorkerPool(1, kind="thread", max_queue_depth=1, policy="reject") as pool:
        instrument(pool, meter_provider=meter.provider)
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 // 0).result()
        until(lambda: pool.state.idle)
        running = pool.submit(brake)
        pool.submit(int).cancel()
        with pytest.raises(CallTimeout):
            pool.task(int, timeout=0.001)()
        queued = pool.submit(int)
        with pytest.raises(QueueDropError):
            pool.submit(int)
        brake.let_go()
        for call in (running, queued):
            call.exception(SOON)

    counted = ("dispatch", "success", "failure", "canceled", "rejected", "requeue")
    assert {name: meter.value(f"task.{name}.total") for name in counted} == {
        "dispatch": 3,
        "success": 2,
        "failure": 1,
        "canceled": 2,
        "rejected": 1,
        "requeue": 0,
    }


def test_a_crash_is_counted_with_its_requeue_and_its_new_worker(meter: Meter, work: Any) -> None:
    with WorkerPool(1, crash_policy="restart-requeue-in-flight", restart_delay=0) as pool:
        instrument(pool, meter_provider=meter.provider)
        assert pool.submit(work.die_once).result(SOON) == 2

    counted = ("worker.spawn", "worker.crash", "worker.terminate", "task.requeue", "task.dispatch")
    assert [meter.value(f"{name}.total") for name in counted] == [2, 1, 0, 1, 2]


def test_a_worker_that_had_to_be_ended_is_counted(meter: Meter, work: Any, tmp_path: Path) -> None:
    began = tmp_path / "began"
    with WorkerPool(1, grace=0) as pool:
        instrument(pool, meter_provider=meter.provider)
        call = pool.submit(work.hang, began)
        until(began.exists)
        call.cancel()
        pool.submit(int).result(SOON)

    assert meter.value("worker.terminate.total") == 1


def test_counts_outlive_their_pool(meter: Meter) -> None:
    for _ in range(3):
        with WorkerPool(1, kind="thread", name="short-lived") as pool:
            instrument(pool, meter_provider=meter.provider)
            pool.submit(int).result()
        del pool
        gc.collect()
        meter.points("task.success.total")

    assert meter.value("task.success.total") == 3
    assert meter.points("queue.in_flight") == []


def test_pools_without_a_name_share_one_label(meter: Meter) -> None:
    with WorkerPool(1, kind="thread") as one, WorkerPool(1, kind="thread") as other:
        instrument(one, meter_provider=meter.provider)
        instrument(other, meter_provider=meter.provider)
        wait([one.submit(int), other.submit(int)], SOON)
        (point,) = meter.points("task.success.total")

    assert point.attributes["pool"] == "pool"
    assert point.value == 2


def test_the_histograms_know_the_function_and_split_the_wait(meter: Meter) -> None:
    brake = Brake()
    with WorkerPool(1, kind="thread", max_queue_depth=1, name="photos") as pool:
        instrument(pool, meter_provider=meter.provider)
        pool.submit(brake)
        brake.begun()
        pool.submit(int)
        late: Future[Any] = Future()
        waiting = threading.Thread(target=lambda: late.set_result(pool.submit(time.sleep, 0)))
        waiting.start()
        until(lambda: pool.state.waiting == 1)
        brake.let_go()
        call = late.result(SOON)
        call.result(SOON)
    by_task = {
        name: {point.attributes["task"]: point for point in meter.points(name)}
        for name in ("queue.wait_ms", "queue.waiting_ms", "queue.pending_ms", "task.duration_ms")
    }

    sleep, integer = (
        {name: by_task[name][task] for name in by_task} for task in ("time.sleep", "builtins.int")
    )
    assert sleep["queue.wait_ms"].attributes == {
        "task": "time.sleep", "pool": "photos", "kind": "thread", "policy": "block",
    }  # fmt: skip
    assert sleep["queue.waiting_ms"].sum == call.waiting_for * 1000 > 0
    assert sleep["queue.pending_ms"].sum == pytest.approx(call.pending_for * 1000)
    assert sleep["queue.wait_ms"].sum == pytest.approx(call.waited * 1000)
    assert sleep["task.duration_ms"].sum == call.ran_for * 1000 > 0
    assert integer["queue.waiting_ms"].sum == 0 < integer["queue.pending_ms"].sum
    assert sleep["queue.wait_ms"].explicit_bounds[1] < 1, "where most waits are"


def test_what_costs_a_call_time_can_be_left_out(meter: Meter) -> None:
    with WorkerPool(1, kind="thread") as pool:
        instrument(pool, meter_provider=meter.provider, histograms=False, spans=False)
        pool.submit(int).result()

    assert meter.points("task.duration_ms") == []
    assert meter.value("task.success.total") == 1
    hooks = pool.internals.call_queue.hooks
    assert hooks.queued is hooks.dispatch is hooks.settle is None
    assert pool.internals.tracing is None


def test_to_instrument_twice_is_to_instrument_once(meter: Meter, spans: Spans) -> None:
    with WorkerPool(1, kind="thread") as pool:
        for _ in range(2):
            instrument(pool, meter_provider=meter.provider, tracer_provider=spans.provider)
        pool.submit(int).result()

    assert meter.value("task.success.total") == 1
    assert meter.points("task.duration_ms")[0].count == 1
    assert len(spans.one("penstock.call").events) == 2


def test_all_pools_can_be_instrumented_those_to_come_as_well(
    meter: Meter, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_watchers", [])
    with WorkerPool(1, kind="thread", name="old") as old:
        instrument(meter_provider=meter.provider, tracer_provider=spans.provider)
        with WorkerPool(1, kind="thread", name="new") as new:
            wait([old.submit(int), new.submit(int)], SOON)
            counts = {point.attributes["pool"]: point.value for point in meter.points("task.success.total")}

    assert counts["old"] == counts["new"] == 1
    assert {span.attributes["pool"] for span in spans.named("penstock.call", 2)} == {"old", "new"}


def test_the_global_providers_are_used_also_if_they_are_set_later(
    meter: Meter, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An earlier test in this process may have used the global provider: its instruments belong to the proxy that is replaced here.
    monkeypatch.setattr(meters, "_meters", weakref.WeakKeyDictionary())
    # OpenTelemetry has no public way to reset its providers.
    internal = import_module("opentelemetry.metrics._internal")
    monkeypatch.setattr(internal, "_METER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    fresh = (
        (internal, "_PROXY_METER_PROVIDER"),
        (internal, "_METER_PROVIDER_SET_ONCE"),
        (trace, "_TRACER_PROVIDER_SET_ONCE"),
    )
    for module, name in fresh:
        monkeypatch.setattr(module, name, type(getattr(module, name))())
    with WorkerPool(1, kind="thread") as pool:
        instrument(pool)
        metrics.set_meter_provider(meter.provider)
        trace.set_tracer_provider(spans.provider)
        instrument(pool)
        pool.submit(int).result()

    spans.one("penstock.call")
    until(lambda: meter.points("task.success.total"))
    assert meter.value("task.success.total") == 1
    assert meter.points("task.duration_ms")[0].count == 1


# Traces


@pytest.fixture
def traced(tmp_path: Path, work: Any, spans: Spans) -> Iterator[Any]:
    """A process pool whose worker writes its spans to a file, and that file, read."""
    path = tmp_path / "spans"

    def read() -> dict[str, Any]:
        return {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}

    with WorkerPool(
        1,
        initializer=work.set_up_sdk,
        initargs=(path,),
        crash_policy="restart-requeue-in-flight",
        restart_delay=0,
    ) as pool:
        instrument(pool, tracer_provider=spans.provider)
        yield pool, read


def test_the_workers_span_is_a_child_of_the_callers(traced: Any, work: Any, spans: Spans) -> None:
    pool, read = traced
    with spans.tracer.start_as_current_span("the caller") as caller:
        assert pool.submit(work.work, 21).result(SOON) == 42
    call, inside = spans.one("penstock.call"), read()
    run = inside["penstock.run traced_work.work"]

    assert call.name == "penstock.call traced_work.work"
    assert call.parent.span_id == caller.get_span_context().span_id
    assert run["parent"] == call.context.span_id
    assert inside["inside"]["parent"] == run["id"]
    assert {line["trace"] for line in inside.values()} == {call.context.trace_id}
    assert run["attributes"]["attempt"] == 1


def test_each_attempt_is_a_span_and_a_requeue_is_an_event(traced: Any, work: Any, spans: Spans) -> None:
    pool, read = traced
    assert pool.submit(work.die_once).result(SOON) == 2
    call, run = spans.one("penstock.call"), read()["penstock.run traced_work.die_once"]
    events = [(event.name, event.attributes.get("attempt")) for event in call.events]

    assert events == [("queued", None), ("dispatch", 1), ("requeue", 1), ("dispatch", 2)]
    assert run["parent"] == call.context.span_id
    assert run["attributes"]["attempt"] == call.attributes["attempt"] == 2


def test_an_error_marks_both_spans(traced: Any, work: Any, spans: Spans) -> None:
    pool, read = traced
    with pytest.raises(ValueError, match="no"):
        pool.submit(work.fail).result(SOON)
    call, run = spans.one("penstock.call"), read()["penstock.run traced_work.fail"]

    assert call.status.status_code is StatusCode.ERROR
    assert call.status.description == "ValueError: no"
    assert call.attributes["outcome"] == "failure"
    assert run["status"] == "ERROR"


def test_without_an_sdk_the_worker_still_runs_in_the_callers_context(work: Any, spans: Spans) -> None:
    with WorkerPool(1) as pool:
        instrument(pool, tracer_provider=spans.provider)
        token = context.attach(baggage.set_baggage("tenant", "acme"))
        try:
            place = pool.submit(work.where_am_i).result(SOON)
        finally:
            context.detach(token)
        after = pool.submit(work.where_am_i).result(SOON)
    first, second = spans.named("penstock.call", 2)

    assert place == (first.context.trace_id, first.context.span_id, "acme")
    assert after == (second.context.trace_id, second.context.span_id, None)


def test_a_call_leaves_no_context_behind_in_its_worker(work: Any) -> None:
    with WorkerPool(1) as pool:
        instrument(pool, tracer_provider=trace.NoOpTracerProvider())
        token = context.attach(baggage.set_baggage("tenant", "acme"))
        try:
            first = pool.submit(work.where_am_i).result(SOON)
        finally:
            context.detach(token)

        assert first == (0, 0, "acme")
        assert pool.submit(work.where_am_i).result(SOON) == (0, 0, None)


def test_a_thread_worker_uses_the_tracer_that_was_given(work: Any, spans: Spans) -> None:
    with WorkerPool(1, kind="thread") as pool:
        instrument(pool, tracer_provider=spans.provider)
        trace_id, span_id, _ = pool.submit(work.where_am_i).result(SOON)
    call, run = spans.one("penstock.call"), spans.one("penstock.run")

    assert (run.context.trace_id, run.context.span_id) == (trace_id, span_id)
    assert run.parent.span_id == call.context.span_id


def test_a_call_that_nobody_samples_is_not_sampled_in_the_worker_either(tmp_path: Path, work: Any) -> None:
    path = tmp_path / "spans"
    with WorkerPool(1, initializer=work.set_up_sdk, initargs=(path,)) as pool:
        instrument(pool, tracer_provider=TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
        pool.submit(work.work, 1).result(SOON)

    assert not path.exists()


async def test_the_parent_of_an_awaited_call_is_the_span_of_its_task(spans: Spans) -> None:
    async with WorkerPool(1, kind="thread") as pool:
        instrument(pool, tracer_provider=spans.provider)
        with spans.tracer.start_as_current_span("the task") as task:
            await pool.call(int)

    assert spans.one("penstock.call").parent.span_id == task.get_span_context().span_id


def test_a_singletons_method_is_named_with_its_class(work: Any, spans: Spans, meter: Meter) -> None:
    with SingletonWorker(work.Model) as model:
        instrument(model, tracer_provider=spans.provider, meter_provider=meter.provider)
        assert model.predict(3) == 3

    assert spans.one("penstock.call").name == "penstock.call traced_work.Model.predict"
    assert meter.points("task.duration_ms")[0].attributes["task"] == "traced_work.Model.predict"


def test_a_partial_is_named_like_its_function(spans: Spans) -> None:
    with WorkerPool(1, kind="thread") as pool:
        instrument(pool, tracer_provider=spans.provider)
        pool.submit(partial(time.sleep, 0)).result()

    assert spans.one("penstock.call").name == "penstock.call time.sleep"


def test_the_events_lie_where_the_waits_say(spans: Spans) -> None:
    brake = Brake()
    with WorkerPool(1, kind="thread", max_queue_depth=0) as pool:
        instrument(pool, tracer_provider=spans.provider)
        pool.submit(brake)
        brake.begun()
        threading.Timer(0.02, brake.let_go).start()
        call = pool.submit(int)
        call.result(SOON)
    span = next(span for span in spans.named("penstock.call", 2) if "int" in span.name)
    queued, dispatch = span.events

    assert queued.timestamp - span.start_time >= int(call.waiting_for * 1e9) > 0
    assert dispatch.timestamp - queued.timestamp == pytest.approx(call.pending_for * 1e9, abs=1000)
    assert span.attributes["waiting_ms"] == call.waiting_for * 1000
    assert span.attributes["pending_ms"] == call.pending_for * 1000
    assert span.attributes["wait_ms"] == call.waited * 1000
    assert span.attributes["duration_ms"] == call.ran_for * 1000
    assert span.start_time < queued.timestamp <= dispatch.timestamp < span.end_time


def test_the_span_of_a_reserved_place_begins_where_it_was_asked_for(spans: Spans) -> None:
    with WorkerPool(1, kind="thread") as pool:
        instrument(pool, tracer_provider=spans.provider)
        with pool.reserve() as place:
            payload_made = time.time_ns()
            place.submit(int, "7").result()

    assert spans.one("penstock.call").start_time < payload_made


def test_a_place_that_is_not_used_leaves_no_span(spans: Spans) -> None:
    with WorkerPool(1, kind="thread") as pool:
        instrument(pool, tracer_provider=spans.provider)
        with pool.reserve():
            pass
        pool.submit(int).result()

    spans.one("penstock.call")


# Every span ends, whatever became of its call


def the_end_of(spans: Spans, task: str) -> tuple[str, StatusCode, Any]:
    span = spans.one(f"penstock.call {task}")
    return span.attributes["outcome"], span.status.status_code, span.attributes.get("phase")


def test_a_cancel_is_an_end_but_no_error(spans: Spans, work: Any, tmp_path: Path) -> None:
    began = tmp_path / "began"
    with WorkerPool(1) as pool:
        instrument(pool, tracer_provider=spans.provider)
        pool.task(work.until_canceled, key_of=lambda _: "k").submit(began)
        until(began.exists)
        pool.cancel("k", "enough")

        assert the_end_of(spans, "") == ("canceled", StatusCode.UNSET, "in-flight")
        assert spans.one("penstock.call").attributes["key"] == "k"


def test_a_timeout_is_an_error_with_its_phase(spans: Spans) -> None:
    with WorkerPool(1, kind="thread") as pool:
        instrument(pool, tracer_provider=spans.provider)
        pool.pause()
        with pytest.raises(CallTimeout):
            pool.task(int, timeout=0.001)()
        pool.resume()

    assert the_end_of(spans, "") == ("timed_out", StatusCode.ERROR, "queued")


@pytest.mark.parametrize(("policy", "dropped"), [("reject", "builtins.str"), ("drop-oldest", "builtins.int")])
def test_a_call_that_is_shed_ends_as_rejected(spans: Spans, policy: str, dropped: str) -> None:
    with WorkerPool(1, kind="thread", max_queue_depth=1, policy=policy) as pool:
        instrument(pool, tracer_provider=spans.provider)
        pool.pause()

        def one_too_many() -> None:
            oldest = pool.submit(int)
            pool.submit(str)
            oldest.result(SOON)

        with pytest.raises(QueueDropError):
            one_too_many()
        pool.resume()

    assert the_end_of(spans, dropped) == ("rejected", StatusCode.ERROR, None)


def test_a_call_to_a_closed_pool_ends_its_span(spans: Spans) -> None:
    with WorkerPool(1, kind="thread") as pool:
        instrument(pool, tracer_provider=spans.provider)
    with pytest.raises(PoolClosedError):
        pool.submit(int)

    assert the_end_of(spans, "") == ("failure", StatusCode.ERROR, None)


def test_what_a_closing_pool_ends_ends_its_spans(spans: Spans) -> None:
    pool = WorkerPool(1, kind="thread", max_queue_depth=1)
    instrument(pool, tracer_provider=spans.provider)
    pool.pause()
    pool.submit(int)
    pool.dispose()

    assert the_end_of(spans, "")[0] == "failure"


def test_a_call_whose_key_is_canceled_ends_its_span(spans: Spans) -> None:
    with WorkerPool(1, kind="thread", key_of=lambda: "k") as pool:
        instrument(pool, tracer_provider=spans.provider)
        pool.cancel("k")
        with pytest.raises(CallCanceled):
            pool.submit(int)

    assert the_end_of(spans, "") == ("canceled", StatusCode.UNSET, "waiting")


def test_a_payload_that_cannot_be_made_ends_its_span(spans: Spans) -> None:
    with WorkerPool(1) as pool:
        instrument(pool, tracer_provider=spans.provider)
        with pytest.raises(NotPicklable):
            pool.submit(len, threading.Lock())  # type: ignore[arg-type]  # that is the point

    spans.one("penstock.call builtins.len")


# Without it


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("penstock.telemetry.meters", "penstock.telemetry.spans"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'penstock\[otel\]'"):
        instrument()


def test_pools_import_nothing_of_opentelemetry_until_somebody_asks() -> None:
    code = (
        "import sys, penstock; from penstock.telemetry.registry import instrument\n"
        "with penstock.WorkerPool(1) as pool: assert pool.submit(len, 'ab').result() == 2\n"
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    program = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert program.stdout.strip() == "[]"


def test_graphs_are_instrumented_with_the_pools(
    meter: Meter, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_watchers", [])
    graph = Graph("sums")
    graph.add(lambda: 0, name="nothing")
    with GraphExecutor(compute=1, io=1, name="reports") as executor:
        instrument(meter_provider=meter.provider, tracer_provider=spans.provider)
        executor.run(graph.compile())
        pools = {point.attributes["pool"] for point in meter.points("queue.in_flight")}

    assert "reports" in pools
    spans.one("penstock.graph sums")


def test_anything_but_a_pool_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="pool is 'photos'; it must be a WorkerPool"):
        instrument("photos")  # type: ignore[arg-type]  # that is the point
