"""What a type checker makes of the calls: mypy runs over this file, and to run it is to see that the types are true."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, assert_type

import penstock
from penstock.flow.parallel import Flow, SyncFlow, parallel_limit, parallel_limit_sync
from penstock.flow.pullers import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable


async def length(word: str) -> int:
    return len(word)


def later(word: str) -> Awaitable[int]:
    return asyncio.ensure_future(length(word))


def plain(word: str) -> int:
    return len(word)


async def words() -> AsyncIterator[str]:
    yield "one"


async def test_the_result_has_the_type_that_fn_comes_to() -> None:
    assert_type(parallel_limit(["one"], 1, length), Flow[int])
    assert_type(parallel_limit(words(), 1, length), Flow[int])
    assert_type(parallel_limit(["one"], 1, later), Flow[int])
    assert_type(parallel_limit(["one"], 1, plain), Flow[int])
    assert_type(parallel_limit(["one"], 1, length, errors="skip", ordered=True), Flow[int])

    async for size in parallel_limit(["one"], 1, length):
        assert_type(size, int)
        assert isinstance(size, int)


async def test_a_future_of_an_executor_is_seen_through(request) -> None:
    pool = ThreadPoolExecutor(1)
    request.addfinalizer(pool.shutdown)

    def submitted(word: str) -> Future[int]:
        return pool.submit(plain, word)

    flow = parallel_limit(["one"], 1, submitted)
    assert_type(flow, Flow[int])

    assert isinstance(await anext(flow), int)


async def test_an_outcome_knows_its_item_and_its_value() -> None:
    flow = parallel_limit(["one"], 1, length, errors="settled")
    assert_type(flow, Flow[Outcome[str, int]])
    outcome = await anext(flow)
    assert_type(outcome.item, str)
    assert_type(outcome.value, int | None)
    assert_type(outcome.result(), int)

    assert (outcome.item, outcome.result()) == ("one", 3)


async def test_an_outcome_tells_a_type_checker_whether_there_is_a_value_or_an_error() -> None:
    async for outcome in parallel_limit(["one"], 1, length, errors="settled"):
        if outcome.ok is True:
            assert_type(outcome.value, int)
            assert_type(outcome.error, None)
        else:
            assert_type(outcome.value, None)
            assert_type(outcome.error, BaseException)
        if outcome.error is None:
            assert_type(outcome.value, int)
        else:
            assert_type(outcome.value, None)
        match outcome:
            case penstock.Returned(value=value):
                assert_type(value, int)
            case penstock.Raised(error=error):
                assert_type(error, BaseException)

        assert isinstance(outcome, penstock.Settled)
        assert outcome.ok


if TYPE_CHECKING:  # mypy follows the plain `if` too; pyright follows no truth of a member

    def narrowed(outcome: Outcome[str, int]) -> int:
        return outcome.value if outcome.ok else 0  # pyright: ignore[reportReturnType]


def test_the_sync_twin_has_the_types_of_the_function() -> None:
    executor: Executor | None = None
    flow = parallel_limit_sync(["one"], 1, plain, executor=executor)
    assert_type(flow, SyncFlow[int])
    assert_type(parallel_limit_sync(["one"], 1, plain, errors="settled"), SyncFlow[Outcome[str, int]])

    assert list(flow) == [3]
