"""What type checkers see: an enqueued call is typed like the function. `make types` checks this file; what it must refuse is marked."""

from __future__ import annotations

from typing import assert_type

import penstock
from penstock.testing import VirtualScheduler


def test_a_job_is_typed_like_its_function() -> None:
    with VirtualScheduler(inline=True, capacity=90, crash_retries=[1, 2]) as scheduler:

        @scheduler.job
        def plain(path: str, deep: bool = False) -> int:
            return len(path) + deep

        assert_type(plain("a"), int)
        assert_type(plain.enqueue("a", deep=True).result(), int)
        assert_type(plain.enqueue_many(["a"])[0].result(), int)


def test_a_context_is_filled_in_and_not_asked_for() -> None:
    with VirtualScheduler(inline=True) as scheduler:

        @scheduler.job(unique=True)
        def told(ctx: penstock.JobContext, path: str) -> float:
            return ctx.attempt / 2

        assert_type(told("a"), float)
        assert_type(told.options(priority=3).enqueue("a").result(), float)


async def test_a_coroutine_gives_what_it_returns() -> None:
    with VirtualScheduler(inline=True) as scheduler:

        @scheduler.job(cost=5, retries=(60, 300), priority="HIGH")
        async def later(n: int) -> str:
            return str(n)

        assert_type(await later(1), str)
        assert_type(await (await later.enqueue_async(2)).wait(), str)


def wrong(scheduler: penstock.Scheduler, told: penstock.JobFunction[[str], float, float]) -> None:
    """Never called: each line is refused by the checker, or its mark would be."""
    told.enqueue(7)  # type: ignore[arg-type]  # that is the test
    told.enqueue()  # type: ignore[call-arg]  # that is the test
    told.options(colour="red")  # type: ignore[call-arg]  # that is the test
    scheduler.job(cost="much")  # type: ignore[call-overload]  # that is the test
    penstock.Scheduler("jobs.db", tempo=3)  # type: ignore[call-arg]  # that is the test
