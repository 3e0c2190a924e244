"""Putting a backup in the place of a file: nothing is deleted, and a refusal changes nothing."""

from __future__ import annotations

from contextlib import closing

import pytest

from penstock.core.errors import StoreFailed
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import SECOND
from penstock.stores.api import Depth, Query, Submit, committed
from penstock.stores.sqlite.connection import copy
from penstock.stores.sqlite.guard import HighWater, HighWaterMark, read_mark
from penstock.stores.sqlite.restore import restore
from penstock.stores.sqlite.store import SqliteStore

NOW = 1_900_000_000 * SECOND


def opened(path):
    return SqliteStore(path, lambda: NOW)


def submit(store):
    [receipt] = committed(store, Submit([Intent(addon_id="a", job_type="t")], Depth()))
    return receipt.job_id


def jobs(path):
    store = opened(path)
    try:
        return {job.job_id for job in store.find(Query(limit=100))}
    finally:
        store.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.db"


@pytest.fixture
def backup(path, tmp_path):
    """Of a file with one job, which has another one by now."""
    store = opened(path)
    first = submit(store)
    copy(path, tmp_path / "backup.db")
    second = submit(store)
    store.close()
    return tmp_path / "backup.db", first, second


def everything(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-open")}


def test_the_backup_takes_the_place_of_the_file_and_that_one_is_kept(path, backup):
    file, first, second = backup
    kept = restore(file, path)

    assert jobs(path) == {first}
    assert jobs(kept) == {first, second}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_was_left_open_by_a_kill_is_kept_whole(path, backup, tmp_path):
    file, first, second = backup
    store = opened(path)
    third = submit(store)
    killed = tmp_path / "killed"
    killed.mkdir()
    for part in ("", "-wal"):
        (killed / f"jobs.db{part}").write_bytes(path.with_name(f"jobs.db{part}").read_bytes())
    store.close()
    kept = restore(file, killed / "jobs.db")

    assert jobs(kept) == {first, second, third}
    assert jobs(killed / "jobs.db") == {first}


def test_the_mark_of_the_old_trail_does_not_outlive_a_restore(path, backup):
    with closing(HighWaterMark(path)) as mark:
        mark.secure(HighWater(1_000_000))
    restore(backup[0], path)

    assert read_mark(path) is None


def test_a_file_that_is_damaged_or_gone_is_no_obstacle(path, backup, tmp_path):
    file, first, _ = backup
    path.write_bytes(b"\0" * 10_000)
    kept = restore(file, path)

    assert kept.read_bytes() == b"\0" * 10_000
    assert restore(file, tmp_path / "new.db") is None
    assert jobs(path) == jobs(tmp_path / "new.db") == {first}


def test_a_file_that_a_process_uses_is_refused(path, backup, tmp_path):
    store = opened(path)
    before = everything(tmp_path)
    with pytest.raises(StoreFailed, match="penstock stop"):
        restore(backup[0], path)

    assert everything(tmp_path) == before
    store.close()


@pytest.mark.parametrize("bad", ["cut", "foreign", "empty"])
def test_a_backup_that_is_none_is_refused(path, backup, tmp_path, bad):
    file = backup[0]
    content = {"cut": file.read_bytes()[: 20 * 2_048], "foreign": b"not a database" * 1_000, "empty": b""}[
        bad
    ]
    file.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(StoreFailed):
        restore(file, path)

    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*before-restore*"))
