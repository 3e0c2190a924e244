"""What a recorded run shows, and that lanes really overlap."""

import asyncio
import itertools
import json
import os
import sys
import threading
import time

import pytest

from penstock.core.calls.graph_plan import Const, critical_path
from penstock.core.errors import BadCall
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor
from penstock.graphs.picture import draw
from penstock.graphs.trace import write_chrome
from tests.waiting import LONG

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))


def busy(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def trace_of(result):
    assert result.trace is not None
    return result.trace


def mixed():
    """
    20 waits on the I/O lane, half of them in threads and half on the event loop, and computing beside them. None of them ends before
    all are under way.
    """
    graph, here, all_here = Graph("mixed"), [], threading.Event()

    def arrive():
        here.append(1)
        if len(here) == 21:
            all_here.set()

    for number in range(10):

        @graph.node(lane="io", name=f"read {number}")
        def read():
            arrive()
            return int(all_here.wait(LONG))

        @graph.node(name=f"fetch {number}")
        async def fetch():
            arrive()
            while not all_here.is_set():
                await asyncio.sleep(0.001)
            return 1

    @graph.node
    def compute():
        arrive()
        return int(all_here.wait(LONG))

    graph.add(
        sum,
        name="joined",
        inputs={
            "iterable": [*(f"read {n}" for n in range(10)), *(f"fetch {n}" for n in range(10)), "compute"]
        },
    )
    return graph.compile()


def test_waiting_and_computing_overlap():
    with GraphExecutor(compute=2, io=16) as executor:
        result = executor.run(mixed(), trace=True)
    side_by_side = [event for event in trace_of(result).events if event.node != "joined"]
    latest_start, first_end = max(e.started for e in side_by_side), min(e.ended for e in side_by_side)

    assert result["joined"] == 21
    assert latest_start < first_end


@pytest.mark.skipif(SOAK == 1, reason="says something on a quiet machine only: PENSTOCK_SOAK=2")
def test_a_run_lasts_as_long_as_its_longest_path():
    graph = Graph()
    for number in range(10):
        graph.add(lambda: time.sleep(0.05), name=f"read {number}", lane="io")
    graph.add(lambda: busy(0.03), name="compute")
    plan = graph.compile()
    with GraphExecutor(compute=2, io=16) as executor:
        executor.run(plan)  # starts the threads
        best = min((executor.run(plan, trace=True) for _ in range(5)), key=lambda result: result.seconds)
    trace = trace_of(best)

    longest = sum(trace.durations()[node] for node in trace.critical_path())
    assert best.seconds < 1.6 * longest


def small(executor, **options):
    graph = Graph("small", env=("x",))
    graph.add(lambda x: x, name="first")
    graph.add(lambda first: 1 / 0, name="fails", on_error="skip_dependents")
    graph.add(lambda fails: fails, name="never")
    graph.add(lambda item: item, name="each", over=Const([5, 6]), inputs={}, lane="io")

    async def last(first, each):
        return first

    graph.add(last, name="last")
    return executor.run(graph.compile(), {"x": 1}, **options)


def test_a_trace_has_one_event_for_each_attempt_and_item(executor):
    trace = trace_of(small(executor, trace=True))

    assert sorted((event.node, event.item, event.lane) for event in trace.events if event.item is None) == [
        ("fails", None, "compute"),
        ("first", None, "compute"),
        ("last", None, "io"),
    ]
    assert sorted(event.item for event in trace.events if event.node == "each") == [0, 1]
    by_name = {event.node: event for event in trace.events}
    assert by_name["fails"].error == "ZeroDivisionError: division by zero"
    assert all(event.ended >= event.started >= event.ready >= 0 for event in trace.events)
    assert all(event.queue_delay >= 0 for event in trace.events)
    assert by_name["last"].ready == max(
        by_name["first"].ended, *(e.ended for e in trace.events if e.node == "each")
    )


def test_a_run_that_is_not_recorded_has_no_trace(executor):
    assert small(executor).trace is None


@pytest.mark.parametrize(("share", "expected"), [(0, 0), (0.1, 10), (0.25, 25), (1, 100)])
def test_sampling_records_its_share_of_the_runs(share, expected):
    graph = Graph()
    graph.add(lambda: 1, name="node")
    plan = graph.compile()
    with GraphExecutor(compute=1, trace=share) as executor:
        recorded = sum(executor.run(plan).trace is not None for _ in range(100))

    assert recorded == expected


def test_retries_are_seen_as_attempts(executor):
    graph, attempts = Graph(), []

    def flaky():
        attempts.append(1)
        if len(attempts) < 3:
            raise ValueError(f"attempt {len(attempts)}")

    graph.add(flaky, name="flaky", retries=2)
    trace = trace_of(executor.run(graph.compile(), trace=True))

    errors = ["ValueError: attempt 1", "ValueError: attempt 2", None]
    assert [(event.attempt, event.error) for event in trace.events] == list(enumerate(errors, start=1))


def test_the_chrome_trace_is_what_perfetto_reads(executor, tmp_path):
    results = [small(executor, trace=True), small(executor, trace=True)]
    path = tmp_path / "trace.json"
    write_chrome(path, *(result.trace for result in results))
    events = json.loads(path.read_text())["traceEvents"]

    slices = [event for event in events if event["ph"] == "X"]
    assert len({event["pid"] for event in slices}) == 2
    assert {"run", "first", "fails", "each[0]", "each[1]", "last"} == {event["name"] for event in slices}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    [failed, _] = [event for event in slices if event["name"] == "fails"]
    assert failed["args"]["error"].startswith("ZeroDivisionError")
    assert "queue_delay_ms" in failed["args"]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["skipped: never"] * 2
    starts, ends = ([event for event in events if event["ph"] == kind] for kind in "sf")
    assert {event["id"] for event in starts} == {event["id"] for event in ends} != set()
    rows = {(event["pid"], event["tid"]) for event in slices}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert rows <= named


def test_slices_of_one_row_never_overlap():
    graph = Graph()

    async def wait():
        await asyncio.sleep(0.002)

    for number in range(20):
        graph.add(wait, name=f"n{number}")
    with GraphExecutor(compute=1) as executor:
        trace = trace_of(executor.run(graph.compile(), trace=True))
    rows: dict[str, list] = {}
    for event in trace.events:
        rows.setdefault(event.worker, []).append(event)

    for events in rows.values():
        for before, after in itertools.pairwise(events):
            assert before.ended <= after.started


def test_the_critical_path_is_the_longest_chain():
    graph = Graph()
    graph.add(lambda: 1, name="a")
    graph.add(lambda a: 1, name="b")
    graph.add(lambda a: 1, name="c")
    graph.add(lambda b, c: 1, name="d")
    graph.add(lambda: 1, name="alone")
    plan = graph.compile()
    durations = {"a": 1.0, "b": 5.0, "c": 2.0, "d": 1.0, "alone": 6.5}

    path = critical_path(plan, {plan.index[name]: seconds for name, seconds in durations.items()})

    assert [plan.names[node] for node in path] == ["a", "b", "d"]


def test_a_run_that_is_cut_short_can_still_be_looked_at(executor):
    graph, entered, leave = Graph(), threading.Event(), threading.Event()

    def held(first):
        entered.set()
        leave.wait(30)

    graph.add(lambda: 1, name="first")
    graph.add(held, name="held", lane="io")
    graph.add(lambda held: 1, name="after")
    run = executor.submit(graph.compile(), trace=True)
    entered.wait(10)
    run.cancel()
    leave.set()

    names = [event["name"] for event in trace_of(run.result()).chrome()["traceEvents"] if event["ph"] == "i"]
    assert names == ["skipped: after", "canceled: held"]


# Pictures


def test_without_the_extra_the_picture_says_what_to_install(executor, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygraphviz", None)

    with pytest.raises(BadCall, match=r"pip install 'penstock\[pictures\]'"):
        draw(small(executor).plan)


def test_a_picture_shows_lanes_times_and_the_critical_path(executor):
    svg = small(executor, trace=True).trace.svg()

    assert svg.lstrip().startswith("<?xml")
    for words in ("first", "each [ ]", "never", "skipped", "error", "critical path", "compute", "io", "x"):
        assert f">{words}" in svg or f"{words}<" in svg, words
    assert svg.count("#c0392b") >= 2


def test_a_plan_can_be_drawn_before_it_runs(executor):
    svg = draw(mixed())

    assert "read 3" in svg
    assert "critical path" not in svg


def test_a_graph_too_big_to_read_is_not_drawn():
    graph = Graph("huge")
    for number in range(501):
        graph.add(lambda: 1, name=f"n{number}")

    with pytest.raises(BadCall, match="limit="):
        draw(graph.compile())
