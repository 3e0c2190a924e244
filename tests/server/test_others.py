"""
Nothing that a token which is bound to one addon can get names anything of another one.

Two addons make up random histories; whatever the other one can name carries a mark. After each history the bound token asks every route for everything,
about its own things and about the other's, and no answer may hold the mark or an id of the other, but for what the question itself said.
"""

from __future__ import annotations

import os
import random
from contextlib import contextmanager

import pytest
from http_kit import ServerKit
from test_waiting import Stream

from penstock.core.jobs.load import Capacity, Senses
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.preemption import begin
from penstock.server.routes import ROUTES
from penstock.wire import PREFIX

MARK = "zq7theirs"
THEIRS, OURS = f"{MARK}-addon", "ours"
SEEDS = 6 * int(os.environ.get("PENSTOCK_SOAK", "1"))
#: Room is kept for whom it was once refused to.
FULL = {"ordering": Ordering(patience=0)}
MEASURED = {"capacity": Capacity(), "senses": Senses(needed=frozenset())}


class History:
    """What both addons do, one thing after the other. `secrets`: all that ours must not learn."""

    def __init__(self, kit, seed):
        self.kit, self.dice = kit, random.Random(seed)
        self.secrets = {MARK}
        self.jobs = {THEIRS: [], OURS: []}
        self.leases = {THEIRS: [], OURS: []}
        self.clients = {addon: self.mint(addon) for addon in (THEIRS, OURS)}
        self.ours = self.clients[OURS]
        self.schedules = []

    def mint(self, addon):
        client = self.kit.client.mint(addon_id=addon, name=f"of {addon}")
        if addon == THEIRS:
            self.secrets.add(client.token.split("_")[1])
        return client

    def name(self, addon, word):
        return f"{MARK}-{word}" if addon == THEIRS else word

    def hide(self, addon, *ids):
        if addon == THEIRS:
            self.secrets |= {*ids, *(one.partition(".")[0][-8:] for one in ids)}

    def submit(self, addon, **more):
        dice, name = self.dice, self.name
        fields = {
            "job_type": name(addon, "type"),
            "tags": [name(addon, "tag")],
            "payload": {name(addon, "key"): name(addon, "value")},
            "idempotency_key": f"{name(addon, 'key')}-{dice.random()}",
            "cost_units": dice.choice([5, 30, 60, 90]),
            "priority": dice.choice([5, 50, 95]),
            "run_when": dice.choice(["any", "normal", "quiet"]),
        }
        if dice.random() < 0.5:
            fields["expected_duration_sec"] = dice.choice([5, 600])
        if dice.random() < 0.2:
            fields["deadline_at"] = "2100-01-01T00:00:00Z"
        job_id = self.clients[addon].submit(addon_id=addon, **fields | more)
        self.jobs[addon].append(job_id)
        self.hide(addon, job_id)

    def schedule(self, addon):
        """With a job that ran by hand, and edits in the trail."""
        name, client = self.name(addon, "nightly"), self.clients[addon]
        job = {"addon_id": addon, "job_type": self.name(addon, "type"), "payload": self.name(addon, "value")}
        client.post("/schedules/add", {"name": name, "cron": "0 6 * * *", "job": job})
        job_id = client.post(f"/schedules/{name}/run", {}).json["job_id"]
        self.jobs[addon].append(job_id)
        self.hide(addon, job_id)
        client.post(f"/schedules/{name}/pause")
        return name

    def claim(self, addon):
        taken = self.clients[addon].claim(worker=self.name(addon, "worker"), limit=2)
        self.leases[addon] += [job["lease_id"] for job in taken]

    def borrow(self, addon):
        asked = {
            "addon_id": addon,
            "job_type": self.name(addon, "loan"),
            "worker": self.name(addon, "worker"),
        }
        granted = self.clients[addon].post("/lease/request", asked).json
        if granted["approved"]:
            self.leases[addon].append(granted["lease_id"])
            self.hide(addon, granted["lease_id"])

    def beat(self, addon):
        for lease_id in self.leases[addon]:
            body = {"lease_id": lease_id, "checkpoint": {"at": self.name(addon, "place")}, "spent": 1.5}
            self.clients[addon].post("/lease/heartbeat", body)

    def end(self, addon):
        if self.leases[addon]:
            lease_id = self.leases[addon].pop(self.dice.randrange(len(self.leases[addon])))
            how = self.dice.choice([{"state": "DONE"}, {"state": "FAILED", "error": self.name(addon, "woe")}])
            self.clients[addon].post("/lease/report", {"lease_id": lease_id, **how})

    def change(self, addon):
        if self.jobs[addon]:
            job_id = self.dice.choice(self.jobs[addon])
            verb, body = self.dice.choice([("cancel", {}), ("edit", {"priority": 60}), ("retry", None)])
            self.clients[addon].post(f"/queue/jobs/{job_id}/{verb}", body)

    def tell(self, addon):
        """By the local user, who speaks for whom it likes: what a bound token says counts for less."""
        readings = {"error_rate": 0.9, "p95_ms": 9_000.0}
        self.kit.local.post("/signals", {"addon_id": addon, "readings": readings})
        self.clients[addon].post("/programs/attach", {"name": self.name(addon, "program"), "tasks": []})

    def set(self, addon):
        client = self.dice.choice([self.clients[addon], self.kit.client])
        client.post(self.dice.choice(["/pause", "/resume"]), {"addon_id": addon, "create": True})
        client.post("/addons/edit", {"addon_id": addon, "weight": self.dice.randint(1, 9), "create": True})

    def preempt(self, addon):
        """A run is asked to make room for a job of the other addon, as the preempter asks it."""
        service = self.kit.service
        other = OURS if addon == THEIRS else THEIRS
        running = [d for d in service.store.live() if d.addon_id == addon and d.job_id is not None]
        if running and self.jobs[other]:
            now = service.store.now()
            service.preempter.cycle = begin(
                running[0].dispatch_id, self.dice.choice(self.jobs[other]), now, service.rules.preemption
            )
            service.preempter.request(service.preempter.cycle, now)

    def step(self):
        self.kit.service.dispatcher.step(self.kit.store.now())

    def random(self):
        self.go_on(40)
        self.schedules = [self.schedule(addon) for addon in (THEIRS, OURS)]

    def full(self):
        """What runs is theirs, and ours waits for its end."""
        self.submit(THEIRS, cost_units=60, run_when="any", expected_duration_sec=600)
        self.step()
        self.clients[THEIRS].post("/lease/request", {"job_id": self.jobs[THEIRS][0]})
        self.submit(OURS, cost_units=60, run_when="any")
        self.step()

    def kept(self):
        """A job of ours has passed theirs, which needs more room; from then on room is kept for theirs."""
        self.full()
        self.submit(THEIRS, cost_units=90, run_when="any", priority=95)
        for _ in range(3):
            self.submit(OURS, cost_units=5, run_when="any", expected_duration_sec=9_999)
            self.step()

    def behind(self):
        self.submit(THEIRS, cost_units=60, run_when="any", priority=95)
        self.submit(OURS, cost_units=60, run_when="any", priority=5)

    def busy(self):
        """A signal of theirs keeps a job of ours from starting."""
        self.tell(THEIRS)
        self.submit(OURS, cost_units=5, run_when="quiet")
        self.step()

    def yielding(self):
        self.submit(OURS, cost_units=5, run_when="any")
        self.claim(OURS)
        self.submit(THEIRS)
        self.preempt(OURS)

    def go_on(self, steps):
        acts = [self.submit] * 5 + [self.claim] * 3 + [
            self.borrow, self.beat, self.end, self.change, self.tell, self.set, self.preempt, self.mint
        ]  # fmt: skip
        for _ in range(steps):
            self.dice.choice(acts)(self.dice.choice([THEIRS, THEIRS, OURS]))
            self.kit.service.dispatcher.step(self.kit.store.now())

    def questions(self):
        """Of every route: about our things, about theirs, and about nothing."""
        ids = [*self.jobs[OURS], *self.jobs[THEIRS][:3]]
        leases = [*self.leases[OURS][:2], *self.leases[THEIRS][:2], "none"]
        for route in ROUTES:
            path = route.path.removeprefix(PREFIX)
            if route.streams or path in ("/pause", "/resume", "/login"):
                continue
            if route.parameter is not None:
                for one in ids if route.parameter == "job_id" else ["0123456789", *self.schedules]:
                    body = {"lease_id": leases[0]} if path.endswith(("ack", "complete")) else None
                    if not path.endswith(("cancel", "retry", "edit", "complete", "ack")) or one == ids[-1]:
                        yield route.verb, path.replace(f"{{{route.parameter}}}", one), body
            elif path == "/lease/request":
                for priority in (5, 95):
                    yield (
                        "POST",
                        path,
                        {"addon_id": OURS, "job_type": "t", "cost_units": 90, "priority": priority},
                    )
                yield from (("POST", path, {"job_id": job_id}) for job_id in ids)
            elif path in ("/lease/heartbeat", "/lease/report", "/lease/release"):
                yield from (("POST", path, {"lease_id": lease_id}) for lease_id in leases)
            elif path == "/queue/find":
                yield from (("GET", f"{path}?part={job_id[-8:]}", None) for job_id in ids)
            elif path in ("/queue/jobs", "/events", "/leases", "/queue/dispatchable"):
                yield "GET", f"{path}?limit=500", None
                yield "GET", f"{path}?addon_id={THEIRS}", None
                if path == "/events":
                    yield from (("GET", f"{path}?limit=500&job_id={job_id}", None) for job_id in ids)
            else:
                yield route.verb, path, None if route.verb == "GET" else {}


def check(history, question, content):
    asked = repr(question)
    received = content.decode()
    leaked = [secret for secret in history.secrets if secret in received and secret not in asked]
    assert not leaked, (question, leaked, received[:2_000])


@contextmanager
def received(path, plot, seed, rules):
    path.mkdir(mode=0o700, exist_ok=True)
    kit = ServerKit(path, start=False, rules=rules)
    try:
        history = History(kit, seed)
        plot(history)
        yield history
    finally:
        kit.close()


PLOTS = [
    *((History.random, seed, rules) for seed in range(SEEDS) for rules in (FULL, MEASURED)),
    *((plot, 0, FULL) for plot in (History.full, History.kept, History.behind, History.yielding)),
    (History.busy, 0, MEASURED),
]


@pytest.mark.parametrize(("plot", "seed", "rules"), PLOTS)
def test_nothing_that_a_bound_token_can_get_names_anything_of_another_addon(tmp_path, plot, seed, rules):
    with received(tmp_path, plot, seed, rules) as history:
        for question in list(history.questions()):
            check(history, question, history.ours.send(*question).content)
        events = history.ours.get("/events?limit=500").json["events"]
        whole = {e["seq"]: e for e in history.kit.client.get("/events?limit=500").json["events"]}
        assert [set(e["data"]) for e in events] == [set(whole[e["seq"]]["data"]) for e in events]
        with Stream(history.ours, "?after=0") as stream:
            check(history, "stream", repr(stream.take(len(events))).encode())
        for path in ("/stats/stream", "/stats/history"):
            assert history.ours.get(path).status == 403


def test_the_histories_have_something_to_hide(tmp_path):
    """A token that is not bound is told of the other addon in each of the ways that the bound one must not be."""
    met = set()
    for number, plot in enumerate(PLOTS):
        with received(tmp_path / str(number), *plot) as history:
            met |= set(ways(history))

    assert met == {
        "queued_ahead", "room_kept", "not_quiet", "no_worker", "when", "ahead", "held_by", "gates", "preemption",
        "DENIED room_kept", "DENIED not_quiet", "PREEMPT_REQUESTED",
    }  # fmt: skip


def ways(history):
    """In what the scheduler says about our jobs: the ways in which it names something of theirs."""
    client = history.kit.client

    def names(received):
        return any(secret in repr(received) for secret in history.secrets)

    for job_id in history.jobs[OURS]:
        received = client.get(f"/queue/jobs/{job_id}/explain").json
        if names(received["reason_data"]):
            yield received["reason"]
        for field in ("ahead", "held_by", "preemption", "gates"):
            if names(received[field]):
                yield field
        if names(received["text"].partition(", when ")[2]):
            yield "when"
        for event in client.get(f"/events?limit=500&job_id={job_id}").json["events"]:
            if names(event["data"]):
                yield f"{event['kind']} {event['reason']}".strip()
