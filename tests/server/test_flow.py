"""The flow of the seed over real HTTP: its paths, its fields, its states."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from http_kit import SEED_BODY, ServerKit
from tests.waiting import until

from penstock.core.jobs.load import Capacity, Reading
from penstock.core.jobs.types import HOUR
from penstock.stores.api import Admit, committed


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
    assert caller.kinds(job_id) == ["SUBMITTED", "ADMITTED", "DISPATCHING", "RUNNING", "CHECKPOINT", "DONE"]


def test_a_job_goes_from_submit_to_done_in_one_step(caller):
    job_id = caller.submit(payload=[1, {"a": None}], tags=["x"])

    [claimed] = caller.claim(addon_id="visuals", job_types=["indexing"], worker="w", wait_sec=5)
    assert (claimed["job_id"], claimed["payload"], claimed["fence"]) == (job_id, [1, {"a": None}], 1)
    outcome = {"lease_id": claimed["lease_id"], "state": "FAILED", "error": "no such file"}
    assert caller.post(f"/queue/jobs/{job_id}/complete", outcome).json["state"] == "FAILED"
    job = caller.job(job_id)
    assert (job["state"], job["error"], job["end"]) == ("FAILED", "no such file", "job_error")


def test_a_payload_comes_back_as_it_was_given(client):
    payload = '{"z": 1, "a": 1.50, "big": 123456789012345678901234567890, "text": "\\u00e9\\n\\ud83d\\ude00", "nested": [[[]]]}'
    answer = client.post("/queue/jobs/submit", f'{{"addon_id": "a", "job_type": "t", "payload": {payload}}}')

    content = client.get(f"/queue/jobs/{answer.json['job_id']}").content
    assert f'"payload":{payload}'.encode() in content


# cancel, in each state


def queued(client):
    return client.submit()


def dispatching(client):
    job_id = client.submit()
    assert client.get("/queue/dispatchable?wait_sec=10").json["jobs"]
    return job_id


def running(client):
    job_id = dispatching(client)
    assert client.post("/lease/request", {"job_id": job_id}).json["approved"]
    return job_id


def test_a_queued_job_is_canceled_at_once(client):
    job_id = queued(client)

    assert client.post(f"/queue/jobs/{job_id}/cancel").json["state"] == "CANCELED"
    assert client.kinds(job_id) == ["SUBMITTED", "CANCELED"]


def test_a_dispatching_job_is_canceled_at_once(live):
    job_id = dispatching(live.client)

    assert live.client.post(f"/queue/jobs/{job_id}/cancel").json["state"] == "CANCELED"
    assert live.client.post("/lease/request", {"job_id": job_id}).status == 409


def test_a_running_job_is_told_to_stop_and_then_canceled(live):
    client = live.client
    job_id = running(client)
    by_lease = {"lease_id": client.job(job_id)["lease_id"]}

    assert client.post(f"/queue/jobs/{job_id}/cancel").json["state"] == "RUNNING"
    beat = client.post("/lease/heartbeat", by_lease).json
    assert (beat["cancel"], beat["stop"]) == (True, "canceled")
    landed = client.post(f"/queue/jobs/{job_id}/complete", by_lease | {"state": "DONE"}).json
    assert landed["state"] == "CANCELED"


def test_a_canceled_job_can_be_canceled_again(live):
    job_id = running(live.client)
    lease = live.client.job(job_id)["lease_id"]
    live.client.post(f"/queue/jobs/{job_id}/cancel")
    live.client.post("/lease/release", {"lease_id": lease})
    trail = live.client.kinds(job_id)
    again = live.client.post(f"/queue/jobs/{job_id}/cancel")

    assert (again.status, again.json["state"]) == (200, "CANCELED")
    assert live.client.kinds(job_id) == trail


def test_a_job_that_failed_by_its_deadline_says_so(kit):
    soon = datetime.now(UTC) + timedelta(milliseconds=200)
    job_id = kit.client.submit(deadline_at=soon.isoformat())
    until(lambda: kit.store.now() > kit.store.job(job_id).intent.deadline_at)
    kit.service.maintenance.step(kit.store.now())
    job = kit.client.job(job_id)

    assert (job["state"], job["end"]) == ("FAILED", "deadline_passed")
    assert job["error"] == "its deadline passed while it waited in the queue"


def test_an_admitted_job_says_so_before_it_is_dispatched(live):
    job_id = dispatching(live.client)
    page = live.client.get(f"/events?job_id={job_id}").json
    submitted, admitted, dispatched = page["events"]

    assert [e["kind"] for e in page["events"]] == ["SUBMITTED", "ADMITTED", "DISPATCHING"]
    assert (admitted["state"], dispatched["state"]) == ("QUEUED", "DISPATCHING")
    assert (admitted["n"], admitted["dispatch_id"]) == (dispatched["n"], dispatched["dispatch_id"])
    assert page["next"] == dispatched["n"]


@pytest.mark.parametrize("door", ["ack", "heartbeat", "report"])
def test_a_worker_tells_which_process_runs_its_job(live, door):
    job_id = running(live.client)
    lease = live.client.job(job_id)["lease_id"]
    path = f"/queue/jobs/{job_id}/ack" if door == "ack" else f"/lease/{door}"
    before = live.client.job(job_id)["pid"]
    assert live.client.post(path, {"lease_id": lease, "pid": 4711}).status == 200

    assert (before, live.client.job(job_id)["pid"]) == (None, 4711)
    assert [job["pid"] for job in live.client.get("/queue/jobs").json["jobs"]] == [4711]
    assert [one["pid"] for one in live.client.get("/leases").json["leases"]] == [4711]


def test_a_job_that_is_done_cannot_be_canceled_and_says_what_can_be_done(live):
    client = live.client
    job_id = running(client)
    outcome = {"lease_id": client.job(job_id)["lease_id"], "state": "DONE"}
    client.post(f"/queue/jobs/{job_id}/complete", outcome)

    before = client.kinds(job_id)
    answer = client.post(f"/queue/jobs/{job_id}/cancel")
    assert client.state(job_id) == "DONE"
    assert client.kinds(job_id) == before
    assert (answer.status, answer.json["code"], answer.json["data"]["allowed"]) == (409, "illegal_move", [])


def test_a_failed_job_is_queued_again_by_retry_and_nothing_else_is(live):
    client = live.client
    job_id = running(client)
    outcome = {"lease_id": client.job(job_id)["lease_id"], "state": "FAILED", "error": "x"}

    refused = client.post(f"/queue/jobs/{job_id}/retry")
    assert (refused.status, refused.json["code"]) == (409, "illegal_move")
    assert "complete" in refused.json["data"]["allowed"]
    client.post(f"/queue/jobs/{job_id}/complete", outcome)
    again = client.post(f"/queue/jobs/{job_id}/retry").json
    assert again["state"] in ("QUEUED", "DISPATCHING")  # the dispatcher may have been quicker than the answer
    assert client.post(f"/queue/jobs/{job_id}/retry").status == 409


# admission only


def test_a_lease_without_a_job_is_granted_held_and_released(client):
    asked = {"addon_id": "visuals", "job_type": "indexing", "cost_units": 60}
    lease = client.post("/lease/request", asked).json
    assert (lease["approved"], lease["job_id"]) == (True, None)

    denied = client.post("/lease/request", asked).json
    assert (denied["approved"], denied["reason"]) == (False, "no_room")
    assert denied["retry_after_sec"] >= 1
    assert "needs 60 units; 30 of 90 are free" in denied["message"]

    assert client.post("/lease/release", {"lease_id": lease["lease_id"]}).status == 200
    assert client.post("/lease/request", asked).json["approved"] is True


def test_a_list_says_in_one_clause_why_each_job_is_where_it_is(client, kit):
    """From what the rows have: a round for each of them would make a list slow."""
    failed, blocked = (client.submit(cost_units=10) for _ in range(2))
    for job_id, state in ((failed, "FAILED"), (blocked, "DONE")):
        kit.service.dispatcher.step(kit.store.now())
        lease = client.post("/lease/request", {"job_id": job_id, "worker": "w"}).json["lease_id"]
        client.post("/lease/report", {"lease_id": lease, "state": state, "error": "Traceback\nKeyError: 7"})
    large = client.submit(cost_units=90)
    kit.service.dispatcher.step(kit.store.now())
    client.post("/lease/request", {"job_id": large, "worker": "w"})
    waits, later = client.submit(cost_units=20), client.submit(earliest_start_at="2100-01-01T00:00:00Z")
    behind, elsewhere = client.submit(cost_units=20), client.submit(labels=["gpu"])
    kit.service.dispatcher.step(kit.store.now())
    looks = kit.store.read_view
    kit.store.read_view = None
    try:
        jobs = {job["job_id"]: job["why"] for job in client.get("/queue/jobs").json["jobs"]}
    finally:
        kit.store.read_view = looks

    assert (jobs[failed], jobs[blocked]) == ("KeyError: 7", "")
    assert jobs[waits] == "needs 20 units; too few are free"
    assert (jobs[behind], jobs[elsewhere]) == (
        "behind 1 job of the same kind",
        "waits for a host with the label gpu",
    )
    assert jobs[later].startswith("starts in about")
    assert client.get(f"/queue/jobs/{failed}").json["why"] == "KeyError: 7"
    assert client.get(f"/queue/jobs/{behind}").json["why"] == "behind 1 job of the same kind"
    assert all(len(why) <= 60 for why in jobs.values())


def test_a_lease_for_a_queued_job_is_denied_with_the_reason_and_a_hint(client):
    client.post("/pause", {})
    job_id = client.submit()

    denied = client.post("/lease/request", {"job_id": job_id}).json
    assert (denied["approved"], denied["reason"]) == (False, "paused")
    assert denied["retry_after_sec"] >= 1
    assert client.state(job_id) == "QUEUED"


def test_asking_for_nothing_in_particular_names_what_is_missing(client):
    answer = client.post("/lease/request", {})

    assert (answer.status, answer.fields) == (422, ["addon_id", "job_type"])


# fences


def test_a_stale_lease_is_refused_everywhere_and_changes_nothing(live):
    client = live.client
    job_id = client.submit(retry_delays_sec=[0])
    [first] = client.claim(wait_sec=5)
    stale = {"lease_id": first["lease_id"]}
    client.post(f"/queue/jobs/{job_id}/complete", stale | {"state": "FAILED", "error": "again"})
    [second] = client.claim(wait_sec=10)
    assert second["fence"] == 2
    before = (client.job(job_id), client.kinds(job_id))

    for path, body in [
        (f"/queue/jobs/{job_id}/ack", stale),
        (f"/queue/jobs/{job_id}/complete", stale | {"state": "DONE"}),
        ("/lease/heartbeat", stale | {"progress": 1}),
        ("/lease/report", stale | {"progress": 1, "state": "DONE"}),
    ]:
        answer = client.post(path, body)
        assert (answer.status, answer.json["code"]) == (409, "stale_dispatch"), path
    [ended] = client.post("/queue/complete/bulk", {"outcomes": [stale | {"state": "DONE"}]}).json["outcomes"]
    assert ended["problem"]["code"] == "stale_dispatch"
    assert (client.job(job_id), client.kinds(job_id)) == before


def test_an_outcome_told_twice_is_answered_twice_and_happens_once(live):
    client = live.client
    job_id = client.submit()
    [claimed] = client.claim(wait_sec=5)
    outcome = {"lease_id": claimed["lease_id"], "state": "DONE", "result": 7}
    path = f"/queue/jobs/{job_id}/complete"

    assert [client.post(path, outcome).json["state"] for _ in range(2)] == ["DONE", "DONE"]
    assert client.post(path, outcome | {"result": 8}).status == 409
    assert client.kinds(job_id).count("DONE") == 1
    assert client.job(job_id)["result"] == 7


def test_a_lease_does_not_speak_for_another_job(live):
    client = live.client
    jobs = [client.submit(), client.submit()]
    [claimed] = client.claim(wait_sec=5)
    other = next(job_id for job_id in jobs if job_id != claimed["job_id"])

    answer = client.post(f"/queue/jobs/{other}/complete", {"lease_id": claimed["lease_id"], "state": "DONE"})
    assert answer.status == 409
    assert client.state(claimed["job_id"]) == "RUNNING"


def test_a_released_job_goes_on_waiting(live):
    client = live.client
    job_id = client.submit()
    [claimed] = client.claim(wait_sec=5)

    assert client.post("/lease/release", {"lease_id": claimed["lease_id"]}).json["state"] == "QUEUED"
    assert client.kinds(job_id)[-1] in {"REQUEUED", "DISPATCHING"}


def test_a_report_carries_progress_spending_and_outcome(live):
    client = live.client
    job_id = client.submit(cost_limit=2.5, unit="EUR")
    [claimed] = client.claim(wait_sec=5)
    report = {"lease_id": claimed["lease_id"], "progress": 1, "spent": 0.1, "state": "DONE", "result": "ok"}

    assert client.post("/lease/report", report).json["state"] == "DONE"
    job = client.job(job_id)
    assert (job["spent"], job["cost_limit"], job["unit"], job["result"]) == (0.1, 2.5, "EUR", "ok")


# many at once


@pytest.mark.parametrize("later", [timedelta(days=1), timedelta(seconds=30)])
def test_a_submit_with_a_deadline_says_whether_it_looks_reachable(client, later):
    body = {"addon_id": "a", "job_type": "t", "expected_duration_sec": 600, "time_sensitive": True}
    body["deadline_at"] = (datetime.now(UTC) + later).isoformat()

    answer = client.post("/queue/jobs/submit", body)
    assert answer.json["deadline_reachable"] is (later > timedelta(seconds=600))
    assert client.post("/queue/jobs/submit", SEED_BODY).json["deadline_reachable"] is None


def test_bulk_submit_is_all_or_none(client):
    jobs = [{"addon_id": "a", "job_type": "t", "priority": "high"}] * 3
    assert len(client.post("/queue/jobs/submit/bulk", {"jobs": jobs}).json["jobs"]) == 3

    refused = client.post("/queue/jobs/submit/bulk", {"jobs": [*jobs, jobs[0] | {"cost_units": 91}]})
    assert refused.status == 422
    assert refused.fields == ["jobs[3].cost_units"]
    assert len(client.get("/queue/jobs").json["jobs"]) == 3


def test_outcomes_in_bulk_stand_each_on_its_own(live):
    client = live.client
    for _ in range(3):
        client.submit(cost_units=10)
    claimed = []
    while len(claimed) < 3:
        claimed += client.claim(limit=3, wait_sec=5)
    leases = [job["lease_id"] for job in claimed]
    client.post("/lease/release", {"lease_id": leases[1]})

    outcomes = [
        {"lease_id": leases[0], "state": "DONE", "result": 1},
        {"lease_id": leases[1], "state": "DONE"},
        {"lease_id": leases[2], "state": "FAILED", "error": "e", "failure": "job_error"},
        {"lease_id": "nobody.1", "state": "DONE"},
    ]
    received = client.post("/queue/complete/bulk", {"outcomes": outcomes}).json["outcomes"]
    assert [ended["state"] for ended in received] == ["DONE", None, "FAILED", None]
    assert [ended["problem"] and ended["problem"]["status"] for ended in received] == [None, 409, None, 404]


def test_an_exchange_ends_and_claims_in_one_call(live):
    client = live.client
    client.post("/pause", {"addon_id": "other", "create": True})
    [first, second] = [client.submit(cost_units=90) for _ in range(2)]
    [claimed] = client.claim(wait_sec=5)
    assert claimed["job_id"] == first

    outcome = {"lease_id": claimed["lease_id"], "state": "DONE"}
    received = client.post("/queue/exchange", {"outcomes": [outcome], "limit": 5}).json
    assert [ended["state"] for ended in received["outcomes"]] == ["DONE"]
    assert [job["job_id"] for job in received["jobs"]] == [second]


def test_an_idempotency_key_returns_the_first_job_and_refuses_another_body(client):
    body = {"addon_id": "a", "job_type": "t", "idempotency_key": "k"}
    first = client.post("/queue/jobs/submit", body).json
    again = client.post("/queue/jobs/submit", body).json
    other = client.post("/queue/jobs/submit", body | {"cost_units": 11})

    assert (first["created"], again["created"]) == (True, False)
    assert first["job_id"] == again["job_id"]
    assert (other.status, other.json["code"]) == (409, "key_conflict")


# looking


def test_lists_are_filtered_and_paged(client):
    ids = [client.submit(addon_id=a, tags=[t]) for a in "ab" for t in "xyz"]

    def listed(query):
        answer = client.get(f"/queue/jobs?{query}").json
        return [job["job_id"] for job in answer["jobs"]], answer["next"]

    assert listed("addon_id=b")[0] == ids[3:]
    assert listed("tag=y")[0] == [ids[1], ids[4]]
    assert listed("state=QUEUED,DONE")[0] == ids
    assert listed("state=DONE") == ([], None)
    page, after = listed("limit=4")
    assert page == ids[:4]
    assert listed(f"limit=4&after={after}") == (ids[4:], None)
    assert listed("newest_first=true&limit=2")[0] == [ids[5], ids[4]]


def test_a_job_is_found_by_the_end_of_its_id(client):
    job_id = client.submit()
    client.submit()

    assert client.get(f"/queue/find?part={job_id[-8:]}").json == {"job_ids": [job_id]}
    assert client.get("/queue/find?part=ffffffff").json == {"job_ids": []}


def test_edit_changes_what_it_names_and_nothing_else(client):
    job_id = client.submit(deadline_at="2100-01-01T00:00:00Z")
    before = client.job(job_id)

    edited = client.post(f"/queue/jobs/{job_id}/edit", {"priority": "urgent", "deadline_at": None}).json
    assert (edited["priority"], edited["deadline_at"]) == (95, None)
    same = before.keys() - {"priority", "deadline_at"}
    assert {name: edited[name] for name in same} == {name: before[name] for name in same}


def test_explain_says_what_a_job_waits_for(client):
    client.post("/pause", {"addon_id": "visuals", "create": True})
    job_id = client.submit()

    received = client.get(f"/queue/jobs/{job_id}/explain").json
    assert (received["reason"], received["state"]) == ("paused", "QUEUED")
    assert "Addon visuals is paused" in received["text"]
    assert "cancel" in received["allowed"]


def test_pause_holds_one_addon_or_everything_and_resume_takes_it_up(live):
    client = live.client
    client.post("/pause")
    assert client.get("/stats").json["paused"] is True
    job_id = client.submit()
    assert client.claim() == []

    client.post("/resume")
    assert [job["job_id"] for job in client.claim(wait_sec=5)] == [job_id]


def test_an_addon_has_a_weight_and_can_be_paused(client):
    client.submit()

    assert (
        client.post(
            "/addons/edit", {"addon_id": "visuals", "weight": 300, "paused": True, "create": True}
        ).json["weight"]
        == 300
    )
    [addon] = client.get("/addons").json["addons"]
    assert (addon["addon_id"], addon["weight"], addon["paused"], addon["jobs"]) == (
        "visuals", 300, True, {"QUEUED": 1},
    )  # fmt: skip


def test_stats_leases_and_capacity_tell_the_same_story(live):
    client = live.client
    client.submit(cost_units=40)
    client.submit(cost_units=60)
    [claimed] = client.claim(wait_sec=5)

    stats, capacity = client.get("/stats").json, client.get("/capacity").json
    [lease] = client.get("/leases").json["leases"]
    assert stats["jobs"] == {"QUEUED": 1, "RUNNING": 1}
    assert lease["lease_id"] == claimed["lease_id"]
    assert stats["units_in_use"] == capacity["in_use"] == lease["cost_units"] == 40
    assert (capacity["capacity"], capacity["free"]) == (90, 50)


def test_an_application_reports_its_own_readings_and_only_those(client):
    received = {"addon_id": "shop", "readings": {"p95_ms": 120, "error_rate": 0.01}}
    assert client.post("/signals", received).status == 200
    readings = {(r["source"], r["name"]): r["value"] for r in client.get("/capacity").json["readings"]}
    assert readings == {("shop", "p95_ms"): 120.0, ("shop", "error_rate"): 0.01}

    refused = client.post("/signals", received | {"readings": {"cpu": 0.0}})
    assert (refused.status, refused.fields) == (422, ["readings"])
    assert "error_rate, p95_ms, in_flight" in refused.json["detail"]


def test_an_addon_that_reports_trouble_of_its_own_stops_no_other(tmp_path):
    """Its token is bound to it, so it speaks for itself. The owner's own tokens speak for the host."""
    kit = ServerKit(tmp_path, start=False, rules={"capacity": Capacity()})
    try:
        assert kit.client.get("/capacity").json["quiet"] == "PANIC"  # nothing has been measured yet
        for name in ("cpu", "memory"):
            kit.service.machine.report(Reading(name, 0.0, kit.store.now(), ttl=HOUR))
        loud = kit.client.mint(addon_id="loud")
        received = {"addon_id": "loud", "readings": {"error_rate": 1.0, "p95_ms": 1e9}, "ttl_sec": 3_600}
        assert loud.post("/signals", received).status == 200

        assert kit.client.get("/capacity").json["quiet"] == "NORMAL"
        assert kit.client.get("/capacity").json["quiet_sec"] >= 0
        job_id = kit.client.submit(addon_id="other")
        assert [job["job_id"] for job in kit.client.claim(addon_id="other", wait_sec=1)] == [job_id]

        assert kit.client.post("/signals", received).status == 200
        assert kit.client.get("/capacity").json["quiet"] == "PANIC"
    finally:
        kit.close()


def test_health_is_open_and_says_no_more_than_it_must(kit):
    answer = kit.client.send("GET", "/healthz", prefix="", Authorization=None)

    assert (answer.status, answer.json) == (200, {"status": "ok"})
    assert kit.client.get("/health").json["problems"] == []


def test_a_store_that_cannot_be_used_is_503_and_health_says_degraded(kit, monkeypatch):
    from penstock.core.errors import StoreFailed

    def broken(*_, **__):
        raise StoreFailed("the database jobs.db cannot be used: disk I/O error", kind="io")

    for name in ("job", "alarm"):
        monkeypatch.setattr(kit.store, name, broken)
    answer = kit.client.get("/queue/jobs/x")
    assert (answer.status, answer.json["code"], answer.headers["Retry-After"]) == (503, "store_failed", "5")
    health = kit.client.send("GET", "/healthz", prefix="")
    assert (health.status, health.json) == (503, {"status": "degraded"})


def test_a_submit_whose_sync_failed_is_told_which_job_to_ask_for(tmp_path):
    from tests.failing_syncs import FailingSyncs

    with FailingSyncs() as syncs:
        kit = ServerKit(tmp_path)
        try:
            syncs.failing = True
            answer = kit.client.post("/queue/jobs/submit", {"addon_id": "a", "job_type": "t"})
            health = kit.client.send("GET", "/healthz", prefix="")
            syncs.failing = False
            (job_id,) = answer.json["data"]["job_ids"]

            assert (answer.status, answer.json["code"]) == (503, "outcome_unknown")
            assert "Nothing was accepted" not in answer.json["hint"]
            assert (health.status, health.json) == (503, {"status": "degraded"})
            assert kit.client.get(f"/queue/jobs/{job_id}").status == 404
        finally:
            kit.close()


def test_health_remembers_a_failed_write_until_another_one_succeeds(tmp_path):
    from penstock.core.errors import StoreFailed

    def broken(_):
        raise StoreFailed("its disk is full", kind="full")

    kit = ServerKit(tmp_path, start=False)  # it writes nothing by itself
    try:
        with pytest.raises(StoreFailed):
            committed(kit.store, Admit("here", broken))
        for _ in range(2):
            (problem,) = kit.client.get("/health").json["problems"]
            assert problem == "the store cannot be written: its disk is full"

        kit.client.submit(addon_id="a")
        assert kit.client.get("/health").json["problems"] == []
    finally:
        kit.close()


def test_our_own_mistake_tells_the_client_nothing(kit, monkeypatch, caplog):
    monkeypatch.setattr(kit.store, "job", lambda _: 1 / 0)
    answer = kit.client.get("/queue/jobs/x")

    assert (answer.status, answer.json["code"]) == (500, "internal")
    assert b"Zero" not in answer.content
    assert "ZeroDivisionError" in caplog.text
