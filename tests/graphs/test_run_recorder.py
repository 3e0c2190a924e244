"""What `lanes()` shows of a graph, and that a run costs no more without it."""

import asyncio
import gc
import threading
import weakref

import pytest

from penstock.graphs import trace
from penstock.graphs.builder import Graph


def chain():
    graph = Graph("chain")

    @graph.node
    def first():
        return 1

    @graph.node(lane="io")
    def second(first):
        return first + 1

    @graph.node
    async def third(second):
        await asyncio.sleep(0)
        return second + 1

    return graph.compile()


def test_nothing_is_recorded_until_somebody_looks(executor):
    before = executor.run(chain())
    shown = executor.lanes()
    watched, after = executor.run(chain()), executor.run(chain())

    assert (before.trace, shown, after.trace) == (None, None, None)
    assert watched.trace is not None


def test_a_run_is_shown_as_bars_by_worker(executor):
    executor.lanes()
    executor.run(chain())
    lanes = executor.lanes()

    assert (lanes.graph, lanes.status, lanes.nodes, lanes.left_out) == ("chain", "ok", 3, 0)
    assert [(bar.node, bar.lane) for bar in lanes.bars] == [
        ("first", "compute"),
        ("second", "io"),
        ("third", "io"),
    ]
    assert [bar.worker.rpartition("-")[0] for bar in lanes.bars] == ["compute", "io", "loop"]
    assert all(0 <= bar.ready <= bar.started <= bar.ended <= lanes.seconds for bar in lanes.bars)
    assert all(bar.critical and not bar.failed for bar in lanes.bars)


def test_a_run_is_shown_while_it_goes_on(executor):
    reached, go = threading.Event(), threading.Event()
    graph = Graph("slow")

    @graph.node
    def before():
        return 1

    @graph.node
    def slow(before):
        reached.set()
        go.wait(30)

    executor.lanes()
    run = executor.submit(graph.compile())
    reached.wait(30)
    during = executor.lanes()
    go.set()
    run.result()
    after = executor.lanes()

    assert during.status == "running"
    assert [(bar.node, bar.ended is None) for bar in during.bars] == [("before", False), ("slow", True)]
    assert [(bar.node, bar.ended is None) for bar in after.bars] == [("before", False), ("slow", False)]


def test_whoever_looks_again_after_the_end_sees_another_run(executor):
    executor.lanes()
    executor.run(chain())
    first = executor.lanes()
    executor.run(chain())
    second = executor.lanes()

    assert second.run > first.run


@pytest.mark.parametrize(("young", "shown"), [(1_000, "ok"), (0, "running")])
def test_a_run_that_has_only_begun_does_not_hide_the_one_before_it(executor, monkeypatch, young, shown):
    monkeypatch.setattr(trace, "_YOUNG", young)
    reached, go = threading.Event(), threading.Event()
    graph = Graph("slow")

    @graph.node
    def slow():
        reached.set()
        go.wait(30)

    executor.lanes()
    executor.run(chain())
    executor.lanes()
    run = executor.submit(graph.compile())
    reached.wait(30)
    lanes = executor.lanes()
    go.set()
    run.result()

    assert lanes.status == shown


def test_a_node_that_failed_shows(executor):
    graph = Graph("broken")

    @graph.node
    def broken():
        raise ValueError("no")

    executor.lanes()
    executor.run(graph.compile(), check=False)
    lanes = executor.lanes()

    assert (lanes.status, [bar.failed for bar in lanes.bars]) == ("error", [True])


def test_of_a_run_that_is_over_no_value_is_kept(executor):
    class Large:
        pass

    graph = Graph("large")

    @graph.node
    def large():
        return Large()

    executor.lanes()
    value = weakref.ref(executor.run(graph.compile())["large"])
    executor.lanes()
    gc.collect()

    assert value() is None


def test_who_says_that_a_run_is_not_to_be_recorded_is_obeyed(executor):
    executor.lanes()

    assert executor.run(chain(), trace=False).trace is None


@pytest.mark.parametrize(("most", "shown"), [(2, ["second", "third"]), (5, ["first", "second", "third"])])
def test_of_many_bars_the_latest_are_shown(executor, monkeypatch, most, shown):
    monkeypatch.setattr(trace, "_MOST_BARS", most)
    executor.lanes()
    executor.run(chain())
    lanes = executor.lanes()

    assert [bar.node for bar in lanes.bars] == shown
    assert lanes.left_out == 3 - len(shown)


def test_a_huge_graph_is_not_recorded_only_to_be_looked_at(executor, monkeypatch):
    monkeypatch.setattr(trace, "_MOST_NODES", 2)
    executor.lanes()

    assert executor.run(chain()).trace is None
