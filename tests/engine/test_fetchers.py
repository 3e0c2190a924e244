"""Who sees a job first where some workers claim in one step and others poll for reservations."""

from __future__ import annotations

from penstock.core.words import AddonId
from penstock.engine.fetchers import Kinds

ANY, A, B = Kinds(), Kinds(AddonId("a")), Kinds(AddonId("b"))
A_T = Kinds(AddonId("a"), frozenset({"t"}))


def jobs(dispatches):
    return [dispatch.job_id for dispatch in dispatches]


def test_a_claim_without_filters_hides_no_job_from_a_worker_that_polls(works):
    works.desk.claim(ANY)
    [job] = works.submit()
    works.step()

    assert jobs(works.desk.poll(A)) == [job]


def test_a_worker_that_polls_goes_on_seeing_jobs_between_claims_of_others(works):
    works.desk.poll(A)
    for _ in range(3):
        works.desk.claim(ANY)
        [job] = works.submit()
        works.step()

        assert jobs(works.desk.poll(A)) == [job]
        works.desk.complete(works.desk.lease(job).dispatch_id)
        works.later(8)


def test_a_worker_of_another_addon_that_polls_changes_nothing(works):
    works.desk.claim(ANY)
    [job] = works.submit()
    works.desk.poll(B)
    works.step()

    assert works.state(job) == "QUEUED"
    assert [taken.job.job_id for taken in works.desk.claim(ANY)] == [job]


def test_a_worker_that_names_its_jobs_keeps_them_from_a_poll_for_everything(works):
    works.desk.claim(A_T)
    [job] = works.submit()
    works.desk.poll(ANY)
    works.step()

    assert works.state(job) == "QUEUED"


def test_a_claim_takes_what_was_reserved_for_a_worker_that_polls(works):
    works.desk.claim(ANY)
    [job] = works.submit()
    works.desk.poll(A)

    assert [taken.job.job_id for taken in works.desk.claim(ANY)] == [job]


def test_a_worker_that_stopped_polling_is_waited_for_no_longer(works):
    works.desk.poll(A)
    works.later(31)
    works.desk.claim(ANY)
    [job] = works.submit()
    works.step()

    assert works.state(job) == "QUEUED"


def test_explain_tells_of_the_worker_that_asked_last(works):
    works.desk.claim(ANY)
    works.later(12)
    [job] = works.submit()
    told = works.desk.explain(job)
    works.desk.poll(A)

    assert (told.reason, told.text) == (
        "awaits_worker",
        "waiting 0 s: waits for a worker to claim it; the last one that may asked 12 s ago",
    )
    assert "reserved" in works.desk.explain(job).text
