"""Arrays in a program: a function that runs once for each index."""

from __future__ import annotations

import pytest
from tests.waiting import LONG

import penstock
from penstock.core.errors import BadIntent, NotFound


@pytest.fixture
def scheduler(tmp_path):
    with penstock.Scheduler(str(tmp_path / "jobs.db"), capacity=100) as scheduler:
        yield scheduler


def test_a_function_runs_once_for_each_index_and_knows_its_own(scheduler):
    ran = []

    @scheduler.job(cost=1)
    def mark(word: str) -> int:
        job = penstock.current_job()
        ran.append((word, job.array_index))
        return 2 * job.array_index

    array = mark.enqueue_array(range(1, 31), "x", at_once=3)

    assert array.wait(LONG) == "DONE"
    assert sorted(ran) == [("x", n) for n in range(1, 31)]
    assert (array.done, array.progress, array.failed_indices) == (30, 1.0, "")
    assert array.job(17).result(LONG) == 34


def test_a_job_without_an_array_has_no_index(scheduler):
    @scheduler.job(cost=1)
    def index() -> int | None:
        return penstock.current_job().array_index

    assert index.enqueue().result(LONG) is None


def test_failed_indices_are_named_and_run_again(scheduler):
    broken = {3, 4, 9}

    @scheduler.job(cost=1)
    def mend() -> None:
        if penstock.current_job().array_index in broken:
            raise ValueError("broken")

    array = mend.enqueue_array(range(10), at_once=2)
    assert (array.wait(LONG), array.failed_indices, array.done) == ("FAILED", "3-4,9", 7)
    broken.clear()

    array.retry()

    assert (array.wait(LONG), array.failed_indices, array.done) == ("DONE", "", 10)


def test_a_bad_array_is_refused_by_name(scheduler):
    @scheduler.job(cost=1)
    def nothing() -> None:
        pass

    for indices, at_once in ((range(0), None), (range(10**9), None), ([1], 0), ([-1], None)):
        with pytest.raises(BadIntent, match="array"):
            nothing.enqueue_array(indices, at_once=at_once)
    with pytest.raises(NotFound):
        nothing.enqueue_array([1]).job(2)
