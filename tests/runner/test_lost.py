"""What outlives even SIGKILL, and what is left on disk."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from penstock.core.errors import StoreFailed
from penstock.core.jobs.tracker import Graces
from penstock.core.jobs.types import SECOND, EndReason
from penstock.runner.folder import OutputCleaner
from penstock.stores.api import Apply, Complete
from tests.waiting import alive, until

from .plant import SOAK

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def freezer():
    """A process that is frozen by a version 1 control group does not see SIGKILL until it is thawed."""
    group = FREEZER / f"penstock-test-{time.monotonic_ns()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no freezer to make a process that survives SIGKILL")

    def freeze(pid):
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        until(lambda: (group / "freezer.state").read_text() == "FROZEN\n")

    def thaw():
        (group / "freezer.state").write_text("THAWED")

    yield freeze, thaw
    thaw()

    def removed():
        with contextlib.suppress(OSError):
            group.rmdir()
        return not group.exists()

    until(removed)


#: Without a lease that expires meanwhile: maintenance would then give the job its end.
LONG_LEASE = {"lease_for": 3_600 * SECOND}
SHORT = {"graces": Graces(cancel=0, term=SECOND // 10, kill=SECOND), "stragglers_sec": 0.1}


def test_a_tree_that_survives_sigkill_keeps_its_units_until_it_is_gone(plants, freezer):
    freeze, thaw = freezer
    plant = plants(**SHORT)
    job = plant.command("sleep", "300", fields={"cost_units": 7})
    [pid] = until(plant.runner.pids)
    freeze(pid)
    plant.job_service.cancel(job)

    plant.until(job, "CANCELED")
    assert alive(pid)
    assert plant.units() == 7
    # Notes and ends are batches of their own, and either may be written first.
    until(lambda: {("ALERT", "lost"), ("SIGNALED", "lost")} <= set(plant.events(job)))
    thaw()
    until(lambda: plant.units() == 0)
    assert not alive(pid)


def test_its_job_does_not_run_here_again_until_then(plants, freezer):
    freeze, thaw = freezer
    plant = plants(**SHORT)
    job = plant.command("sleep", "300")
    [pid] = until(plant.runner.pids)
    freeze(pid)
    plant.job_service.stop(f"{job}.1", EndReason.PREEMPTION_TIMEOUT)

    until(lambda: len(plant.store.attempts(job)) == 2 and plant.last(job).end)
    assert [str(attempt.end) for attempt in plant.store.attempts(job)] == [
        "preemption_timeout",
        "start_timeout",
    ]
    assert "survive" in plant.last(job).error
    assert plant.state(job) == "QUEUED"
    thaw()
    until(lambda: not alive(pid) and plant.units() == 0)
    plant.job_service.cancel(job)


def test_a_shutdown_does_not_wait_for_it(plants, freezer):
    freeze, thaw = freezer
    plant = plants()
    job = plant.command("sleep", "300")
    [pid] = until(plant.runner.pids)
    freeze(pid)
    began = time.monotonic()
    plant.runner.stop(1)

    assert SOAK == 1 or time.monotonic() - began < 2
    assert plant.events(job)[-1] == ("REQUEUED", "graceful_shutdown")
    thaw()
    until(lambda: not alive(pid))


def test_what_belongs_to_a_forgotten_job_is_removed_and_nothing_else(plant):
    kept, old = plant.command("echo", "kept"), plant.command("touch", "left behind")
    plant.settled(kept), plant.settled(old)
    runs = plant.data / "runs"
    (runs / old).rename(runs / "01a1e391-0000-7000-8000-000000000000")

    OutputCleaner(plant.store, runs).step()

    assert sorted(path.name for path in runs.iterdir()) == sorted([".lock", kept])
    assert plant.output(kept)["stdout"] == "kept\n"


def refused(operations):
    """The answers of a store whose disk is full."""
    answers = [Future() for _ in operations]
    for answer in answers:
        answer.set_exception(StoreFailed("the disk is full"))
    return answers


def test_a_store_that_does_not_answer_does_not_hold_up_a_shutdown(plants, monkeypatch):
    plant = plants(rules=LONG_LEASE)
    job = plant.command("sleep", "300")
    [pid] = until(plant.runner.pids)
    monkeypatch.setattr(plant.store, "commit", lambda *operations, wait=False: refused(operations))
    began = time.monotonic()
    plant.runner.stop(1)

    assert SOAK == 1 or time.monotonic() - began < 2
    until(lambda: not plant.runner.running)  # on a busy machine the stop did not wait for it
    assert not alive(pid)
    monkeypatch.undo()
    assert plant.state(job) == "RUNNING"


def test_an_end_that_cannot_be_written_is_written_later(plants, monkeypatch):
    plant = plants(rules=LONG_LEASE)
    job = plant.command("sleep", "0.2")
    until(plant.runner.pids)
    commit, failed = plant.store.commit, []

    def commit_all_but_ends(*operations, wait=False):
        ends = [each for each in operations if isinstance(each, Apply | Complete) and not each.empty]
        if not ends:
            return commit(*operations, wait=wait)
        failed.extend(ends)
        return refused(operations)

    monkeypatch.setattr(plant.store, "commit", commit_all_but_ends)
    until(lambda: failed)
    assert plant.state(job) == "RUNNING"
    monkeypatch.undo()

    assert str(plant.settled(job).end) == "completed"
    assert len(plant.store.attempts(job)) == 1
