"""Who may hold a connection, and how many: no peer locks the others out, and nothing on TCP locks the owner out."""

from __future__ import annotations

import http.client
import resource
import socket
import ssl
import subprocess

import pytest
from http_kit import Client, ServerKit
from tests.daemon import Daemon
from tests.waiting import LONG, until

from penstock.scheduler.permissions import Unsafe
from penstock.server.connections import ConnectionBudget, ConnectionLimits, Peers
from penstock.server.listener import Config, Server, most_connections
from penstock.wire import PREFIX


@pytest.fixture
def narrow(tmp_path):
    """Room for twelve connections over TCP, nine of one peer, and for four over the Unix socket."""
    made = ServerKit(
        tmp_path, start=False, connection_limits=ConnectionLimits(connections=12, per_peer=9, local=4)
    )
    yield made
    made.close()


def line_to(kit, source="127.0.0.1"):
    """127.0.0.0/8 is this machine's whole: each address of it is another peer."""
    return socket.create_connection(("127.0.0.1", kit.server.port), timeout=20, source_address=(source, 0))


def ask(line, kit, path="/stats", token=None):
    """Over a connection that stays open; the status, or None if it was closed."""
    line.sendall(
        f"GET {PREFIX}{path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {token or kit.client.token}\r\n\r\n".encode()
    )
    response = http.client.HTTPResponse(line)
    try:
        response.begin()
    except (http.client.RemoteDisconnected, ConnectionError):
        return None
    response.read()
    return response.status


def is_closed(line):
    """Now. An answer that came before the end is read away."""
    line.setblocking(False)
    try:
        while line.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def waiting(kit, source="127.0.0.1"):
    """A connection whose request is being served for as long as it lasts."""
    line = line_to(kit, source)
    line.sendall(
        f"GET {PREFIX}/events/stream HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {kit.client.token}\r\n\r\n".encode()
    )
    assert line.recv(12) == b"HTTP/1.1 200"
    return line


# on the wire


def test_connections_over_tcp_do_not_lock_the_owner_out_of_the_unix_socket(narrow):
    held = [waiting(narrow) for _ in range(9)] + [waiting(narrow, "127.0.0.2") for _ in range(3)]

    refused = line_to(narrow)
    assert ask(refused, narrow) == 503
    assert narrow.local.get("/stats").status == 200
    for line in [*held, refused]:
        line.close()
    until(lambda: narrow.client.get("/stats").status == 200)


def test_the_owner_can_always_add_one_more_over_the_unix_socket(narrow):
    silent = [narrow.local.connect() for _ in range(10)]
    for line in silent:
        line.connect()

    assert narrow.local.get("/stats").status == 200
    for line in silent:
        line.close()


def test_clients_that_say_nothing_lock_nobody_out(narrow):
    silent = [line_to(narrow) for _ in range(40)]

    assert narrow.client.get("/stats").status == 200
    until(lambda: sum(map(is_closed, silent)) >= 31)  # 9 of one peer, and the others gave way
    for line in silent:
        line.close()


def test_one_peer_cannot_have_all_places(narrow):
    held = [waiting(narrow) for _ in range(9)]
    one_more = line_to(narrow)
    assert ask(one_more, narrow) == 503

    other = line_to(narrow, "127.0.0.2")
    assert ask(other, narrow) == 200
    for line in [*held, one_more, other]:
        line.close()


def test_who_has_shown_a_token_gives_way_last(narrow):
    proven = line_to(narrow)
    assert ask(proven, narrow) == 200
    silent = [line_to(narrow) for _ in range(30)]
    until(lambda: sum(map(is_closed, silent)) >= 22)

    assert ask(proven, narrow) == 200
    for line in [proven, *silent]:
        line.close()


def test_what_is_being_served_never_gives_way(narrow):
    stream = waiting(narrow)
    silent = [line_to(narrow) for _ in range(30)]
    until(lambda: sum(map(is_closed, silent)) >= 22)

    assert not is_closed(stream)
    for line in [stream, *silent]:
        line.close()


def test_a_client_that_does_not_read_its_answer_is_dropped(tmp_path):
    static = tmp_path / "static"
    static.mkdir()
    (static / "index.html").write_text("<!doctype html>")
    (static / "large.js").write_bytes(b" " * 8_000_000)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    kit = ServerKit(home, start=False, page=static, connection_limits=ConnectionLimits(unread_sec=0.2))
    try:
        budget, entered = kit.server.listeners[0].budget, []
        enter = budget.enter
        budget.enter = lambda holder: entered.append(holder) or enter(holder)
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        line.connect(("127.0.0.1", kit.server.port))
        line.sendall(b"GET /assets/large.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: entered and len(budget) == 0)
        line.close()
    finally:
        kit.close()


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    (folder / "key.pem").chmod(0o600)
    return folder


@pytest.fixture
def secure(tmp_path, certificate):
    def make(**limits):
        made.append(
            ServerKit(
                tmp_path,
                start=False,
                tls_cert=certificate / "cert.pem",
                tls_key=certificate / "key.pem",
                connection_limits=ConnectionLimits(**limits),
            )
        )
        return made[0]

    made = []
    yield make
    for kit in made:
        kit.close()


def ask_securely(kit, certificate):
    context = ssl.create_default_context(cafile=certificate / "cert.pem")
    connection = http.client.HTTPSConnection("localhost", kit.server.port, timeout=20, context=context)
    try:
        connection.request("GET", f"{PREFIX}/stats", headers={"Authorization": f"Bearer {kit.client.token}"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_handshake_that_is_not_made_is_cut_off(secure):
    kit = secure(head_sec=0.3)
    line = line_to(kit)
    line.settimeout(LONG)

    assert line.recv(1) == b""
    until(lambda: len(kit.server.listeners[0].budget) == 0)
    line.close()


def test_the_budget_holds_before_the_handshake(secure, certificate):
    kit = secure(connections=8, per_peer=6)
    silent = [line_to(kit) for _ in range(40)]
    until(lambda: sum(map(is_closed, silent)) >= 34)

    assert ask_securely(kit, certificate) == 200
    assert kit.local.get("/stats").status == 200
    for line in silent:
        line.close()


# which peers


@pytest.fixture
def from_elsewhere(monkeypatch):
    """What the kernel says of every peer: a documentation address stands for a machine in the network."""

    def come_from(address):
        monkeypatch.setattr("penstock.server.connections.peer_address", lambda _: address)

    return come_from


@pytest.fixture
def proxied(tmp_path):
    made = ServerKit(tmp_path, start=False, trusted_proxies=["192.0.2.1"], allowed_hosts=["jobs.example.org"])
    yield made
    made.close()


def test_plain_http_from_an_undeclared_address_is_refused(proxied, from_elsewhere):
    from_elsewhere("192.0.2.7")
    forged = {
        "X_Forwarded_For": "127.0.0.1",
        "X_Forwarded_Proto": "https",
        "Forwarded": "for=127.0.0.1;proto=https",
    }
    for path in ("/tokens", "/stats"):
        for headers in ({}, forged):
            line = proxied.client.connect()
            line.connect()
            assert ask(line.sock, proxied, path) == 403, headers
            line.close()


def test_a_declared_proxy_is_let_in_and_still_needs_a_token(proxied, from_elsewhere):
    from_elsewhere("192.0.2.1")

    assert proxied.client.get("/stats", X_Forwarded_Proto="https").status == 200
    assert Client(proxied.server).get("/stats", X_Forwarded_For="127.0.0.1").status == 401


def test_what_a_declared_proxy_took_in_the_clear_is_refused(proxied, from_elsewhere):
    from_elsewhere("192.0.2.1")

    assert proxied.client.get("/stats", X_Forwarded_Proto="http").status == 403


def test_forwarded_headers_of_other_peers_are_ignored(proxied):
    assert proxied.client.get("/stats", X_Forwarded_Proto="http", X_Forwarded_For="192.0.2.7").status == 200


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("192.0.2.1", True),
        ("::ffff:192.0.2.1", True),
        ("2001:db8::1", True),
        ("2001:db8:0:0::1", True),
        ("192.0.2.7", False),
        ("10.0.0.1", False),
        ("::ffff:192.0.2.7", False),
        ("2001:db8::2", False),
        ("fe80::1%eth0", False),
        ("0.0.0.0", False),
    ],
)
def test_in_the_clear_only_this_machine_and_declared_proxies_come(address, allowed):
    proxies = ["192.0.2.1", "2001:db8::1"]

    assert Peers(proxies, tls=False).may_connect(address) is allowed
    assert Peers(proxies, tls=True).may_connect(address)


def test_a_proxy_that_is_no_address_is_refused_at_the_start(kit):
    with pytest.raises(Unsafe, match=r"proxy.example.org"):
        Server(
            kit.service,
            Config(directory=kit.server.token_file.parent, trusted_proxies=["proxy.example.org"]),
        )


# descriptors


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (64, (24, 8)),
        (1_024, (384, 128)),
        (1_000_000, (1_000, 250)),
        (resource.RLIM_INFINITY, (1_000, 250)),
    ],
)
def test_half_of_the_descriptors_are_kept_back_for_jobs(monkeypatch, limit, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))

    assert tuple(most_connections(ConnectionLimits(), unix=unix) for unix in (False, True)) == expected


@pytest.mark.long
def test_a_job_runs_however_many_connections_are_open(tmp_path):
    daemon = Daemon(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, before[1]))  # the daemon inherits it
    try:
        daemon.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    host, _, port = daemon.url.rpartition("/")[2].partition(":")
    held = [socket.create_connection((host, int(port)), timeout=20) for _ in range(200)]
    try:
        job_id = daemon.client.submit("a", "penstock.command", {"argv": ["true"]}).job_id
        assert daemon.client.wait(job_id, LONG).state == "DONE"
    finally:
        for line in held:
            line.close()
        daemon.close()


# the budget alone


class FakeConnection:
    def __init__(self, peer, *, idle=True):
        self.peer, self.idle, self.gone = peer, idle, False

    def give_way(self):
        self.gone = True


def entered(budget, peer, count=1, **more):
    connections = [FakeConnection(peer, **more) for _ in range(count)]
    assert all(map(budget.enter, connections))
    return connections


def test_the_peer_with_the_most_places_gives_one_up():
    budget = ConnectionBudget(most=5, per_peer=4)
    many, few = entered(budget, "many", 3), entered(budget, "few", 2)
    entered(budget, "new")

    assert [h.gone for h in many + few] == [True, False, False, False, False]
    assert len(budget) == 5


def test_a_peer_that_is_busy_all_over_is_refused_and_takes_no_other_peers_place():
    budget = ConnectionBudget(most=5, per_peer=3)
    entered(budget, "busy", 3, idle=False)
    [other] = entered(budget, "other")

    assert not budget.enter(FakeConnection("busy"))
    assert not other.gone


def test_a_declared_proxy_stands_for_many():
    budget = ConnectionBudget(most=5, per_peer=1, unlimited=frozenset({"proxy"}))
    entered(budget, "proxy", 5, idle=False)

    assert not budget.enter(FakeConnection("proxy"))


def test_a_place_is_given_up_once():
    budget = ConnectionBudget(most=2, per_peer=2)
    [holder] = entered(budget, "a")
    for _ in range(2):
        budget.leave(holder)
        budget.prove(holder)

    assert len(budget) == 0
    entered(budget, "a", 2, idle=False)
    assert not budget.enter(FakeConnection("a"))
