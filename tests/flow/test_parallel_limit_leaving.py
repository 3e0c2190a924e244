from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from penstock.flow.parallel import parallel_limit

pytestmark = pytest.mark.usefixtures("no_task_is_left")


async def test_break_cancels_what_runs_at_once(calls):
    async def call(item):
        return item if item == 0 else await calls.call(item)

    async for _ in parallel_limit(range(9), 3, call):
        await calls.settle()
        break

    assert all(task.cancelling() for task in asyncio.all_tasks() if task.get_name() == "parallel_limit")
    await calls.settle()
    assert calls.canceled == [1, 2, 3]
    assert calls.running == []


async def test_an_error_in_the_body_cancels_what_runs(calls):
    async def call(item):
        return item if item == 0 else await calls.call(item)

    async def loop():
        async for _ in parallel_limit(range(9), 3, call):
            await calls.settle()
            raise LookupError

    with pytest.raises(LookupError):
        await loop()
    await calls.settle()

    assert calls.canceled == [1, 2, 3]


async def test_leaving_a_context_waits_until_everything_has_ended(calls):
    ended = []

    async def call(item):
        if item == 0:
            return item
        try:
            return await calls.call(item)
        finally:
            await calls.settle()
            ended.append(item)

    async with parallel_limit(range(9), 3, call) as flow:
        async for _ in flow:
            await calls.settle()
            break

    assert ended == [1, 2, 3]


async def test_closing_drops_results_and_ends_the_loop(calls):
    flow = parallel_limit(range(9), 3, calls.call)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()
    calls.end(0, 1)
    await taking
    await flow.aclose()
    await flow.aclose()

    assert [result async for result in flow] == []


async def test_closing_ends_the_loop_of_a_task_that_waits_for_a_result(calls):
    flow = parallel_limit(range(9), 3, calls.call)
    taking = asyncio.ensure_future(anext(flow, "end"))
    await calls.settle()
    await flow.aclose()

    assert await taking == "end"


async def test_a_flow_that_was_never_begun_can_be_closed(calls):
    flow = parallel_limit(calls.apulled_from(range(9)), 3, calls.call)
    await flow.aclose()

    assert [result async for result in flow] == []


async def test_a_call_that_closes_its_own_flow_is_told_that_this_cannot_be():
    async def call(item):
        await flow.aclose()

    flow = parallel_limit(range(3), 1, call)

    with pytest.raises(RuntimeError, match="cannot close the flow that it is part of"):
        await anext(flow)


async def test_cancelling_the_loop_cancels_the_rest_and_waits_for_it(calls):
    ended = []

    async def call(item):
        try:
            return await calls.call(item)
        finally:
            await calls.settle()
            ended.append(item)

    async def loop():
        async for _ in parallel_limit(range(9), 3, call):
            pass

    looping = asyncio.ensure_future(loop())
    await calls.settle()
    looping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looping

    assert ended == [0, 1, 2]


async def test_a_second_cancellation_reaches_calls_that_ignored_the_first(calls):
    async def stubborn(item):
        try:
            return await calls.call(item)
        except asyncio.CancelledError:
            return await calls.call(f"{item} again")

    flow = parallel_limit(range(9), 2, stubborn)
    looping = asyncio.ensure_future(anext(flow))
    await calls.settle()
    looping.cancel()
    await calls.settle()
    assert calls.running == ["0 again", "1 again"]
    looping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looping

    assert calls.running == []


async def test_closing_that_is_cancelled_still_waits_for_the_end(calls):
    ended = []

    async def call(item):
        try:
            return await calls.call(item)
        except asyncio.CancelledError:
            await calls.call(f"{item} cleans up")
        finally:
            ended.append(item)

    flow = parallel_limit(range(9), 2, call)
    taking = asyncio.ensure_future(anext(flow, "end"))
    await calls.settle()
    closing = asyncio.ensure_future(flow.aclose())
    await calls.settle()
    assert calls.running == ["0 cleans up", "1 cleans up"]
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing

    assert ended == [0, 1]
    assert await taking == "end"


async def test_a_timeout_around_the_loop_is_a_timeout(calls):
    async def loop():
        async with asyncio.timeout(0.01):
            async for _ in parallel_limit(range(9), 3, calls.call):
                pass

    with pytest.raises(TimeoutError):
        await loop()

    assert calls.canceled == [0, 1, 2]


@pytest.mark.parametrize("leave", ["close", "break"])
async def test_a_source_is_closed_on_leaving(calls, leave):
    closed = []

    def source():
        try:
            yield from range(9)
        finally:
            closed.append(True)

    async def echo(item):
        return item

    flow = parallel_limit(source(), 3, echo)
    await anext(flow)
    if leave == "close":
        await flow.aclose()
    else:
        del flow
        await calls.settle()

    assert closed == [True]


@pytest.mark.parametrize("how", ["close", "break", "error", "cancel"])
async def test_an_async_source_is_closed_on_leaving(calls, how):
    async def call(item):
        if item == 0:
            return item
        if how == "error":
            raise ValueError
        return await calls.call(item)

    async def loop():
        async for _ in flow:
            pass

    flow = parallel_limit(calls.apulled_from(range(9)), 2, call)
    await anext(flow)
    if how == "close":
        await flow.aclose()
    elif how == "break":
        del flow
        await calls.settle()
    elif how == "error":
        with pytest.raises(ValueError):
            await loop()
    else:
        looping = asyncio.ensure_future(loop())
        await calls.settle()
        looping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looping

    assert calls.closed


async def test_an_error_while_the_source_is_closed_is_raised_by_aclose():
    async def source():
        try:
            while True:
                yield 1
        finally:
            raise LookupError("closing")

    flow = parallel_limit(source(), 2, lambda x: x)
    await anext(flow)

    with pytest.raises(LookupError, match="closing"):
        await flow.aclose()


async def test_an_error_while_the_source_is_closed_does_not_hide_the_first():
    async def source():
        try:
            while True:
                yield 0
        finally:
            raise LookupError("closing")

    with pytest.raises(ZeroDivisionError):
        async for _ in parallel_limit(source(), 2, lambda x: 1 / x):
            pass


async def test_no_call_starts_for_an_item_that_comes_after_the_end(calls):
    async def source():
        yield 0
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            yield 1

    flow = parallel_limit(source(), 2, calls.call)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()
    calls.end(0)
    await taking
    await calls.settle()
    await flow.aclose()

    assert calls.started == [0]


async def test_closing_the_last_of_a_chain_closes_all(calls):
    first = parallel_limit(range(99), 2, calls.call)
    last = parallel_limit(first, 2, calls.call)
    taking = asyncio.ensure_future(anext(last))
    await calls.settle()
    assert calls.running == [0, 1]
    await last.aclose()
    with pytest.raises(StopAsyncIteration):
        await taking

    assert calls.running == []
    assert [result async for result in first] == []


async def test_a_flow_in_a_cycle_is_cancelled_when_it_is_collected(calls):
    holder: list[Any] = [parallel_limit(range(9), 2, calls.call)]
    holder.append(holder)
    taking = asyncio.ensure_future(anext(holder[0]))
    await calls.settle()
    calls.end(0)
    await taking
    await calls.settle()
    del holder, taking
    gc.collect()
    await calls.settle()

    assert calls.running == []


async def test_a_flow_may_be_dropped_on_another_thread(calls):
    box = [parallel_limit(range(9), 2, calls.call)]
    taking = asyncio.ensure_future(anext(box[0]))
    await calls.settle()
    calls.end(0)
    await taking
    del taking
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    await calls.settle()

    assert calls.running == []


def test_a_loop_that_ends_cancels_a_flow_that_somebody_still_holds(calls):
    async def main():
        flow = parallel_limit(range(9), 2, calls.call, errors="skip")
        taking = asyncio.ensure_future(anext(flow))
        await calls.settle()
        calls.end(0)
        await taking
        await calls.settle()
        return flow

    flow = asyncio.run(main())

    assert sorted(calls.canceled) == [1, 2]
    del flow


def test_break_just_before_the_loop_ends_leaves_nothing_to_warn_about(calls):
    async def call(item):
        return item if item == 0 else await calls.call(item)

    async def main():
        async for _ in parallel_limit(calls.apulled_from(range(9)), 2, call):
            await calls.settle()
            break

    asyncio.run(main())

    assert calls.running == []
    assert calls.closed


def test_a_flow_may_outlive_its_closed_event_loop(calls):
    loop = asyncio.new_event_loop()
    flow = parallel_limit([1, 2], 1, lambda x: x)
    assert loop.run_until_complete(anext(flow)) == 1
    loop.run_until_complete(calls.settle())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()

    del flow
