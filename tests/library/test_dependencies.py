"""Jobs of a program that wait for other jobs."""

from __future__ import annotations

import pytest

import penstock
from penstock.core.errors import JobCanceled, NotFound


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_child_reads_the_results_of_its_parents(make, kind):
    scheduler = make(kind=kind, workers=2)
    number, total = scheduler.job(number_of), scheduler.job(total_of)
    parents = number.enqueue_many([1, 2, 3])

    child = total.options(after=parents).enqueue()

    assert scheduler.store.job(child.id).unmet == 3
    with scheduler:
        assert child.result(timeout=30) == 60
    assert {parent.state for parent in parents} == {"DONE"}


def number_of(n: int) -> int:
    return n * 10


def total_of() -> int:
    parents = penstock.current_job().parents
    assert {parent.state for parent in parents} == {"DONE"}
    return sum(parent.result for parent in parents)


def test_conditions_are_given_beside_the_job(real):
    ran = []

    @real.job
    def fails() -> None:
        raise ValueError("as expected")

    @real.job
    def note(what: str) -> list[str]:
        ran.append(what)
        [parent] = penstock.current_job().parents
        return [parent.state]

    parent = fails.enqueue()
    after_end = note.options(after=[(parent, "done")]).enqueue("done")
    after_failure = note.options(after=[(parent.id, "failed")]).enqueue("failed")
    after_success = note.options(after=[parent]).enqueue("ok")

    with real:
        assert after_end.result(timeout=30) == ["FAILED"]
        assert after_failure.result(timeout=30) == ["FAILED"]
        with pytest.raises(
            JobCanceled, match=f"it was to run after job {parent.id[-8:]}:ok, which is FAILED"
        ):
            after_success.result(timeout=30)
    assert sorted(ran) == ["done", "failed"]


def test_explain_names_the_parents_and_the_way_out(real):
    @real.job
    def work() -> None: ...

    parents = work.enqueue_many([()] * 5)
    child = work.options(after=parents, if_unmet="wait").enqueue()

    explained = real.job_service.explain(child.id)

    assert explained.reason == "waits_for_parents"
    assert f"It waits for job {parents[0].id[-8:]} (QUEUED) to be DONE" in explained.text
    assert "and for 2 more jobs." in explained.text


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"after": "0190"}, TypeError, "list of jobs"),
        ({"after": [7]}, TypeError, "a job, the id of one"),
        ({"after": [("x", "ended")]}, TypeError, "'ok', 'done', 'failed'"),
        ({"if_unmet": "stop"}, ValueError, "'cancel', 'fail', 'wait', 'any'"),
        ({"after": ["x", "x"]}, ValueError, "names job x twice"),
        ({"after": [str(n) for n in range(10_001)]}, ValueError, "at most 10000"),
    ],
)
def test_a_wrong_option_is_refused_by_name(real, given, error, words):
    @real.job
    def work() -> None: ...

    with pytest.raises(error, match=words):
        work.options(**given).enqueue()


def test_an_unknown_parent_is_refused(real):
    @real.job
    def work() -> None: ...

    with pytest.raises(NotFound, match="there is no job nothing"):
        work.options(after=["nothing"]).enqueue()
