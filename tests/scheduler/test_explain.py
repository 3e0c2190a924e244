from __future__ import annotations

import json

import pytest

from penstock.core.jobs.admission import AdmissionLimits, Caps
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity, Host, Reading
from penstock.core.jobs.reasons import REASONS
from penstock.core.jobs.spending import Budget
from penstock.core.jobs.types import SECOND
from penstock.scheduler.dispatcher import WorkerKinds
from penstock.stores.api import RegisterHost, committed


def lease_all(works):
    for dispatch in works.job_service.dispatchable():
        works.job_service.lease(dispatch.job_id)


def test_a_head_explains_itself_from_the_record(works):
    [large] = works.submit(addon_id="b", cost_units=85, expected_duration_sec=60)
    works.step()
    lease_all(works)
    [job_id] = works.submit(cost_units=8)
    works.step()
    works.later(41)
    told = works.job_service.explain(job_id)

    assert told.text == (
        "Waiting for 41 s. It needs 8 units; 5 of 90 are free, and enough are expected in 19 s. "
        f"Likely start in 19 s, when job {large[-8:]} ends."
    )
    assert told.recorded
    assert json.loads(json.dumps(told.as_json()))["reason"] == "no_room"


def test_a_job_behind_others_says_how_many_and_that_it_was_decided_anew(works):
    works.submit(cost_units=90)
    works.step()
    ids = works.submit(n=4, cost_units=10)
    works.step()
    told = works.job_service.explain(ids[3])

    assert told.line_ahead == 3
    assert not told.recorded
    assert "3 jobs of the same kind are before it" in told.text


def test_it_names_who_is_ahead_and_why(works):
    works.submit(addon_id="greedy", cost_units=90)
    works.step()
    [mine] = works.submit(addon_id="greedy", priority=45)
    [band] = works.submit(addon_id="b", priority=90)
    [share] = works.submit(addon_id="c", priority=42)
    told = works.job_service.explain(mine)

    assert [(a.job_id, a.why) for a in told.ahead] == [(band, "band"), (share, "share")]


def test_a_job_whose_time_has_not_come_says_when(works):
    [job_id] = works.submit(earliest_start_at=works.now + 90 * SECOND)
    told = works.job_service.explain(job_id)

    assert told.text == "It starts in 90 s at the earliest."


def test_a_job_that_nothing_holds_starts_with_the_next_tick(works):
    [job_id] = works.submit()
    assert "Nothing is in its way" in works.job_service.explain(job_id).text

    works.step()
    assert "units are reserved" in works.job_service.explain(job_id).text


def test_explaining_changes_nothing(works):
    [job_id] = works.submit(cost_units=90)
    works.submit(n=3)
    before = works.store.events(0, 100)
    works.job_service.explain(job_id)

    assert works.store.events(0, 100) == before
    assert works.store.ledger("local").units == 0


# every reason there is


def draining(works):
    works.machine.draining = True
    return works, works.submit()[0]


def everything_paused(works):
    works.job_service.pause()
    return works, works.submit()[0]


def not_ready(works):
    return works, works.submit(earliest_start_at=works.now + 90 * SECOND)[0]


def measured(works, cpu):
    works = works.under(capacity=Capacity())
    for name, value in (("cpu", cpu), ("memory", 0.1)):
        works.machine.report(Reading(name, value, works.now))
    return works


def not_quiet(works):
    works = measured(works, cpu=0.45)
    return works, works.submit(run_when="quiet")[0]


def not_quiet_long_enough(works):
    works = measured(works, cpu=0.05)
    return works, works.submit(run_when="quiet", quiet_for_sec=600)[0]


def cap_reached(works):
    works = works.under(limits=AdmissionLimits(Caps(per_addon=1)))
    works.submit()
    works.step()
    return works, works.submit()[0]


def budget_spent(works):
    works = works.under(limits=AdmissionLimits(budgets={"a": Budget(day=1_000_000)}))
    [first] = works.submit()
    works.step()
    works.job_service.heartbeat(works.job_service.lease(first).dispatch_id, spent=1_000_000)
    return works, works.submit()[0]


def no_room(works):
    works.submit(cost_units=90)
    works.step()
    return works, works.submit()[0]


def room_kept(works):
    works.submit(n=4, addon_id="b", cost_units=20)
    works.step()
    [large] = works.submit(addon_id="large", cost_units=90, priority=60)
    works.submit(addon_id="c", cost_units=5)
    works.step()
    lease_all(works)
    works.later(20)
    for dispatch in works.store.live():
        works.job_service.heartbeat(dispatch.dispatch_id)
    works.later(11)
    [small] = works.submit(addon_id="d", cost_units=5)
    works.step()
    assert works.state(large) == "QUEUED"
    return works, small


def queued_ahead(works):
    works.submit(n=9, priority=90)
    return works, works.submit()[0]


def awaits_worker(works):
    works.job_service.claim(WorkerKinds("a"), 1)
    works.later(12)
    return works, works.submit()[0]


def label_missing(works):
    return works.under(labels=("arm",)), works.submit(labels=("gpu",))[0]


CASES = {
    "label_missing": (label_missing, "No running host has the label gpu"),
    "draining": (draining, "starts no more jobs"),
    "paused": (everything_paused, "Everything is paused"),
    "not_ready": (not_ready, "It starts in 90 s at the earliest"),
    "not_quiet": (
        not_quiet,
        "The machine is in normal use (busy score 4.5 of 10, from cpu). This job starts when the load drops to QUIET",
    ),
    "not_quiet_long_enough": (not_quiet_long_enough, "waits for 600 s of quiet"),
    "cap_reached": (cap_reached, "Addon a has 1 in flight, its limit"),
    "budget_spent": (budget_spent, "The budget of this day is spent (1.00 of 1.00)"),
    "no_room": (no_room, "needs 10 units; 0 of 90 are free"),
    "room_kept": (room_kept, "90 units are kept for job"),
    "queued_ahead": (queued_ahead, "of priority 90 goes first and needs the same units"),
    "awaits_worker": (
        awaits_worker,
        "waits for a worker to claim it. A worker that may claim it last asked 12 s ago",
    ),
}


def test_every_reason_has_its_case():
    assert set(CASES) == set(REASONS)


@pytest.mark.parametrize("code", CASES)
def test_every_reason_is_told_in_words_and_as_json(works, code):
    arrange, words = CASES[code]
    works, job_id = arrange(works)
    told = works.job_service.explain(job_id)
    data = json.loads(json.dumps(told.as_json()))

    assert words in told.text
    assert data["reason"] == code
    assert data["retry_after_sec"] >= 1


def test_one_paused_addon_is_named(works):
    works.job_service.pause("a")
    [job_id] = works.submit()

    assert "Addon a is paused" in works.job_service.explain(job_id).text


def test_the_names_of_the_fields_are_a_promise(works):
    [job_id] = works.submit()

    assert set(works.job_service.explain(job_id).as_json()) == {
        "job_id", "state", "text", "waiting_sec", "reason", "reason_data", "retry_after_sec", "recorded", "ahead", "line_ahead",
        "likely_start_at", "next_when_ends", "allowed",
    }  # fmt: skip


def test_a_job_far_back_in_a_long_line_does_not_claim_to_be_next(works):
    works.submit(cost_units=90)
    works.step()
    *_, last = works.submit(n=1_500)

    assert works.job_service.explain(last).line_ahead == 1_000


# deadlines


def deadline(works, seconds, **fields):
    intent = {"addon_id": "a", "job_type": "t", "deadline_at": works.now + seconds * SECOND} | fields
    [receipt] = works.job_service.submit([Intent(**intent)])
    return receipt


def test_a_submit_says_that_its_deadline_looks_reachable(works):
    receipt = deadline(works, 60, expected_duration_sec=60)

    assert (receipt.deadline_reachable, receipt.likely_start_at) == (True, works.now)


def test_a_submit_says_that_its_deadline_does_not(works):
    works.submit(cost_units=90, expected_duration_sec=100)
    works.step()
    receipt = deadline(works, 120, expected_duration_sec=30)

    assert (receipt.deadline_reachable, receipt.likely_start_at) == (False, works.now + 100 * SECOND)


def test_those_before_it_count(works):
    works.submit(n=3, cost_units=90, expected_duration_sec=100)

    assert deadline(works, 290).likely_start_at == works.now + 300 * SECOND
    assert deadline(works, 290, priority=99).deadline_reachable is True


def test_what_cannot_be_said_is_not_said(works):
    works.submit(cost_units=90)
    works.step()

    receipt = deadline(works, 60)
    assert (receipt.deadline_reachable, receipt.likely_start_at) == (None, None)


def test_a_job_for_later_is_judged_by_its_own_beginning(works):
    receipt = deadline(works, 60, earliest_start_at=works.now + 50 * SECOND, expected_duration_sec=20)

    assert (receipt.deadline_reachable, receipt.likely_start_at) == (False, works.now + 50 * SECOND)


def test_a_submit_without_a_deadline_looks_at_nothing(works, monkeypatch):
    monkeypatch.setattr(works.store, "look", None)
    [receipt] = works.job_service.submit([Intent(addon_id="a", job_type="t")])

    assert (receipt.deadline_reachable, receipt.likely_start_at) == (None, None)


def test_a_bulk_is_looked_at_once_and_the_future_has_the_answer_too(works, monkeypatch):
    looks, look = [], works.store.look
    monkeypatch.setattr(works.store, "look", lambda *args: looks.append(1) or look(*args))
    intent = Intent(addon_id="a", job_type="t", deadline_at=works.now + 60 * SECOND)
    receipts = works.job_service.submit_soon([intent] * 50).result(60)

    assert len(looks) == 1
    assert [r.deadline_reachable for r in receipts] == [True] * 9 + [None] * 41


def test_who_asks_at_another_host_is_told_where_it_will_run(works):
    [job_id] = works.submit(labels=("gpu",))
    until = works.now + 30 * SECOND
    here = Host(
        host="render-1",
        instance="i",
        started_at=works.now,
        seen_at=works.now,
        until=until,
        labels=("arm", "gpu"),
    )
    committed(works.store, RegisterHost(here))

    assert "This host lacks the label gpu; render-1 can run it" in works.job_service.explain(job_id).text
    works.later(31)
    assert "No running host has the label gpu" in works.job_service.explain(job_id).text


def test_a_label_holds_nobody_else_up_and_nobody_records_what_is_not_for_them(works):
    [asks] = works.submit(labels=("gpu",), priority=90, cost_units=90)
    [plain] = works.submit(cost_units=90)
    works.step()

    assert ("QUEUED", "DISPATCHING") == (works.state(asks), works.state(plain))
    assert ["SUBMITTED"] == works.kinds(asks)
