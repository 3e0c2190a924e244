"""A running job makes room for one that counts for clearly more: with real processes."""

from __future__ import annotations

import json

from penstock.core.jobs.load import Capacity
from penstock.core.jobs.preemption import Preemption
from penstock.core.jobs.types import SECOND
from tests.waiting import alive, until

from .plant import pids_in

ONE = {"capacity": Capacity(fixed=10)}


def requests(plant, job):
    return [e.data["asked"] for e in plant.store.events(0, 1_000, job) if e.kind == "PREEMPT_REQUESTED"]


def test_a_victim_that_listens_yields_and_goes_on_from_its_checkpoint(plants, tmp_path):
    plant = plants(rules=ONE)
    path = tmp_path / "n"
    low = plant.function("listen", str(path), fields={"cost_units": 10, "priority": 30})
    until(lambda: path.exists() and path.read_text() > "2")
    high = plant.function("add", 1, 2, fields={"cost_units": 10, "priority": 80})

    assert plant.settled(high).result == "3"
    assert requests(plant, low) == [1]
    reached = json.loads(plant.store.checkpoint(low))
    until(lambda: int(path.read_text() or 0) > reached)
    assert str(plant.store.attempts(low)[0].end) == "cooperative_preemption"
    plant.job_service.cancel(low)
    plant.until(low, "CANCELED")


def test_a_victim_that_does_not_listen_is_asked_twice_and_then_made_to(plants, tmp_path):
    plant = plants(rules=ONE | {"preemption": Preemption(patience=SECOND // 2)})
    low, path = plant.tree(tmp_path, fields={"cost_units": 10, "priority": 30})
    pids = pids_in(path)
    high = plant.command("true", fields={"cost_units": 10, "priority": 80})

    plant.settled(high)
    assert [pid for pid in pids if alive(pid)] == []
    assert requests(plant, low) == [1, 2]
    assert ("REQUEUED", "preemption_timeout") in plant.events(low)
    plant.job_service.cancel(low)
    plant.until(low, "CANCELED")


def test_a_job_that_must_not_be_preempted_keeps_its_units(plants, tmp_path):
    plant = plants(rules={"capacity": Capacity(fixed=20)})
    spared, path = plant.tree(tmp_path, fields={"cost_units": 10, "priority": 10, "preemptible": False})
    low, other = plant.tree(tmp_path, fields={"cost_units": 10, "priority": 30})
    pids, _ = pids_in(path), pids_in(other)
    high = plant.command("true", fields={"cost_units": 10, "priority": 100})

    until(lambda: requests(plant, low))
    assert requests(plant, spared) == []
    plant.job_service.cancel(low)
    plant.settled(high)
    assert [pid for pid in pids if not alive(pid)] == []
    plant.job_service.cancel(spared)
    plant.until(spared, "CANCELED")


def test_one_cycle_at_a_time(plants, tmp_path):
    plant = plants(rules={"capacity": Capacity(fixed=20)})
    lows = [plant.tree(tmp_path, fields={"cost_units": 10, "priority": 30}) for _ in range(2)]
    for _, path in lows:
        pids_in(path)
    highs = [plant.command("true", fields={"cost_units": 10, "priority": 80}) for _ in range(2)]

    until(lambda: any(requests(plant, low) for low, _ in lows))
    preempter, looks = plant.service.preempter, []
    step = preempter.step
    preempter.step = lambda now: looks.append(now) or step(now)
    until(lambda: len(looks) > 4)
    assert sorted(len(requests(plant, low)) for low, _ in lows) == [0, 1]
    for job in highs + [low for low, _ in lows]:
        plant.job_service.cancel(job)
        plant.until(job, "CANCELED")


def test_a_victim_that_ends_by_itself_closes_the_cycle(plants, tmp_path):
    plant = plants(rules=ONE)
    go = tmp_path / "go"
    low = plant.submit(
        "shell", {"script": f"until [ -e {go} ]; do sleep 0.02; done"}, cost_units=10, priority=30
    )
    plant.until(low, "RUNNING")
    high = plant.command("true", fields={"cost_units": 10, "priority": 80})
    until(lambda: requests(plant, low))
    go.touch()

    plant.settled(high)
    assert plant.state(low) == "DONE"
    until(lambda: plant.service.preempter.cycle is None)
