"""Real receivers: an HTTP server on loopback that keeps the requests it gets, and answers as the test says."""

from __future__ import annotations

import json
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from tests.waiting import until

from penstock.alerts import Alerting
from penstock.core.jobs.alerts import Alert
from penstock.core.jobs.changes import Change, alert_note
from penstock.settings import Settings
from penstock.settings.settings import AddonSettings, AlertSettings, LeaseSettings
from penstock.stores.api import Apply, committed
from penstock.stores.memory.store import MemoryStore


class Receiver:
    """`script`: what is done with the next requests, a status or a function of the handler; then 204 for all."""

    def __init__(self, port=0):
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # the connection stays open unless we are the ones to close it

            def do_POST(self):
                self.body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.seen.append((self.path, dict(self.headers), self.body))
                answer = receiver.script.popleft() if receiver.script else 204
                if callable(answer):
                    answer(self)
                    return
                self.send_response(answer)
                self.send_header("Content-Length", "0")
                if 300 <= answer < 400:
                    self.send_header("Location", f"http://127.0.0.1:{receiver.port}/elsewhere")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.script, self.seen = deque(), []
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/alerts?from=test"

    @property
    def received(self):
        return [json.loads(body) for _, _, body in self.seen]

    def close(self):
        if self._thread.is_alive():
            self._end()

    def _end(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def receivers():
    made = []

    def make(port=0):
        made.append(Receiver(port))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def receiver(receivers):
    return receivers()


class AlertingKit:
    """A store, and alerting on it that can be stopped and started."""

    def __init__(self, folder):
        self.folder = folder
        self.store = MemoryStore(lambda: time.time_ns() // 1_000)
        self.running = None

    @property
    def secret_file(self):
        return self.folder / "webhook.secret"

    def start(self, *, addons=None, leases=None, **options):
        settings = Settings(
            data_dir=self.folder,
            alerts=AlertSettings(**{"allow_private": True} | options),
            addons={name: AddonSettings(**addon) for name, addon in (addons or {}).items()},
            leases=leases or LeaseSettings(),
        )
        self.running = Alerting(self.store, settings).start()
        return self

    def stop(self):
        if self.running is not None:
            self.running.stop()
            self.running = None

    def delivered(self, count, receiver):
        """Wait until `count` messages have arrived and left the spool: a stop before that would repeat one."""
        until(lambda: len(receiver.received) == count and not self.messages())

    def alert(self, key="k", **more):
        fields = {"kind": "cost_warning", "addon_id": "photos", "text": f"about {key}"} | more
        committed(self.store, Apply([Change(self.store.now(), (alert_note(Alert(key=key, **fields)),))]))

    def alerts(self, kind):
        return [event for event in self.store.events(0, 1_000) if event.reason == kind]

    def messages(self, role="webhook"):
        return sorted((self.folder / "alerts" / role).glob("*.json"))


@pytest.fixture
def alerting(tmp_path):
    kit = AlertingKit(tmp_path)
    yield kit
    kit.stop()
