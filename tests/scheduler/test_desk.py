from __future__ import annotations

import pytest

from penstock.core.errors import BadIntent, IllegalMove, NotFound, StaleDispatch
from penstock.core.jobs.end_rules import DispatchPhase, EndReason
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.types import SECOND
from penstock.scheduler.dispatcher import WorkerKinds


def kinds(addon_id=None, *types):
    from penstock.scheduler.dispatcher import WorkerKinds

    return WorkerKinds(addon_id, frozenset(types))


def running(works, **fields):
    [job_id] = works.submit(**fields)
    works.step()
    return job_id, works.job_service.lease(job_id, "w1")


def test_the_two_step_way_from_submit_to_done(works):
    [job_id] = works.submit()
    works.step()
    [offered] = works.job_service.dispatchable("a")
    lease = works.job_service.lease(job_id, "w1")
    answer = works.job_service.heartbeat(lease.dispatch_id, progress=0.5)
    landed = works.job_service.complete(lease.dispatch_id, '{"ok": true}')

    assert offered.job_id == job_id
    assert answer.stop is None
    assert str(landed) == works.state(job_id) == "DONE"
    assert works.kinds(job_id) == ["SUBMITTED", "DISPATCHING", "RUNNING", "DONE"]


def test_the_one_step_way(works):
    ids = works.submit(n=3)
    claimed = works.job_service.claim(kinds("a"), limit=2, worker="w1")

    assert [c.job.job_id for c in claimed] == ids[:2]
    assert {works.state(c.job.job_id) for c in claimed} == {"RUNNING"}
    assert works.state(ids[2]) == "QUEUED"


def test_a_claim_takes_up_what_was_reserved_before_it_came(works):
    [job_id] = works.submit()
    works.step()
    [claimed] = works.job_service.claim(kinds("a"))

    assert claimed.job.job_id == job_id
    assert claimed.dispatch.fence == 1


def test_a_claim_takes_only_what_its_worker_can_run_and_reserves_what_stands_before_it(works):
    [other] = works.submit(addon_id="b", priority=90)
    [mine] = works.submit(job_type="x")
    [claimed] = works.job_service.claim(kinds("a", "x"))

    assert claimed.job.job_id == mine
    assert works.state(other) == "DISPATCHING"


def test_jobs_that_a_worker_comes_for_are_left_in_line_until_it_stays_away(works):
    assert works.job_service.claim(kinds("a")) == []
    [job_id] = works.submit()
    works.step()
    assert works.state(job_id) == "QUEUED"

    works.later(31)
    works.step()
    assert works.state(job_id) == "DISPATCHING"


def test_a_job_that_comes_back_brings_its_checkpoint(works):
    works.submit()
    [first] = works.job_service.claim(kinds())
    works.job_service.heartbeat(first.dispatch.dispatch_id, checkpoint='{"page": 3}')
    works.job_service.release(first.dispatch.dispatch_id)
    [second] = works.job_service.claim(kinds())

    assert first.checkpoint is None
    assert second.checkpoint == '{"page": 3}'


def test_bad_input_names_the_field_and_changes_nothing(works):
    with pytest.raises(BadIntent, match="cost_units"):
        works.submit(cost_units=91)
    assert works.store.events(0, 10) == []


def test_a_bulk_with_one_bad_job_is_refused_whole(works):
    from penstock.core.jobs.intent import Intent

    with pytest.raises(BadIntent):
        works.job_service.submit([Intent(addon_id="a", job_type="t"), Intent(addon_id="a", job_type="")])
    assert works.store.events(0, 10) == []


@pytest.mark.parametrize("call", ["cancel", "retry", "edit", "lease"])
def test_an_unknown_job_is_not_found(works, call):
    with pytest.raises(NotFound):
        getattr(works.job_service, call)("no-such-job")


@pytest.mark.parametrize("call", ["heartbeat", "complete", "release"])
def test_an_unknown_lease_is_not_found(works, call):
    with pytest.raises(NotFound):
        getattr(works.job_service, call)("no-such-job.1")


def test_cancel_in_each_state(works):
    [queued] = works.submit()
    works.job_service.cancel(queued)
    [reserved] = works.submit()
    works.step()
    works.job_service.cancel(reserved)
    running_id, lease = running(works)
    works.job_service.cancel(running_id)

    assert [works.state(i) for i in (queued, reserved, running_id)] == ["CANCELED", "CANCELED", "RUNNING"]
    assert works.job_service.heartbeat(lease.dispatch_id).stop is EndReason.CANCELED
    works.job_service.complete(lease.dispatch_id)
    assert works.state(running_id) == "CANCELED"
    done, lease = running(works)
    works.job_service.complete(lease.dispatch_id)
    with pytest.raises(IllegalMove):
        works.job_service.cancel(done)


def test_cancel_twice_is_once(works):
    job_id, _ = running(works)
    works.job_service.cancel(job_id)
    before = works.store.events(0, 100)
    works.job_service.cancel(job_id)

    assert works.store.events(0, 100) == before


def test_a_reservation_that_was_canceled_cannot_be_leased(works):
    [job_id] = works.submit()
    works.step()
    works.job_service.cancel(job_id)

    with pytest.raises(StaleDispatch):
        works.job_service.lease(job_id)


def test_a_worker_that_stood_still_past_its_lease_can_change_nothing(works):
    job_id, old = running(works)
    works.later(31)
    works.step()
    works.later(60)
    works.step()
    new = works.job_service.lease(job_id)
    before = (works.store.job(job_id), works.store.events(0, 100))

    for call in (works.job_service.heartbeat, works.job_service.complete, works.job_service.release):
        with pytest.raises(StaleDispatch):
            call(old.dispatch_id)
    assert (works.store.job(job_id), works.store.events(0, 100)) == before
    assert works.job_service.complete(new.dispatch_id)


def test_a_report_after_the_expiry_is_too_late_though_nobody_has_swept(works):
    _, lease = running(works)
    works.later(30)

    with pytest.raises(StaleDispatch, match="expired"):
        works.job_service.complete(lease.dispatch_id)


def test_the_spending_limit_stops_a_run_and_blocks_its_job_until_somebody_decides(works):
    job_id, lease = running(works, cost_limit=1_000)
    assert works.job_service.heartbeat(lease.dispatch_id, spent=999).stop is None
    assert works.job_service.heartbeat(lease.dispatch_id, spent=1_200).stop is EndReason.COST_LIMIT_REACHED
    works.job_service.release(lease.dispatch_id)

    assert works.state(job_id) == "BLOCKED"
    assert "ALERT" in works.kinds(job_id)
    works.job_service.retry(job_id)
    works.step()
    again = works.job_service.lease(job_id)
    assert works.job_service.heartbeat(again.dispatch_id, spent=999).stop is None


def test_a_failed_job_comes_back_by_retry_alone(works):
    job_id, lease = running(works)
    works.job_service.fail(lease.dispatch_id, "boom")
    assert works.state(job_id) == "FAILED"

    assert str(works.job_service.retry(job_id).state) == "QUEUED"


def test_an_edit_is_checked_like_a_submit(works):
    [job_id] = works.submit(n=1)

    with pytest.raises(BadIntent, match="priority"):
        works.job_service.edit(job_id, priority=0)
    assert works.job_service.edit(job_id, priority=99).intent.priority == 99


def test_a_lease_without_a_job_is_given_denied_and_given_back(works):
    lease, _ = works.job_service.ask(AdmissionClass("guest", "t", 80), 50)
    nothing, decision = works.job_service.ask(AdmissionClass("guest", "t", 20), 50)

    assert lease.phase is DispatchPhase.LEASED
    assert nothing is None
    assert (decision.reason.code, decision.retry_after_sec) == ("no_room", 5.0)
    assert works.job_service.release(lease.dispatch_id) is None
    assert works.job_service.ask(AdmissionClass("guest", "t", 20), 50)[0]


def test_asking_often_wins_nothing_against_who_is_in_line(works):
    works.submit(cost_units=50)

    assert works.job_service.ask(AdmissionClass("guest", "t", 90), 50)[1].reason.code == "queued_ahead"


def test_the_hint_of_a_denial_is_never_an_invitation_to_spin(works):
    works.machine.draining = True
    _, decision = works.job_service.ask(AdmissionClass("guest", "t", 1), 100)

    assert decision.reason.code == "draining"
    assert decision.retry_after_sec >= 1


def test_what_a_deadline_missed_is_told(works):
    [job_id] = works.submit(deadline_at=works.now + 10 * SECOND, earliest_start_at=works.now + 9 * SECOND)
    works.later(10)
    works.step()

    assert works.state(job_id) == "FAILED"
    assert works.store.events(0, 10, job_id)[-1].reason == "deadline_passed"


def test_a_worker_that_names_no_types_is_not_given_what_only_the_runner_can_run(works):
    own, *_ = works.submit(job_type="penstock.command")
    other, *_ = works.submit(job_type="t")
    claimed = works.job_service.claim(WorkerKinds(), 5)

    assert [one.job.job_id for one in claimed] == [other]
    assert [
        one.job.job_id
        for one in works.job_service.claim(WorkerKinds(job_types=frozenset({"penstock.command"})), 5)
    ] == [own]
