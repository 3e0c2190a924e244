"""Who may do what: every route against every way of not being allowed, made from the route table."""

from __future__ import annotations

import http.client
from collections import defaultdict

import pytest
from http_kit import Client, ServerKit

from penstock.server.routes import ALL_ROUTES, OPEN, ROUTES, Route
from penstock.wire import PREFIX, Scope

VERBS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"]


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    made = ServerKit(tmp_path_factory.mktemp("rights"), start=False)
    # The lease first: the scheduler denies it while a job waits.
    made.lease_id = made.client.post("/lease/request", {"addon_id": "theirs", "job_type": "t"}).json[
        "lease_id"
    ]
    made.job_id = made.client.submit(addon_id="theirs")
    job = {"addon_id": "theirs", "job_type": "t"}
    made.client.post("/schedules/add", {"name": "nightly", "cron": "0 6 * * *", "job": job})
    made.array_id = made.client.post("/arrays/submit", {"array": "1-9%1", "job": job}).json["array_id"]
    made.client.post("/batches/submit", {"name": "nightly", "addon_id": job["addon_id"], "jobs": [job]})
    yield made
    made.close()


class KeepAlive:
    """Sends many requests over one connection: a matrix has thousands of them."""

    def __init__(self, kit):
        self.kit, self.connection = kit, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.connection is not None:
            self.connection.close()

    def send(self, verb, path, headers, body):
        for _ in range(2):
            if self.connection is None:
                self.connection = http.client.HTTPConnection("127.0.0.1", self.kit.server.port, timeout=20)
            try:
                self.connection.request(verb, path, body, headers)
                response = self.connection.getresponse()
                content = response.read()
            except (http.client.HTTPException, ConnectionError):
                self.connection.close()
                self.connection = None
                continue
            return response.status, content
        raise AssertionError("no answer")


@pytest.fixture
def keep_alive(kit):
    with KeepAlive(kit) as made:
        yield made


def world(kit):
    return kit.store.newest(), len(kit.server.tokens.all()), kit.store.live()


def concrete(kit, route):
    names = defaultdict(lambda: "0123456789", job_id=kit.job_id, name="nightly", array_id=kit.array_id)
    return route.path.format_map(names)


def all_routes():
    return [route for route in ALL_ROUTES if route.path.startswith(PREFIX)]


def refusals(kit):
    """The row's name, the headers, and the answer that every route gives to every verb."""
    good = kit.client.token
    expired = kit.client.mint(expires_at="2020-01-01T00:00:00Z").token
    gone = kit.client.post("/tokens/create", {"name": "gone", "scopes": ["jobs:read"]}).json
    kit.client.post(f"/tokens/{gone['token']['token_id']}/revoke")

    def bearer(token):
        return {"Authorization": f"Bearer {token}"}

    yield "no token", {}, 401
    yield "malformed", {"Authorization": "Bearer"}, 401
    yield "another scheme", {"Authorization": f"Basic {good}"}, 401
    yield "a wrong secret", bearer(good[:-3] + "AAA"), 401
    yield "only the id", bearer(good.rpartition("_")[0]), 401
    yield "expired", bearer(expired), 401
    yield "revoked", bearer(gone["secret"]), 401
    yield "foreign host", bearer(good) | {"Host": "evil.example"}, 403
    yield "foreign host with our port", bearer(good) | {"Host": f"evil.example:{kit.server.port}"}, 403
    yield "no host to speak of", bearer(good) | {"Host": ""}, 403
    yield "foreign origin", bearer(good) | {"Origin": "https://evil.example"}, 403
    yield "null origin", bearer(good) | {"Origin": "null"}, 403
    yield "cross-site", bearer(good) | {"Sec-Fetch-Site": "cross-site"}, 403
    yield "same-site", bearer(good) | {"Sec-Fetch-Site": "same-site"}, 403


def test_no_route_and_no_verb_works_without_a_token(kit, keep_alive):
    rows = list(refusals(kit))
    before = world(kit)
    for name, headers, expected in rows:
        for route in all_routes():
            for verb in VERBS:
                body = b"{}" if verb in {"POST", "PUT", "PATCH"} else None
                sent = headers | ({"Content-Type": "application/json"} if body else {})
                status, content = keep_alive.send(verb, concrete(kit, route), sent, body)
                assert status == expected, (name, verb, route.path, content)
    assert world(kit) == before


def test_each_route_wants_its_own_scope_and_no_other_will_do(kit, keep_alive):
    tokens = {
        scope: kit.client.mint(scopes=[str(s) for s in Scope if s is not scope]).token for scope in Scope
    }
    before = world(kit)
    for route in all_routes():
        sent = {"Authorization": f"Bearer {tokens[route.scope]}", "Content-Type": "application/json"}
        status, content = keep_alive.send(
            route.verb, concrete(kit, route), sent, b"{}" if route.verb == "POST" else None
        )
        assert status == 403, (route.path, content)
        assert str(route.scope).encode() in content
    assert world(kit) == before


def test_head_is_answered_as_get_without_the_content(kit, keep_alive):
    before = world(kit)
    sent = {"Authorization": f"Bearer {kit.client.token}"}
    for route in all_routes():
        if route.verb == "GET" and not route.streams:
            path = concrete(kit, route)
            read, content = keep_alive.send("GET", path, sent, None)
            status, nothing = keep_alive.send("HEAD", path, sent, None)
            assert (status, nothing) == (read, b""), route.path
            assert content
    assert world(kit) == before


def test_head_of_a_stream_ends(kit):
    answer = kit.client.send("HEAD", "/events/stream")

    assert (200, "text/event-stream") == (answer.status, answer.headers["Content-Type"])


def test_head_needs_the_token_of_get(kit):
    assert 401 == Client(kit.server).send("HEAD", "/queue/jobs").status


def test_a_route_knows_its_own_verbs_and_refuses_the_rest(kit, keep_alive):
    knows = {}
    for route in all_routes():
        knows.setdefault(route.path, set()).add(route.verb)
    for kind, word in (("schedules", "add"), ("batches", "submit")):  # as the name of one
        knows[f"{PREFIX}/{kind}/{word}"] |= knows[f"{PREFIX}/{kind}/{{name}}"]
    for verbs in knows.values():
        if "GET" in verbs:
            verbs.add("HEAD")
    before = world(kit)
    sent = {"Authorization": f"Bearer {kit.client.token}", "Content-Type": "application/json"}
    for route in all_routes():
        for verb in set(VERBS) - knows[route.path]:
            status, _ = keep_alive.send(verb, concrete(kit, route), sent, None)
            assert status == 405, (verb, route.path)
    assert world(kit) == before


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_only_json_is_understood(kit, keep_alive, kind):
    before = world(kit)
    sent = {"Authorization": f"Bearer {kit.client.token}"} | ({"Content-Type": kind} if kind else {})
    for route in ROUTES:
        if route.verb == "POST":
            status, _ = keep_alive.send("POST", concrete(kit, route), sent, b"{}")
            assert status == 415, route.path
    assert world(kit) == before


def bodies(kit):
    """For each route that names something of an addon: a body with which the owner would succeed or be refused for other reasons."""
    lease = {"lease_id": kit.lease_id}
    return {
        "addons/edit": {"addon_id": "theirs", "paused": True},
        "ack": lease,
        "complete": lease | {"state": "DONE"},
        "complete/bulk": {"outcomes": [lease | {"state": "DONE"}]},
        "exchange": {"outcomes": [lease | {"state": "DONE"}], "addon_id": "theirs"},
        "edit": {"priority": 1},
        "heartbeat": lease,
        "report": lease,
        "release": lease,
        "request": {"job_id": kit.job_id},
        "claim": {"addon_id": "theirs"},
        "signals": {"addon_id": "theirs", "readings": {"p95_ms": 1}},
        "pause": {"addon_id": "theirs"},
        "resume": {"addon_id": "theirs"},
        "cancel/bulk": {"addon_id": "theirs"},
        "retry/bulk": {"addon_id": "theirs"},
        "schedules/{name}/edit": {"missed": "skip"},
    }


FOREIGN_QUERIES = {
    "queue/jobs": "addon_id=theirs",
    "schedules": "addon_id=theirs",
    "arrays": "addon_id=theirs",
    "batches": "addon_id=theirs",
    "queue/count": "addon_id=theirs",
    "queue/dispatchable": "addon_id=theirs",
    "events": "addon_id=theirs",
    "events/stream": "addon_id=theirs",
    "leases": "addon_id=theirs",
}


def test_a_token_of_another_addon_meets_nothing_of_ours(kit):
    """404, the same as for what was never there; and the two that would make something new are refused by name."""
    other = kit.client.mint(addon_id="ours")
    before, seen = world(kit), set()
    for route in ROUTES:
        short = route.path.removeprefix(f"{PREFIX}/")
        named = bodies(kit).items()
        body = next((b for end, b in named if short == end), None)
        if body is None and route.parameter not in ("name", "array_id"):
            body = next((b for end, b in named if short.endswith(f"/{end}")), None)
        if route.verb == "GET" and short in FOREIGN_QUERIES:
            answer = other.get(f"/{short}?{FOREIGN_QUERIES[short]}")
        elif route.parameter in ("job_id", "name", "array_id") or body is not None:
            answer = other.send(route.verb, concrete(kit, route).removeprefix(PREFIX), body)
        else:
            continue
        seen.add(short)
        assert answer.status == 404, (route.path, answer)
    assert world(kit) == before
    untouched = {r.path.removeprefix(f"{PREFIX}/") for r in ROUTES} - seen
    assert untouched == {
        "queue/jobs/submit", "queue/jobs/submit/bulk", "queue/find", "stats", "capacity", "addons", "health", "kick",
        "tokens", "tokens/create", "tokens/{token_id}/revoke", "login", "run/self", "stats/stream", "stats/history", "programs", "programs/attach",
        "hosts", "arrays/submit", "batches/submit", "schedules/add", "hosts/drain", "hosts/undrain", "alerts", "types",
    }  # fmt: skip


def test_absent_and_not_yours_are_told_in_the_same_words(kit):
    other = kit.client.mint(addon_id="ours")
    absent = kit.job_id[:-4] + "0000"

    def received(job_id):
        return other.get(f"/queue/jobs/{job_id}").content.replace(job_id.encode(), b"")

    assert received(kit.job_id) == received(absent)


def test_a_token_of_another_addon_cannot_submit_for_ours(kit):
    other = kit.client.mint(addon_id="ours")
    before = world(kit)
    job = {"addon_id": "theirs", "job_type": "t"}

    assert other.post("/queue/jobs/submit", job).fields == ["addon_id"]
    bulk = other.post("/queue/jobs/submit/bulk", {"jobs": [job | {"addon_id": "ours"}, job]})
    assert (bulk.status, bulk.fields) == (403, ["jobs[1].addon_id"])
    assert world(kit) == before


def test_a_bound_token_counts_and_sees_only_its_own(kit):
    other = kit.client.mint(addon_id="ours")
    own = other.submit(addon_id="ours")

    assert [job["job_id"] for job in other.get("/queue/jobs").json["jobs"]] == [own]
    assert other.get(f"/queue/find?part={kit.job_id[-8:]}").json == {"job_ids": []}
    assert other.get("/stats").json["jobs"] == {"QUEUED": 1}
    assert list(other.get("/stats").json["addons"]) == ["ours"]
    assert other.get("/leases").json["leases"] == []
    assert [addon["addon_id"] for addon in other.get("/addons").json["addons"]] == ["ours"]
    assert {event["job_id"] for event in other.get("/events").json["events"]} == {own}
    assert other.post(f"/queue/jobs/{own}/cancel").status == 200


def test_a_bound_token_does_not_learn_whose_job_is_in_its_way(kit):
    other = kit.client.mint(addon_id="ours")
    first = kit.client.submit(addon_id="theirs", cost_units=40, priority=90)
    own = other.submit(addon_id="ours", cost_units=40, priority=10)

    received = other.get(f"/queue/jobs/{own}/explain").content.decode()
    assert first not in received
    assert first[-8:] not in received
    assert "theirs" not in received
    assert "another job" in received.lower()
    assert first in kit.client.get(f"/queue/jobs/{own}/explain").content.decode()
    denied = other.post(
        "/lease/request", {"addon_id": "ours", "job_type": "t", "priority": 5}
    ).content.decode()
    assert "queued_ahead" in denied
    assert first not in denied
    assert first[-8:] not in denied
    for job_id in (first, own):
        kit.client.post(f"/queue/jobs/{job_id}/cancel")


def test_a_token_has_limits_of_cost_and_priority(kit):
    small = kit.client.mint(max_cost_units=20, max_priority=50)
    job = {"addon_id": "a", "job_type": "t"}

    answer = small.post("/queue/jobs/submit", job | {"cost_units": 21, "priority": "HIGH"})
    assert (answer.status, answer.json["code"]) == (403, "over_token_limit")
    assert answer.fields == ["cost_units", "priority"]
    job_id = small.submit(cost_units=20, priority=50)
    assert small.post(f"/queue/jobs/{job_id}/edit", {"priority": 51}).status == 403
    loan = small.post("/lease/request", job | {"cost_units": 21})
    assert loan.status == 403


def test_nobody_can_give_away_more_than_they_have(kit):
    maintenance = kit.client.mint(
        scopes=["admin:tokens", "jobs:read"], addon_id="ours", max_cost_units=10, max_priority=50
    )
    asked = {
        "name": "n",
        "scopes": ["jobs:read"],
        "addon_id": "ours",
        "max_cost_units": 10,
        "max_priority": 50,
    }

    for change, field in [
        ({"scopes": ["jobs:cancel"]}, "scopes"),
        ({"addon_id": "theirs"}, "addon_id"),
        ({"addon_id": None}, "addon_id"),
        ({"max_cost_units": 11}, "max_cost_units"),
        ({"max_priority": None}, "max_priority"),
    ]:
        answer = maintenance.post("/tokens/create", asked | change)
        assert (answer.status, answer.fields) == (403, [field])
    assert maintenance.post("/tokens/create", asked).status == 200
    assert {token["addon_id"] for token in maintenance.get("/tokens").json["tokens"]} == {"ours"}
    [first, *_] = kit.client.get("/tokens").json["tokens"]
    assert maintenance.post(f"/tokens/{first['token_id']}/revoke").status == 404


def test_a_token_cannot_outlive_the_one_that_makes_it(kit):
    soon, later = "2100-01-01T00:00:00Z", "2100-01-01T00:00:01Z"
    maintenance = kit.client.mint(expires_at=soon)
    asked = {"name": "n", "scopes": ["jobs:read"]}
    refused = maintenance.post("/tokens/create", asked | {"expires_at": later})
    endless = maintenance.post("/tokens/create", asked).json["token"]

    assert (refused.status, refused.fields) == (403, ["expires_at"])
    assert endless["expires_at"] == soon
    assert endless["parent_id"] == maintenance.token.split("_")[1]


def test_a_route_without_a_scope_cannot_exist():
    with pytest.raises(TypeError, match="scope"):
        Route(verb="GET", path="/x", summary="", handler=len)


def test_only_health_is_open():
    assert [route.path for route in ALL_ROUTES if route.scope is OPEN] == ["/healthz"]


def test_reading_never_writes(kit):
    before = world(kit)
    for route in ROUTES:
        if route.verb == "GET" and not route.streams:
            query = "?part=abcd" if route.path.endswith("/find") else ""
            answer = kit.client.get(concrete(kit, route).removeprefix(PREFIX) + query)
            assert answer.status == 200, (route.path, answer)
    assert world(kit) == before


def test_own_origin_and_own_names_are_welcome(kit):
    port = kit.server.port
    for headers in [
        {"Host": "localhost"},
        {"Host": f"127.0.0.1:{port}", "Origin": f"http://127.0.0.1:{port}", "Sec_Fetch_Site": "same-origin"},
        {"Host": "[::1]:99"},
    ]:
        assert kit.client.get("/stats", **headers).status == 200


def test_no_answer_invites_another_site(kit):
    answer = kit.client.get("/stats", Origin=f"http://localhost:{kit.server.port}")

    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"


def test_two_of_a_header_that_decides_are_refused(kit):
    connection = kit.client.connect()
    connection.putrequest("GET", f"{PREFIX}/stats", skip_host=True)
    for name, value in [
        ("Host", "evil.example"),
        ("Host", "localhost"),
        ("Authorization", f"Bearer {kit.client.token}"),
    ]:
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status in {400, 403}
    connection.close()


def test_the_local_socket_is_the_owners_and_a_token_given_there_counts(kit):
    assert kit.local.get("/tokens").status == 200
    weak = Client(kit.server, kit.client.mint(scopes=["jobs:read"]).token, unix=True)
    assert weak.get("/tokens").status == 403
    assert Client(kit.server, "pst_no_no", unix=True).get("/stats").status == 401


def test_no_secret_appears_in_any_answer_or_log(kit, caplog):
    secret = kit.client.mint().token
    Client(kit.server, secret + "x").get("/stats")

    shown = kit.client.get("/tokens").content + kit.client.get("/events?limit=500").content
    assert secret.encode() not in shown
    assert (
        secret.split("_", 2)[2].encode() not in shown
    )  # the part after the public id; it may contain _ itself
    assert secret not in caplog.text


def test_a_token_of_an_addon_cannot_drain_everybodys_host(kit):
    answer = kit.client.mint(addon_id="ours").post("/hosts/drain", {"host": "local"})

    assert 403 == answer.status
