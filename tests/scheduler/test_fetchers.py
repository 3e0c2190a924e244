"""Who sees a job first where some workers claim in one step and others poll for reservations."""

from __future__ import annotations

from penstock.core.jobs.types import AddonId
from penstock.scheduler.pulling_workers import WorkerKinds

ANY, A, B = WorkerKinds(), WorkerKinds(AddonId("a")), WorkerKinds(AddonId("b"))
A_T = WorkerKinds(AddonId("a"), frozenset({"t"}))


def jobs(dispatches):
    return [dispatch.job_id for dispatch in dispatches]


def test_a_claim_without_filters_hides_no_job_from_a_worker_that_polls(works):
    works.job_service.claim(ANY)
    [job] = works.submit()
    works.step()

    assert jobs(works.job_service.poll(A)) == [job]


def test_a_worker_that_polls_goes_on_seeing_jobs_between_claims_of_others(works):
    works.job_service.poll(A)
    for _ in range(3):
        works.job_service.claim(ANY)
        [job] = works.submit()
        works.step()

        assert jobs(works.job_service.poll(A)) == [job]
        works.job_service.complete(works.job_service.lease(job).dispatch_id)
        works.later(8)


def test_a_worker_of_another_addon_that_polls_changes_nothing(works):
    works.job_service.claim(ANY)
    [job] = works.submit()
    works.job_service.poll(B)
    works.step()

    assert works.state(job) == "QUEUED"
    assert [taken.job.job_id for taken in works.job_service.claim(ANY)] == [job]


def test_a_worker_that_names_its_jobs_keeps_them_from_a_poll_for_everything(works):
    works.job_service.claim(A_T)
    [job] = works.submit()
    works.job_service.poll(ANY)
    works.step()

    assert works.state(job) == "QUEUED"


def test_a_claim_takes_what_was_reserved_for_a_worker_that_polls(works):
    works.job_service.claim(ANY)
    [job] = works.submit()
    works.job_service.poll(A)

    assert [taken.job.job_id for taken in works.job_service.claim(ANY)] == [job]


def test_a_worker_that_stopped_polling_is_waited_for_no_longer(works):
    works.job_service.poll(A)
    works.later(31)
    works.job_service.claim(ANY)
    [job] = works.submit()
    works.step()

    assert works.state(job) == "QUEUED"


def test_explain_tells_of_the_worker_that_asked_last(works):
    works.job_service.claim(ANY)
    works.later(12)
    [job] = works.submit()
    told = works.job_service.explain(job)
    works.job_service.poll(A)

    assert (told.reason, told.text) == (
        "awaits_worker",
        "Waiting for 0 s. It waits for a worker to claim it. A worker that may claim it last asked 12 s ago.",
    )
    assert "reserved" in works.job_service.explain(job).text
