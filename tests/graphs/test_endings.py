"""However a run or an executor ends: it ends, once, by its first cause, and nothing starts after."""

import asyncio
import gc
import threading
import time
import weakref
from collections import Counter

import pytest

from penstock.core.calls.graph_plan import Const, RunStatus
from penstock.core.errors import CallCanceled, CallTimeout, PoolClosedError
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor
from penstock.graphs.run import Run
from penstock.graphs.run_context import current_run
from tests.waiting import until

FAR = 30


def this_run():
    run = current_run()
    assert run is not None
    return run


class Held:
    """A node that is entered, and left when the test says so."""

    def __init__(self):
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.left = threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.leave.wait(FAR)
        self.left.set()
        return "too late"


@pytest.fixture
def held():
    held = Held()
    yield held
    held.leave.set()


def held_graph(held, lane="io"):
    graph = Graph("held")
    graph.add(lambda: 1, name="before")
    graph.add(lambda before: held(), name="held", lane=lane)
    graph.add(lambda held: held, name="after")
    return graph.compile()


def test_cancel_ends_the_run_at_once(executor, held):
    run = executor.submit(held_graph(held))
    held.entered.wait(FAR)

    assert run.cancel("changed my mind")
    result = run.result(timeout=0)
    assert (result.status, result.reason) == (RunStatus.CANCELED, "was canceled: changed my mind")
    assert result.values == {"before": 1}
    assert result.canceled == ["held"]
    assert result.skipped == {"after": "the run was canceled: changed my mind"}
    with pytest.raises(CallCanceled, match="changed my mind") as caught:
        result.check()
    assert caught.value.result is result


def test_the_first_cause_wins(executor, held):
    run = executor.submit(held_graph(held), timeout=FAR)
    held.entered.wait(FAR)

    assert run.cancel("first")
    assert not run.cancel("second")
    run.expire()
    assert run.result(timeout=0).reason == "was canceled: first"


def test_a_value_that_comes_after_the_end_is_not_in_the_result(executor, held):
    run = executor.submit(held_graph(held))
    held.entered.wait(FAR)
    run.cancel()
    result = run.result()
    held.leave.set()
    held.left.wait(FAR)
    executor.close()

    assert result.values == {"before": 1}
    assert result.canceled == ["held"]


def test_a_node_may_cancel_its_own_run(executor):
    graph = Graph()
    graph.add(lambda: this_run().cancel("enough"), name="stops")
    graph.add(lambda stops: stops, name="after")

    result = executor.run(graph.compile(), check=False)

    assert (result.status, result.reason) == (RunStatus.CANCELED, "was canceled: enough")
    assert list(result.skipped) == ["after"]


def test_cancelling_whoever_awaits_a_run_cancels_the_run(executor, held):
    async def main():
        task = asyncio.create_task(executor.arun(held_graph(held)))
        await asyncio.to_thread(held.entered.wait, FAR)
        [run] = executor.live_runs
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return run.result(timeout=0)

    assert asyncio.run(main()).status is RunStatus.CANCELED


def test_an_async_node_of_a_cancelled_run_is_cancelled(executor):
    graph, entered, ended = Graph(), threading.Event(), threading.Event()

    async def waits():
        entered.set()
        try:
            await asyncio.sleep(FAR)
        finally:
            ended.set()

    graph.add(waits, name="waits")
    run = executor.submit(graph.compile())
    entered.wait(FAR)
    run.cancel()

    assert ended.wait(FAR)
    assert run.result().canceled == ["waits"]


# Deadlines


@pytest.mark.parametrize("lane", ["compute", "io"])
def test_a_run_ends_at_its_deadline_although_a_node_never_returns(executor, held, lane):
    result = executor.run(held_graph(held, lane), timeout=2, check=False)

    assert result.status is RunStatus.DEADLINE
    assert result.canceled == ["held"]
    assert list(result.skipped) == ["after"]
    with pytest.raises(CallTimeout, match="ran out of time"):
        result.check()


def test_a_run_ends_at_its_deadline_although_a_node_blocks_the_event_loop(held):
    graph = Graph()

    async def blocks():
        held()

    graph.add(blocks, name="blocks")
    with GraphExecutor(compute=1) as executor:
        result = executor.run(graph.compile(), timeout=2, check=False)
        held.leave.set()

    assert (result.status, result.canceled) == (RunStatus.DEADLINE, ["blocks"])


def test_a_run_whose_deadline_has_passed_calls_nothing(executor):
    graph, calls = Graph(), []
    graph.add(lambda: calls.append(1), name="node")

    result = executor.run(graph.compile(), timeout=0, check=False)

    assert (result.status, calls) == (RunStatus.DEADLINE, [])
    assert executor.snapshot().totals["spawned"] == 0


def test_the_deadline_is_checked_before_every_node_and_not_left_to_the_timer(executor):
    """A node that keeps the interpreter to itself keeps it from the timer as well."""
    graph, without_timer = Graph(), threading.Event()

    def hogs():
        without_timer.wait(FAR)
        while this_run().remaining:
            pass

    graph.add(hogs, name="hogs")
    graph.add(lambda hogs: hogs, name="after")
    run = executor.submit(graph.compile(), timeout=2)
    run.deadline_timer.cancel()
    without_timer.set()
    result = run.result(timeout=FAR)

    assert result.status is RunStatus.DEADLINE
    assert list(result.skipped) == ["after"]


def test_a_run_that_ended_leaves_no_timer_behind(executor):
    graph = Graph()
    graph.add(lambda: 1, name="node")
    run = executor.submit(graph.compile(), timeout=3600)
    run.result()

    assert run.deadline_timer is not None
    assert run.deadline_timer.canceled


# Close


def test_close_ends_live_runs_as_canceled_and_starts_nothing_more(held):
    executor = GraphExecutor(compute=2, io=2)
    run = executor.submit(held_graph(held))
    held.entered.wait(FAR)
    threading.Timer(0.05, held.leave.set).start()

    assert executor.close() == []
    result = run.result(timeout=0)
    assert (result.status, result.reason) == (RunStatus.CANCELED, "was canceled: the executor was closed")
    assert list(result.skipped) == ["after"]


def test_close_in_the_middle_of_many_runs_ends_them_all():
    graph, calls, lock = Graph(), Counter[tuple[int, str]](), threading.Lock()

    def count(name, feeds):
        with lock:
            calls[this_run().id, name] += 1

    async def count_async(name, feeds):
        await asyncio.sleep(0)
        count(name, feeds)

    for number in range(60):
        feeds = [f"n{one}" for one in range(max(0, number - 3), number)]
        fn = count_async if number % 3 == 0 else count
        inputs = {"name": Const(f"n{number}"), "feeds": feeds}
        graph.add(fn, name=f"n{number}", inputs=inputs, lane="io" if number % 3 == 1 else None)
    plan = graph.compile()
    for _ in range(10):
        executor = GraphExecutor(compute=3, io=3)
        runs = [executor.submit(plan) for _ in range(20)]
        runs[3].result()
        assert executor.close() == []
        seen = dict(calls)

        for run in runs:
            result = run.result(timeout=0)
            assert result.status in (RunStatus.OK, RunStatus.CANCELED)
            assert not any((run.id, name) in seen for name in result.skipped)
        assert max(calls.values()) == 1
        assert dict(calls) == seen, "something started after close"


def test_close_returns_by_its_timeout_and_names_what_it_left_behind(held, no_thread_stays):
    executor = GraphExecutor(compute=1, io=1, name="stuck")
    run = executor.submit(held_graph(held))
    held.entered.wait(FAR)

    began = time.perf_counter()
    [left] = executor.close(timeout=0.2)
    took = time.perf_counter() - began

    no_thread_stays.add(left.thread)
    assert 0.2 <= took
    assert left.node == "held"
    assert left.thread in {thread.name for thread in threading.enumerate()}
    assert left.thread.startswith("stuck-io")
    assert run.result(timeout=0).status is RunStatus.CANCELED


def test_close_names_the_node_that_blocks_the_event_loop(held, no_thread_stays):
    graph = Graph()

    async def blocks():
        held()

    graph.add(blocks, name="blocks")
    executor = GraphExecutor(compute=1, name="blocked")
    executor.submit(graph.compile())
    held.entered.wait(FAR)

    [left] = executor.close(timeout=0.2)

    no_thread_stays.add(left.thread)
    assert (left.thread, left.node) == ("blocked-loop", "blocks")


def test_close_names_a_thread_whose_run_ended_long_ago(held, no_thread_stays):
    executor = GraphExecutor(compute=1, io=1, grace=0.01)
    run = executor.submit(held_graph(held))
    held.entered.wait(FAR)
    run.cancel()
    while not executor.snapshot().totals["terminated"]:
        held.left.wait(0.001)

    [left] = executor.close(timeout=0.1)

    no_thread_stays.add(left.thread)
    assert left.node == "held"


def test_an_async_node_that_will_not_be_cancelled_does_not_hold_up_close():
    graph, entered = Graph(), threading.Event()

    async def stubborn():
        while True:
            entered.set()
            try:
                await asyncio.sleep(FAR)
            except asyncio.CancelledError:
                continue

    graph.add(stubborn, name="stubborn")
    executor = GraphExecutor(compute=1)
    run = executor.submit(graph.compile())
    entered.wait(FAR)

    assert executor.close(timeout=5) == []
    assert run.result(timeout=0).status is RunStatus.CANCELED
    gc.collect()


def test_close_twice_is_close_once(executor):
    assert executor.close() == []
    assert executor.close() == []


def test_close_from_inside_a_node_does_not_wait_for_itself():
    executor, graph = GraphExecutor(compute=1), Graph()
    graph.add(lambda: executor.close(timeout=5), name="closes")
    run = executor.submit(graph.compile())

    assert run.result(timeout=FAR).status is RunStatus.CANCELED
    executor.close()


def test_an_executor_that_nobody_holds_lets_its_threads_go():
    graph = Graph()
    graph.add(lambda: 1, name="node")

    async def node():
        return 1

    graph.add(node, name="async")
    executor = GraphExecutor(compute=1)
    executor.run(graph.compile())
    name, gone = executor.name, weakref.ref(executor)
    del executor
    until = time.monotonic() + FAR
    while gone() is not None and time.monotonic() < until:  # a worker may be on its way out of the run
        gc.collect()

    assert gone() is None
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(FAR)
            assert not thread.is_alive()


def test_a_run_that_ended_is_not_kept_alive_by_the_workers(executor):
    class Big: ...

    graph = Graph()
    graph.add(Big, name="big", inputs={})
    graph.add(lambda big: None, name="reader", lane="io")
    result = executor.run(graph.compile())
    big = weakref.ref(result["big"])
    del result

    def gone():
        gc.collect()
        return big() is None

    until(gone)  # the worker may still be on its way out of the last node


def test_whoever_is_interrupted_while_waiting_cancels_the_run(executor, held, monkeypatch):
    plan = held_graph(held)

    def interrupted(self, timeout=None):
        held.entered.wait(FAR)
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.pools.future.LazyFuture.result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.run(plan)

    assert executor.snapshot().totals["runs_canceled"] == 1


def test_submitting_while_closing_ends_one_way_or_the_other():
    graph = Graph()
    graph.add(lambda: 1, name="a")
    graph.add(lambda a: 1, name="b", lane="io")
    plan = graph.compile()
    for _ in range(30):
        executor, runs = GraphExecutor(compute=1, io=1), list[Run]()

        def submit(executor=executor, runs=runs):
            try:
                while True:
                    runs.append(executor.submit(plan))
            except PoolClosedError:
                pass

        thread = threading.Thread(target=submit)
        thread.start()
        while not runs:
            pass
        executor.close()
        thread.join(FAR)

        assert all(run.result(timeout=0).status in (RunStatus.OK, RunStatus.CANCELED) for run in runs)


def test_a_run_that_comes_when_close_has_listed_the_others_ends_all_the_same():
    """In one order and no other: `submit` has found the executor open, and reads the env while `close` runs from start to end."""
    graph, executor = Graph(env=["number"]), GraphExecutor(compute=1)
    graph.add(lambda number: number, name="node")

    class ClosingEnv(dict[str, int]):
        def __getitem__(self, name):
            executor.close()
            return super().__getitem__(name)

    result = executor.submit(graph.compile(), ClosingEnv(number=1)).result(timeout=0)

    assert (result.status, result.reason) == (RunStatus.CANCELED, "was canceled: the executor was closed")


def test_an_executor_can_be_closed_from_asyncio():
    async def main():
        async with GraphExecutor(compute=1) as executor:
            graph = Graph()
            graph.add(lambda: 1, name="node")
            return (await executor.arun(graph.compile()))["node"], executor

    value, executor = asyncio.run(main())

    assert (value, executor.closed) == (1, True)


def test_the_deadline_is_checked_before_a_node_of_the_event_loop_too(executor):
    graph, without_timer = Graph(), threading.Event()

    async def blocks():
        without_timer.wait(FAR)
        while this_run().remaining:
            pass

    async def after(blocks): ...

    graph.add(blocks, name="blocks")
    graph.add(after, name="after")
    run = executor.submit(graph.compile(), timeout=2)
    run.deadline_timer.cancel()
    without_timer.set()
    result = run.result(timeout=FAR)

    assert (result.status, list(result.skipped)) == (RunStatus.DEADLINE, ["after"])


@pytest.mark.parametrize("lane", ["compute", "io", "async"])
def test_a_run_for_which_no_thread_can_be_had_ends_with_that_error(monkeypatch, lane):
    def no_more(self):
        raise RuntimeError("can't start new thread")

    async def node(): ...

    graph = Graph()
    if lane == "async":
        graph.add(node, name="node")
    else:
        graph.add(lambda: 1, name="node", lane=lane)
    executor = GraphExecutor(compute=1)
    monkeypatch.setattr(threading.Thread, "start", no_more)

    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor.run(graph.compile())
    assert executor.snapshot().totals["runs_canceled"] == 1
    monkeypatch.undo()
    assert executor.run(graph.compile()).whole
    executor.close()


def test_something_of_ours_that_fails_ends_the_run_and_not_the_worker(executor, monkeypatch, caplog):
    graph = Graph()
    graph.add(lambda: 1, name="a")
    graph.add(lambda a: 1, name="b", lane="io")
    plan = graph.compile()

    def bug(self, nodes):
        raise AssertionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.graphs.run.Run.push_ready", bug)
        result = executor.run(plan, check=False)

    assert (result.status, str(result.errors["b"])) == (RunStatus.ERROR, "a bug of ours")
    assert "please report this" in caplog.text
    assert executor.run(plan).whole


def test_a_run_that_failed_is_not_kept_by_a_timer(executor):
    class Big: ...

    graph = Graph()
    graph.add(Big, name="big", inputs={})
    graph.add(lambda big: 1 / 0, name="fails")
    executor.grace = 3600
    result = executor.run(graph.compile(), check=False)
    big = weakref.ref(result["big"])
    del result
    until = time.monotonic() + FAR
    while big() is not None and time.monotonic() < until:
        gc.collect()

    assert big() is None


def test_a_run_that_ended_needs_no_garbage_collector_to_go(executor):
    class Big: ...

    graph = Graph()
    graph.add(Big, name="big", inputs={})
    graph.add(lambda big: None, name="reader", lane="io")
    plan = graph.compile()
    gc.disable()
    try:
        result = executor.run(plan)
        big = weakref.ref(result["big"])
        del result
        until = time.monotonic() + FAR
        while big() is not None and time.monotonic() < until:
            threading.Event().wait(0.001)  # a worker may be on its way out of the run
        assert big() is None
    finally:
        gc.enable()
