"""The test kit, used as the people who have it would."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import penstock
from penstock.testing import VirtualScheduler

pytest_plugins = ["pytester"]


def test_nothing_runs_until_it_is_drained(scheduler):
    seen = []
    job = scheduler.job(name="note")(lambda n: seen.append(n)).enqueue(7)

    assert "QUEUED" == job.state
    assert [] == seen

    assert 1 == scheduler.drain()
    assert [7] == seen
    assert "DONE" == job.state


def test_drain_also_runs_what_the_jobs_enqueue(scheduler):
    seen = []

    @scheduler.job
    def count(n: int) -> None:
        seen.append(n)
        if n:
            count.enqueue(n - 1)

    count.enqueue(3)

    assert 4 == scheduler.drain()
    assert [3, 2, 1, 0] == seen


def test_a_week_of_retries_passes_in_one_call(scheduler, clock):
    tries = []

    @scheduler.job(retries=[86_400] * 7)
    def flaky() -> None:
        tries.append(clock.now())
        raise OSError("still down")

    job = flaky.enqueue()

    assert 8 == scheduler.drain(advance=timedelta(days=8))
    assert timedelta(days=7) == tries[-1] - tries[0]
    assert "FAILED" == job.state
    with pytest.raises(penstock.JobFailed, match="OSError: still down"):
        job.result(0)


def test_advance_true_goes_as_far_as_there_is_something_to_wait_for(scheduler, clock):
    began = clock.now()
    run = scheduler.job(name="run")(lambda: None)
    job = run.options(not_before=timedelta(days=30)).enqueue()

    assert 0 == scheduler.drain()
    assert 1 == scheduler.drain(advance=True)
    assert "DONE" == job.state
    assert timedelta(days=30) == clock.now() - began


def test_a_job_is_not_run_before_its_time_and_is_run_at_it(scheduler, clock):
    @scheduler.job
    def later() -> str:
        return clock.now().isoformat()

    job = later.options(not_before=datetime(2030, 1, 2, tzinfo=UTC)).enqueue()

    assert 0 == scheduler.drain(advance=timedelta(hours=23))
    assert 1 == scheduler.drain(advance=timedelta(hours=2))
    assert "2030-01-02T00:00:00+00:00" == job.result(0)


def test_jobs_run_in_the_order_of_the_real_scheduler(scheduler):
    seen = []
    note = scheduler.job(name="note")(lambda word: seen.append(word))
    note.options(priority="LOW").enqueue("low")
    note.enqueue("normal")
    note.options(priority="URGENT").enqueue("urgent")

    scheduler.drain()

    assert ["urgent", "normal", "low"] == seen


def test_time_that_passes_inside_a_job_is_its_running_time(scheduler, clock):
    @scheduler.job(max_runtime=60)
    def slow(ctx: penstock.JobContext) -> None:
        for _ in range(1_000):
            clock.advance(10)
            ctx.check()

    job = slow.enqueue()
    scheduler.drain()

    assert "QUEUED" == job.state  # by the crash schedule, as max_runtime_exceeded says
    assert "TIMEOUT" in [str(event.kind) for event in job.events()]


def test_a_job_that_takes_long_keeps_its_lease(scheduler, clock):
    @scheduler.job
    def slow() -> str:
        clock.advance(timedelta(days=1))
        return "done"

    job = slow.enqueue()
    scheduler.drain()

    assert "done" == job.result(0)


def test_a_job_can_be_canceled_while_it_runs(scheduler):
    @scheduler.job
    def suicidal(ctx: penstock.JobContext) -> None:
        assert not ctx.canceled
        scheduler.get(ctx.id).cancel()
        assert ctx.canceled

    job = suicidal.enqueue()
    scheduler.drain()

    assert "CANCELED" == job.state


def test_coroutines_run_too_even_inside_a_test_that_is_one(scheduler):
    @scheduler.job
    async def twice(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    async def main():
        job = await twice.enqueue_async(21)
        scheduler.drain()
        return await job.wait()

    assert 42 == asyncio.run(main())


# assert_enqueued


@pytest.fixture
def index(scheduler):
    @scheduler.job
    def index(path: str, deep: bool = False) -> None:
        pass

    return index


def test_what_was_enqueued_can_be_asserted_with_and_without_arguments(scheduler, index):
    index.enqueue("/a")
    index.enqueue("/b", deep=True)

    scheduler.assert_enqueued(index)
    scheduler.assert_enqueued(index, count=2)
    [job] = scheduler.assert_enqueued(index, "/b", deep=True, count=1)
    scheduler.assert_enqueued(index, "/c", count=0)
    assert "QUEUED" == job.state


def test_a_failed_assertion_says_what_was_enqueued_instead(scheduler, index):
    index.options(not_before=60, priority=80).enqueue("/b")

    with pytest.raises(AssertionError) as failed:
        scheduler.assert_enqueued(index, "/a")

    expected = "index(path='/a') is not enqueued; enqueued are:\n  index(path='/b')  QUEUED, priority 80, due in 60 s"
    assert expected == str(failed.value)


def test_a_wrong_count_and_an_empty_queue_are_said_too(scheduler, index):
    with pytest.raises(AssertionError, match=r"index\(\.\.\.\) is not enqueued; nothing is enqueued"):
        scheduler.assert_enqueued(index)
    index.enqueue("/a")
    with pytest.raises(AssertionError, match=r"index\(\.\.\.\) is enqueued 1 times, not 2"):
        scheduler.assert_enqueued(index, count=2)


# inline


def test_inline_runs_a_call_where_it_is_enqueued():
    with VirtualScheduler(inline=True) as scheduler:
        double = scheduler.job(name="double")(lambda n: 2 * n)

        assert 42 == double.enqueue(21).result(0)
        assert [2, 4] == [job.result(0) for job in double.enqueue_many([1, 2])]


def test_inline_raises_the_error_of_the_function_itself():
    with VirtualScheduler(inline=True) as scheduler:

        @scheduler.job(retries=(60,))
        def boom() -> None:
            raise KeyError("gone")

        with pytest.raises(KeyError, match="gone"):
            boom.enqueue()


# over a program's own scheduler


def test_a_programs_own_scheduler_can_be_replaced_for_a_test(tmp_path):
    app = penstock.Scheduler(tmp_path / "jobs.db")

    @app.job
    def index(path: str) -> str:
        return path.upper()

    with VirtualScheduler.over(app) as scheduler:
        with app:
            job = index.enqueue("/a")
            scheduler.assert_enqueued(index, "/a")
            scheduler.drain()
            assert "/A" == job.result(0)

    assert not (tmp_path / "jobs.db").exists()
    assert "QUEUED" == index.enqueue("/b").state
    assert (tmp_path / "jobs.db").exists()
    app.close()


def test_a_clock_does_not_go_back_and_takes_only_spans(clock):
    with pytest.raises(ValueError, match="by is -1"):
        clock.advance(-1)
    with pytest.raises(TypeError, match="by is 'x'"):
        clock.advance("x")


# the plugin


@pytest.fixture
def alone(monkeypatch):
    """Without the plugins of this environment, which take longer to load than the test to run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_the_fixtures_are_there_for_anybody_who_has_penstock(pytester, alone):
    pytester.makepyfile(
        """
        def test_it(scheduler, clock):
            job = scheduler.job(name="add")(lambda a, b: a + b).options(not_before=60).enqueue(1, 2)
            assert scheduler.drain() == 0
            clock.advance(60)
            assert scheduler.drain() == 1
            assert job.result(0) == 3
        """
    )

    result = pytester.runpytest_subprocess("-p", "penstock.testing.plugin", "-p", "no:cacheprovider")

    result.assert_outcomes(passed=1)


def test_the_plugin_loads_nothing_of_penstock_before_a_test_asks(pytester, alone):
    pytester.makepyfile(
        """
        import sys

        def test_it():
            assert {"penstock.library.scheduler", "penstock.core", "apsw"} & set(sys.modules) == set()
        """
    )

    result = pytester.runpytest_subprocess("-p", "penstock.testing.plugin", "-p", "no:cacheprovider")

    result.assert_outcomes(passed=1)
