"""A real server on a loopback port and a Unix socket, and a client that is nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import socket

from penstock.core.jobs.load import Capacity
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.server.listener import Config, serve
from penstock.wire import PREFIX, Scope

SEED_BODY = """{
  "addon_id": "visuals",
  "job_type": "indexing",
  "cost_units": 30,
  "priority": "NORMAL",
  "constraints": {"cpu_heavy": true, "disk_write_heavy": false, "network_heavy": false},
  "expected_duration_sec": 120,

  "payload": {"path": "/some/dir"},
  "time_sensitive": false,
  "earliest_start_at": "2025-12-28T23:00:00Z"
}"""


def read_secret(file):
    return file.read_text("ascii").strip()


class Answer:
    def __init__(self, response):
        self.status, self.headers, self.content = response.status, response.headers, response.read()

    @property
    def json(self):
        return json.loads(self.content)

    @property
    def fields(self):
        return [problem["field"] for problem in self.json["problems"]]

    def __repr__(self):
        return f"{self.status} {self.content[:500]!r}"


class Unix(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=20)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Client:
    """`token` None: none is sent. Headers that are None are not sent either."""

    def __init__(self, server, token=None, *, unix=False):
        self.server, self.token, self.unix = server, token, unix

    def connect(self):
        if self.unix:
            return Unix(self.server.socket)
        return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)

    def send(self, verb, path, body=None, *, prefix=PREFIX, **headers):
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token is not None:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        if body is not None and not isinstance(body, (str, bytes)):
            body = json.dumps(body)
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        connection = self.connect()
        try:
            connection.request(
                verb, f"{prefix}{path}", body, {k: v for k, v in sent.items() if v is not None}
            )
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def get(self, path, **headers):
        return self.send("GET", path, **headers)

    def post(self, path, body=None, **headers):
        return self.send("POST", path, body, **headers)

    def submit(self, **fields):
        answer = self.post("/queue/jobs/submit", {"addon_id": "visuals", "job_type": "indexing"} | fields)
        assert answer.status == 200, answer
        return answer.json["job_id"]

    def job(self, job_id):
        return self.get(f"/queue/jobs/{job_id}").json

    def state(self, job_id):
        return self.job(job_id)["state"]

    def claim(self, **fields):
        answer = self.post("/queue/claim", fields)
        assert answer.status == 200, answer
        return answer.json["jobs"]

    def kinds(self, job_id):
        return [event["kind"] for event in self.get(f"/events?job_id={job_id}").json["events"]]

    def mint(self, **fields):
        asked = {"name": "test", "scopes": [str(scope) for scope in Scope]} | fields
        answer = self.post("/tokens/create", asked)
        assert answer.status == 200, answer
        return Client(self.server, answer.json["secret"], unix=self.unix)


class ServerKit:
    """A scheduler on SQLite with its server; `client` has the first token, `local` comes by the Unix socket."""

    def __init__(self, path, *, start=True, rules=None, **config):
        from penstock.stores.sqlite.store import SqliteStore

        clock = SteadyClock()
        self.store = SqliteStore(path / "jobs.db", clock)
        self.service = SchedulerService(
            self.store, SchedulerRules(**{"capacity": Capacity(fixed=90)} | (rules or {})), clock=clock
        )
        try:
            self.server = serve(self.service, Config(directory=path, socket=path / "penstock.sock", **config))
        except BaseException:
            self.store.close()
            raise
        self.client = Client(self.server, read_secret(self.server.token_file))
        self.local = Client(self.server, unix=True)
        if start:
            self.service.start()

    def close(self):
        self.server.stop()
        self.service.stop()
        problems = self.store.audit()
        self.store.close()
        assert problems == []
