"""A stop is bounded (SPEC RS-5): whatever is late, every dispatch has an end when it returns, and no lease is left."""

from __future__ import annotations

from threading import Thread, current_thread

import pytest

from penstock.core.errors import Unavailable
from penstock.core.jobs.states import DispatchPhase
from penstock.core.jobs.tracker import Tracker
from penstock.core.jobs.types import SECOND
from penstock.runner.runner import AFTER_STOP
from penstock.runner.warden import boot_time
from tests.waiting import until

from .plant import LONG, Plant, count_calls

IGNORES_EVERYTHING = "trap '' TERM INT HUP; echo up; exec sleep 300"


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """
    A runner with three commands. Its first write after the stop began takes until the time of that stop is over,
    and the store refuses the next write: a busy disk does both.
    """
    (tmp_path / "data").mkdir()
    plant = Plant(tmp_path / "data")
    jobs = [plant.submit("shell", {"script": IGNORES_EVERYTHING}) for _ in range(3)]
    until(lambda: all(plant.last(job) and plant.output(job)["stdout"] for job in jobs))
    commit, refused = plant.store.commit, []

    def late(*operations, **how):
        if current_thread().name == "penstock-runner" and plant.stops_at:
            if boot_time() >= plant.stops_at + AFTER_STOP and not refused:
                refused.append(operations)
                raise Unavailable("the database is locked")
            until(lambda: boot_time() >= plant.stops_at + AFTER_STOP)
        return commit(*operations, **how)

    plant.stops_at = 0.0
    monkeypatch.setattr(plant.store, "commit", late)
    yield plant, jobs
    plant.stop()
    until(lambda: not plant.ours(), what="the end of all processes")


def test_a_runner_that_is_late_gives_every_dispatch_its_end(busy):
    plant, jobs = busy
    plant.stops_at = boot_time() + 0.2
    plant.runner.stop(0.2)
    until(lambda: not plant.runner.running)  # on a busy machine the stop did not wait for it

    assert {plant.state(job) for job in jobs} == {"QUEUED"}
    assert {plant.events(job)[-1] for job in jobs} == {("REQUEUED", "graceful_shutdown")}
    assert plant.store.live(phases=[DispatchPhase.LEASED, DispatchPhase.ENDING]) == []
    assert plant.units() == 0


def test_the_time_of_a_stop_counts_from_the_call_and_not_from_when_the_thread_gets_to_it(
    tmp_path, monkeypatch
):
    (tmp_path / "data").mkdir()
    plant = Plant(tmp_path / "data")
    requests = count_calls(plant.runner, "call_soon", monkeypatch)
    free_again, drains = [], []

    def keep_busy():
        until(lambda: len(requests) > 1)  # the stop has been requested
        free_again.append(boot_time())

    monkeypatch.setattr(
        Tracker, "drain", lambda _, now, timeout: drains.append((now + timeout) / SECOND) or []
    )
    plant.runner.call_soon(keep_busy)
    called_at = boot_time()
    stopping = Thread(target=plant.runner.stop, args=(LONG,))
    stopping.start()
    [ends] = until(lambda: drains)

    assert called_at <= ends - LONG + 0.001  # whole microseconds
    assert ends - LONG <= free_again[0]
    monkeypatch.undo()
    plant.stop()
    stopping.join()
