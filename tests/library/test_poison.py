"""Odd ends of functions in the library: each lands in a stated state, and its neighbours notice nothing."""

from __future__ import annotations

import asyncio
import sys

import pytest
from tests import poison
from tests.poison import NOT_FINITE, POISONS, STATES, STORED
from tests.waiting import LONG

import penstock
from penstock.core.jobs.types import EndReason


def as_coroutine(function):
    async def run():
        return function()

    return run


def run_all(scheduler, names, wrap=lambda function: function):
    """The state of each, and its error or its result; every second job is an innocent one."""
    beside = scheduler.job(name="neighbour")(poison.neighbour)
    jobs = {name: scheduler.job(name=name)(wrap(getattr(poison, name))) for name in names}
    ended, neighbours = {}, []
    with scheduler:
        handles = {}
        for n, (name, job) in enumerate(jobs.items()):
            handles[name] = job.enqueue()
            neighbours.append((n, beside.enqueue(n)))
        for name, handle in handles.items():
            try:
                ended[name] = ("DONE", handle.result(LONG))
            except penstock.JobFailed as error:
                ended[name] = (str(error.state), error.traceback)
        assert [n + 1 for n, _ in neighbours] == [handle.result(LONG) for _, handle in neighbours]
        ends = {one.end for _, handle in neighbours for one in scheduler.store.attempts(handle.id)}
        assert ends <= {
            EndReason.COMPLETED,
            EndReason.RELEASED,
        }  # a call that waits too long for a thread goes back to the queue
    return ended


def check(ended):
    assert {name: STATES[name] for name in ended} == {name: state for name, (state, _) in ended.items()}
    for name, words in NOT_FINITE.items():
        assert words in ended[name][1]
    assert all(ended[name][1] == result for name, result in STORED.items())
    for name, (state, text) in ended.items():
        assert state == "DONE" or (text and len(text) <= 20_000), name
        assert "\ufffd" in str(text) or "surrogate" not in name


def test_on_threads(make):
    check(run_all(make(), POISONS))


def test_on_the_event_loop(make):
    check(run_all(make(), POISONS, as_coroutine))


def test_on_processes(make):
    scheduler = make(kind="process", workers=2, crash_retries=[])

    ended = run_all(scheduler, [*POISONS, "leave_at_once"])

    assert "FAILED" == ended.pop("leave_at_once")[0]
    check(ended)


def test_on_postgresql(postgres):
    scheduler = penstock.Scheduler(postgres.dsn, workers=4, stop_timeout=10)
    try:
        check(run_all(scheduler, POISONS))
    finally:
        scheduler.close()


def test_a_task_that_a_coroutine_leaves_behind_cannot_stop_the_others(real):
    @real.job
    async def leaves_a_task():
        asyncio.get_running_loop().create_task(exits())
        await asyncio.sleep(0)
        return 1

    async def exits():
        sys.exit(3)

    @real.job
    async def later():
        return 2

    with real:
        first = leaves_a_task.enqueue()

        assert (1, 2) == (first.result(LONG), later.enqueue().result(LONG))


def test_a_job_in_a_process_may_have_another_name_than_its_function(make):
    scheduler = make(kind="process", workers=1)
    job = scheduler.job(poison.neighbour)
    other = scheduler.job(name="another")(poison.checkpoints)

    with scheduler:
        assert (6, "saved") == (job.enqueue(5).result(LONG), other.enqueue().result(LONG))


def test_a_checkpoint_with_nan_is_refused_by_name(real):
    @real.job
    def saves():
        try:
            penstock.current_job().save_checkpoint({"loss": float("nan")})
        except ValueError as error:
            return str(error)

    with real:
        words = saves.enqueue().result(LONG)

    assert "the checkpoint holds NaN at ['loss']: JSON has no NaN" in words


@pytest.mark.parametrize("option", [{"tags": ["caf\udce9"]}, {"unique_key": "a\0b"}])
def test_a_name_that_no_database_keeps_is_refused_where_it_is_given(real, option):
    job = real.job(name="neighbour")(poison.neighbour)

    with pytest.raises(ValueError, match="must be valid UTF-8 without NUL"):
        job.options(**option).enqueue(1)
