"""A whole scheduler with a runner, on SQLite unless a test brings a store, with real processes. No test framework in here: it is also run as a program."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.tracker import Graces
from penstock.core.jobs.types import SECOND
from penstock.runner.folder import RunnerFolder
from penstock.runner.payload import Functions, RunnerOptions
from penstock.runner.process_tree import RUNNER_MARK, find_marked
from penstock.runner.runner import Runner
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.sqlite.store import SqliteStore
from tests.waiting import LONG, until

HERE = Path(__file__).parent
TREE = str(HERE / "tree.py")
SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
QUICK = Graces(cancel=SECOND // 2, term=SECOND // 4, kill=5 * SECOND)


class Plant:
    """`dispatch=False`: to submit and to look, beside a scheduler in another process."""

    def __init__(self, data, *, dispatch=True, rules=None, store=None, **settings):
        self.data = data
        clock = SteadyClock()
        self.store = store or SqliteStore(data / "jobs.db", clock)
        self.rules = SchedulerRules(
            **{
                "capacity": Capacity(fixed=90),
                "schedules": Schedules(crash=(0, 0), unavailable=(0,)),
                "tick": SECOND // 4,
            }
            | (rules or {})
        )
        runs = RunnerFolder(data)
        self.service = SchedulerService(
            self.store, self.rules, clock=clock, survivors=runs.survivors(), preempts=True
        )
        functions = Functions(names={"add": "work_for_tests:add"}, paths=["work_for_tests:*"])
        self.runner = Runner(
            self.service,
            runs,
            RunnerOptions(
                **{
                    "graces": QUICK,
                    "stragglers_sec": 0.2,
                    "functions": functions,
                    "path": (str(HERE),),
                    "workers": 2,
                }
                | settings
            ),
        )
        self.job_service = self.service.job_service
        if dispatch:
            self.service.start()
            self.runner.start()

    def stop(self, timeout=5):
        self.runner.stop(timeout)
        self.service.stop()
        problems = self.store.audit()
        self.store.close()
        assert problems == []

    def submit(self, job_type="command", payload=None, **fields):
        fields = {"addon_id": "a", "cost_units": 1} | fields
        intent = Intent(job_type=f"penstock.{job_type}", payload=json.dumps(payload), **fields)
        return self.job_service.submit([intent])[0].job_id

    def command(self, *argv, fields=None, **payload):
        return self.submit("command", {"argv": list(argv), **payload}, **(fields or {}))

    def python(self, code, fields=None, **payload):
        return self.command(sys.executable, "-c", code, fields=fields, **payload)

    def function(self, name, *args, fields=None, **kwargs):
        payload = {"function": f"work_for_tests:{name}", "args": list(args), "kwargs": kwargs}
        return self.submit("function", payload, **(fields or {}))

    def tree(self, tmp_path, *how, fields=None, **payload):
        """A tree of processes that do not want to die; its pids are in the file that comes back once all of them are up."""
        pids = tmp_path / f"pids-{time.monotonic_ns()}"
        return self.command(sys.executable, TREE, str(pids), *how, fields=fields, **payload), pids

    def state(self, job_id):
        return str(self.store.job(job_id).state)

    def until(self, job_id, *states, seconds=LONG):
        until(lambda: self.state(job_id) in states, seconds, f"{states} of {self.last(job_id)}")
        return self.last(job_id)

    def settled(self, job_id, seconds=LONG):
        return self.until(job_id, "DONE", "FAILED", "CANCELED", "BLOCKED", seconds=seconds)

    def last(self, job_id):
        attempts = self.store.attempts(job_id)
        return attempts[-1] if attempts else None

    def events(self, job_id):
        """Without the denials: whether a round comes by in between is a matter of time."""
        events = [(str(e.kind), e.reason) for e in self.store.events(0, 1_000, job_id)]
        return [(kind, reason) for kind, reason in events if kind != "DENIED"]

    def output(self, job_id):
        pieces = list(self.runner.output(self.last(job_id).dispatch_id).read())
        return {
            name: b"".join(p.data for p in pieces if p.stream == name).decode()
            for name in ("stdout", "stderr", "log")
        }

    def units(self):
        return self.store.ledger(self.rules.host).units

    def ours(self):
        """Everything below this runner, and the launcher itself."""
        return [process.pid for process, _ in find_marked(RUNNER_MARK, {RunnerFolder(self.data).mark})]


def count_calls(owner, name, monkeypatch):
    """The list grows by one with each call of the method."""
    calls, method = [], getattr(owner, name)

    def counted(*args, **kwargs):
        calls.append(args)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


def pids_in(path, n=None):
    def whole():
        found = [int(line) for line in path.read_text().split()] if path.exists() else []
        return found if len(found) == (5 if n is None else n) else None

    return until(whole, what="the tree")
