"""Lists of jobs by time and by text, and how many jobs of each state a filter finds; the same on every store."""

from __future__ import annotations

import pytest

from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import Query


def found(kit, **fields):
    return [job.job_id for job in kit.store.find(Query(**fields))]


def test_jobs_are_found_by_the_time_at_which_they_were_created(kit):
    [first] = kit.submit()
    kit.later(60)
    [second] = kit.submit()

    assert found(kit, since=kit.now) == [second]
    assert found(kit, before=kit.now) == [first]
    assert found(kit, since=kit.now - 60 * SECOND, before=kit.now + 1) == [first, second]


@pytest.mark.parametrize("states", [(), (JobState.QUEUED,)])
@pytest.mark.parametrize(
    "part", ["thumb", "THUMB", "holiday", "Holiday.JPG", "red", "100%", "a_b", "\\", "Größe"]
)
def test_text_finds_a_job_by_its_type_payload_and_tags(kit, part, states):
    kit.submit(job_type="other", payload='{"path": "axb"}')
    [job_id] = kit.submit(
        job_type="thumbnail", payload='{"path": "Holiday.jpg 100% a_b c\\\\d Größe"}', tags=("dark-red",)
    )

    assert found(kit, text=part, states=states) == [job_id]


def test_text_finds_a_job_by_the_error_of_any_of_its_attempts(kit):
    _, dispatch = kit.start()
    kit.submit()
    kit.end(dispatch, EndReason.JOB_ERROR, error="Traceback ...\nOSError: No space left")

    assert found(kit, text="no SPACE") == [dispatch.job_id]
    assert found(kit, text="no such text") == []


def test_a_count_tells_the_states_of_the_jobs_that_match_whatever_the_page_shows(kit):
    _, dispatch = kit.start(addon_id="b")
    kit.end(dispatch, EndReason.JOB_ERROR, error="out of paint")
    kit.submit(3, payload='"paint"')
    kit.submit(2)

    assert kit.store.count(Query(text="paint", states=[JobState.DONE], limit=1, after=2)) == {
        JobState.FAILED: 1,
        JobState.QUEUED: 3,
    }
    assert kit.store.count(Query(addon_id="b")) == {JobState.FAILED: 1}
    assert kit.store.count(Query(job_type="nothing")) == {}


def test_the_jobs_before_one_are_those_of_its_ready_queue(kit):
    first, second, third = (kit.submit(cost_units=7)[0] for _ in range(3))
    [urgent] = kit.submit(cost_units=7, priority=60)
    [other] = kit.submit(cost_units=8)
    [later] = kit.submit(cost_units=7, earliest_start_at=kit.now + 60 * SECOND)
    jobs = {job.no: job.job_id for job in kit.store.find(Query())}

    before = {jobs[no]: count for no, count in kit.store.jobs_before(list(jobs), 2).items()}
    assert before == {urgent: 0, first: 1, second: 2, third: 2, other: 0}
    assert later not in before
    assert kit.store.jobs_before([], 2) == {}
