from __future__ import annotations

import json

import pytest
from tests.scheduler.situations import measured

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Host
from penstock.core.jobs.types import SECOND
from penstock.core.jobs.viewer import Viewer
from penstock.core.jobs.workers import WorkerKinds
from penstock.stores.api import Query, RegisterHost, committed


def lease_all(kit):
    for dispatch in kit.job_service.dispatchable():
        kit.job_service.lease(dispatch.job_id)


def test_a_head_explains_itself_from_the_record(kit):
    [large] = kit.submit(addon_id="b", cost_units=85, expected_duration_sec=60)
    kit.step()
    lease_all(kit)
    [job_id] = kit.submit(cost_units=8)
    kit.step()
    kit.later(41)
    told = kit.job_service.explain(job_id)

    assert told.text.startswith(
        "Waiting for 41 s. It needs 8 units; 5 of 90 are free, and enough are expected in 19 s. "
    )
    assert f"Likely start in 19 s, when job {large[-8:]} ends." in told.text
    assert told.recorded
    assert json.loads(json.dumps(told.as_json()))["reason"] == "no_room"


def test_a_job_behind_others_says_how_many_and_that_it_was_decided_anew(kit):
    kit.submit(cost_units=90)
    kit.step()
    ids = kit.submit(n=4, cost_units=10)
    kit.step()
    told = kit.job_service.explain(ids[3])

    assert told.line_ahead == 3
    assert not told.recorded
    assert "3 jobs of the same kind are before it" in told.text


def test_it_names_who_is_ahead_and_why(kit):
    kit.submit(addon_id="greedy", cost_units=90)
    kit.step()
    [mine] = kit.submit(addon_id="greedy", priority=45)
    [band] = kit.submit(addon_id="b", priority=90)
    [share] = kit.submit(addon_id="c", priority=42)
    told = kit.job_service.explain(mine)

    assert [(a.job_id, a.why) for a in told.ahead] == [(band, "band"), (share, "share")]


def paused(kit):
    kit.submit(addon_id="b", priority=90)
    kit.job_service.pause("b")


def without_a_host(kit):
    kit.submit(addon_id="b", priority=90, labels=("gpu",))


def with_full_workers(kit):
    kinds = WorkerKinds("b")
    kit.submit(addon_id="b", priority=90)
    kit.job_service.claim(kinds, 1, "full")
    kit.submit(addon_id="b", priority=90)


@pytest.mark.parametrize("arrange", [paused, without_a_host, with_full_workers])
def test_a_job_that_cannot_start_is_not_ahead(kit, arrange):
    kit.submit(addon_id="greedy", cost_units=60)
    kit.step()
    arrange(kit)
    [mine] = kit.submit(addon_id="greedy", cost_units=60, priority=45)

    assert kit.job_service.explain(mine).ahead == ()


def test_a_job_that_needs_more_than_the_load_allows_is_not_ahead(kit):
    kit = measured(kit, cpu=0.5)
    kit.submit(addon_id="b", priority=90, cost_units=80)
    kit.submit(addon_id="greedy", cost_units=40)
    kit.step()
    [mine] = kit.submit(addon_id="greedy", cost_units=40)

    assert kit.job_service.explain(mine).ahead == ()


def test_a_job_whose_time_has_not_come_says_when(kit):
    [job_id] = kit.submit(earliest_start_at=kit.now + 90 * SECOND)
    told = kit.job_service.explain(job_id)

    assert told.text.startswith("It starts in 90 s at the earliest.")


def test_a_job_that_nothing_holds_starts_with_the_next_tick(kit):
    kit.job_service.poll(WorkerKinds("a"))
    [job_id] = kit.submit()
    assert "Nothing is in its way" in kit.job_service.explain(job_id).text

    kit.step()
    assert "units are reserved" in kit.job_service.explain(job_id).text


def test_explaining_changes_nothing(kit):
    [job_id] = kit.submit(cost_units=90)
    kit.submit(n=3)
    before = kit.store.events(0, 100)
    kit.job_service.explain(job_id)

    assert kit.store.events(0, 100) == before
    assert kit.store.ledger("local").units == 0


# all of it is in test_situations


def test_one_paused_addon_is_named(kit):
    kit.job_service.pause("a")
    [job_id] = kit.submit()

    assert "Addon a is paused" in kit.job_service.explain(job_id).text


def test_the_names_of_the_fields_are_a_promise(kit):
    [job_id] = kit.submit()

    assert set(kit.job_service.explain(job_id).as_json()) == {
        "job_id", "state", "text", "short", "waiting_sec", "reason", "reason_data", "gates", "retry_after_sec", "recorded", "ahead",
        "line_ahead", "likely_start_at", "likely_start_low_at", "likely_start_high_at", "next_when_ends", "next_step", "next_at", "way_out", "held_by", "last_failure", "preemption",
        "deadline_at", "deadline_reachable", "hosts", "waited", "allowed",
    }  # fmt: skip


def test_a_job_far_back_in_a_long_line_does_not_claim_to_be_next(kit):
    kit.submit(cost_units=90)
    kit.step()
    *_, last = kit.submit(n=1_500)

    assert kit.job_service.explain(last).line_ahead == 1_000


# deadlines


def deadline(kit, seconds, **fields):
    intent = {"addon_id": "a", "job_type": "t", "deadline_at": kit.now + seconds * SECOND} | fields
    [receipt] = kit.job_service.submit([Intent(**intent)])
    return receipt


def test_a_submit_says_that_its_deadline_looks_reachable(kit):
    receipt = deadline(kit, 60, expected_duration_sec=60)

    assert (receipt.deadline_reachable, receipt.likely_start_at) == (True, kit.now)


def test_a_submit_says_that_its_deadline_does_not(kit):
    kit.submit(cost_units=90, expected_duration_sec=100)
    kit.step()
    receipt = deadline(kit, 120, expected_duration_sec=30)

    assert (receipt.deadline_reachable, receipt.likely_start_at) == (False, kit.now + 100 * SECOND)


def test_those_before_it_count(kit):
    kit.submit(n=3, cost_units=90, expected_duration_sec=100)

    assert deadline(kit, 290).likely_start_at == kit.now + 300 * SECOND
    assert deadline(kit, 290, priority=99).deadline_reachable is True


def test_what_cannot_be_said_is_not_said(kit):
    kit.submit(cost_units=90)
    kit.step()

    receipt = deadline(kit, 60)
    assert (receipt.deadline_reachable, receipt.likely_start_at) == (None, None)


def test_a_job_for_later_is_judged_by_its_own_beginning(kit):
    receipt = deadline(kit, 60, earliest_start_at=kit.now + 50 * SECOND, expected_duration_sec=20)

    assert (receipt.deadline_reachable, receipt.likely_start_at) == (False, kit.now + 50 * SECOND)


def test_a_submit_without_a_deadline_looks_at_nothing(kit, monkeypatch):
    monkeypatch.setattr(kit.store, "read_view", None)
    [receipt] = kit.job_service.submit([Intent(addon_id="a", job_type="t")])

    assert (receipt.deadline_reachable, receipt.likely_start_at) == (None, None)


def test_a_bulk_is_looked_at_once(kit, monkeypatch):
    looks, look = [], kit.store.read_view
    monkeypatch.setattr(kit.store, "read_view", lambda *args: looks.append(1) or look(*args))
    intent = Intent(addon_id="a", job_type="t", deadline_at=kit.now + 60 * SECOND)
    receipts = kit.job_service.submit([intent] * 50)

    assert len(looks) == 1
    assert [r.deadline_reachable for r in receipts] == [True] * 9 + [None] * 41


def test_who_asks_at_another_host_is_told_where_it_will_run(kit):
    [job_id] = kit.submit(labels=("gpu",))
    until = kit.now + 30 * SECOND
    here = Host(
        host="render-1",
        instance="i",
        started_at=kit.now,
        seen_at=kit.now,
        until=until,
        labels=("arm", "gpu"),
    )
    committed(kit.store, RegisterHost(here))

    assert "This host lacks the label gpu; render-1 has it" in kit.job_service.explain(job_id).text
    kit.later(31)
    assert "No running host has the label gpu" in kit.job_service.explain(job_id).text


def test_a_label_holds_nobody_else_up_and_nobody_records_what_is_not_for_them(kit):
    [asks] = kit.submit(labels=("gpu",), priority=90, cost_units=90)
    [plain] = kit.submit(cost_units=90)
    kit.step()

    assert ("QUEUED", "DISPATCHING") == (kit.state(asks), kit.state(plain))
    assert ["SUBMITTED"] == kit.kinds(asks)


# what an addon may learn


def seen_by(kit, job_id, addon):
    owned = {job.job_id for job in kit.store.find(Query(addon_id=addon, limit=100))}
    return kit.job_service.explain(job_id, Viewer(addon, owned.__contains__))


def test_a_viewer_learns_no_type_of_another_addons_workers(kit):
    kit.job_service.claim(WorkerKinds("b", frozenset({"thumbnail"})), 1)
    kit.job_service.claim(WorkerKinds("a", frozenset({"resize"})), 1)
    [job_id] = kit.submit(job_type="thumnail")

    assert kit.job_service.explain(job_id).reason_data["known"] == ("resize", "thumbnail")
    assert seen_by(kit, job_id, "a").reason_data["known"] == ("resize",)
    assert "thumbnail" not in seen_by(kit, job_id, "a").text


def test_a_viewer_learns_how_many_jobs_hold_the_units_and_the_names_of_its_own(kit):
    [theirs] = kit.submit(addon_id="b", cost_units=60)
    [mine] = kit.submit(addon_id="a", cost_units=30)
    kit.step()
    lease_all(kit)
    [job_id] = kit.submit()

    assert kit.job_service.explain(job_id).held_by == (theirs, mine)
    assert seen_by(kit, job_id, "a").held_by == (None, mine)
    assert f"Job {mine[-8:]} and 1 more job use the rest." in seen_by(kit, job_id, "a").text
