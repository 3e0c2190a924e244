"""A scheduler that starts where another one died: what was in flight lands once, and nothing runs twice at once."""

from __future__ import annotations

import pytest

from penstock.core.errors import StaleDispatch
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import MINUTE, SECOND, EndReason
from penstock.scheduler.maintenance import recover, workers_named
from penstock.scheduler.service import SchedulerService

OURS = workers_named("runner:")


def running(kit, worker, **fields):
    [job_id] = kit.submit(**fields)
    kit.step()
    return job_id, kit.job_service.lease(job_id, worker)


def test_what_our_runner_ran_is_put_back_as_one_crash_with_its_backoff(kit):
    job_id, _ = running(kit, "runner:1")
    kit.later(5)
    done = recover(kit.store, kit.rules, OURS)
    job = kit.store.job(job_id)

    assert (done.put_back, done.given_time) == (1, 0)
    assert (str(job.state), job.counters.crash, job.not_before) == ("QUEUED", 1, kit.now + MINUTE)
    assert kit.store.events(0, 100, job_id)[-1].reason == "scheduler_restarted"
    assert kit.store.ledger(kit.rules.host).units == 0


def test_its_processes_are_ended_before_anybody_else_could_be_given_the_job(kit):
    job_id, lease = running(kit, "runner:1")
    seen = []

    def survivors(dispatches):
        seen.append(([d.dispatch_id for d in dispatches], kit.state(job_id)))
        return [lease.dispatch_id]

    recover(kit.store, kit.rules, survivors)

    assert seen == [([lease.dispatch_id], "RUNNING")]


def test_a_process_that_would_not_end_keeps_its_job_from_starting_again(kit):
    job_id, _ = running(kit, "runner:1")
    recover(kit.store, kit.rules, lambda _: [])
    kit.step()

    assert kit.state(job_id) == "RUNNING"


def test_an_addons_lease_that_ran_out_while_nobody_listened_gets_the_time_of_one_lease(kit):
    job_id, lease = running(kit, "w1")
    kit.later(3_600)
    recover(kit.store, kit.rules, OURS)
    kit.step()
    answer = kit.job_service.heartbeat(lease.dispatch_id)

    assert kit.state(job_id) == "RUNNING"
    assert (answer.stop, answer.expires_at) == (None, kit.now + 30 * SECOND)
    kit.later(29)
    kit.step()
    assert kit.job_service.end(lease.dispatch_id)


def test_an_addons_worker_that_is_gone_costs_its_job_one_lease_and_one_crash(kit):
    job_id, lease = running(kit, "w1")
    kit.later(3_600)
    recover(kit.store, kit.rules, OURS)
    kit.later(30)
    kit.step()

    assert kit.state(job_id) == "QUEUED"
    assert kit.store.job(job_id).counters.crash == 1
    with pytest.raises(StaleDispatch):
        kit.job_service.end(lease.dispatch_id)


def test_a_reservation_waits_for_its_worker_once_more(kit):
    [job_id] = kit.submit()
    kit.step()
    kit.later(3_600)
    recover(kit.store, kit.rules, OURS)
    kit.step()

    assert kit.state(job_id) == "DISPATCHING"
    assert kit.job_service.lease(job_id).phase is DispatchPhase.LEASED


def test_a_run_that_had_been_canceled_lands_as_canceled(kit):
    job_id, _ = running(kit, "runner:1")
    kit.job_service.cancel(job_id)
    recover(kit.store, kit.rules, OURS)

    assert kit.state(job_id) == "CANCELED"


def test_what_was_told_to_stop_is_given_no_more_time(kit):
    job_id, _ = running(kit, "w1")
    kit.job_service.cancel(job_id)
    kit.later(3_600)
    recover(kit.store, kit.rules, OURS)
    kit.step()

    assert kit.state(job_id) == "CANCELED"


def test_a_lease_without_a_job_is_given_back_with_its_scheduler(kit):
    from penstock.core.jobs.admission import AdmissionClass

    kit.job_service.ask(AdmissionClass("guest", "t", 80), 50, "runner:1")
    kit.job_service.ask(AdmissionClass("guest", "t", 5), 50, "w1")
    recover(kit.store, kit.rules, OURS)

    assert [d.worker for d in kit.store.live()] == ["w1"]


def test_what_another_host_runs_is_none_of_our_business(kit):
    _, lease = running(kit, "runner:1")
    from msgspec.structs import replace

    other = replace(kit.rules, host="elsewhere")
    recover(kit.store, other, OURS)

    assert kit.store.dispatch(lease.dispatch_id) == lease


def test_recovering_twice_counts_once(kit):
    job_id, _ = running(kit, "runner:1")
    recover(kit.store, kit.rules, OURS)
    recover(kit.store, kit.rules, OURS)

    assert kit.store.job(job_id).counters.crash == 1


def test_the_sixth_crash_in_a_row_is_the_last(kit):
    [job_id] = kit.submit()
    for _ in range(6):
        kit.later(31 * 60)
        kit.step()
        kit.job_service.lease(job_id, "runner:1")
        recover(kit.store, kit.rules, OURS)

    assert kit.state(job_id) == "FAILED"


def test_a_house_recovers_before_it_ticks_and_says_so(kit):
    _, lease = running(kit, "runner:1")
    service = SchedulerService(kit.store, kit.rules, survivors=OURS)
    service.start("the second")
    service.stop()
    [told] = [e for e in kit.store.events(0, 100) if e.kind == "SCHEDULER_STARTED"]

    assert kit.store.dispatch(lease.dispatch_id).end is EndReason.SCHEDULER_RESTARTED
    assert told.data == {"holder": "the second", "put_back": 1, "given_time": 0}


@pytest.mark.parametrize(
    "first", [EndReason.MAX_RUNTIME_EXCEEDED, EndReason.PREEMPTION_TIMEOUT, EndReason.GRACEFUL_SHUTDOWN]
)
def test_a_job_that_was_canceled_while_it_was_being_stopped_does_not_run_again_after_a_crash(kit, first):
    job_id, lease = running(kit, "runner:1")
    kit.job_service.stop(lease.dispatch_id, first)
    kit.job_service.cancel(job_id)
    recover(kit.store, kit.rules, OURS)

    assert kit.state(job_id) == "CANCELED"


@pytest.mark.parametrize(
    "first", [EndReason.MAX_RUNTIME_EXCEEDED, EndReason.PREEMPTION_TIMEOUT, EndReason.GRACEFUL_SHUTDOWN]
)
def test_a_job_that_was_canceled_while_it_was_being_stopped_is_canceled_when_its_lease_is_over(kit, first):
    job_id, lease = running(kit, "w1")
    kit.job_service.stop(lease.dispatch_id, first)
    kit.job_service.cancel(job_id)
    kit.later(3_600)
    kit.step()

    assert kit.state(job_id) == "CANCELED"
    assert kit.kinds(job_id)[-1] == "CANCELED"
