"""What a run gives: values by name, whatever lane they come from and however it was started."""

import asyncio
import contextvars
import threading
from concurrent.futures import FIRST_COMPLETED, as_completed, wait

import pytest

from penstock.core.calls.graph_plan import Const, Env, NodeStatus, RunStatus
from penstock.core.errors import BadCall, PoolClosedError
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor
from penstock.graphs.run_context import current_run


def this_run():
    run = current_run()
    assert run is not None
    return run


def diamond():
    graph = Graph("diamond", env=("x",))

    @graph.node
    def top(x):
        return x + 1

    @graph.node(lane="io")
    def left(top):
        return top * 2

    @graph.node
    async def right(top):
        await asyncio.sleep(0)
        return top * 3

    @graph.node
    def bottom(left, right):
        return left + right

    return graph.compile()


def test_values_are_found_by_the_names_of_their_nodes(executor):
    result = executor.run(diamond(), {"x": 1})

    assert result.values == {"top": 2, "left": 4, "right": 6, "bottom": 10}
    assert result["bottom"] == 10
    assert result.status is RunStatus.OK
    assert result.whole
    with pytest.raises(KeyError, match="has no node 'botom'"):
        result["botom"]


def test_inputs_come_from_nodes_environment_constants_and_defaults(executor):
    graph = Graph(env=("rate",))
    graph.add(lambda: 2, name="two")
    graph.add(lambda: 3, name="three")

    rate_of_env, nine = Env("rate"), Const(9)

    def everything(
        two, /, named, rate, const, default=40, *rest, only, marked=rate_of_env, fixed=nine, **more
    ):
        return (two, named, rate, const, default, rest, only, marked, fixed, more)

    inputs = {
        "named": "three",
        "const": Const("text"),
        "rest": ["two", Const(0)],
        "only": ["two", "three"],
        "extra": Env("rate"),
    }
    graph.add(everything, name="all", inputs=inputs)

    value = executor.run(graph.compile(), {"rate": 1.5})["all"]

    assert value == (2, 3, 1.5, "text", 40, (2, 0), [2, 3], 1.5, 9, {"extra": 1.5})


@pytest.mark.parametrize("arity", range(6))
def test_any_number_of_inputs_arrives_in_order(executor, arity):
    graph = Graph()
    for number in range(arity):
        graph.add(lambda number=number: number, name=f"n{number}", inputs={"number": Const(number)})
    graph.add(lambda *args: args, name="all", inputs={"args": [f"n{number}" for number in range(arity)]})
    graph.add(lambda args: args, name="list", inputs={"args": [f"n{number}" for number in range(arity)]})

    result = executor.run(graph.compile())

    assert result["all"] == tuple(range(arity))
    assert result["list"] == list(range(arity))


def test_none_is_a_value_like_any_other(executor):
    graph = Graph()
    graph.add(lambda: None, name="nothing")
    graph.add(lambda nothing: nothing is None, name="seen")

    result = executor.run(graph.compile())

    assert result.values == {"nothing": None, "seen": True}


def test_a_run_lacks_nothing_or_does_not_begin(executor):
    with pytest.raises(BadCall, match=r"lacks 'x' in its env; it was given 'y'"):
        executor.run(diamond(), {"y": 1})


def test_a_run_can_be_awaited(executor):
    async def main():
        results = await asyncio.gather(*(executor.arun(diamond(), {"x": x}) for x in range(20)))
        return [result["bottom"] for result in results]

    assert asyncio.run(main()) == [5 * (x + 1) for x in range(20)]


def test_a_run_is_a_future(executor):
    runs = {executor.submit(diamond(), {"x": x}): x for x in range(20)}

    first, _ = wait(runs, return_when=FIRST_COMPLETED)
    assert first
    assert {runs[run]: run.result()["bottom"] for run in as_completed(runs)} == {
        x: 5 * (x + 1) for x in range(20)
    }


def test_a_callback_hears_of_the_end_once(executor):
    notified: list[object] = []
    run = executor.submit(diamond(), {"x": 1})
    run.add_done_callback(notified.append)
    run.result()
    run.add_done_callback(notified.append)

    assert notified == [run, run]


def test_one_plan_runs_again_and_again_and_beside_itself(executor):
    plan = diamond()
    for _ in range(30):
        runs = [executor.submit(plan, {"x": x}) for x in range(30)]

        assert [run.result()["bottom"] for run in runs] == [5 * (x + 1) for x in range(30)]


def test_runs_may_be_started_by_many_threads(executor):
    plan, results = diamond(), {}

    def start(x):
        results[x] = executor.run(plan, {"x": x})["bottom"]

    threads = [threading.Thread(target=start, args=(x,)) for x in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == {x: 5 * (x + 1) for x in range(16)}


def test_a_chain_of_nodes_needs_no_stack(executor):
    graph = Graph()
    graph.add(lambda: 0, name="n0")
    for number in range(1, 5000):
        graph.add(lambda before: before + 1, name=f"n{number}", inputs={"before": f"n{number - 1}"})

    assert executor.run(graph.compile())["n4999"] == 4999


def test_workers_outlive_the_runs(executor):
    def names():
        return {thread.name for thread in threading.enumerate() if thread.name.startswith(executor.name)}

    executor.run(diamond(), {"x": 1})
    before = names()
    for _ in range(50):
        executor.run(diamond(), {"x": 1})

    assert before <= names()
    assert len(names()) <= 2 + 4 + 1


def test_two_nodes_of_a_lane_run_at_the_same_time(executor):
    graph, meet = Graph(), threading.Barrier(2, timeout=10)
    graph.add(lambda: meet.wait() >= 0, name="one")
    graph.add(lambda: meet.wait() >= 0, name="two")

    assert executor.run(graph.compile()).values == {"one": True, "two": True}


def test_a_lane_runs_no_more_nodes_than_it_has_threads():
    graph, entered, leave = Graph(), threading.Semaphore(0), threading.Event()

    def block():
        entered.release()
        assert leave.wait(60)

    for number in range(10):
        graph.add(block, name=f"n{number}", lane="io")

    with GraphExecutor(compute=1, io=3) as executor:
        run = executor.submit(graph.compile())
        for _ in range(3):
            entered.acquire()
        now = executor.snapshot()
        leave.set()
        run.result()

    assert (now.in_flight, now.pending_queue_depth) == (3, 7)


def test_the_event_loop_holds_no_more_nodes_than_allowed():
    graph, held, most = Graph(), [], 0

    async def block():
        nonlocal most
        mine = asyncio.get_running_loop().create_future()
        held.append(mine)
        most = max(most, len(held))
        if len(held) == 5:  # as many as may be here: let them go, the first last
            for future in reversed(held):
                future.set_result(None)
        await mine
        held.remove(mine)

    for number in range(40):
        graph.add(block, name=f"n{number}")

    with GraphExecutor(compute=1, tasks=5) as executor:
        executor.run(graph.compile())

    assert most == 5


def test_inside_a_node_the_run_can_be_seen(executor):
    graph = Graph(env=("x",))

    def look():
        run = this_run()
        return run.node, dict(run.env), run.remaining is not None and 0 < run.remaining <= 60, run.canceled

    async def look_async():
        return look()

    graph.add(look, name="compute")
    graph.add(look, name="io", lane="io")
    graph.add(look_async, name="loop")

    result = executor.run(graph.compile(), {"x": 1, "more": 2}, timeout=60)

    env = {"x": 1, "more": 2}
    assert result.values == {name: (name, env, True, False) for name in ("compute", "io", "loop")}
    assert current_run() is None


def test_nodes_see_the_context_variables_of_whoever_started_the_run(executor):
    who = contextvars.ContextVar("who", default="nobody")
    graph = Graph()

    def look():
        return who.get()

    async def look_async():
        return who.get()

    graph.add(look, name="compute")
    graph.add(look, name="io", lane="io")
    graph.add(look_async, name="loop")
    who.set("me")

    assert set(executor.run(graph.compile()).values.values()) == {"me"}


def test_waiting_for_a_run_inside_a_node_is_refused_before_it_can_lock_up(executor):
    graph, inner = Graph(), diamond()
    graph.add(lambda: executor.run(inner, {"x": 1}), name="nested")

    async def nested_async():
        return (await executor.arun(inner, {"x": 1}))["bottom"]

    graph.add(nested_async, name="awaits")

    with pytest.raises(BadCall, match="inside a node"):
        executor.run(graph.compile())

    good = Graph()
    good.add(nested_async, name="awaits")
    assert executor.run(good.compile())["awaits"] == 10


def test_a_closed_executor_runs_nothing(executor):
    executor.close()

    with pytest.raises(PoolClosedError):
        executor.run(diamond(), {"x": 1})


def test_the_snapshot_counts_what_runs_and_what_is_ready(executor):
    graph, entered, leave = Graph(), threading.Semaphore(0), threading.Event()

    def block():
        entered.release()
        assert leave.wait(60)

    for number in range(5):
        graph.add(block, name=f"n{number}")
    run = executor.submit(graph.compile())
    entered.acquire()
    entered.acquire()

    now = executor.snapshot()
    leave.set()
    run.result()
    after = executor.snapshot()

    assert (now.kind, now.in_flight, now.pending_queue_depth) == ("graph", 2, 3)
    assert now.load_by_worker == (1, 1)
    assert (
        after.in_flight,
        after.pending_queue_depth,
        after.totals["runs_ok"],
        after.totals["succeeded"],
    ) == (
        0,
        0,
        1,
        5,
    )
    assert run.result().node("n0") == NodeStatus.OK


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"compute": 0}, "compute"),
        ({"io": 1.5}, "io"),
        ({"tasks": 0}, "tasks"),
        ({"trace": 2}, "trace"),
        ({"grace": -1}, "grace"),
        ({"processes": 0}, "processes"),
    ],
)
def test_a_wrong_option_of_the_executor_is_named(options, word):
    with pytest.raises(ValueError, match=word):
        GraphExecutor(**options)
