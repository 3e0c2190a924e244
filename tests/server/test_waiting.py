"""Long polls and streams: they wake at once, miss nothing, and harm nobody."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
from http_kit import ServerKit
from tests.waiting import LONG, until

from penstock.server.app import RequestLimits
from penstock.wire import PREFIX

#: Below the two seconds at which a waiter looks by itself: in so short a time only a wake-up brings an answer.


class Stream:
    """Server-sent events, read as a browser would."""

    def __init__(self, client, query="", last=None):
        self.connection = client.connect()
        headers = {"Authorization": f"Bearer {client.token}"} | (
            {"Last-Event-ID": str(last)} if last is not None else {}
        )
        self.connection.request("GET", f"{PREFIX}/events/stream{query}", headers=headers)
        self.response = self.connection.getresponse()
        self.last = last

    def __enter__(self):
        assert self.response.status == 200, self.response.read()
        self.response.readline(), self.response.readline()  # retry: 1000
        return self

    def __exit__(self, *_):
        self.connection.sock and self.connection.sock.close()
        self.response.close()
        self.connection.close()

    def __iter__(self):
        fields = {}
        while line := self.response.readline():
            text = line.decode().rstrip("\n")
            if not text and fields:
                self.last = int(fields["id"])
                yield json.loads(fields["data"])
                fields = {}
            elif text and not text.startswith(":"):
                name, _, value = text.partition(": ")
                fields[name] = value

    def take(self, count):
        return list(islice(self, count))


def later(function, *args):
    """Runs beside the test; what it returns is asked for with `result`."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return future


def waiters(kit):
    """How many requests wait for an event now."""
    return kit.server.app_state.event_hub.waiting


def test_a_claim_wakes_at_once_when_a_job_is_submitted(live):
    waiting = later(lambda: live.client.claim(wait_sec=30))
    until(lambda: waiters(live) == 1)
    job_id = live.client.submit()

    assert [job["job_id"] for job in waiting.result(60)] == [job_id]


def test_a_claim_wakes_when_there_is_room_again(live):
    client = live.client
    client.submit(cost_units=90)
    [first] = client.claim(wait_sec=5)
    second = client.submit(cost_units=90)
    waiting = later(lambda: client.claim(wait_sec=30))
    until(lambda: waiters(live) == 1)
    client.post(f"/queue/jobs/{first['job_id']}/complete", {"lease_id": first["lease_id"], "state": "DONE"})

    assert [job["job_id"] for job in waiting.result(60)] == [second]


def test_a_worker_that_waits_for_a_job_is_listed_with_what_it_can_take(live):
    first = later(
        lambda: live.client.claim(wait_sec=30, worker="w1", limit=3, addon_id="visuals", job_types=["t"])
    )
    second = later(lambda: live.client.claim(wait_sec=30, worker="w2"))
    until(lambda: waiters(live) == 2)
    host = live.service.rules.host
    one = {"worker": "w1", "host": host, "addon_id": "visuals", "job_types": ["t"], "free": 3}
    two = {"worker": "w2", "host": host, "addon_id": None, "job_types": [], "free": 1}

    assert sorted(live.client.get("/leases").json["free_workers"], key=str) == sorted([one, two], key=str)
    assert live.client.get("/leases?addon_id=visuals").json["free_workers"] == [one]
    assert live.client.mint(addon_id="visuals").get("/leases").json["free_workers"] == [one]
    assert live.client.mint(addon_id="other").get("/leases").json["free_workers"] == []
    live.client.submit(job_type="u")  # only for the second: it would take the other one too
    assert len(second.result(60)) == 1
    live.client.submit(job_type="t")
    assert len(first.result(60)) == 1


def test_dispatchable_wakes_at_once(live):
    waiting = later(lambda: live.client.get("/queue/dispatchable?addon_id=visuals&wait_sec=30").json["jobs"])
    until(lambda: waiters(live) == 1)
    job_id = live.client.submit()

    assert [job["job_id"] for job in waiting.result(60)] == [job_id]


def test_a_claim_without_filters_hides_no_job_from_a_poll(kit):
    """The scheduler has no dispatcher of its own: only the poll itself reserves here."""
    kit.client.claim()
    job_id = kit.client.submit()

    assert [job["job_id"] for job in kit.client.get("/queue/dispatchable?addon_id=visuals").json["jobs"]] == [
        job_id
    ]


def test_a_claim_without_filters_hides_no_job_from_a_stream_of_its_addon(kit):
    kit.client.claim()
    job_id = kit.client.submit()
    with Stream(kit.client, "?addon_id=visuals&after=0") as stream:
        received = stream.take(3)

    assert [event["kind"] for event in received] == ["SUBMITTED", "ADMITTED", "DISPATCHING"]
    assert {event["job_id"] for event in received} == {job_id}


def test_a_client_that_comes_back_after_admitted_sees_the_dispatch(kit):
    job_id = kit.client.submit()
    kit.client.get("/queue/dispatchable?addon_id=visuals")
    kit.service.dispatcher.step(kit.store.now())
    with Stream(kit.client, f"?job_id={job_id}") as stream:
        stream.take(2)
        seen = stream.last
    with Stream(kit.client, f"?job_id={job_id}", last=seen) as stream:
        kinds = [event["kind"] for event in stream.take(2)]

    assert kinds == ["ADMITTED", "DISPATCHING"]


def test_a_job_can_be_waited_for(live):
    client = live.client
    job_id = client.submit()
    waiting = later(lambda: client.get(f"/queue/jobs/{job_id}?wait_sec=30").json)
    [claimed] = client.claim(wait_sec=5)
    until(lambda: waiters(live) == 1)
    outcome = {"lease_id": claimed["lease_id"], "state": "DONE", "result": 42}
    client.post(f"/queue/jobs/{job_id}/complete", outcome)

    assert (waiting.result(60)["state"], waiting.result()["result"]) == ("DONE", 42)


def test_a_wait_that_is_over_answers_with_what_there_is(kit):
    assert kit.client.claim(wait_sec=0.05) == []
    job_id = kit.client.submit()
    assert kit.client.get(f"/queue/jobs/{job_id}?wait_sec=0.05").json["state"] == "QUEUED"
    assert kit.client.get("/events?after=999&wait_sec=0.05").json == {"events": [], "next": 999}


def test_many_claims_wait_without_a_thread_each_and_each_job_goes_to_one(live):
    threads = threading.active_count()
    pool = ThreadPoolExecutor(40)
    waiting = [pool.submit(lambda: live.client.claim(wait_sec=30)) for _ in range(40)]
    until(lambda: waiters(live) == 40)
    assert threading.active_count() - threads - 40 <= 8

    jobs = {live.client.submit(cost_units=1) for _ in range(40)}
    claimed = [job["job_id"] for future in waiting for job in future.result(60)]
    assert sorted(claimed) == sorted(jobs)
    pool.shutdown()


def test_a_job_claimed_for_a_client_that_went_away_is_given_back(live):
    connection = socket.create_connection(("127.0.0.1", live.server.port))
    body = json.dumps({"wait_sec": 30, "addon_id": "visuals"})
    connection.sendall(
        f"POST {PREFIX}/queue/claim HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {live.client.token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    until(lambda: waiters(live) == 1)
    connection.close()
    until(lambda: waiters(live) == 0)
    job_id = live.client.submit()

    [claimed] = live.client.claim(wait_sec=10, addon_id="visuals")
    assert claimed["job_id"] == job_id


def test_a_submit_that_waits_for_room_is_accepted_when_there_is_some(tmp_path):
    from penstock.stores.api import Depth

    kit = ServerKit(tmp_path, rules={"depth": Depth(total=1)})
    try:
        client = kit.client
        client.post("/pause", {})
        first = client.submit()
        waiting = later(lambda: client.submit(wait_sec=30))
        time.sleep(0.1)
        assert not waiting.done()
        client.post(f"/queue/jobs/{first}/cancel")
        assert client.state(waiting.result(60)) == "QUEUED"
    finally:
        kit.close()


# the stream


def test_a_stream_tells_what_happens_as_it_happens(live):
    with Stream(live.client) as stream:
        job_id = live.client.submit()
        [event] = stream.take(1)

    assert (event["kind"], event["job_id"], event["n"]) == ("SUBMITTED", job_id, 1)


def test_a_reader_that_comes_back_misses_nothing_and_sees_nothing_twice(kit):
    client, seen = kit.client, []
    ids = [client.submit() for _ in range(5)]
    with Stream(client, "?after=0") as stream:
        seen += stream.take(2)
        last = stream.last
    job = {"addon_id": "a", "job_type": "t"}
    bulk = client.post("/queue/jobs/submit/bulk", {"jobs": [job] * 700})
    ids += [received["job_id"] for received in bulk.json["jobs"]]
    with Stream(client, last=last) as stream:
        seen += stream.take(300)
        last = stream.last
    ids += [client.submit() for _ in range(3)]
    with Stream(client, last=last) as stream:
        seen += stream.take(406)

    assert [event["job_id"] for event in seen] == ids
    assert [event["seq"] for event in seen] == sorted({event["seq"] for event in seen})


def test_a_stream_of_one_job_counts_its_own_events(live):
    client = live.client
    job_id = client.submit()
    client.submit()
    with Stream(client, f"?job_id={job_id}") as stream:
        client.post(f"/queue/jobs/{job_id}/cancel")
        events = []
        for event in stream:
            events.append(event)
            if event["kind"] == "CANCELED":
                break

    assert {event["job_id"] for event in events} == {job_id}
    entries = [event["n"] for event in events if event["kind"] != "ADMITTED"]  # one entry with DISPATCHING
    assert entries == list(range(1, len(entries) + 1))


def test_a_stream_of_an_addon_tells_of_no_other(kit):
    client = kit.client
    mine = client.mint(addon_id="mine")
    with Stream(mine, "?after=0") as bound, Stream(client, "?after=0&addon_id=mine") as asked:
        client.submit(addon_id="other")
        job_id = client.submit(addon_id="mine")
        events = [bound.take(1), asked.take(1)]

    assert [event["job_id"] for [event] in events] == [job_id, job_id]


@pytest.mark.parametrize("given", ["first", "-1", "1.5", "9" * 20, "9" * 4_300, "9" * 5_000])
def test_a_last_event_id_that_is_none_is_refused(kit, given):
    answer = kit.client.get("/events/stream", Last_Event_ID=given)

    assert (answer.status, answer.fields) == (422, ["Last-Event-ID"])


def test_an_idle_stream_sends_a_sign_of_life(kit, monkeypatch):
    monkeypatch.setattr("penstock.server.handlers.live.HEARTBEAT_SEC", 0.05)
    with Stream(kit.client) as stream:
        assert stream.response.readline() == b": still here\n"


def test_pages_of_the_trail_go_on_where_they_ended(kit):
    ids = [kit.client.submit() for _ in range(5)]
    first = kit.client.get("/events?limit=3").json
    rest = kit.client.get(f"/events?limit=3&after={first['next']}").json

    assert [event["job_id"] for event in first["events"] + rest["events"]] == ids
    waiting = later(lambda: kit.client.get(f"/events?after={rest['next']}&wait_sec=30").json["events"])
    until(lambda: waiters(kit) == 1)
    job_id = kit.client.submit()
    assert [event["job_id"] for event in waiting.result(60)] == [job_id]


def test_a_reader_that_does_not_read_is_dropped_and_harms_nobody(tmp_path):
    kit = ServerKit(tmp_path, start=False, limits=RequestLimits(unread_sec=1.0))
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    try:
        client = kit.client
        deaf.connect(("127.0.0.1", kit.server.port))
        bearer = f"Authorization: Bearer {client.token}"
        asked = f"GET {PREFIX}/events/stream?after=0 HTTP/1.1\r\nHost: localhost\r\n{bearer}\r\n\r\n"
        deaf.sendall(asked.encode())
        with Stream(client, "?after=0") as stream:
            reading = later(stream.take, 15_000)
            jobs = [{"addon_id": "a", "job_type": "t"}] * 1_000
            for _ in range(15):
                assert client.post("/queue/jobs/submit/bulk", {"jobs": jobs}).status == 200
            assert len(reading.result(60)) == 15_000
        until(lambda: open_requests(kit) == 0)
    finally:
        deaf.close()
        kit.close()


def open_requests(kit):
    return kit.server.app_state.open_requests.total()


def test_one_token_cannot_have_all_the_places_to_wait(tmp_path):
    kit = ServerKit(tmp_path, start=False, limits=RequestLimits(waiting=2))
    try:
        greedy = kit.client.mint()
        with Stream(greedy), Stream(greedy):
            refused = greedy.post("/queue/claim", {"wait_sec": 1})
            assert (refused.status, refused.json["code"]) == (429, "too_many")
            assert int(refused.headers["Retry-After"]) >= 1
            assert greedy.get("/stats").status == 200
            assert kit.client.claim(wait_sec=0.01) == []
        until(lambda: greedy.post("/queue/claim", {"wait_sec": 0.01}).status == 200)
    finally:
        kit.close()


def test_stopping_ends_streams_and_long_polls_at_once(tmp_path):
    kit = ServerKit(tmp_path)
    try:
        stream = Stream(kit.client)
        waiting = later(lambda: kit.client.post("/queue/claim", {"wait_sec": 60}))
        until(lambda: waiters(kit) == 2)

        kit.server.stop()
        assert waiting.result(60).status == 200, "and not after its sixty seconds"
        assert stream.response.read().endswith(b"\n")
        stream.connection.close()
    finally:
        kit.close()


def revoke(kit, client):
    kit.client.post(f"/tokens/{client.token.split('_')[1]}/revoke")


def test_a_stream_ends_when_its_token_is_revoked(kit):
    doomed, other = kit.client.mint(), kit.client.mint()
    with Stream(doomed) as stream, Stream(other) as beside:
        revoke(kit, doomed)
        rest = stream.response.read()
        kit.client.submit()

        assert b"data:" not in rest
        assert beside.take(1)


def test_a_stream_ends_when_the_parent_of_its_token_is_revoked(kit):
    parent = kit.client.mint()
    with Stream(parent.mint()) as stream:
        revoke(kit, parent)

        assert b"data:" not in stream.response.read()


def test_a_stream_ends_when_its_token_is_taken_out_of_the_file(kit):
    doomed = kit.client.mint()
    with Stream(doomed) as stream:
        kit.server.tokens.path.write_text("[]")

        assert b"data:" not in stream.response.read()


@pytest.mark.parametrize(
    ("verb", "path", "body"),
    [
        ("POST", "/queue/claim", {"wait_sec": 60}),
        ("GET", "/queue/dispatchable?wait_sec=60", None),
        ("GET", "/events?wait_sec=60&after=1", None),
        ("GET", "/queue/jobs/{job_id}?wait_sec=60", None),
    ],
)
def test_a_long_poll_ends_when_its_token_is_revoked(kit, verb, path, body):
    job_id = kit.client.submit()
    kit.client.post("/pause")
    doomed = kit.client.mint()
    after = kit.client.get("/stats").json["newest_event"]
    path = path.format(job_id=job_id).replace("after=1", f"after={after}")
    waiting = later(doomed.send, verb, path, body)
    until(lambda: waiters(kit), what="the request to wait")
    revoke(kit, doomed)

    assert waiting.result(LONG).status == 401


def test_submits_at_once_share_commits(kit):
    """While the first commit is reported, the others arrive: they are written together, and no thread waited for them."""
    commits, all_have_arrived = [], threading.Event()

    def on_commit():
        commits.append(1)
        assert all_have_arrived.wait(60)

    kit.store.on_change(on_commit)
    with ThreadPoolExecutor(64) as pool:
        waiting = [pool.submit(kit.client.submit)]
        until(lambda: commits)
        waiting += [pool.submit(kit.client.submit) for _ in range(63)]
        until(lambda: open_requests(kit) >= 63)  # the first may have been answered
        all_have_arrived.set()
        ids = {future.result(60) for future in waiting}

    assert len(ids) == 64
    assert len(commits) < 8
