"""Every act of administration is an event that names its principal."""

from __future__ import annotations

import pytest
from http_kit import Client, ServerKit


def token_id(client):
    return client.token.split("_")[1]


@pytest.fixture
def maintenance(kit):
    return kit.client.mint()


def last(kit, kind):
    events = kit.client.get("/events?limit=500").json["events"]
    return [event for event in events if event["kind"] == kind][-1]


def test_a_token_that_is_made_and_revoked_is_in_the_trail(kit, maintenance):
    made = maintenance.post("/tokens/create", {"name": "n", "scopes": ["jobs:read"], "addon_id": "a"}).json[
        "token"
    ]
    received = last(kit, "TOKEN_MADE")["data"]
    kit.local.post(f"/tokens/{made['token_id']}/revoke")
    gone = last(kit, "TOKEN_REVOKED")["data"]

    assert (received["by"], received["token_id"], received["name"]) == (
        token_id(maintenance),
        made["token_id"],
        "n",
    )
    assert (received["scopes"], received["bound_to"], received["parent_id"]) == (
        ["jobs:read"],
        "a",
        token_id(maintenance),
    )
    assert gone == {"by": "local", "token_id": made["token_id"], "name": "n", "bound_to": "a"}


def test_a_token_that_cannot_be_recorded_is_not_made(kit, monkeypatch):
    known = kit.server.tokens.all()
    monkeypatch.setattr(kit.store, "commit", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no room")))
    answer = kit.client.post("/tokens/create", {"name": "n", "scopes": ["jobs:read"]})

    assert answer.status == 500
    assert kit.server.tokens.all() == known


@pytest.mark.parametrize("read_only", [False, True])
def test_a_login_is_in_the_trail_when_it_is_asked_for_and_when_it_is_used(tmp_path, read_only):
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("")
    (tmp_path / "home").mkdir(mode=0o700)
    kit = ServerKit(tmp_path / "home", start=False, page=tmp_path / "page")
    try:
        maintenance = kit.client.mint()
        code = maintenance.post("/login", {"read_only": read_only}).json["url"].partition("#code=")[2]
        asked = last(kit, "LOGIN")
        Client(kit.server).send("POST", "/session", {"code": code}, prefix="")
        used = last(kit, "LOGIN")
        [session] = [token for token in kit.server.tokens.all() if token.name == "page"]
    finally:
        kit.close()

    assert asked["reason"] == "link_made"
    assert asked["data"] == {"by": token_id(maintenance), "read_only": read_only}
    assert used["reason"] == "session_opened"
    by = {"by": token_id(maintenance), "token_id": session.token_id}
    assert used["data"] == by | {"read_only": read_only}


@pytest.mark.parametrize(
    ("path", "body", "received"),
    [
        (
            "/addons/edit",
            {"addon_id": "a", "weight": 7, "create": True},
            {"addon_id": "a", "weight": 7, "paused": False},
        ),
        ("/pause", {"addon_id": "a", "create": True}, {"addon_id": "a", "weight": 100, "paused": True}),
        ("/resume", {}, {"addon_id": "*", "weight": 100, "paused": False}),
    ],
)
def test_who_set_an_addon_is_in_the_trail(kit, maintenance, path, body, received):
    assert maintenance.post(path, body).status == 200

    assert last(kit, "ADDON_SET")["data"] == received | {"by": token_id(maintenance)}


def test_who_drained_a_host_is_in_the_trail(live):
    maintenance = live.client.mint()
    here = live.client.get("/hosts").json["here"]
    maintenance.post("/hosts/drain", {"host": here})
    drained = last(live, "HOST_SET")["data"]
    live.local.post("/hosts/undrain", {"host": here})

    assert drained == {"host": here, "draining": True, "by": token_id(maintenance)}
    assert last(live, "HOST_SET")["data"] == {"host": here, "draining": False, "by": "local"}


def test_who_edited_canceled_or_retried_a_job_is_in_the_trail(kit, maintenance):
    job_id = kit.client.submit()
    maintenance.post(f"/queue/jobs/{job_id}/edit", {"priority": 60, "deadline_at": "2100-01-01T00:00:00Z"})
    edited = last(kit, "EDITED")["data"]
    [taken] = kit.client.claim()
    kit.client.post("/lease/report", {"lease_id": taken["lease_id"], "state": "FAILED"})
    maintenance.post(f"/queue/jobs/{job_id}/retry")
    retried = last(kit, "RETRIED")["data"]
    maintenance.post(f"/queue/jobs/{job_id}/cancel")

    by = token_id(maintenance)
    assert (edited["by"], edited["priority"], "deadline_at" in edited) == (by, 60, True)
    assert (retried["by"], last(kit, "CANCELED")["data"]["by"]) == (by, by)


def test_who_canceled_a_job_that_was_reserved_is_in_the_trail(kit, maintenance):
    job_id = kit.client.submit()
    kit.service.dispatcher.step(kit.store.now())
    state = kit.client.state(job_id)
    maintenance.post(f"/queue/jobs/{job_id}/cancel")

    assert state == "DISPATCHING"
    assert last(kit, "CANCELED")["data"]["by"] == token_id(maintenance)


def test_tokens_and_logins_are_no_business_of_a_bound_token(kit, maintenance):
    bound = maintenance.mint(addon_id="a")

    assert bound.get("/events?limit=500").json["events"] == []
