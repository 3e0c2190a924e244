"""
An agent that costs money: it works in phases and reports what it spends. The scheduler stops it at its limit;
after a retry by its owner the agent continues from its last phase.

    python examples/agent.py
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from penstock import current_job
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.load import Capacity
from penstock.core.jobs.types import AddonId
from penstock.runner.folder import RunnerFolder
from penstock.runner.payload import Functions, RunnerOptions
from penstock.runner.runner import Runner
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.sqlite.store import SqliteStore

STEPS = ["read the question", "search", "read what was found", "think", "write", "check"]


def research(question: str) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Each `yield` is a safe place to stop and saves a checkpoint; the next attempt starts from it."""
    job = current_job()
    state = job.checkpoint or {"done": []}
    for step in STEPS:
        if step in state["done"]:
            continue
        job.log.info("%s: %s", step, question)
        time.sleep(0.05)  # the model thinks
        state["done"].append(step)
        job.progress(len(state["done"]) / len(STEPS))
        job.spend("0.25")
        yield state
    return {"answer": 42, "steps": state["done"]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock, runs = SteadyClock(), RunnerFolder(folder)
        store = SqliteStore(Path(folder) / "jobs.db", clock)
        rules = SchedulerRules(capacity=Capacity(fixed=90))
        service = SchedulerService(store, rules, clock=clock, survivors=runs.survivors()).start()
        allowed = Functions(paths=["agent:research"])
        here = (str(Path(__file__).parent),)
        runner = Runner(service, runs, RunnerOptions(functions=allowed, path=here)).start()

        payload = json.dumps({"function": "agent:research", "args": ["the question"]})
        a_dollar = Intent(
            addon_id=AddonId("agents"), job_type="penstock.function", payload=payload, cost_limit=1_000_000
        )
        [receipt] = service.job_service.submit([a_dollar])

        def show() -> None:
            while (job := store.job(receipt.job_id)) and job.state not in ("BLOCKED", "DONE", "FAILED"):
                time.sleep(0.02)
            assert job is not None
            reached = len(json.loads(store.checkpoint(job.job_id) or "{}").get("done", []))
            print(f"{job.state} after ${job.spent / 1e6:.2f}, {reached} of {len(STEPS)} steps done")

        show()
        for event in store.events(0, 100, receipt.job_id):
            if event.kind == "ALERT":
                print(f"alert to the owner: {event.reason}")
        service.job_service.retry(receipt.job_id)  # another dollar
        show()
        print(store.attempts(receipt.job_id)[-1].result)
        runner.stop(5)
        service.stop()
        store.close()


if __name__ == "__main__":
    main()
