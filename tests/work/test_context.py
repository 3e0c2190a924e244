"""One JobContext: the same function runs unchanged in the library, in an SDK worker and in the runner (JC-1 to JC-3)."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
from tests.runner.plant import Plant
from tests.waiting import until
from tests.work import job_functions

import penstock
from penstock import Client
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.tracker import Graces
from penstock.core.jobs.types import SECOND
from penstock.runner.payload import Functions
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.server.listener import Config, serve
from penstock.stores.sqlite.store import SqliteStore

RULES = SchedulerRules(capacity=Capacity(fixed=100), schedules=Schedules(crash=(), unavailable=(0,)))
DEADLINE = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
FIELDS = {"addon_id": "photos", "tags": ("red",), "deadline_at": int(DEADLINE.timestamp()) * SECOND}


class Library:
    """An embedded scheduler. `function`: submits under this name, so that the payload is as in the other ways."""

    def __init__(self, folder, *, kind="thread"):
        self.scheduler = penstock.Scheduler(folder / "jobs.db", workers=2, kind=kind, rules=RULES)
        self.store = self.scheduler.store

    def submit(self, name, argument):
        function = getattr(job_functions, name)
        job = self.scheduler.job(name=name)(function)
        options = {"addon": "photos", "tags": ["red"], "deadline": DEADLINE}
        handle = job.options(**options).enqueue(argument)
        self.scheduler.start()
        return handle.id

    def cancel(self, job_id):
        self.scheduler.get(job_id).cancel()

    def close(self):
        self.scheduler.close()


class Sdk:
    """An SDK worker beside a scheduler over HTTP."""

    def __init__(self, folder, *, processes=False):
        self.store = SqliteStore(folder / "jobs.db", lambda: time.time_ns() // 1_000)
        self.service = SchedulerService(self.store, RULES).start("the test")
        self.server = serve(
            self.service, Config(directory=folder / "data", socket=folder / "data" / "penstock.sock")
        )
        self.client = Client(self.server.url, token=self.server.token_file.read_text().strip())
        self.worker = penstock.Worker(self.client.url, token=self.client.token, addon="photos")
        self.thread = Thread(target=partial(self.worker.run, 2, processes=processes))

    def submit(self, name, argument):
        self.worker.job(name)(getattr(job_functions, name))
        intent = Intent(job_type=name, payload=json.dumps([argument]), cost_units=1, **FIELDS)
        job_id = self.service.job_service.submit([intent])[0].job_id
        self.thread.start()
        return job_id

    def cancel(self, job_id):
        self.service.job_service.cancel(job_id)

    def close(self):
        self.worker.stop()
        self.thread.join()
        for client in (self.client, self.worker.client, self.worker.fetcher):
            client.close()
        self.server.stop()
        self.service.stop()
        self.store.close()


class InRunner:
    """Functions in warm workers of the runner."""

    def __init__(self, folder):
        (folder / "data").mkdir()
        here = str(Path(job_functions.__file__).parent)
        functions = Functions(paths=["job_functions:*"])
        # The usual graces: a function that leaves by itself must have time for it on a busy machine.
        self.plant = Plant(folder / "data", functions=functions, path=(here,), graces=Graces())
        self.store = self.plant.store

    def submit(self, name, argument):
        return self.plant.submit(
            "function", {"function": f"job_functions:{name}", "args": [argument]}, **FIELDS
        )

    def cancel(self, job_id):
        self.plant.job_service.cancel(job_id)

    def close(self):
        self.plant.stop()


WAYS = {
    "library threads": (Library, ""),
    "library processes": (partial(Library, kind="process"), ""),
    "library async": (Library, "_async"),
    "library async processes": (partial(Library, kind="process"), "_async"),
    "sdk threads": (Sdk, ""),
    "sdk processes": (partial(Sdk, processes=True), ""),
    "sdk async": (Sdk, "_async"),
    "sdk async processes": (partial(Sdk, processes=True), "_async"),
    "runner": (InRunner, ""),
    "runner async": (InRunner, "_async"),
}
SYNC = [name for name, (_, suffix) in WAYS.items() if not suffix]


@pytest.fixture
def way(request, tmp_path):
    make, suffix = WAYS[request.param]
    made = make(tmp_path)
    made.suffix, made.processes = suffix, "processes" in request.param
    yield made
    made.close()


def settled(way, job_id):
    until(
        lambda: str(way.store.job(job_id).state) in {"DONE", "FAILED", "CANCELED", "BLOCKED"},
        what=f"{job_id}",
    )
    return way.store.job(job_id), way.store.attempts(job_id)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_function_uses_every_member_of_its_context(way, caplog):
    caplog.set_level(logging.INFO, "penstock.job")
    job_id = way.submit(f"use_all{way.suffix}", 7)
    job, attempts = settled(way, job_id)

    assert [str(attempt.end) for attempt in attempts] == ["unavailable", "completed"]
    assert json.loads(attempts[-1].result) == {
        "id": job_id,
        "attempt": 2,
        "fence": 2,
        "addon": "photos",
        "tags": ["red"],
        "deadline": DEADLINE.isoformat().replace("+00:00", "Z"),
        "stop": [False, False],
        "checkpoint": {"number": 7, "seen": None},
        "same": True,
    }
    assert job.spent == 500_000
    assert "something is away" in attempts[0].error
    if isinstance(way, InRunner):
        assert way.plant.output(job_id)["log"] == "50 %: a part\nattempt 2\n"
    elif not way.processes:
        assert f"[{job_id[-8:]}] attempt 2" in caplog.text


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_function_sees_that_its_job_is_canceled_and_leaves(way, tmp_path):
    path = tmp_path / "seen"
    job_id = way.submit(f"wait_for_cancel{way.suffix}", str(path))
    until(path.with_suffix(".began").exists)
    way.cancel(job_id)
    job, attempts = settled(way, job_id)

    assert (str(job.state), str(attempts[-1].end)) == ("CANCELED", "canceled")
    assert path.read_text() == f"True True {job_id}"


@pytest.mark.parametrize("way", SYNC, indirect=True)
def test_each_phase_of_a_generator_is_a_checkpoint(way):
    job, attempts = settled(way, way.submit("phases", 3))

    assert (str(job.state), attempts[-1].result) == ("DONE", "[2]")


def test_outside_a_job_there_is_no_context():
    with pytest.raises(LookupError, match="outside a job"):
        penstock.current_job()


def test_a_warm_worker_needs_the_standard_library_only():
    """The runner may use a Python that has nothing else installed."""
    program = "import sys, penstock.runner.worker; sys.exit('msgspec' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
