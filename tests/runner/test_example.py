from __future__ import annotations

import subprocess
import sys
from functools import partial

from penstock.core.jobs.load import Capacity, Reading
from penstock.scheduler import service
from tests import SOURCES
from tests.waiting import until

from .plant import HERE

EXAMPLES = HERE.parents[1] / "examples"


def test_the_agent_stops_at_its_limit_and_goes_on_where_it_was():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "agent.py"],
        check=True,
        capture_output=True,
        text=True,
    )

    *lines, result = run.stdout.splitlines()
    assert lines == [
        "BLOCKED after $1.00, 4 of 6 steps done",
        "alert to the owner: cost_limit_reached",
        "DONE after $1.50, 6 of 6 steps done",
    ]
    assert '"answer":42' in result
    assert run.stderr == ""


class Weather:
    """A machine that is as busy as it is told."""

    def __init__(self, machine, *_, busy, **__):
        self._machine, self._busy = machine, busy

    def step(self, now):
        for name in ("cpu", "memory"):
            self._machine.report(Reading(name, self._busy[-1], now))
        return now + 50_000


def test_the_job_for_the_night_waits_for_quiet_stops_when_asked_and_goes_on_where_it_was(
    plants, tmp_path, monkeypatch
):
    busy = [0.6]
    monkeypatch.setattr(service, "LoadSampler", partial(Weather, busy=busy))
    plant = plants(rules={"capacity": Capacity()})
    folder, sums = tmp_path / "files", tmp_path / "sums"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.txt").write_text(f"{n}")
    sums.touch()
    job = plant.command(
        str(EXAMPLES / "overnight.sh"),
        str(folder),
        str(sums),
        env={"PENSTOCK": f"{sys.executable} -m penstock.cli.main", "PYTHONPATH": str(SOURCES)},
        fields={"run_when": "quiet"},
    )
    until(lambda: plant.store.job(job).denied)
    why = plant.job_service.explain(job)
    busy.append(0.1)
    until(lambda: len(sums.read_text().splitlines()) == 1)
    plant.runner.ask_to_yield(plant.last(job).dispatch_id)

    assert plant.settled(job).end == "completed"
    assert why.reason == "not_quiet"
    assert [str(attempt.end) for attempt in plant.store.attempts(job)] == [
        "cooperative_preemption",
        "completed",
    ]
    assert [line.rpartition("/")[2] for line in sums.read_text().splitlines()] == ["0.txt", "1.txt", "2.txt"]
