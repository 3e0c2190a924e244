from __future__ import annotations

import asyncio
import contextvars
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any

import pytest

from penstock.flow import pullers
from penstock.flow.parallel import parallel_limit

pytestmark = pytest.mark.usefixtures("no_task_is_left")


async def double(x):
    await asyncio.sleep(0)
    return 2 * x


class Later:
    """An awaitable that is no coroutine."""

    def __init__(self, x):
        self.x = x

    def __await__(self):
        return double(self.x).__await__()


async def collect(flow):
    return [result async for result in flow]


@pytest.fixture
async def tasks_made():
    made = []

    def factory(loop, coro, **options):
        made.append(asyncio.Task(coro, loop=loop, **options))
        return made[-1]

    asyncio.get_running_loop().set_task_factory(factory)
    yield made
    asyncio.get_running_loop().set_task_factory(None)


# What comes out


async def test_every_item_gives_one_result():
    results = await collect(parallel_limit(range(100), 7, double))

    assert [2 * x for x in range(100)] == sorted(results)


async def test_results_come_in_the_order_in_which_the_calls_end(calls):
    flow = parallel_limit(range(3), 3, calls.call)
    taking = asyncio.ensure_future(collect(flow))
    await calls.settle()
    calls.end(2, 0, 1)

    assert await taking == [2, 0, 1]


async def test_ordered_results_come_in_the_order_of_the_items(calls):
    flow = parallel_limit(range(3), 3, calls.call, ordered=True)
    taking = asyncio.ensure_future(collect(flow))
    await calls.settle()
    calls.end(2, 0, 1)

    assert await taking == [0, 1, 2]


async def test_an_ordered_result_comes_out_as_soon_as_those_before_it_have(calls):
    flow = parallel_limit(range(4), 4, calls.call, ordered=True)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()
    calls.end(1, 0)

    assert [await taking, await anext(flow)] == [0, 1]
    await flow.aclose()


@pytest.mark.parametrize("items", [[], (), iter(()), range(0)])
async def test_no_items_give_no_results(items):
    assert await collect(parallel_limit(items, 3, double)) == []


async def test_an_async_source_is_pulled_by_one_call_at_a_time(calls):
    results = await collect(parallel_limit(calls.apulled_from(range(50)), 5, double))

    assert [2 * x for x in range(50)] == sorted(results)


async def test_a_call_that_let_others_go_first_does_not_go_to_a_source_that_is_being_asked(
    calls, monkeypatch
):
    monkeypatch.setattr(pullers, "_TIME_SLICE", 0)
    more = asyncio.Event()

    async def source():
        for item in range(5):
            yield item
        await more.wait()

    async def call(item):
        return await calls.call(item) if item >= 3 else item

    flow = parallel_limit(source(), 10, call)
    assert await anext(flow) == 0
    await calls.settle()
    calls.end(3)
    await calls.settle()
    calls.end(4)
    more.set()

    assert await collect(flow) == [1, 2, 3, 4]


async def test_an_async_source_that_never_waits_is_used_by_all_pullers(calls):
    async def at_once():
        for item in range(20):
            yield item

    flow = parallel_limit(at_once(), 5, calls.call)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()

    assert calls.running == [0, 1, 2, 3, 4]
    calls.end(0)
    await taking
    await flow.aclose()


@pytest.mark.parametrize("ordered", [False, True])
async def test_an_async_source_that_waits_still_keeps_n_calls_in_progress(calls, ordered):
    flow = parallel_limit(calls.apulled_from(range(20)), 4, calls.call, ordered=ordered)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()

    assert calls.running == [0, 1, 2, 3]
    calls.end(0)
    assert await taking == 0
    await calls.settle()
    assert calls.running == [1, 2, 3, 4]
    await flow.aclose()


async def test_a_slow_async_source_does_not_hold_up_results():
    more = asyncio.Event()

    async def source():
        yield 1
        await more.wait()
        yield 2

    flow = parallel_limit(source(), 3, double)

    assert await anext(flow) == 2
    more.set()
    assert await anext(flow) == 4
    assert await collect(flow) == []


async def test_flows_can_be_chained():
    doubled = parallel_limit(range(30), 3, double)

    assert [4 * x for x in range(30)] == sorted(await collect(parallel_limit(doubled, 4, double)))


# What fn may be


async def test_a_plain_functions_value_is_the_result():
    assert await collect(parallel_limit(range(3), 2, lambda x: x + 1, ordered=True)) == [1, 2, 3]


async def test_a_function_that_returns_an_awaitable_is_awaited():
    assert await collect(parallel_limit(range(3), 2, Later, ordered=True)) == [0, 2, 4]
    assert await collect(
        parallel_limit(range(3), 2, lambda x: asyncio.ensure_future(double(x)), ordered=True)
    ) == [0, 2, 4]
    assert await collect(parallel_limit(range(3), 2, partial(double), ordered=True)) == [0, 2, 4]


async def test_a_function_that_submits_to_an_executor_is_waited_for():
    with ThreadPoolExecutor(2) as pool:
        results = await collect(parallel_limit(range(50), 2, lambda x: pool.submit(abs, x), ordered=True))

    assert list(range(50)) == results


async def test_a_call_sees_the_callers_context_and_not_that_of_another_call():
    name = contextvars.ContextVar("name", default="nobody")
    name.set("caller")

    async def rename(x):
        seen = name.get()
        name.set(f"call {x}")
        await asyncio.sleep(0)
        return seen

    assert await collect(parallel_limit(range(20), 3, rename)) == ["caller"] * 20
    assert name.get() == "caller"


async def test_what_the_loop_sets_later_does_not_reach_its_calls(calls):
    name = contextvars.ContextVar("name", default="nobody")
    name.set("caller")

    async for seen in parallel_limit(range(20), 2, lambda _: name.get()):
        name.set("loop")
        await calls.settle()

        assert seen == "caller"


async def test_context_values_that_cannot_be_compared_do_no_harm():
    class Array:
        def __eq__(self, other):
            raise ValueError("ambiguous")

        def __hash__(self):
            return id(self)

    name: contextvars.ContextVar[Array] = contextvars.ContextVar("name")
    name.set(Array())

    async def rename(x):
        name.set(Array())
        return x

    assert len(await collect(parallel_limit(range(20), 3, rename))) == 20


# What n bounds


async def test_nothing_is_pulled_before_the_first_result_is_asked_for(calls):
    flow = parallel_limit(calls.pulled_from(range(10)), 3, calls.call)
    await calls.settle()

    assert not hasattr(calls, "pulled")
    await flow.aclose()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7, 100, 1000])
async def test_never_more_than_n_calls_are_in_progress_and_n_are_if_there_are_items(calls, n, ordered):
    flow = parallel_limit(range(3 * n), n, calls.call, ordered=ordered)
    taking = asyncio.ensure_future(collect(flow))
    await calls.settle()

    assert n == len(calls.running)
    for item in range(3 * n):
        calls.end(item)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert 3 * n == len(await taking)
    assert n == calls.most


async def test_a_short_source_does_not_cost_n_tasks(tasks_made):
    assert len(await collect(parallel_limit(range(3), 1000, double))) == 3
    assert len(tasks_made) < 30


async def test_a_slow_async_source_does_not_cost_n_tasks_an_item(calls, tasks_made):
    async def source():
        for item in range(100):
            await calls.settle()
            yield item

    assert len(await collect(parallel_limit(source(), 50, double))) == 100
    assert len(tasks_made) < 150


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_loop_that_takes_nothing_holds_back_the_source(calls, ordered):
    flow = parallel_limit(calls.pulled_from(range(100)), 4, double, ordered=ordered)
    first = await anext(flow)
    await calls.settle()

    assert first == 0
    assert len(calls.pulled) <= 2 * 4 + 1
    await flow.aclose()


@pytest.mark.parametrize("ordered", [False, True])
async def test_calls_that_end_one_by_one_and_results_not_taken_are_n_together(calls, ordered):
    flow = parallel_limit(calls.pulled_from(range(100)), 4, calls.call, ordered=ordered)
    taking = asyncio.ensure_future(anext(flow))
    for item in range(5):
        await calls.settle()
        calls.end(item)
    await calls.settle()

    assert await taking == 0
    assert calls.pulled == [0, 1, 2, 3, 4]
    assert await anext(flow) == 1
    await calls.settle()
    assert calls.pulled == [0, 1, 2, 3, 4, 5]
    await flow.aclose()


async def test_a_slow_head_lets_no_more_than_n_results_gather_behind_it(calls):
    flow = parallel_limit(calls.pulled_from(range(100)), 4, calls.call, ordered=True)
    taking = asyncio.ensure_future(anext(flow))
    for item in range(1, 4):
        await calls.settle()
        calls.end(item)
    await calls.settle()

    assert calls.pulled == [0, 1, 2, 3]
    calls.end(0)
    assert [await taking, await anext(flow), await anext(flow), await anext(flow)] == [0, 1, 2, 3]
    await flow.aclose()


async def test_calls_that_never_suspend_do_not_run_ahead_of_the_loop(calls):
    taken = 0
    async for _ in parallel_limit(calls.pulled_from(range(1000)), 3, lambda x: x):
        taken += 1

        assert len(calls.pulled) - taken <= 3


async def test_calls_that_never_suspend_do_not_gather_behind_a_slow_head(calls, monkeypatch):
    monkeypatch.setattr(pullers, "_TIME_SLICE", 60)  # no turn for others hides what is tested

    async def call(item):
        return await calls.call(item) if item < 3 else item

    flow = parallel_limit(calls.pulled_from(range(1000)), 3, call, ordered=True)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()
    calls.end(0)
    await calls.settle()

    assert await taking == 0
    assert calls.pulled == [0, 1, 2, 3]
    await flow.aclose()


async def test_many_calls_that_end_at_once_start_no_more_than_n_behind_a_slow_one(calls):
    flow = parallel_limit(calls.pulled_from(range(100)), 5, calls.call, ordered=True)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()
    calls.end(3, 4)
    await calls.settle()
    calls.end(0, 1)
    await calls.settle()

    assert await taking == 0
    assert calls.pulled == [0, 1, 2, 3, 4, 5]
    await flow.aclose()


@pytest.mark.parametrize("ordered", [False, True])
async def test_calls_that_never_suspend_need_few_tasks(tasks_made, ordered):
    await collect(parallel_limit(range(2000), 64, lambda x: x, ordered=ordered))

    assert len(tasks_made) < 200


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_loop_that_pauses_now_and_then_does_not_cost_a_task_each_time(tasks_made, ordered):
    async for value in parallel_limit(range(1200), 8, double, ordered=ordered):
        if value % 3 == 0:
            await asyncio.sleep(0)

    assert len(tasks_made) < 350


@pytest.mark.skipif(not hasattr(asyncio, "eager_task_factory"), reason="needs Python 3.12")
@pytest.mark.parametrize("ordered", [False, True])
async def test_tasks_may_start_eagerly(ordered):
    loop = asyncio.get_running_loop()
    loop.set_task_factory(getattr(asyncio, "eager_task_factory", None))
    at_once = await collect(parallel_limit(range(100), 7, lambda x: x, ordered=ordered))
    waiting = await collect(parallel_limit(range(100), 7, double, ordered=ordered))
    loop.set_task_factory(None)

    assert sorted(at_once) == list(range(100))
    assert sorted(waiting) == list(range(0, 200, 2))


async def test_reserve_then_build_keeps_n_payloads_alive_for_1000_items(alive):
    async def build_and_use(x):
        payload = alive.payload()
        await asyncio.sleep(0)
        assert payload is not None
        return x

    results = await collect(parallel_limit(range(1000), 8, build_and_use))

    assert len(results) == 1000
    assert alive.most == 8
    assert alive.now == 0


@pytest.mark.parametrize("ordered", [False, True])
async def test_payloads_that_are_results_are_dropped_once_taken(alive, ordered):
    async def build(x):
        await asyncio.sleep(0)
        return alive.payload()

    async for payload in parallel_limit(range(1000), 8, build, ordered=ordered):
        del payload

    assert alive.most <= 2 * 8 + 1
    assert alive.now == 0


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_puller_that_waits_for_its_next_item_keeps_no_payload(alive, ordered):
    more = asyncio.Event()

    async def source():
        for item in range(3):
            yield item
        await more.wait()

    async def build(item):
        payload = alive.payload()
        await asyncio.sleep(0)
        return payload

    flow = parallel_limit(source(), 3, build, ordered=ordered)
    for _ in range(3):
        await anext(flow)
    await asyncio.sleep(0)

    assert alive.now == 0
    more.set()
    assert await collect(flow) == []


async def test_many_items_take_no_memory():
    async def run(count):
        total = 0
        async for value in parallel_limit(iter(range(count)), 8, double):
            total += value
        return total

    await run(100)
    tracemalloc.start()
    try:
        await run(20_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 200_000


# Sharing the event loop


@pytest.mark.parametrize("errors", ["raise", "skip", "settled"])
@pytest.mark.parametrize("n", [1, 8, 1000])
async def test_long_calls_that_never_suspend_let_others_have_a_turn_in_between(errors, n):
    in_a_row = most_in_a_row = 0
    done = False

    async def other():
        nonlocal in_a_row
        while not done:
            in_a_row = 0
            await asyncio.sleep(0)

    async def busy(x):
        nonlocal in_a_row, most_in_a_row
        in_a_row += 1
        most_in_a_row = max(most_in_a_row, in_a_row)
        until = monotonic() + 0.0015
        while monotonic() < until:
            pass
        if errors == "skip":
            raise ValueError(x)
        return x

    task = asyncio.ensure_future(other())
    await collect(parallel_limit(range(40), n, busy, errors=errors))
    done = True
    await task

    assert most_in_a_row <= 3


async def test_two_tasks_cannot_take_from_one_flow(calls):
    flow = parallel_limit(range(3), 2, calls.call)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()

    with pytest.raises(RuntimeError, match="another task waits"):
        await anext(flow)
    calls.end(0)
    assert await taking == 0
    await flow.aclose()


# At the call


wrongly: Any = parallel_limit  # what a program without type checks could do


async def never(x):
    raise AssertionError("must not be called")


@pytest.mark.parametrize(
    ("n", "error", "words"),
    [
        (0, ValueError, "n must be at least 1, not 0"),
        (-3, ValueError, "n must be at least 1, not -3"),
        (True, TypeError, "n must be an int, not True"),
        (2.0, TypeError, "n must be an int, not 2.0"),
        ("8", TypeError, "n must be an int, not '8'"),
        (None, TypeError, "n must be an int, not None"),
        (float("inf"), TypeError, "n must be an int, not inf"),
    ],
)
def test_a_wrong_n_is_an_error_at_the_call(n, error, words):
    with pytest.raises(error, match=words):
        wrongly([1], n, never)


def test_a_wrong_fn_is_an_error_at_the_call():
    with pytest.raises(TypeError, match="fn must be callable, not int: pass the function"):
        wrongly([1], 1, 3)


def test_wrong_items_are_an_error_at_the_call():
    with pytest.raises(TypeError, match="items must be a sync or async iterable, not int"):
        wrongly(3, 1, never)
    with pytest.raises(TypeError, match="not function: call it first"):
        wrongly(collect, 1, never)
    coroutine = double(1)
    with pytest.raises(TypeError, match="not coroutine: await it first"):
        wrongly(coroutine, 1, never)
    coroutine.close()


def test_an_unknown_way_with_errors_is_an_error_at_the_call():
    with pytest.raises(ValueError, match="errors must be 'raise', 'skip' or 'settled', not 'ignore'"):
        wrongly([1], 1, never, errors="ignore")


def test_a_refused_call_has_not_touched_the_items():
    class Items:
        def __iter__(self):
            raise AssertionError("touched")

    with pytest.raises(ValueError):
        wrongly(Items(), 0, never)


async def test_a_number_that_counts_as_an_int_is_one():
    class Two:
        def __index__(self):
            return 2

        def __lt__(self, other):
            return other > 2

    assert await collect(wrongly(range(3), Two(), double, ordered=True)) == [0, 2, 4]
