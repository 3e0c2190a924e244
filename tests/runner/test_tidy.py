"""Outputs go when their jobs are forgotten: soon after a start, steadily, and at a small price."""

from __future__ import annotations

import pytest

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import SECOND
from penstock.runner.folder import OutputCleaner
from penstock.stores.api import Apply, Depth, Prune, Submit, committed
from penstock.stores.memory.store import MemoryStore
from tests.waiting import until

T0 = 1_900_000_000 * SECOND


class CountingStore(MemoryStore):
    """A store that counts how many jobs it was asked for."""

    looked_up = 0

    def jobs(self, ids):
        self.looked_up += len(ids)
        return super().jobs(ids)


class OutputFolders:
    def __init__(self, runs):
        self.now, self.runs = T0, runs
        self.store = CountingStore(lambda: self.now)
        runs.mkdir()
        (runs / ".lock").touch()

    def job(self):
        """With an output."""
        [receipt] = committed(self.store, Submit([Intent(addon_id="a", job_type="t")], Depth()))
        self.folder(receipt.job_id)
        return receipt.job_id

    def folder(self, name):
        (self.runs / name / "1").mkdir(parents=True)
        (self.runs / name / "1" / "0000000000000000").write_bytes(b"words")

    def folders(self):
        return {path.name for path in self.runs.iterdir()} - {".lock"}

    def forget(self, job_id):
        from penstock.core.jobs import changes

        job = self.store.job(job_id)
        committed(self.store, Apply([changes.miss_deadline(job, self.now)]))
        self.now += SECOND
        assert committed(self.store, Prune(self.now, 10)) == 1


@pytest.fixture
def outputs(tmp_path):
    return OutputFolders(tmp_path / "runs")


def test_outputs_that_no_job_owns_are_removed_soon_after_a_start(plants, tmp_path):
    stranger = tmp_path / "data" / "runs" / "00000000-0000-7000-8000-000000000000"
    (stranger / "1").mkdir(parents=True)
    plant = plants()
    job = plant.command("true")

    until(lambda: not stranger.exists())
    plant.settled(job)
    assert (tmp_path / "data" / "runs" / job).exists()


def test_a_pass_is_cut_into_steps_and_removes_the_oldest_first(outputs):
    known = outputs.job()
    for n in range(5):
        outputs.folder(f"0000000{n}")
    tidy = OutputCleaner(outputs.store, outputs.runs, batch=2)

    left = []
    for _ in range(4):
        tidy.step()
        left.append(len(outputs.folders()))
    assert left[:3] == [4, 2, 1]
    assert outputs.folders() == {known}


def test_outputs_of_pruned_jobs_are_removed_and_others_stay(outputs):
    tidy = OutputCleaner(outputs.store, outputs.runs)
    old, young = outputs.job(), outputs.job()
    tidy.step()
    assert outputs.folders() == {old, young}
    outputs.forget(old)
    tidy.step()

    assert outputs.folders() == {young}


def test_no_job_is_looked_up_while_none_is_pruned(outputs):
    tidy = OutputCleaner(outputs.store, outputs.runs)
    for _ in range(3):
        outputs.job()
    tidy.step()
    first = outputs.store.looked_up
    for _ in range(100):
        tidy.step()

    assert (first, outputs.store.looked_up) == (3, 3)
