"""Batches over HTTP: what they show, what is refused, and which token may do what."""

from __future__ import annotations

import pytest

JOB = {"addon_id": "a", "job_type": "resize", "cost_units": 1}
BODY = {"name": "nightly", "addon_id": "a", "jobs": [JOB, JOB], "on_end": JOB, "on_failure": JOB}


def claim(client):
    return client.claim(addon_id="a", job_types=["resize"], worker="w", wait_sec=5)


def finish(client, claimed, **outcome):
    body = {"lease_id": claimed["lease_id"], "state": "DONE"} | outcome
    return client.post(f"/queue/jobs/{claimed['job_id']}/complete", body)


def counts(batch):
    return tuple(batch[name] for name in ("state", "total", "live", "done", "failed", "canceled"))


def test_a_batch_runs_shows_how_far_it_is_and_its_callbacks_follow(live):
    client = live.client
    batch = client.post("/batches/submit", BODY).json
    end, failure = [callback["job_id"] for callback in batch["callbacks"]]
    assert counts(batch) == ("RUNNING", 2, 2, 0, 0, 0)
    assert [callback["on"] for callback in batch["callbacks"]] == ["end", "failure"]
    tagged = client.get("/queue/jobs?tag=batch:nightly").json["jobs"]
    assert sorted(job["job_id"] for job in tagged) == sorted(batch["jobs"])
    explained = client.get(f"/queue/jobs/{end}/explain").json
    assert "batch nightly (RUNNING, 0 of 2 ended) to be over" in explained["text"]
    [parent] = client.get(f"/queue/jobs/{end}/dependencies").json["parents"]
    assert (parent["job_id"], parent["job_type"], parent["title"]) == (
        "batch:nightly",
        "batch",
        "batch nightly: 0 of 2 ended",
    )

    first, second = [*claim(client), *claim(client)]
    finish(client, first, result=7)
    assert counts(client.get("/batches/nightly").json) == ("RUNNING", 2, 1, 1, 0, 0)
    finish(client, second, state="FAILED", error="no")
    ended = client.get("/batches/nightly?wait_sec=5").json
    assert counts(ended) == ("FAILED", 2, 0, 1, 1, 0)
    assert ended["ended_at"] is not None

    claimed = {one["job_id"]: one for one in [*claim(client), *claim(client)]}
    assert set(claimed) == {end, failure}
    assert sorted(map(str, claimed[end]["parents"])) == sorted(
        [str([first["job_id"], "DONE", 7]), str([second["job_id"], "FAILED", None])]
    )
    assert client.post("/batches/nightly/retry").json["changed"] == 1
    assert counts(client.get("/batches/nightly").json) == ("RUNNING", 2, 1, 1, 0, 0)
    changed = client.post("/batches/nightly/cancel").json
    assert (changed["changed"], counts(changed["batch"])) == (1, ("CANCELED", 2, 0, 1, 0, 1))
    kinds = [e["kind"] for e in client.get("/events?limit=500").json["events"]]
    assert [kind for kind in kinds if kind.startswith("BATCH_")] == [
        "BATCH_SUBMITTED",
        "BATCH_ENDED",
        "BATCH_RETRIED",
        "BATCH_CANCELED",
        "BATCH_ENDED",
    ]


def test_an_open_batch_takes_jobs_until_it_is_closed(client):
    client.post("/batches/submit", {"name": "later", "addon_id": "a", "open": True, "on_end": JOB})
    added = client.post("/queue/jobs/submit", JOB | {"batch": "later"}).json["job_id"]
    assert client.job(added)["tags"] == ["batch:later"]
    client.post(f"/queue/jobs/{added}/cancel")
    assert client.get("/batches/later").json["state"] == "RUNNING"

    closed = client.post("/batches/later/close").json
    assert (closed["open"], closed["state"], closed["total"]) == (False, "CANCELED", 1)
    assert client.post("/batches/later/close").status == 200
    refused = client.post("/queue/jobs/submit", JOB | {"batch": "later"})
    assert refused.status == 409
    assert "later has ended (CANCELED) and takes no more jobs" in refused.json["detail"]


def test_a_name_is_used_once_and_a_key_finds_the_batch_again(client):
    keyed = BODY | {"idempotency_key": "k"}
    assert client.post("/batches/submit", keyed).json["created"] is True
    again = client.post("/batches/submit", keyed).json
    assert (again["created"], again["total"], again["jobs"]) == (False, 2, [])
    for body in (BODY, keyed | {"jobs": [JOB]}, BODY | {"idempotency_key": "other"}):
        refused = client.post("/batches/submit", body)
        assert refused.status == 409
        assert "there is a batch nightly already" in refused.json["detail"]
    assert len(client.get("/queue/jobs").json["jobs"]) == 4


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "x" * 50}, "name"),
        ({"name": ".x"}, "name"),
        ({"name": "x\n"}, "name"),
        ({"addon_id": ""}, "addon_id"),
        ({"jobs": [JOB | {"cost_units": 0}]}, "jobs[0].cost_units"),
        ({"jobs": [JOB, JOB | {"deadline_at": "2001-01-01T00:00:00Z"}]}, "jobs[1].deadline_at"),
        ({"jobs": [JOB | {"wait_sec": 1}]}, "jobs[0].wait_sec"),
        ({"jobs": [JOB | {"batch": "other"}]}, "jobs[0].batch"),
        ({"jobs": [JOB | {"tags": ["batch:other"]}]}, "jobs[0].tags"),
        ({"jobs": [JOB | {"after": ["#7"]}]}, "after"),
        ({"jobs": [JOB | {"after": ["#1"]}, JOB | {"after": ["#0"]}]}, "after"),
        ({"on_end": JOB | {"after": ["#0"]}}, "on_end.after"),
        ({"on_failure": JOB | {"priority": 101}}, "on_failure.priority"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_bad_batch_is_refused_by_name_and_changes_nothing(client, change, field):
    refused = client.post("/batches/submit", BODY | change)

    assert refused.status in (400, 422)
    assert field in refused.fields, refused.json
    assert "regex" not in refused.content.decode()
    assert client.get("/batches").json["batches"] == []
    assert client.get("/queue/jobs").json["jobs"] == []


def test_a_batch_that_does_not_exist_is_named(client):
    for path in ("close", "cancel", "retry"):
        assert client.post(f"/batches/nosuch/{path}").status == 404
    assert client.get("/batches/a%20b").status == 404
    refused = client.post("/queue/jobs/submit", JOB | {"batch": "nosuch"})
    assert (refused.status, "there is no batch 'nosuch'" in refused.json["detail"]) == (404, True)
    refused = client.post("/queue/jobs/submit", JOB | {"after": ["batch:nosuch"]})
    assert (refused.status, "there is no batch nosuch" in refused.json["detail"]) == (404, True)


def test_a_bound_token_has_its_own_batches_and_no_others(kit):
    bound = kit.client.mint(addon_id="ours")
    kit.client.post("/batches/submit", BODY | {"open": True})
    ours = JOB | {"addon_id": "ours"}

    assert bound.post("/batches/submit", BODY | {"name": "x"}).status == 403
    assert bound.post("/batches/submit", BODY | {"name": "x", "addon_id": "ours"}).status == 403
    assert bound.post("/batches/submit", {"name": "own", "addon_id": "ours", "jobs": [ours]}).status == 200
    assert [one["name"] for one in bound.get("/batches").json["batches"]] == ["own"]
    assert {404} == {
        bound.get("/batches/nightly").status,
        bound.post("/batches/nightly/close").status,
        bound.post("/batches/nightly/cancel").status,
        bound.post("/batches/nightly/retry").status,
        bound.post("/queue/jobs/submit", ours | {"batch": "nightly"}).status,
        bound.post("/queue/jobs/submit", ours | {"tags": ["batch:nightly"]}).status,
        bound.post("/queue/jobs/submit", ours | {"after": ["batch:nightly"]}).status,
    }
    assert bound.post("/queue/jobs/submit", ours | {"after": ["batch:own"]}).status == 200
    assert bound.post("/queue/jobs/submit", ours | {"batch": "own"}).status == 200


def test_a_bound_token_changes_no_jobs_of_other_addons_in_its_batch(live):
    client = live.client
    bound = client.mint(addon_id="ours")
    body = {"name": "mixed", "addon_id": "ours", "jobs": [JOB, JOB, JOB | {"addon_id": "ours"}]}
    *_, ours = client.post("/batches/submit", body).json["jobs"]
    [claimed] = claim(client)
    finish(client, claimed, state="FAILED", error="no")

    retried = bound.post("/batches/mixed/retry").json
    canceled = bound.post("/batches/mixed/cancel").json

    assert (retried["changed"], canceled["changed"]) == (0, 1)
    assert client.state(ours) == "CANCELED"
    assert counts(client.get("/batches/mixed").json) == ("RUNNING", 3, 1, 0, 1, 1)
    assert client.post("/batches/mixed/cancel").json["changed"] == 1


def test_a_bound_token_does_not_learn_of_parents_of_other_addons(kit):
    kit.client.post("/batches/submit", BODY)
    parent = kit.client.submit(**JOB)
    ours = JOB | {"addon_id": "ours"}
    body = ours | {"after": [parent, "batch:nightly:done"], "if_unmet": "fail"}
    child = kit.client.post("/queue/jobs/submit", body).json["job_id"]
    bound = kit.client.mint(addon_id="ours")

    texts = [
        bound.get(f"/queue/jobs/{child}{path}").content.decode() for path in ("", "/explain", "/dependencies")
    ]
    texts.append(bound.get("/queue/jobs").content.decode())
    assert bound.job(child)["after"] == ["another addon:ok", "another addon:done"]
    kit.client.post(f"/queue/jobs/{parent}/cancel")
    assert bound.job(child)["state"] == "FAILED"
    texts += [bound.get(f"/queue/jobs/{child}{path}").content.decode() for path in ("", "/explain")]
    texts.append(bound.get("/events").content.decode())
    for text in texts:
        assert parent not in text
        assert parent[-8:] not in text
        assert "nightly" not in text


def test_a_job_of_an_admin_waits_for_an_array(client):
    array = client.post("/arrays/submit", {"array": "1-2", "job": JOB}).json["array_id"]
    child = client.post("/queue/jobs/submit", JOB | {"after": [f"{array}:done"]}).json["job_id"]
    explained = client.get(f"/queue/jobs/{child}/explain").json["text"]
    assert f"array {array[-8:]} (RUNNING, 0 of 2 ended) to be over" in explained
    client.post(f"/arrays/{array}/cancel")
    assert client.job(child)["unmet"] == 0


def test_arrays_and_schedules_cannot_be_in_a_batch(client):
    for given, of_array, of_schedule in (
        ({"tags": ["batch:x"]}, "tags", "job.tags"),
        ({"batch": "x"}, "job.batch", "job.batch"),
    ):
        refused = client.post("/arrays/submit", {"array": "1-2", "job": JOB | given})
        assert (refused.status, refused.fields) == (422, [of_array])
        refused = client.post("/schedules/add", {"name": "s", "cron": "@daily", "job": JOB | given})
        assert (refused.status, refused.fields) == (422, [of_schedule])
