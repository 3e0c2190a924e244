from __future__ import annotations

import json

from penstock.core.words import SECOND


def lease_all(works):
    for dispatch in works.desk.dispatchable():
        works.desk.lease(dispatch.job_id)


def test_a_head_explains_itself_from_the_record(works):
    works.submit(addon_id="b", cost_units=85, expected_duration_sec=60)
    works.step()
    lease_all(works)
    [job_id] = works.submit(cost_units=8)
    works.step()
    works.later(41)
    told = works.desk.explain(job_id)

    assert told.text == (
        "waiting 41 s: needs 8 units, 5 free of 90, expected in 19 s; likely to start in 19 s"
    )
    assert told.recorded
    assert json.loads(json.dumps(told.as_json()))["reason"] == "no_room"


def test_a_job_behind_others_says_how_many_and_that_it_was_decided_anew(works):
    works.submit(cost_units=90)
    works.step()
    ids = works.submit(n=4, cost_units=10)
    works.step()
    told = works.desk.explain(ids[3])

    assert told.line_ahead == 3
    assert not told.recorded
    assert "3 of its own kind are before it" in told.text


def test_it_names_who_is_ahead_and_why(works):
    works.submit(addon_id="greedy", cost_units=90)
    works.step()
    [mine] = works.submit(addon_id="greedy", priority=45)
    [band] = works.submit(addon_id="b", priority=90)
    [share] = works.submit(addon_id="c", priority=42)
    told = works.desk.explain(mine)

    assert [(a.job_id, a.why) for a in told.ahead] == [(band, "band"), (share, "share")]


def test_a_job_whose_time_has_not_come_says_when(works):
    [job_id] = works.submit(earliest_start_at=works.now + 90 * SECOND)
    told = works.desk.explain(job_id)

    assert told.text == "not in line yet: not before in 90 s; likely to start in 90 s"


def test_a_job_that_nothing_holds_starts_with_the_next_tick(works):
    [job_id] = works.submit()
    assert "nothing is in its way" in works.desk.explain(job_id).text

    works.step()
    assert "units are reserved" in works.desk.explain(job_id).text


def test_explaining_changes_nothing(works):
    [job_id] = works.submit(cost_units=90)
    works.submit(n=3)
    before = works.store.events(0, 100)
    works.desk.explain(job_id)

    assert works.store.events(0, 100) == before
    assert works.store.books("local").units == 0
