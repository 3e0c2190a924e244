"""Lists by time and text, counts that follow a filter, changes of all jobs that a filter finds, and reruns."""

from __future__ import annotations

from urllib.parse import quote

import pytest


def ids(answer):
    return [job["job_id"] for job in answer.json["jobs"]]


def fail(client, error="OSError: no paint", **fields):
    job_id = client.submit(**fields)
    client.post("/kick")
    [claimed] = [job for job in client.claim(limit=50) if job["job_id"] == job_id]
    outcome = {"lease_id": claimed["lease_id"], "state": "FAILED", "error": error}
    assert client.post(f"/queue/jobs/{job_id}/complete", outcome).json["state"] == "FAILED"
    return job_id


def test_a_list_shows_what_each_job_is(client):
    command = client.submit(job_type="penstock.command", payload={"argv": ["make", "all"]})
    client.submit(payload={"path": "/data"})

    titles = {job["job_id"]: job["title"] for job in client.get("/queue/jobs").json["jobs"]}

    assert titles[command] == "make all"
    assert "indexing(path='/data')" in titles.values()
    assert client.job(command)["title"] == "make all"


def test_jobs_are_listed_and_counted_by_text_and_time(client):
    failed = fail(client)
    queued = client.submit(payload={"colour": "PAINT"})
    client.submit()
    created = quote(client.job(queued)["created_at"])

    assert ids(client.get("/queue/jobs?text=paint")) == [failed, queued]
    assert ids(client.get("/queue/jobs?text=paint&state=QUEUED")) == [queued]
    assert client.get("/queue/count?text=paint").json["jobs"] == {"FAILED": 1, "QUEUED": 1}
    assert client.get("/queue/count").json["jobs"] == {"FAILED": 1, "QUEUED": 2}
    assert client.get("/queue/count?addon_id=visuals").json["jobs"] == {"FAILED": 1, "QUEUED": 2}
    assert failed not in ids(client.get(f"/queue/jobs?since={created}"))
    assert ids(client.get(f"/queue/jobs?before={created}")) == [failed]


def test_a_filter_cancels_every_job_that_it_finds_and_no_other(client):
    wanted = [client.submit(tags=["old"]) for _ in range(3)]
    other = client.submit()

    changed = client.post("/queue/cancel/bulk", {"tag": "old", "state": "QUEUED"}).json

    assert changed == {"changed": 3, "refused": [], "next": None}
    assert {client.state(job_id) for job_id in wanted} == {"CANCELED"}
    assert client.state(other) == "QUEUED"
    assert client.kinds(wanted[0])[-1] == "CANCELED"


def test_more_jobs_than_one_commit_takes_are_canceled_page_by_page(client):
    jobs = [{"addon_id": "visuals", "job_type": "indexing"}] * 600
    assert client.post("/queue/jobs/submit/bulk", {"jobs": jobs}).status == 200

    first = client.post("/queue/cancel/bulk", {}).json
    second = client.post("/queue/cancel/bulk", {"after": first["next"]}).json

    assert (first["changed"], second["changed"], second["next"]) == (500, 100, None)
    assert client.get("/queue/count").json["jobs"] == {"CANCELED": 600}


def test_a_filter_retries_only_jobs_that_can_be_retried(client):
    failed = fail(client)
    queued = client.submit()

    assert client.post("/queue/retry/bulk", {"text": "paint"}).json["changed"] == 1
    assert client.post("/queue/retry/bulk", {"state": "QUEUED,DONE"}).json["changed"] == 0
    assert (client.state(failed), client.state(queued)) == ("QUEUED", "QUEUED")


def test_a_token_of_an_addon_changes_and_counts_only_jobs_of_its_own(kit, client):
    bound = client.mint(addon_id="shop")
    own = bound.submit(addon_id="shop")
    foreign = client.submit()

    assert bound.get("/queue/count").json["jobs"] == {"QUEUED": 1}
    assert bound.post("/queue/cancel/bulk", {}).json["changed"] == 1
    assert bound.post("/queue/cancel/bulk", {"addon_id": "visuals"}).status == 404
    assert bound.post(f"/queue/jobs/{foreign}/rerun").status == 404
    assert (client.state(own), client.state(foreign)) == ("CANCELED", "QUEUED")


def test_a_bulk_retry_leaves_commands_to_tokens_that_may_submit_them(client):
    job_id = client.submit(job_type="penstock.command", payload={"argv": ["true"]}, addon_id="shop")
    [claimed] = client.claim(job_types=["penstock.command"], addon_id="shop")
    outcome = {"lease_id": claimed["lease_id"], "state": "FAILED", "error": "x"}
    client.post(f"/queue/jobs/{job_id}/complete", outcome)
    plain = client.mint(scopes=["jobs:submit:registered", "jobs:read"])

    answer = plain.post("/queue/retry/bulk", {}).json

    assert (answer["changed"], [refused["job_id"] for refused in answer["refused"]]) == (0, [job_id])
    assert client.state(job_id) == "FAILED"


def test_a_rerun_is_a_new_job_with_the_same_request(client):
    job_id = client.submit(payload={"n": 1}, priority=80, idempotency_key="k", tags=["x"])
    client.post(f"/queue/jobs/{job_id}/cancel")

    again = client.post(f"/queue/jobs/{job_id}/rerun").json
    changed = client.post(f"/queue/jobs/{job_id}/rerun", {"payload": {"n": 2}, "priority": "LOW"}).json

    assert again["job_id"] != job_id
    job = client.job(again["job_id"])
    assert (job["state"], job["payload"], job["priority"], job["tags"]) == ("QUEUED", {"n": 1}, 80, ["x"])
    assert job["idempotency_key"] is None
    job = client.job(changed["job_id"])
    assert (job["payload"], job["priority"]) == ({"n": 2}, 25)
    assert client.state(job_id) == "CANCELED"


def test_a_rerun_with_a_key_makes_one_job(client):
    job_id = client.submit(payload={"n": 1}, idempotency_key="of the first")

    again = client.post(f"/queue/jobs/{job_id}/rerun", {"idempotency_key": "again"}).json
    repeated = client.post(f"/queue/jobs/{job_id}/rerun", {"idempotency_key": "again"}).json
    other = client.post(f"/queue/jobs/{job_id}/rerun", {"idempotency_key": "again", "payload": 2})

    assert again["created"]
    assert not repeated["created"]
    assert repeated["job_id"] == again["job_id"] != job_id
    assert client.job(again["job_id"])["idempotency_key"] == "again"
    assert other.status == 409


def test_a_rerun_asks_for_the_rights_of_a_submit(client):
    job_id = client.submit(job_type="penstock.command", payload={"argv": ["true"]})
    plain = client.mint(scopes=["jobs:submit:registered", "jobs:read"])

    assert plain.post(f"/queue/jobs/{job_id}/rerun").status == 403
    bad = client.post(f"/queue/jobs/{job_id}/rerun", {"payload": {"argv": []}})
    assert (bad.status, bad.fields) == (422, ["payload.argv"])


@pytest.mark.parametrize(
    ("path", "body"),
    [("/pause", {"addon_id": "visual"}), ("/addons/edit", {"addon_id": "visual", "weight": 5})],
)
def test_an_addon_that_has_never_been_seen_is_refused_unless_it_shall_be_created(client, path, body):
    client.submit()

    refused = client.post(path, body)
    taken = client.post(path, body | {"create": True})

    assert refused.status == 404
    assert "did you mean visuals?" in refused.json["detail"]
    assert taken.status == 200
    assert client.post(path, body).status == 200  # it is known now


def test_alerts_are_listed_newest_first_and_only_to_their_owner(client):
    for addon in ("shop", "visuals"):
        job_id = client.submit(addon_id=addon, cost_limit=1.0)
        [claimed] = client.claim(addon_id=addon)
        client.post("/lease/heartbeat", {"lease_id": claimed["lease_id"], "spent": 5.0})

    everything = client.get("/alerts").json["alerts"]
    bound = client.mint(addon_id="shop").get("/alerts").json["alerts"]

    assert everything[0]["job_id"] == job_id
    assert {alert["addon_id"] for alert in everything} == {"shop", "visuals"}
    assert {alert["addon_id"] for alert in bound} == {"shop"}
    assert all(alert["text"] for alert in everything)
