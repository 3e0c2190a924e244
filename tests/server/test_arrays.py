"""Arrays over HTTP: what they show, what is refused, and who may do what."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.jobs.arrays import ArrayChange
from penstock.stores.api import ChangeArray, committed

JOB = {"addon_id": "a", "job_type": "resize", "payload": {"size": 1}, "cost_units": 1}
BODY = {"array": "1-1000%8", "job": JOB}


def test_an_array_shows_how_far_it_is_and_the_jobs_that_live(client):
    array = client.post("/arrays/submit", BODY).json
    array_id = array["array_id"]

    assert (array["state"], array["total"], array["live"], array["waiting"], array["created"]) == (
        "RUNNING",
        1_000,
        8,
        992,
        True,
    )
    assert array["live_jobs"] == [f"{array_id}_{index}" for index in range(1, 9)]
    assert client.get(f"/queue/jobs/{array_id}_3").json["payload"] == {"size": 1}
    assert client.get(f"/arrays/{array_id}?index=3").json["job_id"] == f"{array_id}_3"
    assert [array_id] == [one["array_id"] for one in client.get("/arrays").json["arrays"]]


def test_an_index_without_a_job_says_what_it_waits_for(client):
    array_id = client.post("/arrays/submit", BODY).json["array_id"]
    answer = client.get(f"/queue/jobs/{array_id}_17/explain")

    assert answer.status == 404
    assert f"index 17 of array {array_id} waits: 8 of 8 at once" in answer.json["detail"]


def test_an_array_that_is_taken_for_a_job_is_named_to_those_who_may_know_it(client):
    array_id = client.post("/arrays/submit", BODY).json["array_id"]

    answer = client.get(f"/queue/jobs/{array_id}")
    assert (answer.status, answer.json["detail"].partition(":")[0]) == (404, f"{array_id} is an array")
    stranger = client.mint(addon_id="strangers").get(f"/queue/jobs/{array_id}")
    assert (stranger.status, stranger.json["detail"]) == (404, f"there is no job {array_id}")


@pytest.mark.parametrize(
    ("failed", "shown"),
    [
        (range(1, 1_001), "1-1000"),
        ([3, 5, 6, 7], "3,5-7"),
        (range(2, 1_001, 2), "..."),
    ],
)
def test_the_failed_indices_are_shown_as_ranges_and_cut_when_they_grow_long(kit, failed, shown):
    array_id = kit.client.post("/arrays/submit", BODY).json["array_id"]

    def fail(record, *_):
        progress = replace(record.progress, failed=len(failed))
        return ArrayChange(record._replace(progress=progress), [], [], failed=failed)

    committed(kit.store, ChangeArray(array_id, fail))
    array = kit.client.get(f"/arrays/{array_id}").json

    assert (array["failed"], len(array["failed_indices"]) <= 1_004) == (len(failed), True)
    if "..." not in shown:
        assert array["failed_indices"] == shown
    else:
        head, _, rest = array["failed_indices"].rpartition(",")
        assert (rest, [int(index) for index in head.split(",")]) == (
            "...",
            list(failed)[: head.count(",") + 1],
        )


def test_an_array_is_canceled_as_one(client):
    array_id = client.post("/arrays/submit", BODY).json["array_id"]

    canceled = client.post(f"/arrays/{array_id}/cancel").json
    again = client.post(f"/arrays/{array_id}/retry")

    assert (canceled["state"], canceled["canceled"], canceled["live"]) == ("CANCELED", 1_000, 0)
    assert again.status == 409


@pytest.mark.parametrize("array", ["", "9-1", "1-9%0", "1-1000000000", "1-5,3", "x", "1-9%9999999999"])
def test_a_bad_array_is_refused_by_name_and_changes_nothing(client, array):
    refused = client.post("/arrays/submit", BODY | {"array": array})

    assert (refused.status, refused.fields) == (422, ["array"])
    assert "characters that are not allowed" not in refused.json["detail"]
    assert client.get("/arrays").json["arrays"] == []
    assert client.get("/queue/jobs").json["jobs"] == []


def test_a_bound_token_sees_every_event_of_its_own_arrays_and_none_of_others(kit):
    array_id = kit.client.post("/arrays/submit", BODY).json["array_id"]
    kit.client.post(f"/arrays/{array_id}/cancel")

    def kinds(addon_id):
        events = kit.client.mint(addon_id=addon_id).get("/events").json["events"]
        return [event["kind"] for event in events if event["kind"].startswith("ARRAY_")]

    assert kinds("a") == ["ARRAY_SUBMITTED", "ARRAY_CANCELED", "ARRAY_ENDED"]
    assert kinds("b") == []


def test_a_bound_token_has_its_own_arrays_and_no_others(kit):
    other = kit.client.mint(addon_id="ours")
    array_id = kit.client.post("/arrays/submit", BODY).json["array_id"]

    assert other.post("/arrays/submit", BODY).status == 403
    own = other.post("/arrays/submit", BODY | {"job": JOB | {"addon_id": "ours"}}).json["array_id"]
    assert [own] == [one["array_id"] for one in other.get("/arrays").json["arrays"]]
    assert {404} == {
        other.get(f"/arrays/{array_id}").status,
        other.post(f"/arrays/{array_id}/cancel").status,
        other.post(f"/arrays/{array_id}/retry").status,
        other.get(f"/queue/jobs/{array_id}_17").status,
    }
    assert "there is no job" in other.get(f"/queue/jobs/{array_id}_17").json["detail"]


def test_a_list_of_one_addon_is_not_cut_by_the_arrays_of_others(client):
    own = client.post("/arrays/submit", BODY | {"job": JOB | {"addon_id": "ours"}}).json["array_id"]
    for _ in range(3):
        client.post("/arrays/submit", BODY)

    listed = client.mint(addon_id="ours").get("/arrays?limit=2").json["arrays"]

    assert [one["array_id"] for one in listed] == [own]


def test_a_job_of_an_array_is_not_run_again_as_a_job_without_an_index(client):
    array_id = client.post("/arrays/submit", BODY).json["array_id"]
    member = f"{array_id}_3"
    client.post(f"/arrays/{array_id}/cancel")
    before = client.get("/queue/count").json

    refused = client.post(f"/queue/jobs/{member}/rerun")

    assert (refused.status, refused.json["code"]) == (409, "illegal_move")
    assert f"retry the failed indices of array {array_id}" in refused.json["detail"]
    assert client.get("/queue/count").json == before
