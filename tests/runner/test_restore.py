"""After a backup was restored fences begin again where it was taken: outputs of attempts that the database no longer knows are in nobody's way."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.stores.api import SetAddon, committed
from penstock.stores.sqlite.connection import copy
from penstock.stores.sqlite.restore import restore


@pytest.mark.parametrize("kind", ["command", "function"])
def test_a_job_that_ran_after_the_backup_runs_again_after_its_restore(plants, tmp_path, kind):
    plant = plants()
    committed(plant.store, SetAddon("a", paused=True))
    job = plant.command("sh", "-c", "echo once") if kind == "command" else plant.function("shout", "once")
    copy(plant.data / "jobs.db", tmp_path / "backup.db")
    committed(plant.store, SetAddon("a", paused=False))
    first = plant.settled(job)
    plant.stop()

    restore(tmp_path / "backup.db", plant.data / "jobs.db")
    plant = plants()
    assert plant.state(job) == "QUEUED"
    committed(plant.store, SetAddon("a", paused=False))
    second = plant.settled(job)

    assert (str(first.end), first.fence) == (str(second.end), second.fence) == ("completed", 1)
    assert plant.output(job)["stdout"].count("once\n") == 1
    [kept] = Path(plant.data / "runs" / job).glob("1.*")
    assert any(b"once\n" in file.read_bytes() for file in kept.iterdir())
