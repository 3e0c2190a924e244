"""The daemon behind the proxies of docs/how-to/proxy.md: the same configuration with other ports and a certificate of its own."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import socket
import ssl
import subprocess

import pytest
from tests import ROOT
from tests.waiting import LONG, until

PAGE = (ROOT / "docs" / "how-to" / "proxy.md").read_text("utf-8")
NAME = "jobs.example.org"


def configuration(title):
    return re.search(rf'title="{re.escape(title)}"\n(.*?)```', PAGE, re.DOTALL)[1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def nginx(folder, port, upstream):
    text = configuration("penstock.conf").replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("127.0.0.1:8420", upstream).replace(f"/etc/ssl/{NAME}", f"{folder}/{NAME}")
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid; error_log stderr; daemon off; events {{}}\n"
        f"http {{ access_log off; {paths}\n{text}\n}}\n"
    )
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def caddy(folder, port, upstream):
    text = configuration("Caddyfile").replace("127.0.0.1:8420", upstream)
    text = text.replace(
        f"{NAME} {{", f"https://{NAME}:{port} {{\n\ttls {folder}/{NAME}.pem {folder}/{NAME}.key\n"
    )
    (folder / "Caddyfile").write_text(f"{{\n\tadmin off\n\tauto_https off\n}}\n{text}")
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@pytest.fixture(params=[nginx, caddy], ids=["nginx", "caddy"])
def proxy(request, daemon, tmp_path, monkeypatch):
    """Through the proxy: a function that sends a request to the daemon by the name that the proxy serves."""
    program = request.param.__name__
    if shutil.which(program) is None or shutil.which("openssl") is None:
        pytest.skip(f"no {program} or openssl here: apt-get install {program} openssl")
    running = daemon(f"server.allowed_hosts={NAME}", "server.trusted_proxies=127.0.0.1")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={NAME}",
         "-addext", f"subjectAltName=DNS:{NAME}", "-keyout", f"{tmp_path}/{NAME}.key", "-out", f"{tmp_path}/{NAME}.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    port = free_port()
    process = subprocess.Popen(
        request.param(tmp_path, port, running.url.rpartition("/")[2]), stderr=subprocess.PIPE, text=True
    )
    until(lambda: answers(port) or process.poll() is not None)
    assert process.poll() is None, process.stderr.read()
    trust = ssl.create_default_context(cafile=f"{tmp_path}/{NAME}.pem")

    def send(path, name=NAME, **headers):
        plain = socket.create_connection(("127.0.0.1", port), LONG)
        connection = closing.enter_context(contextlib.closing(http.client.HTTPConnection(name, port)))
        connection.sock = trust.wrap_socket(plain, server_hostname=NAME)
        connection.request(
            "GET", path, headers={"Host": name, "Authorization": f"Bearer {running.token}", **headers}
        )
        return closing.enter_context(connection.getresponse())

    send.daemon = running
    with contextlib.ExitStack() as closing:
        yield send
    process.terminate()
    process.communicate(timeout=LONG)


def test_api_and_page_are_served_by_the_name_of_the_proxy(proxy):
    stats = proxy("/api/system/scheduler/stats")
    page = proxy("/")

    assert stats.status == 200, stats.read()
    assert page.status == 200
    assert b"<title>" in page.read()


def test_an_event_comes_through_while_the_stream_stays_open(proxy):
    stream = proxy("/api/system/scheduler/events/stream", Accept="text/event-stream")
    job = proxy.daemon.client.submit("a", "t").job_id
    line = b""
    while job.encode() not in line:
        line = stream.readline()
        assert line

    assert stream.status == 200
