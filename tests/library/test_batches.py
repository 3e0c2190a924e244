"""Batches of jobs in a program."""

from __future__ import annotations

import pytest

import penstock


def family(scheduler):
    @scheduler.job
    def work(n: int) -> int:
        if n < 0:
            raise ValueError("negative")
        return n

    @scheduler.job
    def total(label: str = "sum") -> list:
        return [label, sorted(parent.result or 0 for parent in penstock.current_job().parents)]

    @scheduler.job
    def warn() -> list[str]:
        return [parent.state for parent in penstock.current_job().parents]

    return work, total, warn


def test_a_callback_runs_when_all_jobs_have_ended(real):
    work, total, warn = family(real)
    with real.batch("nightly", on_end=(total, "all"), on_failure=warn) as batch:
        batch.enqueue_many(work, [1, 2, 3])
        batch.enqueue(work, 4)

    assert len(batch.jobs) == 4
    assert batch.progress() == (4, 0, 0, 0)
    with real:
        assert batch.wait(30) == (4, 4, 0, 0)
        assert batch.on_end.result(timeout=30) == ["all", [1, 2, 3, 4]]
    assert batch.on_failure.state == "CANCELED"


def test_a_callback_runs_when_the_first_job_has_failed(real):
    work, total, warn = family(real)
    with real.batch("nightly", on_end=total, on_failure=warn) as batch:
        batch.enqueue_many(work, [1, -2, 3])

    with real:
        assert batch.wait(30) == (3, 2, 1, 0)
        assert "FAILED" in batch.on_failure.result(timeout=30)
        assert batch.on_end.result(timeout=30)[1] == [0, 1, 3]
        assert batch.retry() == 1
        assert batch.wait(30) == (3, 2, 1, 0)


def test_a_batch_is_canceled_as_one_and_its_end_is_an_end(real):
    work, total, _ = family(real)
    with real.batch("nightly", on_end=total) as batch:
        batch.enqueue_many(work, range(20))

    assert batch.cancel() == 20
    assert batch.progress() == (20, 0, 0, 20)
    with real:
        assert batch.on_end.result(timeout=30) == ["sum", [0] * 20]


def test_a_block_that_raises_submits_nothing_and_a_name_is_used_once(real):
    work, _, _ = family(real)
    with pytest.raises(ZeroDivisionError), real.batch("nightly") as batch:
        batch.enqueue(work, 1)
        raise ZeroDivisionError
    assert batch.progress().total == 0

    with real.batch("nightly") as batch:
        batch.enqueue(work, 1)
    with pytest.raises(ValueError, match="already"), real.batch("nightly") as again:
        again.enqueue(work, 1)
    with pytest.raises(ValueError, match="must be 1..49 characters of A-Z"):
        real.batch("")
    with pytest.raises(ValueError, match="must be 1..49 characters of A-Z"):
        real.batch("a b")
    with pytest.raises(TypeError, match="on_end"):
        real.batch("x", on_end=print)


def test_an_empty_batch_is_done_at_once(real):
    _, total, warn = family(real)
    with real.batch("empty", on_end=total, on_failure=warn) as batch:
        pass

    assert (batch.state, batch.progress()) == ("DONE", (0, 0, 0, 0))
    assert batch.on_failure.state == "CANCELED"
    with real:
        assert batch.on_end.result(timeout=30) == ["sum", []]


def test_an_open_batch_takes_jobs_until_it_is_closed(real):
    work, total, _ = family(real)
    with real.batch("nightly", on_end=total, open=True) as batch:
        batch.enqueue(work, 1)
    waits = work.options(after=[batch]).enqueue(7)

    with real:
        assert batch.jobs[0].result(timeout=30) == 1
        assert batch.state == "RUNNING"
        batch.enqueue(work, 2)  # after the block it is a job at once
        work.options(batch="nightly").enqueue(3)
        real.get_batch("nightly").enqueue_many(work, [4, 5])
        assert real.get_batch("nightly").close() in ("RUNNING", "DONE")
        assert batch.wait(30) == (5, 5, 0, 0)
        assert batch.on_end.result(timeout=30) == ["sum", [1, 2, 3, 4, 5]]
        assert waits.result(timeout=30) == 7
    with pytest.raises(penstock.IllegalMove, match="takes no more jobs"):
        work.options(batch=batch).enqueue(6)
    with pytest.raises(penstock.NotFound, match="no batch 'other'"):
        work.options(batch="other").enqueue(6)
    with pytest.raises(penstock.NotFound, match="no batch 'other'"):
        real.get_batch("other")


def test_a_job_waits_for_a_whole_array(real):
    work, total, _ = family(real)
    array = work.enqueue_array(range(5), 1, at_once=2)
    last = work.options(after=[array]).enqueue(9)
    assert last.state == "QUEUED"
    with real:
        assert last.result(timeout=30) == 9
    assert array.state == "DONE"
