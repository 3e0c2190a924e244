"""The flow of the seed over real HTTP: its paths, its fields, its states."""

from __future__ import annotations

import pytest
from http_kit import SEED_BODY


@pytest.fixture(params=["tcp", "unix"])
def caller(request, live):
    return live.client if request.param == "tcp" else live.local


def test_a_job_goes_from_submit_to_done_in_two_steps(caller):
    answer = caller.post("/queue/jobs/submit", SEED_BODY)
    assert (answer.status, answer.json["state"]) == (200, "QUEUED")
    job_id = answer.json["job_id"]

    waiting = caller.get("/queue/dispatchable?addon_id=visuals&wait_sec=10").json["jobs"]
    assert [job["job_id"] for job in waiting] == [job_id]
    assert caller.state(job_id) == "DISPATCHING"
    listed = caller.get("/queue/jobs?state=DISPATCHING&limit=50").json["jobs"]
    assert [job["job_id"] for job in listed] == [job_id]

    lease = caller.post("/lease/request", {"job_id": job_id, "worker": "w1"}).json
    assert lease["approved"] is True
    job = caller.job(job_id)
    assert (job["state"], job["lease_id"]) == ("RUNNING", lease["lease_id"])
    assert job["payload"] == {"path": "/some/dir"}

    by_lease = {"lease_id": lease["lease_id"]}
    assert caller.post(f"/queue/jobs/{job_id}/ack", by_lease).status == 200
    beat = caller.post("/lease/heartbeat", by_lease | {"progress": 0.5, "checkpoint": {"at": 7}}).json
    assert (beat["cancel"], beat["yield"], beat["stop"]) == (False, False, None)
    assert caller.job(job_id)["checkpoint"] == {"at": 7}
    outcome = by_lease | {"state": "DONE", "result": {"files": 3}}
    done = caller.post(f"/queue/jobs/{job_id}/complete", outcome)
    assert (done.status, done.json["state"]) == (200, "DONE")
    assert caller.post("/lease/release", by_lease).json["state"] == "DONE"

    job = caller.job(job_id)
    assert (job["state"], job["result"], job["progress"]) == ("DONE", {"files": 3}, 0.5)
    assert caller.kinds(job_id) == ["SUBMITTED", "DISPATCHING", "RUNNING", "CHECKPOINT", "DONE"]
