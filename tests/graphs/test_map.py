"""Map nodes: as wide as a list that exists only in the run, with the same promises as any node."""

import asyncio
import threading
from collections import Counter

import pytest

from penstock.core.calls.graph_plan import Const, Env, RunStatus
from penstock.core.errors import CallTimeout, NodeSkipped
from penstock.graphs.builder import Graph
from penstock.graphs.run_context import current_run

KINDS = ["compute", "io", "async"]


def mapped(fn, *, items=range(5), kind="compute", **options):
    graph = Graph("mapped")
    graph.add(lambda: list(items), name="items")
    if kind == "async":

        async def waits(item):
            await asyncio.sleep(0)
            return fn(item)

        graph.add(waits, name="each", over="items", **options)
    else:
        graph.add(fn, name="each", over="items", lane=kind, **options)
    graph.add(lambda each: each, name="after")
    return graph.compile()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 1, 2, 500])
def test_each_item_is_worked_on_once_and_results_keep_their_order(executor, kind, size):
    calls, lock = Counter[int](), threading.Lock()

    def square(item):
        with lock:
            calls[item] += 1
        return item * item

    result = executor.run(mapped(square, items=range(size), kind=kind))

    assert result["after"] == [item * item for item in range(size)]
    assert calls == Counter(range(size))


def test_the_decorator_reads_like_a_loop(executor):
    graph = Graph(env=("factor",))

    @graph.node
    def numbers():
        return [1, 2, 3]

    @graph.map(over="numbers")
    def scaled(number, factor):
        return number * factor

    @graph.map(over="scaled", each="value", inputs={"offset": Const(100)})
    def shifted(offset, value):
        return offset + value

    @graph.node
    def total(shifted):
        return sum(shifted)

    assert executor.run(graph.compile(), {"factor": 10})["total"] == 360


@pytest.mark.parametrize("over", [Env("list"), Const([3, 1, 2]), ["a", "b", "c"], "tuple", "set"])
def test_any_source_can_be_mapped_over(executor, over):
    graph = Graph(env=("list",))
    graph.add(lambda: 3, name="a")
    graph.add(lambda: 1, name="b")
    graph.add(lambda: 2, name="c")
    graph.add(lambda: (3, 1, 2), name="tuple")
    graph.add(lambda: {3, 1, 2}, name="set")
    graph.add(lambda item: -item, name="each", over=over)

    result = executor.run(graph.compile(), {"list": [3, 1, 2]})

    assert sorted(result["each"]) == [-3, -2, -1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_that_fails_fails_the_node_and_says_which(executor, kind):
    def picky(item):
        if item == 3:
            raise ValueError("not three")
        return item

    result = executor.run(mapped(picky, kind=kind), check=False)

    assert (result.status, result.cause) == (RunStatus.ERROR, "each")
    assert "while working on item 3" in result.errors["each"].__notes__
    assert "after" in result.skipped


def test_a_map_may_fail_alone(executor):
    def never(item):
        raise ValueError("no")

    result = executor.run(mapped(never, on_error="skip_dependents"))

    assert result.status is RunStatus.OK
    assert set(result.errors) == {"each"}
    with pytest.raises(NodeSkipped):
        result["after"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_new_item_begins_after_one_has_failed(executor, kind):
    calls = []

    def picky(item):
        calls.append(item)
        raise ValueError("no")

    executor.run(mapped(picky, items=range(10_000), kind=kind, on_error="skip_dependents"))

    assert len(calls) <= 60


@pytest.mark.parametrize("kind", KINDS)
def test_each_item_has_retries_of_its_own(executor, kind):
    attempts, lock = Counter[int](), threading.Lock()

    def flaky(item):
        with lock:
            attempts[item] += 1
        if attempts[item] <= item % 3:
            raise ValueError("not yet")
        return item

    result = executor.run(mapped(flaky, items=range(30), kind=kind, retries=2))

    assert result["each"] == list(range(30))
    assert attempts == {item: item % 3 + 1 for item in range(30)}


def test_each_item_has_a_timeout_of_its_own(executor):
    leave = threading.Event()

    def slow(item):
        if item == 2:
            leave.wait(30)
        return item

    result = executor.run(mapped(slow, kind="io", timeout=1), check=False)
    leave.set()

    assert isinstance(result.errors["each"], CallTimeout)
    assert "while working on item 2" in result.errors["each"].__notes__


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_items_at_once_than_the_limit(executor, kind, limit):
    graph, lock = Graph(), threading.Lock()
    running = most = 0

    def enter():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)

    def leave():
        nonlocal running
        with lock:
            running -= 1

    def work(item):
        enter()
        current_run()
        leave()

    async def work_async(item):
        enter()
        await asyncio.sleep(0)
        leave()

    graph.add(work_async if kind == "async" else work, name="each", over=Const(range(200)), limit=limit)
    executor.run(graph.compile())

    assert 1 <= most <= limit


def test_a_limit_of_two_lets_two_work_at_once(executor):
    meet = threading.Barrier(2, timeout=10)

    result = executor.run(mapped(lambda _: meet.wait() >= 0, items=range(6), kind="io", limit=2))

    assert result["each"] == [True] * 6


def test_something_that_cannot_be_mapped_over_is_the_error_of_the_node(executor):
    graph = Graph()
    graph.add(lambda: 7, name="seven")
    graph.add(lambda item: item, name="each", over="seven")

    with pytest.raises(TypeError, match="not iterable"):
        executor.run(graph.compile())


def test_a_cancelled_run_begins_no_further_item(executor):
    calls = []

    def cancels(item):
        calls.append(item)
        run = current_run()
        assert run is not None
        run.cancel()

    result = executor.run(mapped(cancels, items=range(1000)), check=False)

    assert (result.status, result.canceled) == (RunStatus.CANCELED, ["each"])
    assert len(calls) <= 2


def test_no_item_begins_after_one_has_failed_although_the_run_goes_on(executor):
    """The run is held open by another node, and the lane is given all the turns it could want."""
    graph, leave, calls = Graph(), threading.Event(), []

    def picky(item):
        calls.append(item)
        if item == 0:
            raise ValueError("not the first")

    graph.add(picky, name="each", over=Const(range(100_000)), on_error="skip_dependents")
    graph.add(lambda: leave.wait(30), name="holds the run open", lane="io")
    run = executor.submit(graph.compile())
    while not run.errors:
        leave.wait(0.001)
    before = len(calls)
    for _ in range(20):
        executor.schedule(lambda: None).result()
    leave.set()
    run.result()

    assert len(calls) <= before + 2  # one may have been on its way in each thread
