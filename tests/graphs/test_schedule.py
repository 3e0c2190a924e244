"""Any callable on any lane, waited for, awaited or chained."""

import asyncio
import threading
from concurrent.futures import wait
from typing import Any

import pytest

from penstock.core.errors import CallCanceled, PoolClosedError
from penstock.graphs.executor import GraphExecutor
from penstock.graphs.scheduled import Scheduled


def thread_name():
    return threading.current_thread().name


async def async_thread_name():
    return threading.current_thread().name


def test_a_call_runs_on_the_lane_it_asks_for(executor):
    names = [
        executor.schedule(thread_name).result(),
        executor.schedule(thread_name, lane="compute").result(),
        executor.schedule(thread_name, lane="io").result(),
        executor.schedule(async_thread_name).result(),
    ]

    kinds = [name.removeprefix(executor.name).split("-")[1] for name in names]
    assert kinds == ["compute", "compute", "io", "loop"]


def test_arguments_arrive(executor):
    assert executor.schedule(lambda a, *, b: (a, b), 1, b=2).result() == (1, 2)


def test_a_call_can_be_awaited(executor):
    async def main():
        doubled = [executor.schedule(lambda x: 2 * x, x) for x in range(50)]
        return [await call for call in doubled]

    assert asyncio.run(main()) == [2 * x for x in range(50)]


def test_calls_are_futures(executor):
    calls = [executor.schedule(int, text) for text in "123"]

    done, _ = wait(calls)
    assert sorted(call.result() for call in done) == [1, 2, 3]


def test_calls_can_be_chained_across_lanes(executor):
    async def add_loop(names):
        return [*names, thread_name()]

    def add(names):
        return [*names, thread_name()]

    call = executor.schedule(add, [], lane="io").then(add_loop).then(add, lane="compute")

    kinds = [name.removeprefix(executor.name).split("-")[1] for name in call.result(timeout=60)]
    assert kinds == ["io", "loop", "compute"]


def test_an_error_skips_what_follows(executor):
    called: list[int] = []
    call = executor.schedule(int, "x").then(called.append)

    with pytest.raises(ValueError, match="invalid literal"):
        call.result(timeout=60)
    assert called == []


def test_a_call_that_has_not_begun_can_be_cancelled(executor):
    leave, calls = threading.Event(), list[int]()
    holds = [executor.schedule(leave.wait, 10) for _ in range(2)]
    waiting = executor.schedule(calls.append, 1)

    assert waiting.cancel()
    leave.set()
    with pytest.raises(CallCanceled) as caught:
        waiting.result()
    assert caught.value.phase == "queued"
    wait(holds)
    executor.schedule(lambda: None).result()
    assert calls == []


def test_cancelling_whoever_awaits_cancels_the_call(executor):
    entered, ended = threading.Event(), threading.Event()

    async def waits():
        entered.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    async def main():
        call = executor.schedule(waits)
        task = asyncio.ensure_future(_await(call))
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return call

    call = asyncio.run(main())

    assert call.cancelled()
    assert ended.wait(60)


def test_a_call_cancelled_by_somebody_else_does_not_cancel_whoever_awaits_it(executor):
    async def main():
        call = executor.schedule(asyncio.sleep, 30)
        asyncio.get_running_loop().call_later(0.01, call.cancel, "not needed")
        with pytest.raises(CallCanceled, match="not needed"):
            await call
        return "still here"

    assert asyncio.run(main()) == "still here"


async def _await(call):
    return await call


def test_what_follows_a_cancelled_call_is_cancelled(executor):
    leave = threading.Event()
    first = executor.schedule(leave.wait, 10, lane="io")
    second = first.then(print)
    first.cancel()
    leave.set()

    assert second.cancelled()


def test_closing_ends_what_is_scheduled(executor):
    leave = threading.Event()
    running = [executor.schedule(leave.wait, 10) for _ in range(2)]
    waiting = executor.schedule(print)
    threading.Timer(0.02, leave.set).start()
    executor.close()

    assert waiting.cancelled()
    assert all(call.cancelled() for call in running)
    with pytest.raises(PoolClosedError):
        executor.schedule(print)


@pytest.mark.parametrize("lane", ["compute", "io", "process", None])
def test_a_call_that_comes_when_close_has_listed_the_others_ends_all_the_same(lane):
    """In one order and no other: `schedule` has found the executor open, and `close` runs from start to end before the call is listed."""
    executor = GraphExecutor(compute=1, io=1)

    class ClosesFirst(set[Scheduled[Any]]):
        def add(self, call):
            executor.close()
            super().add(call)

    executor.live_calls = ClosesFirst()
    call = executor.schedule(async_thread_name if lane is None else thread_name, lane=lane)

    assert isinstance(call.exception(timeout=0), PoolClosedError)
    assert not executor.live_calls


@pytest.mark.parametrize("lane", ["gpu", ""])
def test_a_lane_that_does_not_exist_is_refused(executor, lane):
    with pytest.raises(ValueError, match="one of 'compute', 'io', 'process'"):
        executor.schedule(print, lane=lane)
    with pytest.raises(ValueError, match="async def"):
        executor.schedule(async_thread_name, lane="compute")


def test_a_thread_that_a_cancelled_call_holds_is_replaced():
    leave, entered = threading.Event(), threading.Event()

    def stuck():
        entered.set()
        leave.wait(60)

    with GraphExecutor(compute=1, grace=0.05) as executor:
        call = executor.schedule(stuck)
        entered.wait(60)
        call.cancel()
        value = executor.schedule(lambda: "fine").result(timeout=60)
        leave.set()

    assert value == "fine"
