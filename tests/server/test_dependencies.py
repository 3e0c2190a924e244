"""Jobs that wait for other jobs, over real HTTP."""

from __future__ import annotations

import pytest

JOB = {"addon_id": "visuals", "job_type": "indexing"}


def claim(client):
    return client.claim(addon_id="visuals", job_types=["indexing"], worker="w", wait_sec=5)


def finish(client, claimed, **outcome):
    body = {"lease_id": claimed["lease_id"], "state": "DONE"} | outcome
    return client.post(f"/queue/jobs/{claimed['job_id']}/complete", body)


def test_a_family_is_submitted_run_and_shown(live):
    client = live.client
    bodies = [JOB, JOB | {"after": ["#0"]}, JOB | {"after": ["#0:done", "#1"], "if_unmet": "wait"}]
    answer = client.post("/queue/jobs/submit/bulk", {"jobs": bodies})
    first, second, third = [job["job_id"] for job in answer.json["jobs"]]

    job = client.job(third)
    assert (job["after"], job["if_unmet"], job["unmet"]) == ([f"{first}:done", f"{second}:ok"], "wait", 2)
    explained = client.get(f"/queue/jobs/{third}/explain").json
    assert explained["reason"] == "waits_for_parents"
    assert f"job {first[-8:]}" in explained["text"]

    [claimed] = claim(client)
    assert (claimed["job_id"], claimed["parents"]) == (first, [])
    finish(client, claimed, result={"files": 3})
    [claimed] = claim(client)
    assert (claimed["job_id"], claimed["parents"]) == (second, [[first, "DONE", {"files": 3}]])
    dependencies = client.get(f"/queue/jobs/{second}/dependencies").json
    assert [(dependency["job_id"], dependency["status"]) for dependency in dependencies["parents"]] == [
        (first, "met")
    ]
    assert [(dependency["job_id"], dependency["state"]) for dependency in dependencies["children"]] == [
        (third, "QUEUED")
    ]
    finish(client, claimed, state="FAILED", error="no")

    assert client.job(third)["state"] == "QUEUED"
    explained = client.get(f"/queue/jobs/{third}/explain").json
    assert explained["way_out"] == f"penstock retry {second[-8:]}"
    client.post(f"/queue/jobs/{second}/cancel")
    client.post(f"/queue/jobs/{second}/retry")
    finish(client, claim(client)[0])
    assert [claimed["job_id"] for claimed in claim(client)] == [third]


def test_a_child_that_cannot_run_says_why(live):
    parent = live.client.submit()
    child = live.client.post("/queue/jobs/submit", JOB | {"after": [parent]}).json["job_id"]

    live.client.post(f"/queue/jobs/{parent}/cancel")

    job = live.client.job(child)
    assert (job["state"], job["end"]) == ("CANCELED", "dependency_unmet")
    assert job["error"] == f"it was to run after job {parent[-8:]}:ok, which is CANCELED"
    clauses = {row["job_id"]: row["why"] for row in live.client.get("/queue/jobs").json["jobs"]}
    assert (clauses[child], clauses[parent]) == (job["error"], "")


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"after": ["no such job"]}, 422, "after"),
        ({"after": ["x:ended"]}, 422, "after"),
        ({"after": "x"}, 422, "after"),
        ({"after": ["0190"]}, 404, "there is no job 0190"),
        ({"after": ["#0"]}, 422, "wait for each other"),
        ({"after": ["#1"]}, 422, "names #1"),
        ({"after": ["x", "x:done"]}, 422, "names job x twice"),
        ({"after": ["x"] * 10_001}, 422, "after"),
        ({"if_unmet": "stop"}, 422, "if_unmet"),
    ],
)
def test_a_wrong_field_is_refused_by_name_and_nothing_changes(client, fields, status, words):
    before = client.get("/queue/jobs?limit=50").json

    answer = client.post("/queue/jobs/submit", JOB | fields)

    assert answer.status == status
    assert words in str(answer.json)
    assert client.get("/queue/jobs?limit=50").json == before


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ((["#1"], ["#0"]), "wait for each other: #"),
        ((["#0"], []), "wait for each other: #0 -> #0"),
        ((["#2"], []), "names #2, but the submit has 2 jobs"),
        ((["#1", "#01"], []), "names job #1 twice"),
    ],
)
def test_jobs_of_one_submit_that_wait_for_each_other_are_refused_by_name(client, after, words):
    before = client.get("/queue/jobs?limit=50").json

    answer = client.post("/queue/jobs/submit/bulk", {"jobs": [JOB | {"after": names} for names in after]})

    assert (answer.status, answer.json["problems"][0]["field"].rpartition(".")[2]) == (422, "after")
    assert words in str(answer.json)
    assert client.get("/queue/jobs?limit=50").json == before


def test_a_job_of_a_batch_that_waits_for_the_batch_is_refused_by_name(client):
    client.post("/batches/submit", {"name": "nightly", "addon_id": "visuals", "open": True})
    waits = client.post("/queue/jobs/submit", JOB | {"after": ["batch:nightly"]}).json["job_id"]

    for parent in ("batch:nightly:done", waits):
        answer = client.post("/queue/jobs/submit", JOB | {"batch": "nightly", "after": [parent]})
        assert answer.status == 422
        assert "wait for each other" in answer.json["detail"]
    assert client.get("/batches/nightly").json["total"] == 0


def test_a_bound_token_can_only_depend_on_its_own_jobs(client):
    theirs = client.submit(addon_id="others")
    bound = client.mint(addon_id="visuals")
    mine = bound.submit(addon_id="visuals")

    known = bound.post("/queue/jobs/submit", JOB | {"after": [mine]})
    foreign = bound.post("/queue/jobs/submit", JOB | {"after": [theirs]})
    unknown = bound.post("/queue/jobs/submit", JOB | {"after": ["0" + theirs[1:-1] + "x"]})

    assert known.status == 200
    assert (foreign.status, unknown.status) == (404, 404)
    assert foreign.json["code"] == unknown.json["code"] == "not_found"
    child = client.post("/queue/jobs/submit", JOB | {"after": [theirs, mine]}).json["job_id"]
    dependencies = bound.get(f"/queue/jobs/{child}/dependencies").json
    assert [dependency["job_id"] for dependency in dependencies["parents"]] == [mine]
    assert theirs[-8:] not in bound.get(f"/queue/jobs/{child}/explain").json["text"]


def test_a_claim_of_a_bound_token_has_the_results_of_foreign_parents_without_their_ids(live):
    client = live.client
    theirs = client.submit(addon_id="others")
    mine = client.submit(addon_id="visuals")
    bound = client.mint(addon_id="visuals")
    body = JOB | {"after": [f"{theirs}:done", f"{mine}:done"]}
    child = client.post("/queue/jobs/submit", body).json["job_id"]
    for parent in (theirs, mine):
        client.post(f"/queue/jobs/{parent}/cancel")

    body = {"job_types": [JOB["job_type"]], "worker": "w", "wait_sec": 30}
    [claimed] = bound.post("/queue/claim", body).json["jobs"]

    assert claimed["job_id"] == child
    assert claimed["parents"] == [["another addon", "CANCELED", None], [mine, "CANCELED", None]]
