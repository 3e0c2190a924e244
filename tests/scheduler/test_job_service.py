from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.errors import BadIntent, IllegalMove, NotFound, StaleDispatch
from penstock.core.jobs.admission import AdmissionClass
from penstock.core.jobs.intent import MAX_PAYLOAD, Intent
from penstock.core.jobs.reasons import retry_after_sec
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.types import SECOND, EndReason
from penstock.core.jobs.workers import WorkerKinds


def kinds(addon_id=None, *types):
    from penstock.scheduler.dispatcher import WorkerKinds

    return WorkerKinds(addon_id, frozenset(types))


def running(kit, **fields):
    [job_id] = kit.submit(**fields)
    kit.step()
    return job_id, kit.job_service.lease(job_id, "w1")


def test_the_two_step_way_from_submit_to_done(kit):
    [job_id] = kit.submit()
    kit.step()
    [offered] = kit.job_service.dispatchable("a")
    lease = kit.job_service.lease(job_id, "w1")
    answer = kit.job_service.heartbeat(lease.dispatch_id, progress=0.5)
    landed = kit.job_service.end(lease.dispatch_id, result='{"ok": true}')

    assert offered.job_id == job_id
    assert answer.stop is None
    assert str(landed) == kit.state(job_id) == "DONE"
    assert kit.kinds(job_id) == ["SUBMITTED", "DISPATCHING", "RUNNING", "DONE"]


def test_the_one_step_way(kit):
    ids = kit.submit(n=3)
    claimed = kit.job_service.claim(kinds("a"), limit=2, worker="w1")

    assert [c.job.job_id for c in claimed] == ids[:2]
    assert {kit.state(c.job.job_id) for c in claimed} == {"RUNNING"}
    assert kit.state(ids[2]) == "QUEUED"


def test_a_claim_takes_up_what_was_reserved_before_it_came(kit):
    [job_id] = kit.submit()
    kit.step()
    [claimed] = kit.job_service.claim(kinds("a"))

    assert claimed.job.job_id == job_id
    assert claimed.dispatch.fence == 1


def test_a_claim_takes_only_what_its_worker_can_run_and_reserves_what_stands_before_it(kit):
    [other] = kit.submit(addon_id="b", priority=90)
    [mine] = kit.submit(job_type="x")
    [claimed] = kit.job_service.claim(kinds("a", "x"))

    assert claimed.job.job_id == mine
    assert kit.state(other) == "DISPATCHING"


def test_jobs_that_a_worker_comes_for_are_left_in_line_until_it_stays_away(kit):
    assert kit.job_service.claim(kinds("a")) == []
    [job_id] = kit.submit()
    kit.step()
    assert kit.state(job_id) == "QUEUED"

    kit.later(31)
    kit.step()
    assert kit.state(job_id) == "DISPATCHING"


def test_a_job_that_comes_back_brings_its_checkpoint(kit):
    kit.submit()
    [first] = kit.job_service.claim(kinds())
    kit.job_service.heartbeat(first.dispatch.dispatch_id, checkpoint='{"page": 3}')
    kit.job_service.release(first.dispatch.dispatch_id)
    [second] = kit.job_service.claim(kinds())

    assert first.checkpoint is None
    assert second.checkpoint == '{"page": 3}'


def test_bad_input_names_the_field_and_changes_nothing(kit):
    with pytest.raises(BadIntent, match="cost_units"):
        kit.submit(cost_units=91)
    assert kit.store.events(0, 10) == []


def test_a_bulk_with_one_bad_job_is_refused_whole(kit):
    from penstock.core.jobs.intent import Intent

    with pytest.raises(BadIntent):
        kit.job_service.submit([Intent(addon_id="a", job_type="t"), Intent(addon_id="a", job_type="")])
    assert kit.store.events(0, 10) == []


@pytest.mark.parametrize("call", ["cancel", "retry", "edit", "lease"])
def test_an_unknown_job_is_not_found(kit, call):
    with pytest.raises(NotFound):
        getattr(kit.job_service, call)("no-such-job")


@pytest.mark.parametrize("call", ["heartbeat", "end", "release"])
def test_an_unknown_lease_is_not_found(kit, call):
    with pytest.raises(NotFound):
        getattr(kit.job_service, call)("no-such-job.1")


def test_cancel_in_each_state(kit):
    [queued] = kit.submit()
    kit.job_service.cancel(queued)
    [reserved] = kit.submit()
    kit.step()
    kit.job_service.cancel(reserved)
    running_id, lease = running(kit)
    kit.job_service.cancel(running_id)

    assert [kit.state(i) for i in (queued, reserved, running_id)] == ["CANCELED", "CANCELED", "RUNNING"]
    assert kit.job_service.heartbeat(lease.dispatch_id).stop is EndReason.CANCELED
    kit.job_service.end(lease.dispatch_id)
    assert kit.state(running_id) == "CANCELED"
    done, lease = running(kit)
    kit.job_service.end(lease.dispatch_id)
    with pytest.raises(IllegalMove):
        kit.job_service.cancel(done)


def test_cancel_twice_is_once(kit):
    job_id, _ = running(kit)
    kit.job_service.cancel(job_id)
    before = kit.store.events(0, 100)
    kit.job_service.cancel(job_id)

    assert kit.store.events(0, 100) == before


def test_a_reservation_that_was_canceled_cannot_be_leased(kit):
    [job_id] = kit.submit()
    kit.step()
    kit.job_service.cancel(job_id)

    with pytest.raises(StaleDispatch):
        kit.job_service.lease(job_id)


def test_a_worker_that_stood_still_past_its_lease_can_change_nothing(kit):
    job_id, old = running(kit)
    kit.later(31)
    kit.step()
    kit.later(60)
    kit.step()
    new = kit.job_service.lease(job_id)
    before = (kit.store.job(job_id), kit.store.events(0, 100))

    for call in (kit.job_service.heartbeat, kit.job_service.end, kit.job_service.release):
        with pytest.raises(StaleDispatch):
            call(old.dispatch_id)
    assert (kit.store.job(job_id), kit.store.events(0, 100)) == before
    assert kit.job_service.end(new.dispatch_id)


def test_a_report_after_the_expiry_is_too_late_though_nobody_has_swept(kit):
    _, lease = running(kit)
    kit.later(30)

    with pytest.raises(StaleDispatch, match="expired"):
        kit.job_service.end(lease.dispatch_id)


def test_the_spending_limit_stops_a_run_and_blocks_its_job_until_somebody_decides(kit):
    job_id, lease = running(kit, cost_limit=1_000)
    assert kit.job_service.heartbeat(lease.dispatch_id, spent=999).stop is None
    assert kit.job_service.heartbeat(lease.dispatch_id, spent=1_200).stop is EndReason.COST_LIMIT_REACHED
    kit.job_service.release(lease.dispatch_id)

    assert kit.state(job_id) == "BLOCKED"
    assert "ALERT" in kit.kinds(job_id)
    kit.job_service.retry(job_id)
    kit.step()
    again = kit.job_service.lease(job_id)
    assert kit.job_service.heartbeat(again.dispatch_id, spent=999).stop is None


def test_a_failed_job_comes_back_by_retry_alone(kit):
    job_id, lease = running(kit)
    kit.job_service.end(lease.dispatch_id, EndReason.JOB_ERROR, error="boom")
    assert kit.state(job_id) == "FAILED"

    assert str(kit.job_service.retry(job_id).state) == "QUEUED"


def test_an_edit_is_checked_like_a_submit(kit):
    [job_id] = kit.submit(n=1)

    with pytest.raises(BadIntent, match="priority"):
        kit.job_service.edit(job_id, priority=0)
    assert kit.job_service.edit(job_id, priority=99).intent.priority == 99


def test_a_lease_without_a_job_is_given_denied_and_given_back(kit):
    lease, _ = kit.job_service.ask(AdmissionClass("guest", "t", 80), 50)
    nothing, reason = kit.job_service.ask(AdmissionClass("guest", "t", 20), 50)

    assert lease.phase is DispatchPhase.LEASED
    assert nothing is None
    assert (reason.code, retry_after_sec(reason, kit.now)) == ("no_room", 5.0)
    assert kit.job_service.release(lease.dispatch_id) is None
    assert kit.job_service.ask(AdmissionClass("guest", "t", 20), 50)[0]


def test_asking_often_wins_nothing_against_who_is_in_line(kit):
    kit.submit(cost_units=50)

    assert kit.job_service.ask(AdmissionClass("guest", "t", 90), 50)[1].code == "queued_ahead"


def test_the_hint_of_a_denial_is_never_an_invitation_to_spin(kit):
    kit.machine.draining = True
    _, reason = kit.job_service.ask(AdmissionClass("guest", "t", 1), 100)

    assert reason.code == "draining"
    assert retry_after_sec(reason, kit.now) >= 1


def test_what_a_deadline_missed_is_told(kit):
    [job_id] = kit.submit(deadline_at=kit.now + 10 * SECOND, earliest_start_at=kit.now + 9 * SECOND)
    kit.later(10)
    kit.step()

    assert kit.state(job_id) == "FAILED"
    assert kit.store.events(0, 10, job_id)[-1].reason == "deadline_passed"


def test_a_worker_that_names_no_types_is_not_given_what_only_the_runner_can_run(kit):
    own, *_ = kit.submit(job_type="penstock.command")
    other, *_ = kit.submit(job_type="t")
    claimed = kit.job_service.claim(WorkerKinds(), 5)

    assert [one.job.job_id for one in claimed] == [other]
    assert [
        one.job.job_id
        for one in kit.job_service.claim(WorkerKinds(job_types=frozenset({"penstock.command"})), 5)
    ] == [own]


PLAIN = Intent(addon_id="a", job_type="t")
BAD = [{"payload": "1" * (MAX_PAYLOAD + 1)}, {"priority": 0}, {"tags": ("",)}]


@pytest.mark.parametrize("bad", BAD, ids=[next(iter(one)) for one in BAD])
def test_among_many_that_are_alike_the_one_that_is_wrong_is_refused(kit, bad):
    with pytest.raises(BadIntent):
        kit.job_service.submit([PLAIN, PLAIN, replace(PLAIN, **bad), PLAIN])
    assert kit.store.newest() == 0


@pytest.mark.parametrize("bad", BAD, ids=[next(iter(one)) for one in BAD])
def test_a_good_submit_does_not_let_a_bad_one_pass(kit, bad):
    kit.job_service.submit([PLAIN])

    with pytest.raises(BadIntent):
        kit.job_service.submit([replace(PLAIN, **bad)])


def test_a_deadline_that_was_good_is_checked_again(kit):
    soon = replace(PLAIN, deadline_at=kit.now + 1)
    kit.job_service.submit([soon])
    kit.later(2)

    with pytest.raises(BadIntent):
        kit.job_service.submit([soon])
