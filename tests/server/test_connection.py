"""What must hold before there is a request: deadlines, sizes, and what arrives broken. Raw sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from pathlib import Path

import pytest
from http_kit import ServerKit
from tests.waiting import until

from penstock.core.errors import Unavailable
from penstock.server.connections import ConnectionLimits
from penstock.server.listener import Config, serve
from penstock.wire import PREFIX


@pytest.fixture
def hasty(tmp_path):
    """Deadlines short enough to be waited for."""
    made = ServerKit(
        tmp_path, start=False, connection_limits=ConnectionLimits(head_sec=1.0, body_sec=1.0, connections=30)
    )
    yield made
    made.close()


def call(kit):
    return socket.create_connection(("127.0.0.1", kit.server.port), timeout=10)


def rest(line):
    """Until the server closes. A reset is an end too."""
    parts = []
    try:
        while part := line.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    line.close()
    return b"".join(parts)


def head(kit, verb="GET", path="/stats", **headers):
    lines = [
        f"{verb} {PREFIX}{path} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {kit.client.token}",
    ]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n"


def status(answer):
    return int(answer.split(b" ", 2)[1]) if answer else None


def drip(line, data):
    """One byte now and then, as a caller does that wants to hold a place for ever. Whether it was cut off before the end."""
    for byte in data:
        try:
            line.send(bytes([byte]))
        except OSError:
            return True
        time.sleep(0.03)
    return False


def test_a_head_that_only_trickles_in_is_cut_off(hasty):
    line = call(hasty)

    assert drip(line, head(hasty) * 100)
    assert status(rest(line)) in {408, None}


def test_a_connection_that_says_nothing_is_cut_off(hasty):
    line = call(hasty)

    assert status(rest(line)) == 408


def test_a_body_that_only_trickles_in_is_cut_off(hasty):
    line = call(hasty)
    line.sendall(
        head(hasty, "POST", "/pause", Content_Type="application/json", Content_Length=10_000) + b"\r\n"
    )

    assert drip(line, b" " * 10_000)
    assert status(rest(line)) in {408, None}


def test_what_dribbles_on_after_the_answer_is_cut_off(hasty):
    line = call(hasty)
    line.sendall(head(hasty, "GET", "/stats", Content_Length=10_000) + b"\r\n")

    assert drip(line, b"x" * 10_000)
    assert status(rest(line)) == 200


def test_slow_callers_harm_nobody(hasty):
    slow = [call(hasty) for _ in range(20)]
    for line in slow:
        line.send(b"GET ")

    assert hasty.client.get("/stats").status == 200
    assert {status(rest(line)) for line in slow} == {408}
    assert hasty.client.get("/stats").status == 200


@pytest.mark.parametrize(
    "flood",
    [b"X: " + b"a" * 100_000 + b"\r\n", b"X: a\r\n" * 5_000, b"X" * 200_000],
    ids=["a long header", "many headers", "a header without end"],
)
def test_a_head_that_is_too_large_is_refused(kit, flood):
    line = call(kit)
    with contextlib.suppress(OSError):
        line.sendall(head(kit) + flood)

    assert status(rest(line)) in {431, None}
    assert kit.client.get("/stats").status == 200


def test_a_hundred_headers_are_too_many(kit):
    line = call(kit)
    line.sendall(head(kit) + b"".join(b"X-%d: a\r\n" % i for i in range(120)) + b"\r\n")

    assert status(rest(line)) == 431


def test_trailers_are_no_headers(kit):
    line = call(kit)
    line.sendall(
        f"POST {PREFIX}/pause HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        f"2\r\n{{}}\r\n0\r\nAuthorization: Bearer {kit.client.token}\r\n\r\n".encode()
    )

    assert status(rest(line)) == 401


def test_a_head_without_a_path_is_refused_and_no_error_of_ours(kit, caplog):
    line = call(kit)
    line.sendall(b"GET http:// HTTP/1.1\r\nHost: localhost\r\n\r\n")

    assert status(rest(line)) == 400
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"BREW /x HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_and_the_line_cut(kit, request_line):
    line = call(kit)
    line.sendall(request_line)
    answer = rest(line)

    assert status(answer) in {400, 401, 403}
    assert b"Traceback" not in answer
    assert kit.client.get("/stats").status == 200


def test_requests_in_one_go_are_answered_in_order(kit):
    line = call(kit)
    line.sendall((head(kit) + b"\r\n") * 2 + head(kit, path="/capacity", Connection="close") + b"\r\n")
    answers = rest(line)

    assert answers.count(b"HTTP/1.1 200") == 3
    assert answers.rindex(b'"quiet_sec"') > answers.rindex(b'"oldest_queued_sec"')


def test_the_socket_is_private_and_goes_with_the_server(tmp_path):
    kit = ServerKit(tmp_path, start=False)
    path = kit.server.socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kit.local.get("/stats").status == 200

    kit.close()
    assert not path.exists()


def test_a_socket_left_by_a_killed_server_is_taken_over_and_a_live_one_is_not(tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "penstock.sock"))
    kit = ServerKit(tmp_path, start=False)
    try:
        assert kit.local.get("/stats").status == 200
        with pytest.raises(Unavailable, match="is a daemon running"):
            serve(kit.service, Config(directory=tmp_path, bind=None, socket=tmp_path / "penstock.sock"))
        assert kit.local.get("/stats").status == 200
    finally:
        kit.close()


def test_a_visitor_of_another_user_is_not_let_in(kit, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    monkeypatch.setattr("penstock.server.connections.peer_uid", lambda _: 54_321)

    with pytest.raises(OSError):
        kit.local.get("/stats")


def test_a_port_in_use_is_told_in_words(kit):
    with pytest.raises(Unavailable, match="choose another port"):
        serve(kit.service, Config(directory=kit.server.token_file.parent, port=kit.server.port))


def test_every_socket_listens_on_loopback_alone(kit):
    table = Path("/proc/net/tcp").read_text("ascii").splitlines()
    listening = [line.split()[1] for line in table if line.split()[3] == "0A"]

    assert [a for a in listening if a.endswith(f":{kit.server.port:04X}")] == [
        f"0100007F:{kit.server.port:04X}"
    ]


def test_a_server_that_stops_leaves_nothing_behind(tmp_path):
    import threading

    before = threading.active_count()
    ServerKit(tmp_path, start=False).close()  # the first event loop of a process leaves a pipe of its own
    handles = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        kit = ServerKit(tmp_path, start=False)
        kit.client.submit()
        kit.close()

    until(lambda: threading.active_count() <= before)  # a thread that has been told to end is about to
    assert len(list(Path("/proc/self/fd").iterdir())) <= handles + 1


def test_an_idle_server_uses_no_time(kit):
    """The least of several turns: other threads of this process may have something to do."""
    kit.client.get("/stats")

    def used():
        began = time.process_time()
        time.sleep(0.5)
        return time.process_time() - began

    assert any(used() < 0.05 for _ in range(5))
