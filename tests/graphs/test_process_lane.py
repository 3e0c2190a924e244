"""Compute nodes in the processes of a pool."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.core.calls.graph_plan import Const, Queue, RunStatus
from penstock.core.errors import BadCall, CallTimeout, NotPicklable, PoolClosedError, WorkerCrashedError
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor
from penstock.graphs.run_context import current_run
from penstock.pools.pool import WorkerPool
from tests.waiting import alive, until


def pid(*_):
    return os.getpid()


def square(x):
    return x * x


def fail(*_):
    raise ValueError("in the process")


def die():
    os._exit(3)


def die_once(marker):
    if not marker.exists():
        marker.touch()
        os._exit(3)
    return "second life"


def forever(marker):
    marker.write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def look():
    run = current_run()
    assert run is not None
    return run.node, run.remaining is not None, run.canceled


@pytest.fixture
def pool():
    with WorkerPool(workers=2, grace=0.2) as pool:
        yield pool


@pytest.fixture
def executor(pool):
    with GraphExecutor(compute=2, io=2, pool=pool, grace=1) as executor:
        yield executor


def graph_of(fn, *, name="node", lane="process", **options):
    graph = Graph()
    graph.add(fn, name=name, lane=lane, **options)
    return graph.compile()


def read_pid(path):
    return int(until(lambda: path.exists() and path.read_text()))


def test_a_node_runs_in_another_process_between_nodes_of_this_one(executor):
    graph = Graph()
    graph.add(lambda: 3, name="x")
    graph.add(square, name="squared", lane="process")
    graph.add(pid, name="there", lane="process", inputs={"_": ["x"]})
    graph.add(lambda squared, there: (squared, there), name="both")

    squared, there = executor.run(graph.compile())["both"]

    assert squared == 9
    assert there != os.getpid()


def test_a_map_spreads_over_the_processes(executor):
    graph = Graph()
    graph.add(square, name="squares", lane="process", over=Const(range(200)))

    assert executor.run(graph.compile())["squares"] == [x * x for x in range(200)]


def test_more_nodes_than_the_pool_takes_wait_in_the_lane():
    graph = Graph()
    for number in range(100):
        graph.add(square, name=f"n{number}", lane="process", inputs={"x": Const(number)})

    with WorkerPool(workers=2, policy="reject") as pool, GraphExecutor(compute=2, pool=pool) as executor:
        values = executor.run(graph.compile()).values

    assert list(values.values()) == [x * x for x in range(100)]


def test_the_run_can_be_seen_from_the_process(executor):
    assert executor.run(graph_of(look, name="there"), timeout=60)["there"] == ("there", True, False)


def test_an_error_comes_back_as_itself(executor):
    with pytest.raises(ValueError, match="in the process"):
        executor.run(graph_of(fail))


def test_a_function_that_cannot_travel_is_the_error_of_its_node(executor):
    lock = threading.Lock()
    graph = Graph()
    graph.add(pid, name="node", lane="process", inputs={"_": [Const(lock)]})

    with pytest.raises((TypeError, NotPicklable)):
        executor.run(graph.compile())


def test_a_process_that_dies_fails_its_node_by_the_pools_policy(executor):
    result = executor.run(graph_of(die), check=False)

    assert result.status is RunStatus.ERROR
    assert isinstance(result.errors["node"], WorkerCrashedError)


def test_a_node_whose_process_died_can_be_tried_again(executor, tmp_path):
    plan = graph_of(die_once, retries=1, inputs={"marker": Const(tmp_path / "died")})

    assert executor.run(plan)["node"] == "second life"


def test_the_deadline_of_a_run_kills_the_worker_of_a_node_that_never_returns(executor, tmp_path):
    marker = tmp_path / "pid"
    executor.run(graph_of(pid))  # there is a worker: the time is for the node alone
    run = executor.submit(graph_of(forever, inputs={"marker": Const(marker)}), timeout=2)
    worker = read_pid(marker)
    result = run.result(timeout=30)

    assert (result.status, result.canceled) == (RunStatus.DEADLINE, ["node"])
    until(lambda: not alive(worker))
    assert executor.run(graph_of(square, inputs={"x": Const(2)}))["node"] == 4


def test_the_timeout_of_a_node_kills_its_worker_too(executor, tmp_path):
    marker = tmp_path / "pid"
    executor.run(graph_of(pid))  # as above
    run = executor.submit(graph_of(forever, timeout=2, inputs={"marker": Const(marker)}))
    worker = read_pid(marker)
    result = run.result(timeout=30)

    assert isinstance(result.errors["node"], CallTimeout)
    until(lambda: not alive(worker))


def test_closing_ends_the_workers_of_a_pool_of_our_own_and_leaves_nobody_behind(tmp_path):
    marker = tmp_path / "pid"
    executor = GraphExecutor(compute=1, processes=1)
    run = executor.submit(graph_of(forever, inputs={"marker": Const(marker)}))
    worker = read_pid(marker)
    pool = executor.lane_queues[Queue.PROCESS].pool
    assert pool is not None

    assert executor.close(timeout=10) == []
    assert run.result(timeout=0).status is RunStatus.CANCELED
    until(lambda: not alive(worker))
    with pytest.raises(PoolClosedError):
        pool.submit(square, 1)


def test_a_pool_that_was_given_outlives_the_executor(pool):
    with GraphExecutor(compute=1, pool=pool) as executor:
        executor.run(graph_of(pid))

    assert pool.submit(square, 3).result() == 9


def test_a_call_can_be_scheduled_on_the_process_lane(executor):
    assert executor.schedule(square, 5, lane="process").result(timeout=30) == 25


def test_any_executor_will_do():
    with ThreadPoolExecutor(2) as pool, GraphExecutor(compute=1, pool=pool) as executor:
        graph = Graph()
        graph.add(square, name="squares", lane="process", over=Const(range(50)))

        assert executor.run(graph.compile())["squares"] == [x * x for x in range(50)]


def test_a_node_on_the_cluster_lane_needs_an_executor_with_a_cluster(executor):
    with pytest.raises(BadCall, match=r"GraphExecutor\(cluster="):
        executor.submit(graph_of(square, lane="cluster", inputs={"x": Const(3)}))
    with pytest.raises(BadCall, match=r"GraphExecutor\(cluster="):
        executor.schedule(square, 3, lane="cluster")
