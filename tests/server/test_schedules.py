"""Schedules over HTTP: what they show, what is refused, and who may do what."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from penstock.core.jobs import moments
from penstock.stores.api import RecordLoad, committed

JOB = {"addon_id": "a", "job_type": "report", "payload": {"day": 1}, "priority": "high", "cost_limit": 2.5}
BODY = {"name": "nightly", "cron": "0 6 * * mon-fri", "zone": "Europe/Berlin", "job": JOB}


def trail(client):
    events = client.get("/events?limit=500").json["events"]
    return [
        (event["kind"], event["reason"], event["data"].get("by"))
        for event in events
        if event["kind"].startswith("SCHEDULE_")
    ]


def test_a_schedule_shows_its_job_and_its_next_five_moments(client):
    added = client.post("/schedules/add", BODY)

    assert added.status == 200
    assert added.json == client.get("/schedules/nightly").json
    assert [added.json] == client.get("/schedules").json["schedules"]
    moments = [datetime.fromisoformat(moment) for moment in added.json["next"]]
    assert [6] * 5 == [moment.hour for moment in moments]
    assert all(moment.weekday() < 5 for moment in moments)
    assert sorted(moments) == moments
    assert {
        "addon_id": "a",
        "job_type": "report",
        "payload": {"day": 1},
        "priority": 75,
        "cost_limit": 2.5,
    } == {name: added.json["job"][name] for name in JOB}
    assert ("skip", "latest", 100, False) == tuple(
        added.json[name] for name in ("overlap", "missed", "missed_limit", "paused")
    )


def test_a_schedule_whose_zone_the_host_does_not_know_is_shown_with_its_problem(client, monkeypatch):
    client.post("/schedules/add", BODY)
    client.post("/schedules/add", {**BODY, "name": "other", "zone": "UTC"})
    monkeypatch.setattr(moments, "_known_zone", lambda name: ZoneInfo("UTC") if name == "UTC" else None)

    stuck, other = client.get("/schedules").json["schedules"]

    assert (
        "this host does not know the time zone 'Europe/Berlin': update its package tzdata" == stuck["problem"]
    )
    assert [] == stuck["next"]
    assert (None, 5) == (other["problem"], len(other["next"]))
    run = client.post("/schedules/nightly/run", {})
    assert 503 == run.status
    assert "time zone" in run.json["detail"]


def test_a_run_by_hand_is_a_job_of_the_schedule_and_a_repeated_request_the_same(client):
    client.post("/schedules/add", BODY)

    first = client.post("/schedules/nightly/run", {"idempotency_key": "k"}).json
    again = client.post("/schedules/nightly/run", {"idempotency_key": "k"}).json

    assert (first["created"], again["created"]) == (True, False)
    assert first["job_id"] == again["job_id"]
    [last] = client.get("/schedules/nightly").json["last"]
    assert (first["job_id"], "QUEUED") == (last["job_id"], last["state"])
    found = client.get("/queue/jobs?tag=schedule:nightly").json["jobs"]
    assert [first["job_id"]] == [job["job_id"] for job in found]
    assert 75 == found[0]["priority"]


def test_every_edit_is_in_the_trail_with_its_principal(kit):
    client = kit.client.mint()
    by = client.token.split("_")[1]
    client.post("/schedules/add", BODY)
    edited = client.post("/schedules/nightly/edit", {"every_sec": 900, "overlap": "queue"}).json
    assert (None, 900, "queue") == (edited["cron"], edited["every_sec"], edited["overlap"])
    assert client.post("/schedules/nightly/pause").json["paused"]
    assert [] == client.get("/schedules/nightly").json["next"]
    assert not client.post("/schedules/nightly/resume").json["paused"]
    client.post("/schedules/nightly/run", {})
    assert client.post("/schedules/nightly/remove").status == 200
    assert client.get("/schedules/nightly").status == 404

    assert [
        ("SCHEDULE_SET", "added", by),
        ("SCHEDULE_SET", "edited", by),
        ("SCHEDULE_SET", "paused", by),
        ("SCHEDULE_SET", "resumed", by),
        ("SCHEDULE_FIRED", "run", by),
        ("SCHEDULE_SET", "removed", by),
    ] == trail(kit.client)


def test_a_schedule_and_a_batch_may_have_the_name_of_a_path(client):
    schedule = client.post("/schedules/add", BODY | {"name": "add"})
    batch = client.post("/batches/submit", {"name": "submit", "addon_id": "a", "jobs": [JOB]})
    assert (schedule.status, batch.status) == (200, 200)

    assert client.get("/schedules/add").json["name"] == "add"
    assert client.get("/batches/submit").json["name"] == "submit"
    assert client.send("PUT", "/schedules/add").headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"name": "a b"}, ["name"]),
        ({"name": "x" * 56}, ["name"]),
        ({"name": "n\n"}, ["name"]),
        ({"cron": "0 0 31 2 *"}, ["cron"]),
        ({"cron": "61 * * * *"}, ["cron"]),
        ({"cron": "x" * 201}, ["cron"]),
        ({"cron": None}, ["cron"]),
        ({"every_sec": 60}, ["cron"]),
        ({"cron": None, "every_sec": 0}, ["every_sec"]),
        ({"cron": None, "every_sec": 10**9}, ["every_sec"]),
        ({"cron": None, "at": "2020-01-01T00:00:00Z"}, ["at"]),
        ({"cron": None, "at": "2030-01-01T00:00:00"}, ["at"]),
        ({"cron": None, "at": "9999-12-31T23:59:59Z", "zone": "Asia/Tokyo"}, ["at"]),
        ({"zone": "Europe/Nowhere"}, ["zone"]),
        ({"zone": "../../etc/passwd"}, ["zone"]),
        ({"overlap": "twice"}, ["overlap"]),
        ({"missed": "some"}, ["missed"]),
        ({"missed_limit": 0}, ["missed_limit"]),
        ({"missed_limit": 1001}, ["missed_limit"]),
        ({"cron": None, "quietest_hour_before": "06:00"}, ["quietest_hour_before"]),
        ({"cron": None, "quietest_hour_before": "25:00"}, ["quietest_hour_before"]),
        ({"quietest_hour_before": "06:00"}, ["quietest_hour_before"]),
        ({"job": JOB | {"deadline_at": "2040-01-01T00:00:00Z"}}, ["deadline_at"]),
        ({"job": JOB | {"earliest_start_at": "2040-01-01T00:00:00Z"}}, ["earliest_start_at"]),
        ({"job": JOB | {"idempotency_key": "k"}}, ["idempotency_key"]),
        ({"job": JOB | {"wait_sec": 5}}, ["job.wait_sec"]),
        ({"job": JOB | {"batch": "b"}}, ["job.batch"]),
        ({"zone": "localtime"}, ["zone"]),
        ({"job": JOB | {"cost_units": 0}}, ["job.cost_units"]),
        ({"job": {"job_type": "t"}}, ["job"]),
        ({"job": JOB | {"job_type": "penstock.command", "payload": {"argv": []}}}, ["job.payload.argv"]),
        ({"zone": "Nowhere", "overlap": "skip", "cron": "61 * * * *"}, ["zone", "cron"]),
        ({"colour": "red"}, ["colour"]),
    ],
)
def test_what_is_no_schedule_is_refused_by_the_name_of_its_field(client, change, fields):
    body = {name: value for name, value in (BODY | change).items() if value is not None}
    newest = client.get("/stats").json["newest_event"]

    answer = client.post("/schedules/add", body)

    assert (422, fields) == (answer.status, answer.fields), answer.json
    assert newest == client.get("/stats").json["newest_event"]
    assert [] == client.get("/schedules").json["schedules"]


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({"cron": "0 0 31 2 *"}, "cron"),
        ({"zone": "Nowhere"}, "zone"),
        ({"cron": "@daily", "every_sec": 5}, "cron"),
        ({"at": "2020-01-01T00:00:00Z"}, "at"),
        ({"overlap": None}, "overlap"),
        ({"job": JOB | {"deadline_at": "2040-01-01T00:00:00Z"}}, "deadline_at"),
        ({}, "body"),
    ],
)
def test_a_wrong_edit_changes_nothing(client, edit, field):
    before = client.post("/schedules/add", BODY).json

    answer = client.post("/schedules/nightly/edit", edit)

    assert (422, [field]) == (answer.status, answer.fields)
    assert before == client.get("/schedules/nightly").json


def test_an_edit_to_the_quietest_hour_takes_no_other_time(kit):
    for hour in range(168):
        committed(kit.store, RecordLoad("here", hour, 1.0 if hour % 24 == 3 else 5.0))
    kit.client.post("/schedules/add", BODY)

    for other in ({"cron": "@daily"}, {"every_sec": 60}, {"at": "2100-01-01T00:00:00Z"}):
        answer = kit.client.post("/schedules/nightly/edit", other | {"quietest_hour_before": "06:00"})
        assert (422, ["quietest_hour_before"]) == (answer.status, answer.fields)
    edited = kit.client.post("/schedules/nightly/edit", {"quietest_hour_before": "06:00", "zone": "UTC"})
    assert edited.json["cron"] == "0 3 * * *"


def test_a_name_is_taken_once(client):
    client.post("/schedules/add", BODY)

    answer = client.post("/schedules/add", BODY | {"cron": "@daily"})

    assert 409 == answer.status
    assert "nightly" in answer.json["detail"]
    assert "0 6 * * mon-fri" == client.get("/schedules/nightly").json["cron"]


def test_a_bound_token_has_its_own_schedules_and_no_others(kit):
    kit.client.post("/schedules/add", BODY)
    other = kit.client.mint(addon_id="ours")
    own = BODY | {"name": "own", "job": JOB | {"addon_id": "ours"}}

    assert (403, ["job.addon_id"]) == (
        (answer := other.post("/schedules/add", BODY | {"name": "x"})).status,
        answer.fields,
    )
    assert 200 == other.post("/schedules/add", own).status
    assert ["own"] == [each["name"] for each in other.get("/schedules").json["schedules"]]
    assert 404 == other.get("/schedules/nightly").status
    moved = other.post("/schedules/own/edit", {"job": JOB})
    assert (403, ["job.addon_id"]) == (moved.status, moved.fields)
    assert {"own"} == {
        event["data"]["schedule"]
        for event in other.get("/events?limit=500").json["events"]
        if event["kind"].startswith("SCHEDULE_")
    }


def test_a_schedule_of_a_command_takes_the_right_to_run_commands(kit):
    command = JOB | {"job_type": "penstock.command", "payload": {"argv": ["true"]}}
    kit.client.post("/schedules/add", BODY | {"job": command})
    kit.client.post("/schedules/nightly/pause")
    other = kit.client.mint(scopes=["jobs:read", "jobs:submit:registered", "jobs:cancel"])

    assert 403 == other.post("/schedules/add", BODY | {"name": "x", "job": command}).status
    for act, body in (("run", {}), ("resume", {}), ("edit", {"cron": "@hourly"})):
        assert 403 == other.post(f"/schedules/nightly/{act}", body).status, act
    assert 200 == other.post("/schedules/nightly/pause").status


def test_the_quietest_hour_before_a_time_is_the_one_with_the_least_recorded_load(kit):
    for hour in range(168):
        committed(kit.store, RecordLoad("here", hour, 1.0 if hour % 24 == 3 else 5.0))
    body = {name: value for name, value in BODY.items() if name not in ("cron", "zone")}

    added = kit.client.post("/schedules/add", body | {"quietest_hour_before": "06:00"})
    edited = kit.client.post("/schedules/nightly/edit", {"quietest_hour_before": "03:30"})

    assert "0 3 * * *" == added.json["cron"]
    assert "30 3 * * *" != edited.json["cron"]
    assert 200 == edited.status
