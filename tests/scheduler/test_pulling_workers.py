"""Who sees a job first where some workers claim in one step and others poll for reservations."""

from __future__ import annotations

from penstock.core.jobs.admission import AdmissionClass
from penstock.core.jobs.types import AddonId
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.dispatcher import FOR_EVER, PullingWorkers, RoundWorkers

ANY, A, B = WorkerKinds(), WorkerKinds(AddonId("a")), WorkerKinds(AddonId("b"))
A_T = WorkerKinds(AddonId("a"), frozenset({"t"}))


def jobs(dispatches):
    return [dispatch.job_id for dispatch in dispatches]


def test_a_claim_without_filters_hides_no_job_from_a_worker_that_polls(kit):
    kit.job_service.claim(ANY)
    [job] = kit.submit()
    kit.step()

    assert jobs(kit.job_service.poll(A)) == [job]


def test_a_worker_that_polls_goes_on_seeing_jobs_between_claims_of_others(kit):
    kit.job_service.poll(A)
    for _ in range(3):
        kit.job_service.claim(ANY)
        [job] = kit.submit()
        kit.step()

        assert jobs(kit.job_service.poll(A)) == [job]
        kit.job_service.end(kit.job_service.lease(job).dispatch_id)
        kit.later(8)


def test_a_worker_of_another_addon_that_polls_changes_nothing(kit):
    kit.job_service.claim(ANY)
    [job] = kit.submit()
    kit.job_service.poll(B)
    kit.step()

    assert kit.state(job) == "QUEUED"
    assert [taken.job.job_id for taken in kit.job_service.claim(ANY)] == [job]


def test_a_worker_that_names_its_jobs_keeps_them_from_a_poll_for_everything(kit):
    kit.job_service.claim(A_T)
    [job] = kit.submit()
    kit.job_service.poll(ANY)
    kit.step()

    assert kit.state(job) == "QUEUED"


def test_a_claim_takes_what_was_reserved_for_a_worker_that_polls(kit):
    kit.job_service.claim(ANY)
    [job] = kit.submit()
    kit.job_service.poll(A)

    assert [taken.job.job_id for taken in kit.job_service.claim(ANY)] == [job]


def test_a_worker_that_stopped_polling_is_waited_for_no_longer(kit):
    kit.job_service.poll(A)
    kit.later(31)
    kit.job_service.claim(ANY)
    [job] = kit.submit()
    kit.step()

    assert kit.state(job) == "QUEUED"


def test_explain_tells_of_the_worker_that_asked_last(kit):
    kit.job_service.claim(ANY)
    kit.later(12)
    [job] = kit.submit()
    told = kit.job_service.explain(job)
    kit.job_service.poll(A)

    assert (told.reason, told.text) == (
        "awaits_worker",
        "Waiting for 0 s. It waits for a worker to claim it. A worker that may claim it last asked 12 s ago.",
    )
    assert "reserved" in kit.job_service.explain(job).text


def test_a_place_left_for_a_job_does_not_depend_on_which_worker_claimed_last():
    kinds = {"addon": B, "library": WorkerKinds(job_types=frozenset({"t"}))}
    classes = [AdmissionClass(AddonId(addon), "t", 1) for addon in "ba"]

    def places(*claimed):
        workers = PullingWorkers()
        for name in claimed:
            workers.came(kinds[name], FOR_EVER)
            workers.has_room(name, kinds[name], 1, FOR_EVER)
        round_workers = RoundWorkers(workers, 0)
        return [round_workers.take_place(each) for each in classes]

    assert places("addon", "library") == places("library", "addon")
