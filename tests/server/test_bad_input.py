"""Bad input gets a 4xx that names the field, and changes nothing."""

from __future__ import annotations

import json
import random
import re

import msgspec
import pytest
from tests import ROOT

from penstock import wire
from penstock.core.jobs.intent import MAX_PAYLOAD
from penstock.server.request import MAX_BODY, MAX_DEPTH, too_deep
from penstock.server.routes import ROUTES
from penstock.wire import PREFIX

GOOD = {"addon_id": "a", "job_type": "t"}
FAR = "2100-01-01T00:00:00Z"

BAD_FIELDS = [
    ("addon_id", ["", "a b", "-a", "a" * 129, 3, None, "a\n", "a\x00"]),
    ("job_type", ["", "../x y", "t" * 129, [], None]),
    ("cost_units", [0, -1, 101, 91, 1.5, "10", None, 10**30]),
    ("priority", [0, 101, "NORMALISH", "", None, 1.5, True]),
    ("constraints", [{"gpu_heavy": True}, {"cpu_heavy": 1}, [], "cpu_heavy"]),
    ("run_when", ["never", "QUIET", None, 1]),
    ("quiet_for_sec", [-1, 10**9, "1", 5]),
    ("expected_duration_sec", [0, -1, 1e18, "long"]),
    ("labels", [["x" * 65], [""], ["a b"], [f"l{n}" for n in range(17)], "x", [1]]),
    ("tags", [["x" * 65], [""], ["x"] * 33, "x", [1]]),
    ("time_sensitive", ["yes", 1, None]),
    ("preemptible", ["no", 0, None]),
    ("deadline_at", ["2020-01-01T00:00:00Z", "tomorrow", "2100-01-01T00:00:00", 1, "0000-00-00T00:00:00Z"]),
    ("earliest_start_at", ["soon", "1960-01-01T00:00:00Z", "2100-01-01", True]),
    ("max_runtime_sec", [0, -5, 1.5, 10**12]),
    ("max_active_sec", [0, -5, 10**12]),
    ("cost_limit", [0, -1, "1", 1e300]),
    ("unit", ["", "x" * 17, 1, "\x00"]),
    ("idempotency_key", ["", "k" * 201, 5]),
    ("retry_delays_sec", [[-1], [1] * 21, 5, [1.5]]),
    ("after", ["x", [1], [{"job_id": ""}], [{"job_id": "x", "condition": "soon"}], ["a", "a"], [""]]),
    ("batch", ["", "a b", ".x", "x" * 50, "x\n", 1]),
    ("if_unmet", ["", "explode", 1, None]),
    ("wait_sec", [-1, 61, "1"]),
    ("payloaf", [{}]),
]


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    from http_kit import ServerKit

    made = ServerKit(tmp_path_factory.mktemp("bad"), start=False)
    yield made
    made.close()


@pytest.fixture
def unchanged(kit):
    before = kit.store.newest()
    yield
    assert kit.store.newest() == before


@pytest.mark.parametrize(("field", "values"), BAD_FIELDS, ids=[field for field, _ in BAD_FIELDS])
def test_a_field_out_of_range_is_named(client, unchanged, field, values):
    for value in values:
        answer = client.post("/queue/jobs/submit", GOOD | {field: value})
        assert answer.status == 422, (value, answer)
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert [name.partition("[")[0].partition(".")[0] for name in answer.fields] == [field], value
        assert "regex" not in answer.content.decode()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("cost_units", 0, "must be at least 1"),
        ("cost_units", 101, "must be at most 100"),
        ("cost_units", "10", "must be a whole number, not text"),
        ("priority", 1.5, "must be a whole number or text, not a number"),
        ("run_when", "never", "must be one of any, normal, quiet"),
        ("idempotency_key", "", "must not be empty"),
        ("idempotency_key", "k" * 201, "must have at most 200 characters"),
        ("labels", "x", "must be a list, not text"),
        ("labels", [f"l{n}" for n in range(17)], "must have at most 16 entries"),
        ("time_sensitive", 1, "must be true or false, not a whole number"),
        (
            "deadline_at",
            "tomorrow",
            "must be a moment of RFC 3339 with its offset, such as 2026-12-24T18:00:00Z",
        ),
    ],
)
def test_a_refusal_says_in_words_what_a_field_must_be(client, unchanged, field, value, says):
    answer = client.post("/queue/jobs/submit", GOOD | {field: value})

    assert [(each["field"], each["message"]) for each in answer.json["problems"]] == [(field, says)]


def test_every_field_of_a_submit_is_in_that_list():
    known = set(wire.SubmitBody.__struct_fields__) - {"payload"}

    assert known <= {field for field, _ in BAD_FIELDS}


def test_all_wrong_fields_are_named_at_once(client, unchanged):
    answer = client.post("/queue/jobs/submit", {"addon_id": 1, "cost_units": 0, "colour": "red", "tags": [1]})

    assert sorted(answer.fields) == ["addon_id", "colour", "cost_units", "job_type", "tags[0]"]


def test_what_belongs_together_is_checked_together(client, unchanged):
    for fields, named in [
        ({"time_sensitive": True}, "time_sensitive"),
        ({"deadline_at": FAR, "earliest_start_at": "2100-01-02T00:00:00Z"}, "earliest_start_at"),
        ({"quiet_for_sec": 5, "run_when": "any"}, "quiet_for_sec"),
    ]:
        answer = client.post("/queue/jobs/submit", GOOD | fields)
        assert (answer.status, answer.fields) == (422, [named])


def test_a_payload_of_two_megabytes_is_refused_by_name(client, unchanged):
    for body in [GOOD | {"payload": "x" * 2_000_000}, {"jobs": [GOOD | {"payload": "x" * 2_000_000}]}]:
        path = "/queue/jobs/submit/bulk" if "jobs" in body else "/queue/jobs/submit"
        answer = client.post(path, body)
        assert (answer.status, answer.json["code"]) == (413, "too_large")
        assert answer.fields == ["jobs" if "jobs" in body else "payload"]


def test_the_page_about_http_names_the_limit_of_a_payload():
    page = (ROOT / "docs" / "http.md").read_text("utf-8")

    assert f"A payload has at most {MAX_PAYLOAD:,} characters of JSON" in page


def test_a_body_without_a_length_is_counted_as_it_comes(client, unchanged):
    def chunks():
        for _ in range(40):
            yield b"[" * 65_536

    connection = client.connect()
    headers = {"Authorization": f"Bearer {client.token}", "Content-Type": "application/json"}
    connection.request("POST", f"{PREFIX}/queue/jobs/submit", chunks(), headers, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413
    response.read()
    connection.close()


def test_a_body_just_below_the_limit_is_taken(client):
    room = MAX_BODY - len(json.dumps(GOOD | {"payload": ""}))
    assert client.post("/queue/jobs/submit", GOOD | {"payload": "x" * min(room, 999_000)}).status == 200


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_is_taken_to_a_depth_and_no_further(client, opening):
    closing = "]" if opening == "[" else "}"
    inner = "[]" if opening == "[" else "{}"

    def nested(depth):
        payload = opening * (depth - 1) + inner + closing * (depth - 1)
        return client.post(
            "/queue/jobs/submit", f'{{"addon_id": "a", "job_type": "t", "payload": {payload}}}'
        )

    assert nested(MAX_DEPTH - 1).status == 200
    for depth in (MAX_DEPTH, 1_000, 100_000):
        assert nested(depth).status == 422, depth


def test_the_depth_that_is_counted_is_the_depth_of_the_json():
    chance = random.Random(16)

    def nested(depth):
        if not depth:
            return chance.choice(['"a[{\\"b"', '"\\\\"', "7", "{}", "[]", '"]"', "null", '"\\\\\\"["'])
        inner = nested(depth - 1)
        beside = nested(chance.randrange(min(depth, 4)))
        return chance.choice([f"[{inner}]", f"[{beside}, {inner}]", f'{{"\\"[": {inner}, "b": {beside}}}'])

    for _ in range(300):
        text = nested(chance.randrange(MAX_DEPTH - 4, MAX_DEPTH + 4))
        depth = depth_of(json.loads(text))
        assert too_deep(text.encode()) is (depth > MAX_DEPTH), (depth, text)


def depth_of(value):
    if isinstance(value, dict | list):
        return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def test_brackets_in_a_text_are_no_depth(client):
    assert client.post("/queue/jobs/submit", GOOD | {"payload": '\\"[{' * 1_000}).status == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"3", b'{"addon_id": "\\ud800"}', b"\x00", b"NaN",
     b'{"addon_id": "a", "job_type": "t", "payload": {"x": "\\ud800"}}', b'{"addon_id": "a", "job_type": "t", "payload": 01}',
     b'{"addon_id": "a", "job_type": "t", "payload": NaN}', b'{"addon_id": "a", "job_type": "t"} x'],
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused(client, unchanged, body):
    answer = client.post("/queue/jobs/submit", body)

    assert (answer.status, answer.json["code"]) == (422, "bad_fields")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/queue/jobs?state=NOWHERE", "state"),
        ("/queue/jobs?limit=0", "limit"),
        ("/queue/jobs?limit=501", "limit"),
        ("/queue/jobs?limit=ten", "limit"),
        ("/queue/jobs?limit=5&limit=6", "limit"),
        ("/queue/jobs?after=-1", "after"),
        ("/queue/jobs?colour=red", "colour"),
        ("/queue/jobs?newest_first=perhaps", "newest_first"),
        ("/queue/jobs?addon_id=%00", "addon_id"),
        ("/queue/jobs?tag=%ff", "query"),
        ("/queue/dispatchable?wait_sec=61", "wait_sec"),
        ("/queue/dispatchable?wait_sec=nan", "wait_sec"),
        ("/queue/find?part=ab", "part"),
        ("/queue/find?part=%25%25%25%25", "part"),
        ("/queue/find", "part"),
        ("/events?limit=501", "limit"),
        ("/events?after=99999999999999999999", "after"),
        ("/stats?x=1", "x"),
    ],
)
def test_a_wrong_query_is_named(client, unchanged, path, field):
    answer = client.get(path)

    assert (answer.status, answer.fields) == (422, [field])


def test_an_unknown_field_is_refused_by_name_on_every_route(client, unchanged):
    for route in ROUTES:
        if route.verb == "POST":
            path = re.sub(r"\{\w+\}", "x", route.path.removeprefix(PREFIX))
            answer = client.post(path, {"colour": "red"})
            assert (answer.status, "colour" in answer.fields) == (422, True), route.path


def test_an_edit_of_the_load_is_an_event_with_its_principal(client):
    job_id = client.submit(run_when="quiet", quiet_for_sec=600)

    edited = client.post(f"/queue/jobs/{job_id}/edit", {"run_when": "normal"})

    assert (200, "normal", 0) == (edited.status, edited.json["run_when"], edited.json["quiet_for_sec"])
    [event] = [e for e in client.get(f"/events?job_id={job_id}").json["events"] if e["kind"] == "EDITED"]
    assert ("normal", 0) == (event["data"]["run_when"], event["data"]["quiet_for_sec"])
    assert event["data"]["by"]
    refused = client.post(f"/queue/jobs/{job_id}/edit", {"quiet_for_sec": 60})
    assert (422, "quiet_for_sec") == (refused.status, *refused.fields)
    assert 422 == client.post(f"/queue/jobs/{job_id}/edit", {"run_when": "never"}).status


def test_an_edit_of_nothing_is_refused(client):
    job_id = client.submit()

    assert client.post(f"/queue/jobs/{job_id}/edit", {}).status == 422
    assert client.kinds(job_id) == ["SUBMITTED"]


def test_ids_that_cannot_be_ids_are_not_found(client, unchanged):
    for path in [
        "/queue/jobs/%00",
        "/queue/jobs/a%2Fb",
        "/queue/jobs/" + "x" * 101,
        "/queue/jobs/..%2f..%2fetc",
    ]:
        assert client.get(path).status == 404


def test_a_depth_limit_is_429_with_a_hint(tmp_path):
    from http_kit import ServerKit

    from penstock.stores.api import Depth

    kit = ServerKit(tmp_path, start=False, rules={"depth": Depth(total=1)})
    try:
        kit.client.submit()
        answer = kit.client.post("/queue/jobs/submit", GOOD)
        assert (answer.status, answer.json["code"]) == (429, "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1
    finally:
        kit.close()


def test_no_answer_has_more_fields_than_its_type_says(client):
    """The views fill every field of the wire types, by name: a new field cannot be forgotten on one side."""
    job_id = client.submit()

    received = client.get(f"/queue/jobs/{job_id}")
    assert set(received.json) == set(wire.JobInfo.__struct_fields__)
    assert msgspec.json.decode(received.content, type=wire.JobInfo).job_id == job_id
    [summary] = client.get("/queue/jobs?limit=1&newest_first=true").json["jobs"]
    assert set(summary) == set(wire.JobSummary.__struct_fields__)


NOT_UTF8 = b'"caf\xe9"'
FIELDS_NOT_UTF8 = [
    ("/queue/jobs/submit", b'{"addon_id": "a", "job_type": "t", "payload": {"name": %s}}', "payload.name"),
    ("/queue/jobs/submit", b'{"addon_id": "a", "job_type": "t", "tags": ["x", %s]}', "tags[1]"),
    (
        "/queue/complete/bulk",
        b'{"outcomes": [{"lease_id": "x.1", "state": "DONE", "result": %s}]}',
        "outcomes[0].result",
    ),
    ("/lease/heartbeat", b'{"lease_id": "x.1", "checkpoint": %s}', "checkpoint"),
    ("/lease/report", b'{"lease_id": "x.1", "state": "FAILED", "error": %s}', "error"),
]


@pytest.mark.parametrize(
    ("path", "body", "field"), FIELDS_NOT_UTF8, ids=[f"{p} {f}" for p, _, f in FIELDS_NOT_UTF8]
)
def test_a_field_that_is_not_utf8_is_refused_by_its_name(client, unchanged, path, body, field):
    answer = client.post(path, body % NOT_UTF8)

    assert (400, "not_utf8", [field]) == (answer.status, answer.json["code"], answer.fields), answer
