"""Nodes that fail: which nodes are skipped, which are retried, what the result has."""

import asyncio
import inspect
import threading

import pytest

from penstock.core.calls.graph_plan import Const, RunStatus
from penstock.core.errors import CallCanceled, CallTimeout, NodeFailed, NodeSkipped
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor
from penstock.graphs.run_context import current_run

LANES = ["compute", "io", "async"]


def this_run():
    run = current_run()
    assert run is not None
    return run


def on_lane(lane, fn):
    """The same function for each lane."""
    if lane != "async":
        return fn, {"lane": lane}

    async def waits(*args):
        return fn(*args)

    waits.__signature__ = inspect.signature(fn)
    return waits, {}


def boom():
    raise ValueError("boom")


def chain(lane="compute", **options):
    """start -> bad -> after, and beside it start -> good."""
    graph = Graph("chain")
    graph.add(lambda: 1, name="start")
    fn, lane_option = on_lane(lane, lambda start: boom())
    graph.add(fn, name="bad", **lane_option, **options)
    graph.add(lambda bad: bad, name="after")
    graph.add(lambda after: after, name="end")
    graph.add(lambda start: start, name="good")
    return graph.compile()


@pytest.mark.parametrize("lane", LANES)
def test_the_error_of_a_node_reaches_the_caller_as_itself_with_a_note(executor, lane):
    with pytest.raises(ValueError, match="boom") as caught:
        executor.run(chain(lane))

    assert "in node 'bad' of graph 'chain'" in caught.value.__notes__


@pytest.mark.parametrize("lane", LANES)
def test_an_error_ends_the_run_and_the_rest_is_skipped(executor, lane):
    result = executor.run(chain(lane), check=False)

    assert (result.status, result.cause) == (RunStatus.ERROR, "bad")
    assert {"after", "end"} <= set(result.skipped) <= {"after", "end", "good"}
    assert result["start"] == 1
    assert not result.whole
    with pytest.raises(NodeSkipped, match="the run ended with the error of 'bad'"):
        result["after"]
    with pytest.raises(ValueError, match="boom"):
        result["bad"]


@pytest.mark.parametrize("lane", LANES)
def test_a_node_may_fail_alone_and_take_only_its_dependents(executor, lane):
    result = executor.run(chain(lane, on_error="skip_dependents"))

    assert result.status is RunStatus.OK
    assert not result.whole
    assert result.values == {"start": 1, "good": 1}
    assert set(result.errors) == {"bad"}
    assert result.skipped == dict.fromkeys(("after", "end"), "it needs 'bad', which failed")
    with pytest.raises(NodeSkipped, match="it needs 'bad', which failed"):
        result["end"]


def test_a_run_waits_for_nodes_whose_dependents_are_all_skipped(executor):
    graph, go = Graph(), threading.Event()
    graph.add(boom, name="bad", on_error="skip_dependents")
    graph.add(lambda: go.wait(60), name="slow", lane="io")
    graph.add(lambda bad, slow: None, name="join")
    run = executor.submit(graph.compile())
    done_early = wait_for_error(run, executor)
    go.set()

    assert not done_early
    assert run.result().values == {"slow": True}


def wait_for_error(run, executor):
    """Until the compute lane has nothing more to do for this run; says whether the run thinks it is over."""
    executor.schedule(lambda: None).result()
    return run.done()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, CallCanceled]
)
@pytest.mark.parametrize("lane", LANES)
def test_a_node_may_raise_anything_and_its_worker_lives_on(executor, lane, error):
    def raises():
        raise error("odd") if error is not CallCanceled else CallCanceled("odd", phase="in-flight")

    graph = Graph()
    fn, options = on_lane(lane, raises)
    graph.add(fn, name="odd", **options)
    plan = graph.compile()
    for _ in range(6):
        result = executor.run(plan, check=False)

        assert result.status is RunStatus.ERROR
        assert isinstance(result.errors["odd"], error)
        with pytest.raises(NodeFailed, match="node 'odd' raised"):
            result.check()
    assert executor.run(chain(lane, on_error="skip_dependents"))["good"] == 1


def test_an_error_waits_for_the_nodes_beside_it(executor):
    graph, started, failed = Graph(), threading.Event(), threading.Event()

    def slow():
        started.set()
        assert failed.wait(60)
        return "saved"

    def bad():
        assert started.wait(60)
        raise ValueError("boom")

    graph.add(slow, name="slow", lane="io")
    graph.add(bad, name="bad")
    graph.add(lambda slow: slow, name="never")
    run = executor.submit(graph.compile())
    while run.cause is None:
        started.wait(0.001)
    over_before = run.done()
    failed.set()
    result = run.result()

    assert not over_before
    assert (result.status, result["slow"]) == (RunStatus.ERROR, "saved")
    assert "never" in result.skipped


def test_an_error_waits_for_a_stuck_neighbour_no_longer_than_the_grace(executor, no_thread_stays):
    graph, started, leave = Graph(), threading.Event(), threading.Event()

    def stuck():
        started.set()
        leave.wait(60)

    def bad():
        assert started.wait(60)
        raise ValueError("boom")

    graph.add(stuck, name="stuck", lane="io")
    graph.add(bad, name="bad")
    result = executor.run(graph.compile(), check=False)
    leave.set()

    assert (result.status, result.canceled) == (RunStatus.ERROR, ["stuck"])
    with pytest.raises(CallCanceled, match="'stuck' was in flight"):
        result["stuck"]


def test_the_nodes_beside_an_error_are_told(executor):
    graph, started, stopped = Graph(), threading.Semaphore(0), []

    def thread():
        started.release()
        while not this_run().canceled:
            threading.Event().wait(0.001)
        stopped.append("thread")
        this_run().check()

    async def task():
        started.release()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            stopped.append("task")
            raise

    def bad():
        started.acquire()
        started.acquire()
        raise ValueError("boom")

    graph.add(thread, name="thread", lane="io")
    graph.add(task, name="task")
    graph.add(bad, name="bad")
    executor.grace = 3600
    result = executor.run(graph.compile(), check=False)

    assert sorted(stopped) == ["task", "thread"]
    assert sorted(result.canceled) == ["task", "thread"]
    assert set(result.errors) == {"bad"}


# Retries


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("delay", [0.0, 0.001])
def test_a_node_is_tried_again_as_often_as_it_asks(executor, lane, delay):
    attempts = []

    def flaky():
        attempts.append(1)
        if len(attempts) < 3:
            raise ValueError("not yet")
        return len(attempts)

    graph = Graph()
    fn, options = on_lane(lane, flaky)
    graph.add(fn, name="flaky", retries=2, retry_delay=delay, **options)

    assert executor.run(graph.compile())["flaky"] == 3


@pytest.mark.parametrize("lane", LANES)
def test_retries_come_to_an_end(executor, lane):
    attempts = []

    def never():
        attempts.append(1)
        raise ValueError(f"attempt {len(attempts)}")

    graph = Graph()
    fn, options = on_lane(lane, never)
    graph.add(fn, name="never", retries=3, **options)

    with pytest.raises(ValueError, match="attempt 4"):
        executor.run(graph.compile())
    assert len(attempts) == 4


def test_only_the_errors_asked_for_are_tried_again(executor):
    attempts = []

    def wrong():
        attempts.append(1)
        raise ValueError("boom")

    graph = Graph()
    graph.add(wrong, name="wrong", retries=3, retry_on=KeyError)
    graph.compile()

    assert executor.run(graph.compile(), check=False).status is RunStatus.ERROR
    assert len(attempts) == 1


def test_the_delay_between_retries_doubles():
    graph = Graph()
    graph.add(boom, name="bad", retries=4, retry_delay=0.5)
    rules = graph.compile().rules[0]

    assert [rules.retry_in(attempt, ValueError()) for attempt in range(1, 6)] == [0.5, 1.0, 2.0, 4.0, None]


def test_a_run_that_ends_does_not_wait_for_a_retry(executor):
    graph = Graph()
    graph.add(boom, name="later", retries=1, retry_delay=3600)
    run = executor.submit(graph.compile())
    while not run.attempts.retry_timers:
        threading.Event().wait(0.001)
    [timer] = run.attempts.retry_timers.values()
    run.cancel()

    assert run.result(timeout=0).canceled == ["later"]
    assert timer.canceled


# Timeouts


def test_an_async_node_that_takes_too_long_is_stopped_and_may_be_tried_again(executor):
    graph, attempts = Graph(), list[str]()

    async def slow(attempts):
        attempts.append("begun")
        try:
            await asyncio.sleep(30 if len(attempts) == 1 else 0)
        finally:
            attempts.append("ended")
        return "done"

    graph.add(slow, name="slow", timeout=2, retries=1, inputs={"attempts": Const(attempts)})

    assert executor.run(graph.compile())["slow"] == "done"
    assert attempts == ["begun", "ended", "begun", "ended"]


@pytest.mark.parametrize("lane", ["compute", "io"])
def test_a_thread_that_takes_too_long_fails_at_once_and_is_not_tried_beside_itself(executor, lane):
    graph, leave, calls = Graph(), threading.Event(), []

    def slow():
        calls.append(1)
        leave.wait(60)
        return "too late"

    graph.add(slow, name="slow", timeout=0.02, retries=5, lane=lane)
    result = executor.run(graph.compile(), check=False)
    leave.set()

    assert isinstance(result.errors["slow"], CallTimeout)
    assert "node 'slow' took longer than its 0.02 s" in str(result.errors["slow"])
    assert len(calls) == 1


def test_a_result_that_comes_after_its_timeout_changes_nothing(executor):
    graph, leave, late = Graph(), threading.Event(), threading.Event()

    def slow():
        leave.wait(60)
        late.set()
        return "too late"

    graph.add(slow, name="slow", timeout=0.02, on_error="skip_dependents", lane="io")
    graph.add(lambda: late.wait(60), name="holds the run open", lane="io")
    run = executor.submit(graph.compile())
    while not run.errors:
        late.wait(0.001)
    leave.set()
    result = run.result(timeout=60)

    assert result.values == {"holds the run open": True}
    assert isinstance(result.errors["slow"], CallTimeout)


def test_an_async_node_that_will_not_stop_is_given_up_after_the_grace(executor):
    graph = Graph()
    leave: list[int] = []

    async def stubborn():
        while not leave:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    graph.add(stubborn, name="stubborn", timeout=0.01, retries=3)
    result = executor.run(graph.compile(), check=False)
    leave.append(1)

    assert isinstance(result.errors["stubborn"], CallTimeout)


def test_a_worker_that_does_not_come_back_is_replaced(no_thread_stays):
    leave = threading.Event()
    stuck = Graph("stuck")
    stuck.add(lambda: leave.wait(60), name="stuck", timeout=0.01)
    fine = Graph("fine")
    fine.add(lambda: "fine", name="fine")
    with GraphExecutor(compute=1, grace=0.05) as executor:
        executor.run(stuck.compile(), check=False)
        value = executor.run(fine.compile(), timeout=10)["fine"]
        leave.set()

    assert value == "fine"


def test_an_error_does_not_wait_for_workers_that_have_left(executor):
    graph = Graph()
    graph.add(lambda: 1, name="quick", lane="io")
    graph.add(lambda quick: executor.schedule(lambda: None, lane="io").result(), name="later")
    graph.add(lambda later: boom(), name="bad")
    executor.grace = 3600

    assert executor.submit(graph.compile()).result(timeout=60).status is RunStatus.ERROR


def test_a_cancel_after_an_error_ends_the_wait_and_not_the_status(executor):
    graph, started, leave = Graph(), threading.Event(), threading.Event()

    def stuck():
        started.set()
        leave.wait(60)

    def bad():
        assert started.wait(60)
        raise ValueError("boom")

    graph.add(stuck, name="stuck", lane="io")
    graph.add(bad, name="bad")
    executor.grace = 3600
    run = executor.submit(graph.compile())
    while run.cause is None:
        started.wait(0.001)

    assert not run.cancel()
    assert run.result(timeout=0).status is RunStatus.ERROR
    assert run.result().cause == "bad"
    leave.set()
