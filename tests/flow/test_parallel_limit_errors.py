from __future__ import annotations

import asyncio
import gc
import logging
import sys
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.flow.parallel import parallel_limit
from penstock.flow.pullers import Returned

pytestmark = pytest.mark.usefixtures("no_task_is_left")


async def take_until_error(flow):
    taken = []
    try:
        async for result in flow:
            taken.append(result)
    except Exception as error:
        return taken, error
    return taken, None


async def odd_ones_fail(x):
    await asyncio.sleep(0)
    if x % 2:
        raise ValueError(x)
    return x


def a_source_that_fails_after(count):
    yield from range(count)
    raise LookupError("source")


async def an_async_source_that_fails_after(count):
    for item in range(count):
        yield item
    raise LookupError("source")


# raise


async def test_the_first_error_is_raised_as_itself(calls):
    taking = asyncio.ensure_future(take_until_error(parallel_limit(range(9), 3, calls.call)))
    await calls.settle()
    error = ValueError("first")
    calls.fail(1, error)

    assert ([], error) == await taking


async def test_the_rest_has_been_cancelled_and_has_ended_when_the_error_is_raised(calls):
    cleaned_up = []

    async def call(item):
        try:
            return await calls.call(item)
        except asyncio.CancelledError:
            await calls.settle()
            cleaned_up.append(item)
            raise

    taking = asyncio.ensure_future(take_until_error(parallel_limit(range(9), 3, call)))
    await calls.settle()
    calls.fail(1, ValueError())
    await taking

    assert calls.canceled == [0, 2]
    assert cleaned_up == [0, 2]
    assert calls.started == [0, 1, 2]


async def test_the_rest_is_cancelled_at_once_even_if_the_loop_is_busy_elsewhere(calls):
    flow = parallel_limit(range(9), 3, calls.call)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()
    calls.end(0)
    await taking
    await calls.settle()
    calls.fail(1, ValueError())
    await calls.settle()

    assert calls.running == []
    with pytest.raises(ValueError):
        await anext(flow)


async def test_results_that_were_ready_before_the_error_come_out_before_it(calls):
    flow = parallel_limit(range(9), 3, calls.call)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()
    calls.end(0)
    await taking
    await calls.settle()
    calls.end(2)
    calls.fail(1, ValueError())
    await calls.settle()

    assert await anext(flow) == 2
    with pytest.raises(ValueError):
        await anext(flow)


async def test_an_error_that_was_dealt_with_goes_without_the_garbage_collector(alive):
    async def fail(item):
        payload = alive.payload()
        await asyncio.sleep(0)
        raise ValueError(payload)

    gc.collect()
    gc.disable()
    try:
        await take_until_error(parallel_limit(range(9), 3, fail))
        await asyncio.sleep(0)

        assert alive.now == 0
    finally:
        gc.enable()


async def test_a_flow_is_over_once_it_has_raised(calls):
    flow = parallel_limit(range(9), 3, odd_ones_fail)
    await take_until_error(flow)

    assert [result async for result in flow] == []


async def test_cancellation_breaks_only_once_into_a_call_that_cleans_up(calls):
    cleaned_up = []

    async def call(item):
        try:
            return await calls.call(item)
        finally:
            if item:
                await calls.settle()
                cleaned_up.append(item)

    flow = parallel_limit(range(3), 3, call)
    taking = asyncio.ensure_future(take_until_error(flow))
    await calls.settle()
    calls.fail(0, ValueError())
    while not calls.canceled:
        await asyncio.sleep(0)
    await flow.aclose()
    await taking

    assert cleaned_up == [1, 2]


async def test_a_call_that_swallows_its_cancellation_changes_nothing(calls):
    async def stubborn(item):
        try:
            return await calls.call(item)
        except asyncio.CancelledError:
            return "late"

    taking = asyncio.ensure_future(take_until_error(parallel_limit(range(9), 3, stubborn)))
    await calls.settle()
    calls.fail(1, ValueError())
    taken, error = await taking

    assert taken == []
    assert isinstance(error, ValueError)
    assert calls.started == [0, 1, 2]


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
async def test_a_call_cannot_end_the_loop_by_raising_what_ends_loops(kind):
    def call(item):
        raise kind

    _, error = await take_until_error(parallel_limit(range(9), 3, call))

    assert isinstance(error, RuntimeError)
    assert isinstance(error.__cause__, kind)


async def test_a_plain_function_that_fails_is_treated_alike():
    _, error = await take_until_error(parallel_limit([0], 1, lambda x: 1 / x))

    assert isinstance(error, ZeroDivisionError)


async def test_a_call_that_was_cancelled_by_somebody_else_cancels_the_loop(calls):
    flow = parallel_limit(range(9), 3, calls.call)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()
    calls.gates[1].cancel()

    with pytest.raises(asyncio.CancelledError):
        await taking
    assert calls.running == []


def test_what_ends_the_program_is_not_held_up():
    async def leave(item):
        await asyncio.sleep(0)
        sys.exit(f"item {item}")

    async def main():
        async for _ in parallel_limit(range(5), 3, leave, errors="skip"):
            pass

    with pytest.raises(SystemExit, match="item 0"):
        asyncio.run(main())


def test_a_program_that_survives_what_should_have_ended_it_finds_its_loop_ended():
    async def leave(item):
        await asyncio.sleep(0)
        sys.exit(f"item {item}")

    async def main():
        async for _ in parallel_limit(range(5), 3, leave, errors="skip"):
            pass

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    while not task.done():
        with pytest.raises(SystemExit):
            loop.run_until_complete(task)
    loop.close()

    assert isinstance(task.exception(), SystemExit)


# skip


@pytest.mark.parametrize("ordered", [False, True])
async def test_skip_leaves_failures_out_and_counts_them(ordered):
    flow = parallel_limit(range(20), 3, odd_ones_fail, errors="skip", ordered=ordered)

    assert list(range(0, 20, 2)) == [result async for result in flow]
    assert flow.skipped == 10


async def test_skipped_failures_are_logged_with_their_item(caplog):
    caplog.set_level(logging.DEBUG, logger="penstock.flow")
    async for _ in parallel_limit(["this"], 1, lambda _: 1 / 0, errors="skip"):
        pass

    [record] = caplog.records
    assert record.getMessage() == "skipped 'this'"
    assert record.exc_info
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_skipped_failure_gives_its_place_to_the_next_item(calls, ordered):
    flow = parallel_limit(range(9), 2, calls.call, errors="skip", ordered=ordered)
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()
    calls.fail(0, ValueError())
    await calls.settle()

    assert calls.running == [1, 2]
    calls.end(1)
    assert await taking == 1
    await flow.aclose()


async def test_a_flow_of_nothing_but_failures_ends():
    def fail(item):
        raise ValueError(item)

    flow = parallel_limit(range(1000), 3, fail, errors="skip", ordered=True)

    assert [result async for result in flow] == []
    assert flow.skipped == 1000


# settled


@pytest.mark.parametrize("ordered", [False, True])
async def test_settled_tells_the_outcome_of_every_item(ordered):
    outcomes = [
        o async for o in parallel_limit(range(4), 2, odd_ones_fail, errors="settled", ordered=ordered)
    ]

    assert sorted((o.item, o.ok) for o in outcomes) == [(0, True), (1, False), (2, True), (3, False)]
    assert {0, 2} == {o.value for o in outcomes if o.ok}
    assert {1, 3} == {o.error.args[0] for o in outcomes if not o.ok}


async def test_an_outcome_gives_its_value_or_raises_its_error():
    good, bad = [o async for o in parallel_limit([0, 1], 1, odd_ones_fail, errors="settled", ordered=True)]

    assert good.result() == 0
    with pytest.raises(ValueError):
        bad.result()


def test_an_outcome_cannot_be_changed():
    outcome: Any = Returned("item", 1)

    with pytest.raises(AttributeError):
        outcome.value = 2
    assert not hasattr(outcome, "__dict__")
    assert Returned("item", 1) == outcome


@pytest.mark.parametrize("gate", [asyncio.Future, Future])
async def test_a_call_cancelled_by_somebody_else_is_an_outcome_too(gate):
    gates = [gate() for _ in range(3)]
    flow = parallel_limit(range(3), 2, gates.__getitem__, errors="settled", ordered=True)
    taking = asyncio.ensure_future(anext(flow))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gates[0].cancel()
    outcome = await taking
    gates[1].set_result("one")
    gates[2].set_result("two")

    assert outcome.item == 0
    assert isinstance(outcome.error, asyncio.CancelledError)
    assert [o.value async for o in flow] == ["one", "two"]


# The source


@pytest.mark.parametrize("errors", ["raise", "skip", "settled"])
@pytest.mark.parametrize("source", [a_source_that_fails_after, an_async_source_that_fails_after])
async def test_an_error_of_the_source_is_raised_whatever_becomes_of_calls(source, errors):
    _, error = await take_until_error(parallel_limit(source(5), 2, odd_ones_fail, errors=errors))

    assert isinstance(error, ValueError if errors == "raise" else LookupError)


@pytest.mark.parametrize("source", [a_source_that_fails_after, an_async_source_that_fails_after])
async def test_an_error_of_the_source_cancels_what_runs(calls, source):
    taking = asyncio.ensure_future(take_until_error(parallel_limit(source(2), 5, calls.call)))

    assert isinstance((await taking)[1], LookupError)
    assert calls.canceled == [0, 1]


@pytest.mark.parametrize("errors", ["skip", "settled"])
@pytest.mark.parametrize("source", [a_source_that_fails_after, an_async_source_that_fails_after])
async def test_where_errors_are_borne_what_runs_comes_out_before_that_of_the_source(calls, source, errors):
    taking = asyncio.ensure_future(take_until_error(parallel_limit(source(2), 5, calls.call, errors=errors)))
    await calls.settle()
    calls.end(0, 1)
    taken, error = await taking

    assert len(taken) == 2
    assert isinstance(error, LookupError)


async def test_a_source_cancelled_by_somebody_else_cancels_the_loop(calls):
    gate = asyncio.get_running_loop().create_future()

    async def source():
        yield 0
        await gate

    flow = parallel_limit(source(), 3, calls.call, errors="skip")
    taking = asyncio.ensure_future(anext(flow))
    await calls.settle()
    gate.cancel()

    with pytest.raises(asyncio.CancelledError):
        await taking
    assert calls.canceled == [0]
