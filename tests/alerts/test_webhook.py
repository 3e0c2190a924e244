"""A message over HTTP: signed, to checked addresses, within its time."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import ssl
import subprocess
import time
from contextlib import suppress
from threading import Thread

import pytest

from penstock.alerts.delivery import Message, MessageRefused, ReceiverAway, Stopped
from penstock.alerts.receivers import Webhook, secrets_in
from penstock.core.jobs.alerts import refusal
from penstock.core.jobs.types import SECOND
from penstock.scheduler.permissions import Unsafe

NOW = 1_900_000_000 * SECOND
MESSAGE = Message(
    number=7, content={"id": "ab-7", "type": "alert", "text": "ünser"}, due=NOW, until=NOW + SECOND
)


def request_from(line):
    """The whole request: a socket that is closed with unread bytes resets the connection."""
    request = b""
    while not request.endswith(b"}") and (piece := line.recv(65_536)):  # a body is a JSON object
        request += piece
    return request


@pytest.fixture
def secret(tmp_path):
    return tmp_path / "webhook.secret"


@pytest.fixture
def listening():
    """A socket that accepts and then does what it is told; not even HTTP is promised."""
    server = socket.create_server(("127.0.0.1", 0))
    threads = []

    def answer(act):
        def serve():
            line, _ = server.accept()
            with line:
                with suppress(OSError):
                    act(line)

        threads.append(Thread(target=serve))
        threads[-1].start()
        return f"http://127.0.0.1:{server.getsockname()[1]}/"

    yield answer
    for thread in threads:
        thread.join(30)
    server.close()


def test_the_signature_is_over_id_time_and_body(receiver, secret):
    Webhook(receiver.url, secret, private=True).deliver(MESSAGE, NOW)

    [(path, headers, body)] = receiver.seen
    key = base64.b64decode(secret.read_text().strip().removeprefix("whsec_"))
    signed = f"{headers['Webhook-Id']}.{headers['Webhook-Timestamp']}.".encode() + body
    mine = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert f"v1,{mine}" == headers["Webhook-Signature"]
    assert ("ab-7", "1900000000") == (headers["Webhook-Id"], headers["Webhook-Timestamp"])
    assert ("/alerts?from=test", "application/json") == (path, headers["Content-Type"])
    assert receiver.received == [{"id": "ab-7", "type": "alert", "text": "ünser"}]


def test_with_two_secrets_both_sign_so_that_one_can_be_replaced(receiver, secret):
    secrets_in(secret)
    webhook = Webhook(receiver.url, secret, private=True)
    webhook.deliver(MESSAGE, NOW)
    secret.write_text("a new secret of ours\n".replace(" ", "-") + secret.read_text())
    webhook.deliver(MESSAGE, NOW)

    first, second = (headers["Webhook-Signature"].split() for _, headers, _ in receiver.seen)
    assert 2 == len(second)
    assert first == second[1:]


def test_the_secret_is_made_for_its_owner_alone_and_kept(secret):
    [key] = secrets_in(secret)

    assert 32 == len(key)
    assert 0o600 == secret.stat().st_mode & 0o777
    assert [key] == secrets_in(secret)


@pytest.mark.parametrize("content", ["", "short", "whsec_!!!", "\xfc" * 40])
def test_a_secret_that_is_none_is_refused_and_not_shown(secret, content):
    secret.write_text(content)
    secret.chmod(0o600)

    with pytest.raises(Unsafe) as caught:
        secrets_in(secret)
    assert str(secret) in str(caught.value)
    assert not content or content not in str(caught.value)


def test_a_secret_that_others_can_read_signs_nothing(receiver, secret):
    webhook = Webhook(receiver.url, secret, private=True)
    secrets_in(secret)
    secret.chmod(0o644)

    with pytest.raises(MessageRefused, match="chmod 600"):
        webhook.deliver(MESSAGE, NOW)
    assert receiver.seen == []


# Where it goes


PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1111"]
NEAR = ["127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "::1", "fd00::1"]
NEVER = [
    "169.254.169.254", "fe80::1", "0.0.0.0", "0.1.2.3", "224.0.0.1", "255.255.255.255", "240.0.0.1", "::",
    "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:169.254.169.254", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b:1::1",
    "2002:7f00:1::", "2001::1", "ff02::1", "fec0::1", "2001:db8::1",
]  # fmt: skip


def test_public_addresses_are_called_near_ones_on_request_and_others_never():
    assert [] == [address for address in PUBLIC if refusal(address, private=False)]
    assert [] == [address for address in NEAR if not refusal(address, private=False)]
    assert [] == [address for address in NEAR if refusal(address, private=True)]
    assert [] == [address for address in NEVER if not refusal(address, private=True)]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1"])
def test_the_address_behind_a_name_is_what_counts(receiver, secret, host):
    url = f"http://{host}:{receiver.port}/"

    with pytest.raises(ReceiverAway, match="loopback or private.*allow_private"):
        Webhook(url, secret).deliver(MESSAGE, NOW)
    assert receiver.seen == []


def test_what_was_checked_is_what_is_connected_to(receiver, secret, monkeypatch):
    """A name that points elsewhere when it is looked up again gains nothing: it is looked up once."""
    asked = []

    def rebinding(host, port, *args, **more):
        if host.replace(".", "").isdigit():  # an address is no question
            return real(host, port, *args, **more)
        asked.append(host)
        return real("127.0.0.1" if len(asked) == 1 else "127.0.0.2", port, *args, **more)

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", rebinding)

    Webhook(f"http://rebinding.example:{receiver.port}/", secret, private=True).deliver(MESSAGE, NOW)

    assert asked == ["rebinding.example"]
    assert f"rebinding.example:{receiver.port}" == receiver.seen[0][1]["Host"]


def test_one_forbidden_address_among_several_spoils_the_name(receiver, secret, monkeypatch):
    real = socket.getaddrinfo
    both = [*real("127.0.0.1", receiver.port), *real("169.254.169.254", 80)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)

    with pytest.raises(ReceiverAway, match="169.254.169.254"):
        Webhook(receiver.url, secret, private=True).deliver(MESSAGE, NOW)
    assert receiver.seen == []


def test_of_two_addresses_the_one_that_answers_is_used(receiver, secret, monkeypatch):
    real = socket.getaddrinfo
    both = [*real("127.0.0.9", receiver.port), *real("127.0.0.1", receiver.port)]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: both if host == "two.example" else real(host, *a, **k)
    )

    Webhook(f"http://two.example:{receiver.port}/", secret, private=True).deliver(MESSAGE, NOW)

    assert 1 == len(receiver.seen)


def test_a_name_that_is_not_found_is_told(secret):
    with pytest.raises(ReceiverAway, match="nowhere.invalid has no address"):
        Webhook("http://nowhere.invalid/", secret).deliver(MESSAGE, NOW)


def test_redirects_are_not_followed(receiver, secret):
    receiver.script.append(307)

    with pytest.raises(MessageRefused, match="307, and redirects are not followed"):
        Webhook(receiver.url, secret, private=True).deliver(MESSAGE, NOW)
    assert 1 == len(receiver.seen)


# What comes back


def test_what_the_receiver_says_against_it_is_told(receiver, secret):
    receiver.script.append(lambda handler: handler.send_error(422, "No", "unknown addon"))

    with pytest.raises(MessageRefused, match="answered 422 No: "):
        Webhook(receiver.url, secret, private=True).deliver(MESSAGE, NOW)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X: %b\r\n" % (b"y" * 2_000) * 50 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: y",
        b"HTTP/1.1 200",
        b"SSH-2.0-x\r\n",
        b"",
    ],
    ids=["long", "half", "line", "ssh", "nothing"],
)
def test_an_answer_that_is_too_long_or_none_counts_as_away(listening, secret, head):
    url = listening(lambda line: (request_from(line), line.sendall(head)))

    with pytest.raises(ReceiverAway, match="no answer"):
        Webhook(url, secret, private=True).deliver(MESSAGE, NOW)


def test_a_long_body_is_not_read(listening, secret):
    sent = []

    def pour(line):
        request_from(line)
        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while len(sent) < 10_000:
            sent.append(line.send(b"x" * 65_536))

    Webhook(listening(pour), secret, private=True).deliver(MESSAGE, NOW)

    assert len(sent) < 10_000


def silence(line):
    while line.recv(65_536):
        pass


def trickle(line):
    request_from(line)
    line.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        line.sendall(b"y")
        time.sleep(0.05)


@pytest.mark.parametrize("act", [trickle, silence], ids=["trickle", "silence"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_time_is_for_all_of_it(listening, secret, scheme, act):
    url = listening(act).replace("http", scheme)

    with pytest.raises(ReceiverAway):  # both would go on for ever
        Webhook(url, secret, private=True, within=0.3).deliver(MESSAGE, NOW)


def test_a_resolver_that_hangs_is_left_behind(secret, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(0.5) or [])

    with pytest.raises(ReceiverAway, match="not found in time"):
        Webhook("http://slow.example/", secret, within=0.2).deliver(MESSAGE, NOW)


def test_a_delivery_can_be_cut_off(listening, secret):
    def receive(line):
        request_from(line)
        webhook.abort()
        silence(line)

    webhook = Webhook(listening(receive), secret, private=True, within=600)

    with pytest.raises(Stopped):  # and not Away, as after its time
        webhook.deliver(MESSAGE, NOW)
    with pytest.raises(Stopped):
        webhook.deliver(MESSAGE, NOW)


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_over_tls_the_name_is_checked_against_the_certificate(listening, secret, certificate, monkeypatch):
    cert, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    got = []

    def serve(line):
        with context.wrap_socket(line, server_side=True) as tls:
            got.append(request_from(tls))
            tls.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    url = listening(serve).replace("http", "https")
    with pytest.raises(ReceiverAway, match="CERTIFICATE_VERIFY_FAILED"):
        Webhook(url, secret, private=True).deliver(MESSAGE, NOW)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    url = listening(serve).replace("http", "https")
    with pytest.raises(ReceiverAway, match="127.0.0.1"):
        Webhook(url, secret, private=True).deliver(MESSAGE, NOW)
    url = listening(serve).replace("http", "https").replace("127.0.0.1", "localhost")
    Webhook(url, secret, private=True).deliver(MESSAGE, NOW)

    assert got[-1].startswith(b"POST / HTTP/1.1\r\n")
    assert b"\r\nHost: localhost:" in got[-1]
