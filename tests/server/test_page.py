"""What the page serves by itself: files, the login link, the session; and what it lives on: live stats, programs, metrics."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from http_kit import Client, ServerKit
from tests.waiting import until

from penstock.server.tokens import Sessions, TokenFile
from penstock.wire import PREFIX


@pytest.fixture
def static(tmp_path):
    """Stands for the page's folder, which needs what npm brings."""
    root = tmp_path / "static"
    (root / "js").mkdir(parents=True)
    (root / "index.html").write_text("<!doctype html><title>Penstock</title>")
    (root / "js" / "main.js").write_text("export {}")
    (root / ".lock").write_text("not for others")
    return root


@pytest.fixture
def paged(tmp_path, static):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    made = ServerKit(home, page=static)
    yield made
    made.close()


def bare(kit, verb, path, body=None, **headers):
    """Whatever the path, without the token that the kit would send."""
    return Client(kit.server).send(verb, path, body, prefix="", **headers)


def code(kit):
    link = kit.client.post("/login").json["url"]
    return link.partition("#code=")[2]


def opened(kit, given=None):
    answer = bare(kit, "POST", "/session", {"code": given or code(kit)})
    return answer, _halves(answer)


def _halves(answer):
    if answer.status != 200:
        return {}
    cookie = answer.headers["set-cookie"].partition(";")[0]
    return {"cookie": cookie, "x-penstock-session": answer.json["session"]}


def test_the_page_and_its_files_come_with_a_policy_that_lets_nothing_else_in(paged):
    page = bare(paged, "GET", "/")
    script = bare(paged, "GET", "/assets/js/main.js")

    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert (script.status, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert script.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/assets/.lock", "/assets/../tokens.json", "/assets/%2e%2e/tokens.json", "/assets/none.js"]
)
def test_only_the_pages_own_files_are_served(paged, path):
    assert bare(paged, "GET", path).status == 404


def test_an_unchanged_file_is_not_sent_again(paged):
    tag = bare(paged, "GET", "/").headers["etag"]

    assert bare(paged, "GET", "/", **{"if-none-match": tag}).status == 304


def test_a_link_opens_the_page_once(paged):
    given = code(paged)
    first, session = opened(paged, given)
    second, _ = opened(paged, given)

    assert first.status == 200
    assert bare(paged, "GET", f"{PREFIX}/stats", **session).status == 200
    assert second.status == 401


def test_the_cookie_is_for_this_page_alone(paged):
    answer, _ = opened(paged)
    cookie = answer.headers["set-cookie"]

    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert "Domain" not in cookie


@pytest.mark.parametrize("missing", ["cookie", "x-penstock-session"])
@pytest.mark.parametrize("verb", ["GET", "POST"])
def test_half_a_session_is_none(paged, missing, verb):
    _, session = opened(paged)
    del session[missing]
    path = "stats" if verb == "GET" else "kick"

    assert bare(paged, verb, f"{PREFIX}/{path}", **session).status == 401


def test_a_cookie_alone_is_worthless_whatever_is_made_of_it(paged):
    """It is what another server on this host receives."""
    _, session = opened(paged)
    cookie = session["cookie"]
    name, _, value = cookie.partition("=")
    derived = hmac.new(value.encode(), b"penstock page", hashlib.sha256).hexdigest()
    halves = ["", value, value.partition(".")[2], derived, hashlib.sha256(value.encode()).hexdigest()]

    for half in halves:
        answer = bare(paged, "GET", f"{PREFIX}/tokens", cookie=cookie, **{"x-penstock-session": half})
        assert answer.status == 401, half
    for secret in (value, f"pst_{value.replace('.', '_')}", f"session {name} {value}", cookie):
        assert bare(paged, "GET", f"{PREFIX}/tokens", authorization=f"Bearer {secret}").status == 401, secret


def test_the_halves_of_two_sessions_do_not_fit(paged):
    sessions = [opened(paged)[1] for _ in range(2)]
    mixed = {**sessions[0], "x-penstock-session": sessions[1]["x-penstock-session"]}

    assert bare(paged, "GET", f"{PREFIX}/stats", **mixed).status == 401
    assert [bare(paged, "GET", f"{PREFIX}/stats", **session).status for session in sessions] == [200, 200]


def test_neither_half_of_a_session_is_kept(paged, tmp_path):
    _, session = opened(paged)
    kept = paged.server.tokens.path.read_text()

    assert session["cookie"].partition(".")[2] not in kept
    assert session["x-penstock-session"] not in kept


def test_the_cookie_is_of_one_instance(tmp_path):
    """Two schedulers that have the same port, one after the other, do not take each other's cookie for theirs."""
    names = set()
    for folder in ("one", "two"):
        tokens = TokenFile(tmp_path / folder, lambda: 0)
        names.add(Sessions(tokens, secure=False, url="", port=8_000).cookie)

    assert len(names) == 2


def test_a_login_code_ends_with_the_token_that_asked_for_it(paged):
    asker = paged.client.mint()
    link = asker.post("/login").json["url"]
    paged.client.post(f"/tokens/{asker.token.split('_')[1]}/revoke")
    answer, _ = opened(paged, link.partition("#code=")[2])

    assert answer.status == 401


def test_a_session_ends_with_the_token_that_asked_for_it(paged):
    asker = paged.client.mint()
    link = asker.post("/login").json["url"]
    _, session = opened(paged, link.partition("#code=")[2])
    before = bare(paged, "GET", f"{PREFIX}/stats", **session).status
    paged.client.post(f"/tokens/{asker.token.split('_')[1]}/revoke")

    assert (before, bare(paged, "GET", f"{PREFIX}/stats", **session).status) == (200, 401)


def test_a_session_sent_by_another_site_is_refused(paged):
    _, session = opened(paged)

    assert bare(paged, "POST", f"{PREFIX}/kick", **session | {"origin": "http://evil.example"}).status == 403
    assert bare(paged, "POST", f"{PREFIX}/kick", **session | {"sec-fetch-site": "cross-site"}).status == 403


def test_a_session_can_do_what_the_one_who_asked_for_the_link_can(paged):
    asked = {"name": "reader", "scopes": ["jobs:read", "admin:tokens"], "addon_id": "a"}
    link = paged.client.mint(**asked).post("/login", {}).json["url"]
    _, session = opened(paged, link.partition("#code=")[2])

    assert bare(paged, "GET", f"{PREFIX}/stats", **session).status == 200
    assert bare(paged, "POST", f"{PREFIX}/pause", {}, **session).status == 403


def test_a_session_is_a_token_that_can_be_seen_and_revoked(paged):
    _, session = opened(paged)
    [mine] = [token for token in paged.client.get("/tokens").json["tokens"] if token["name"] == "page"]
    paged.client.post(f"/tokens/{mine['token_id']}/revoke")

    assert mine["expires_at"] is not None
    assert bare(paged, "GET", f"{PREFIX}/stats", **session).status == 401


def test_a_session_that_is_over_opens_nothing(paged, monkeypatch):
    monkeypatch.setattr("penstock.server.tokens.SESSION_LASTS", timedelta(seconds=-1))
    _, session = opened(paged)

    assert bare(paged, "GET", f"{PREFIX}/stats", **session).status == 401


def test_without_a_page_there_is_nothing_to_log_in_to(client):
    assert client.post("/login").status == 404
    assert client.send("GET", "/", prefix="").status == 404


def test_a_beat_tells_all_that_the_page_shows(paged):
    paged.client.post("/queue/jobs/submit", {"addon_id": "a", "job_type": "t", "payload": {"x": 1}})
    connection = paged.client.connect()
    connection.request(
        "GET", f"{PREFIX}/stats/stream", headers={"Authorization": f"Bearer {paged.client.token}"}
    )
    lines = iter(connection.getresponse().readline, b"")
    beats = (json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: "))
    beat = next(one for one in beats if one["jobs"])
    connection.close()

    assert sum(beat["jobs"].values()) == 1
    assert beat["second"]["capacity"] == 90
    assert beat["quiet"] == "QUIET"


@pytest.mark.parametrize("path", ["/stats/stream", "/stats/history", "/metrics"])
def test_what_tells_of_all_addons_is_not_told_to_one(paged, path):
    bound = paged.client.mint(addon_id="a")

    assert bound.send("GET", path, prefix="" if path == "/metrics" else PREFIX).status == 403


def test_history_has_a_list_per_figure(paged):
    def past():
        return paged.client.get("/stats/history").json

    until(lambda: len(past()["at"]) >= 2)
    past = past()

    assert {len(values) for values in past.values()} == {len(past["at"])}
    assert past["at"] == sorted(past["at"])


def task(**fields):
    return {
        "name": "resize", "kind": "process", "workers": {"running": 2}, "in_flight": 2, "pending_queue_depth": 3,
        "waiting_queue_depth": 1, "max_in_flight": 2, "max_queue_depth": 4, "policy": "block", "paused": False,
        "load_by_worker": [1, 1], "settled_by_worker": [10, 12], "totals": {"settled": 22}, "last_crash": None,
    } | fields  # fmt: skip


def test_a_programs_pools_are_shown_as_it_told_them_last(paged):
    paged.client.post("/programs/attach", {"name": "thumbnailer", "tasks": [task(in_flight=1)]})
    paged.client.post("/programs/attach", {"name": "thumbnailer", "tasks": [task()]})
    [program] = paged.client.get("/programs").json["programs"]

    assert (program["name"], program["tasks"]) == ("thumbnailer", [task(lanes=None)])


def test_an_addon_sees_its_own_programs_only(paged):
    scopes = ["jobs:read", "signals:report"]
    addons = [paged.client.mint(scopes=scopes, addon_id=addon) for addon in "ab"]
    for addon in addons:
        addon.post("/programs/attach", {"name": "same name", "tasks": []})

    assert len(paged.client.get("/programs").json["programs"]) == 2
    assert len(addons[0].get("/programs").json["programs"]) == 1


def test_one_addon_cannot_take_all_the_places_of_attached_programs(paged):
    scopes = ["jobs:read", "signals:report"]
    greedy, modest = (paged.client.mint(addon_id=name, scopes=scopes) for name in ("greedy", "modest"))
    for n in range(64):
        assert greedy.post("/programs/attach", {"name": f"p{n}", "tasks": []}).status == 200
    assert greedy.post("/programs/attach", {"name": "one more", "tasks": []}).status == 429

    for n in range(32):
        assert modest.post("/programs/attach", {"name": f"p{n}", "tasks": []}).status == 200
    assert modest.post("/programs/attach", {"name": "one more", "tasks": []}).status == 429
    assert [len(one.get("/programs").json["programs"]) for one in (greedy, modest)] == [32, 32]


def metrics(kit):
    return kit.client.send("GET", "/metrics", prefix="").content.decode()


def test_metrics_tell_states_capacity_and_times(live):
    live.client.post("/queue/jobs/submit", {"addon_id": "a", "job_type": "t"})
    claimed = live.client.post("/queue/claim", {"wait_sec": 5}).json["jobs"][0]
    lease = claimed["lease_id"]
    live.client.post(f"/queue/jobs/{claimed['job_id']}/complete", {"lease_id": lease, "state": "DONE"})
    live.client.post("/lease/heartbeat", {"lease_id": lease})
    until(lambda: 'penstock_events_total{kind="DONE"} 1.0' in metrics(live))
    text = metrics(live)

    assert 'penstock_jobs{state="DONE"} 1.0' in text
    assert "penstock_capacity_units 90.0" in text
    assert "penstock_fenced_calls_total 1.0" in text
    assert "penstock_attempt_seconds_count 1.0" in text
    assert "penstock_wait_seconds_count 1.0" in text


def test_labels_of_metrics_are_bounded_whatever_users_name_their_addons(live):
    jobs = [{"addon_id": f"addon-{number}", "job_type": "t"} for number in range(70)]
    live.client.post("/queue/jobs/submit/bulk", {"jobs": jobs})
    text = metrics(live)

    assert len(set(re.findall(r'penstock_addon_units\{addon="([^"]+)"\}', text))) == 51


def test_metrics_tell_how_many_units_wait_for_each_set_of_labels_and_no_more_than_fifty(live):
    jobs = [
        {"addon_id": "a", "job_type": "t", "cost_units": 2, "labels": [f"label-{number}"]}
        for number in range(70)
    ]
    live.client.post("/queue/jobs/submit/bulk", {"jobs": jobs})
    text = metrics(live)
    waiting = dict(re.findall(r'penstock_waiting_units\{labels="([^"]*)"\} (\S+)', text))

    assert waiting[""] == "0.0"
    assert waiting["other"] == "40.0"
    assert len(waiting) == 52
    assert 'penstock_waiting_jobs{labels="other"} 20.0' in text


def test_metrics_need_their_scope(live):
    reader = live.client.mint(scopes=["jobs:read"])

    assert reader.send("GET", "/metrics", prefix="").status == 403
    assert bare(live, "GET", "/metrics").status == 401


OPS = Path(__file__).parents[2] / "ops"


def test_the_board_and_the_alert_rules_name_metrics_that_exist(live):
    exposed = set(re.findall(r"^# TYPE (\w+) (?:counter|gauge|histogram)$", metrics(live), re.MULTILINE))
    known = exposed | {f"{name}_{end}" for name in exposed for end in ("bucket", "sum", "count")}
    board, rules = (OPS / "grafana.json").read_text(), (OPS / "alerts.yml").read_text()
    named = set(re.findall(r"\bpenstock_\w+", board + rules))

    assert json.loads(board)["title"] == "Penstock"
    assert named
    assert named - known == set()
