"""Runs take turns: however wide one of them is, the others are not behind it. Counted, not timed."""

import asyncio
import os
import threading

import pytest

from penstock.core.calls.graph_plan import Const
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor
from penstock.graphs.run import TURN_NODES

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))


class Counted:
    """A big run that says how far it is, and waits at its hundredth node until the small one has been submitted."""

    def __init__(self, size, **options):
        self.done = 0
        self.hundredth = threading.Event()
        self.go_on = threading.Event()
        self.size = size
        self.options = options

    def tick(self, *_):
        self.done += 1
        if self.done == 100:
            self.hundredth.set()
            assert self.go_on.wait(30)

    def wide(self):
        graph = Graph("wide")
        graph.add(lambda: 1, name="root")
        for number in range(self.size):
            graph.add(self.tick, name=f"n{number}", inputs={"_": ["root"]}, **self.options)
        return graph.compile()

    def deep(self):
        graph = Graph("deep")
        graph.add(self.tick, name="n0")
        for number in range(1, self.size):
            graph.add(self.tick, name=f"n{number}", inputs={"_": [f"n{number - 1}"]}, **self.options)
        return graph.compile()

    def mapped(self):
        graph = Graph("mapped")
        graph.add(self.tick, name="each", inputs={}, over=Const(range(self.size)), each="_", **self.options)
        return graph.compile()


def small(big, lane="compute"):
    graph = Graph("small")

    def note(*_):
        return big.done

    async def note_async(*_):
        return big.done

    fn, options = (note_async, {}) if lane == "async" else (note, {"lane": lane})
    graph.add(fn, name="a", **options)
    graph.add(fn, name="b", inputs={"_": ["a"]}, **options)
    graph.add(fn, name="c", inputs={"_": ["b"]}, **options)
    return graph.compile()


def passed_meanwhile(executor, big, big_plan, small_plan):
    """How many nodes of the big run were done between the submission of the small one and its last node."""
    run = executor.submit(big_plan)
    assert big.hundredth.wait(30)
    beside = executor.submit(small_plan)
    big.go_on.set()
    last = beside.result(timeout=60)["c"]
    run.cancel()
    return last - 100


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "size"), [("wide", 20_000 * SOAK), ("deep", 10_000), ("mapped", 20_000 * SOAK)]
)
def test_a_run_of_many_thousand_nodes_does_not_hold_up_one_of_three(shape, size):
    big = Counted(size)
    plan = getattr(big, shape)()
    with GraphExecutor(compute=1) as executor:
        passed = passed_meanwhile(executor, big, plan, small(big))

    assert passed <= 2 * TURN_NODES


def test_the_event_loop_takes_turns_too():
    big = Counted(5_000)
    graph = Graph("wide")

    async def tick():
        big.tick()
        await asyncio.sleep(0)

    for number in range(big.size):
        graph.add(tick, name=f"n{number}")
    with GraphExecutor(compute=1, tasks=10) as executor:
        passed = passed_meanwhile(executor, big, graph.compile(), small(big, "async"))

    assert passed <= 200


def test_a_slow_node_ends_its_turn_when_others_wait():
    """A turn is over after a while even if it had few nodes: two slow nodes in a row do not go first."""
    order, begun, go_on = [], threading.Event(), threading.Event()
    slow, quick = Graph("slow"), Graph("quick")

    def first():
        begun.set()
        assert go_on.wait(30)
        order.append("slow 1")

    slow.add(first, name="one")
    slow.add(lambda one: order.append("slow 2"), name="two")
    quick.add(lambda: order.append("quick"), name="quick")
    with GraphExecutor(compute=1) as executor:
        runs = [executor.submit(slow.compile())]
        assert begun.wait(30)
        runs.append(executor.submit(quick.compile()))
        threading.Event().wait(0.005)  # longer than a turn
        go_on.set()
        for run in runs:
            run.result(timeout=30)

    assert order == ["slow 1", "quick", "slow 2"]


def test_a_scheduled_call_takes_its_turn_among_the_runs():
    big = Counted(10_000)
    with GraphExecutor(compute=1) as executor:
        run = executor.submit(big.wide())
        assert big.hundredth.wait(30)
        call = executor.schedule(lambda: big.done)
        big.go_on.set()
        passed = call.result(timeout=60) - 100
        run.cancel()

    assert passed <= 2 * TURN_NODES
