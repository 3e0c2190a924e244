"""Moments between two steps of two threads, which no test could wait for: played one after the other."""

import asyncio
import threading
from collections import deque
from contextvars import copy_context
from types import SimpleNamespace

from penstock.core.calls.graph_plan import Const
from penstock.graphs.builder import Graph
from penstock.graphs.executor import GraphExecutor
from penstock.graphs.lanes import LaneWorker, LoopLane, ThreadLane
from penstock.graphs.run import Run, RunQueue
from penstock.pools.timers import clock


class InBetween(list):
    """A list that calls a function just after an append, as if another thread came in."""

    def __init__(self, items, then):
        super().__init__(items)
        self.then = then

    def append(self, item):
        super().append(item)
        self.then()


def run_queue_of(lane):
    return RunQueue(SimpleNamespace(), lane, 0)


def test_a_node_that_comes_while_an_entry_retires_is_not_left_alone():
    """The thread that pushed it saw no free entry, so the thread that retires its entry must see the node."""
    run_queue = run_queue_of(SimpleNamespace(entries=1))
    run_queue.free_entries.pop()
    run_queue.free_entries = InBetween(run_queue.free_entries, lambda: run_queue.ready.append(7))

    assert run_queue.has_more()
    assert list(run_queue.free_entries) == []


def test_an_entry_that_somebody_else_took_up_again_retires():
    run_queue = run_queue_of(SimpleNamespace(entries=1))
    run_queue.free_entries.pop()

    def push():
        run_queue.ready.append(7)
        run_queue.free_entries.pop()

    run_queue.free_entries = InBetween(run_queue.free_entries, push)

    assert not run_queue.has_more()


def test_no_more_entries_than_there_are_workers():
    pushed: deque = deque()
    run_queue = run_queue_of(SimpleNamespace(entries=3, push=pushed.append))
    run_queue.ready.extend(range(100))
    run_queue.enter_lane(100)

    assert len(pushed) == 3


def test_a_worker_does_not_go_to_sleep_on_work_that_came_before_it_could_be_seen():
    lane = ThreadLane("lane", 1)
    worker = LaneWorker(lane, 1)
    lane.items.append(SimpleNamespace())
    thread = threading.Thread(target=lane.sleep, args=(worker,))
    thread.start()
    thread.join(5)
    slept = thread.is_alive()
    worker.wakeup.release()
    thread.join(5)

    assert not slept


def test_a_task_that_is_cancelled_before_its_first_step_still_settles():
    ended = threading.Event()

    class Unwanted:
        handle = None
        unwanted = True  # its run ended between being begun and having a task

        def node_name(self):
            return None

        def context(self):
            return copy_context()

        def invoke(self):
            raise AssertionError("it must not be called")

        def settle(self, value, error):
            assert isinstance(error, asyncio.CancelledError)
            ended.set()

    node_call = Unwanted()
    lane = LoopLane("loop", 1)
    lane.push(SimpleNamespace(next_call=lambda: node_call, has_more=lambda: False))
    settled = ended.wait(5)
    lane.stop()
    left = lane.join(clock() + 5)

    assert settled
    assert not left


def test_of_two_items_that_end_together_only_one_ends_the_map():
    """The second item ends between the first one's counting and its looking whether that was all."""
    graph = Graph()
    graph.add(lambda item: item, name="each", over=Const(["a", "b"]), limit=1)
    executor = GraphExecutor(compute=2)
    run = Run(executor, graph.compile(), {}, None, None)
    attempts = run.attempts
    first, second = attempts.begin(run, 0), attempts.begin(run, 0)
    ended = []

    class EndsTheSecond:
        def __enter__(self): ...

        def __exit__(self, *_):
            run.lock = threading.Lock()
            ended.append(attempts.store_value(second, "second"))

    run.lock = EndsTheSecond()
    ended.append(attempts.store_value(first, "first"))
    executor.close()

    assert ended == [True, False]
    assert run.values[0] == ["first", "second"]
