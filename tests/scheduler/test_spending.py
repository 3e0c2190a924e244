"""What work may cost: who is told and when, what is stopped, what may not start."""

from __future__ import annotations

import pytest

from penstock.core.jobs.admission import AdmissionLimits, Budget
from penstock.core.jobs.types import HOUR, SECOND, EndReason
from penstock.stores.api import Renew, committed

DAY = 24 * HOUR


def running(kit, **fields):
    [job_id] = kit.submit(**fields)
    kit.step()
    return job_id, kit.job_service.lease(job_id, "w1")


def alerts(kit):
    return [event for event in kit.store.events(0, 1_000) if event.kind == "ALERT"]


@pytest.fixture
def budgeted(kit):
    return kit.under(limits=AdmissionLimits(budgets={"a": Budget(day=1_000, month=5_000)}))


def test_eighty_percent_of_a_jobs_limit_is_told_once(kit):
    job_id, lease = running(kit, cost_limit=1_000_000, unit="EUR")
    for spent in (799_999, 800_000, 900_000):
        assert kit.job_service.heartbeat(lease.dispatch_id, spent=spent).stop is None
    [alert] = alerts(kit)

    assert (alert.job_id, alert.reason) == (job_id, "cost_warning")
    assert alert.data["kind"] == "cost_warning"
    assert (alert.data["addon_id"], alert.data["job_id"]) == ("a", job_id)
    assert (alert.data["spent"], alert.data["limit"]) == (800_000, 1_000_000)
    assert alert.data["text"] == f"job {job_id[-8:]} has spent 0.80 of 1.00 EUR"


def test_at_the_limit_the_owner_is_told_before_the_run_is(kit):
    job_id, lease = running(kit, cost_limit=1_000)
    answer = kit.job_service.heartbeat(lease.dispatch_id, spent=1_300)
    told = [(str(e.kind), e.reason) for e in kit.store.events(0, 100, job_id)][-2:]

    assert answer.stop is EndReason.COST_LIMIT_REACHED
    assert told == [("ALERT", "cost_limit_reached"), ("STOP_REQUESTED", "cost_limit_reached")]
    assert alerts(kit)[0].data["overshoot"] == 300
    assert alerts(kit)[0].data["text"].endswith("0.00 of 0.00 USD; it is stopped")


def test_the_overshoot_is_recorded_with_the_end(kit):
    job_id, lease = running(kit, cost_limit=1_000)
    kit.job_service.heartbeat(lease.dispatch_id, spent=1_100)
    kit.job_service.heartbeat(lease.dispatch_id, spent=1_450)
    kit.job_service.release(lease.dispatch_id)
    last = kit.store.events(0, 100, job_id)[-1]

    assert (str(last.kind), last.reason) == ("BLOCKED", "cost_limit_reached")
    assert last.data == {"spent": 1_450, "limit": 1_000, "overshoot": 450}


def test_a_limit_that_was_passed_while_the_scheduler_died_stops_the_run_at_its_next_word(kit):
    """The amount is on record and the stop is not: the crossing will not come again."""
    from penstock.core.jobs.changes import Renewal

    _, lease = running(kit, cost_limit=1_000)
    committed(
        kit.store,
        Renew([Renewal(dispatch_id=lease.dispatch_id, expires_at=kit.now + 30 * SECOND, spent=2_000)]),
    )

    assert kit.job_service.heartbeat(lease.dispatch_id).stop is EndReason.COST_LIMIT_REACHED


def test_a_retry_by_hand_has_its_marks_before_it_again(kit):
    job_id, lease = running(kit, cost_limit=1_000)
    kit.job_service.heartbeat(lease.dispatch_id, spent=1_000)
    kit.job_service.release(lease.dispatch_id)
    kit.job_service.retry(job_id)
    kit.later(1)
    kit.step()
    again = kit.job_service.lease(job_id)
    kit.job_service.heartbeat(again.dispatch_id, spent=900)
    kit.job_service.heartbeat(again.dispatch_id, spent=1_000)

    assert [a.reason for a in alerts(kit)] == ["cost_limit_reached", "cost_warning", "cost_limit_reached"]
    assert len({a.data["key"] for a in alerts(kit)}) == 3


def test_a_beat_told_twice_is_counted_and_told_once(kit):
    _, lease = running(kit, cost_limit=1_000)
    for _ in range(3):
        kit.job_service.heartbeat(lease.dispatch_id, spent=850)

    assert len(alerts(kit)) == 1


def test_eighty_percent_of_a_budget_is_told_once_whoever_spends(budgeted):
    leases = [running(budgeted)[1] for _ in range(3)]
    for lease in leases:
        budgeted.job_service.heartbeat(lease.dispatch_id, spent=300)
    [alert] = alerts(budgeted)

    assert (alert.job_id, alert.reason, alert.data["addon_id"]) == (None, "budget_warning", "a")
    assert (alert.data["spent"], alert.data["limit"]) == (900, 1_000)


def test_a_spent_budget_ends_its_runs_with_one_alert_and_nobody_elses(budgeted):
    (_, first), (_, second) = running(budgeted), running(budgeted)
    _, other = running(budgeted, addon_id="b")
    answer = budgeted.job_service.heartbeat(first.dispatch_id, spent=1_200)

    assert answer.stop is EndReason.COST_LIMIT_REACHED
    assert budgeted.job_service.heartbeat(second.dispatch_id).stop is EndReason.COST_LIMIT_REACHED
    assert budgeted.job_service.heartbeat(other.dispatch_id, spent=9_999).stop is None
    assert [(a.reason, a.data["overshoot"]) for a in alerts(budgeted)] == [("budget_spent", 200)]
    text = "addon a has spent 0.00 of 0.00 this day; its running jobs are stopped"
    assert alerts(budgeted)[0].data["text"] == text


def test_its_runs_land_as_blocked_and_add_no_alert(budgeted):
    job_id, lease = running(budgeted)
    budgeted.job_service.heartbeat(lease.dispatch_id, spent=1_000)
    budgeted.job_service.release(lease.dispatch_id)

    assert budgeted.state(job_id) == "BLOCKED"
    assert len(alerts(budgeted)) == 1


def test_what_was_only_reserved_goes_back_and_waits(budgeted):
    _, lease = running(budgeted)
    [reserved] = budgeted.submit()
    budgeted.step()
    assert budgeted.state(reserved) == "DISPATCHING"

    budgeted.job_service.heartbeat(lease.dispatch_id, spent=1_000)
    budgeted.step()
    assert budgeted.state(reserved) == "QUEUED"
    assert budgeted.job_service.explain(reserved).reason == "budget_spent"


def test_nothing_of_it_starts_until_the_window_turns_over(budgeted):
    _, lease = running(budgeted)
    budgeted.job_service.heartbeat(lease.dispatch_id, spent=1_000)
    budgeted.job_service.release(lease.dispatch_id)
    [waiting] = budgeted.submit()
    budgeted.step()
    told = budgeted.job_service.explain(waiting)
    midnight = (budgeted.now // DAY + 1) * DAY

    assert (budgeted.state(waiting), told.likely_start_at) == ("QUEUED", midnight)
    budgeted.clock.now = midnight - 1
    budgeted.step()
    assert budgeted.state(waiting) == "QUEUED"
    budgeted.clock.now = midnight
    budgeted.step()
    assert budgeted.state(waiting) == "DISPATCHING"


def test_a_month_counts_across_its_days(budgeted):
    for _ in range(5):
        _, lease = running(budgeted)
        budgeted.job_service.heartbeat(lease.dispatch_id, spent=999)
        budgeted.job_service.end(lease.dispatch_id)
        budgeted.later(86_400)
    _, lease = running(budgeted)

    assert budgeted.job_service.heartbeat(lease.dispatch_id, spent=5).stop is EndReason.COST_LIMIT_REACHED
    assert [a.reason for a in alerts(budgeted) if "month" in a.data["text"]] == [
        "budget_warning",
        "budget_spent",
    ]


def test_a_budget_that_was_spent_while_the_scheduler_died_is_closed_by_the_next_step(budgeted):
    from penstock.core.jobs.changes import Renewal

    job_id, lease = running(budgeted)
    committed(
        budgeted.store,
        Renew([Renewal(dispatch_id=lease.dispatch_id, expires_at=budgeted.now + 30 * SECOND, spent=1_000)]),
    )
    budgeted.later(2)
    budgeted.step()

    assert budgeted.store.dispatch(lease.dispatch_id).reason is EndReason.COST_LIMIT_REACHED
    assert [e.data for e in budgeted.store.events(0, 100, job_id) if e.kind == "STOP_REQUESTED"] == [
        {"budget": "day"}
    ]


def test_a_lease_without_a_job_spends_its_addons_budget_too(budgeted):
    from penstock.core.jobs.admission import AdmissionClass

    lease, _ = budgeted.job_service.ask(AdmissionClass("a", "t", 10), 50)
    answer = budgeted.job_service.heartbeat(lease.dispatch_id, spent=1_000)
    nothing, reason = budgeted.job_service.ask(AdmissionClass("a", "t", 10), 50)

    assert answer.stop is EndReason.COST_LIMIT_REACHED
    assert (nothing, reason.code) == (None, "budget_spent")


def test_a_heartbeat_without_spending_reads_no_budget(budgeted, monkeypatch):
    _, lease = running(budgeted)
    monkeypatch.setattr(budgeted.store, "live", None)
    monkeypatch.setattr(budgeted.store, "ledger", None)

    assert budgeted.job_service.heartbeat(lease.dispatch_id, progress=0.5).stop is None


def test_the_hard_caps_alert_says_whose_and_why(kit):
    job_id, _ = running(kit, max_active_sec=10)
    kit.later(10)
    kit.step()
    kit.later(40)
    kit.step()
    [alert] = alerts(kit)

    assert kit.state(job_id) == "FAILED"
    assert {"kind": "hard_cap_exceeded", "addon_id": "a", "job_id": job_id}.items() <= alert.data.items()
    assert alert.data["key"] == f"hard_cap_exceeded/{job_id}/1"
    assert alert.data["text"] == f"job {job_id[-8:]} is FAILED: hard_cap_exceeded"
