"""A disk that is full, a file that is damaged, foreign, read-only or gone: a clear error that names the file and what to do, and nothing lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

apsw = pytest.importorskip("apsw")

from penstock.core.errors import StoreFailed  # noqa: E402
from penstock.core.jobs.intent import Intent  # noqa: E402 - after importorskip
from penstock.core.jobs.types import SECOND  # noqa: E402
from penstock.stores.api import Depth, Query, Submit, committed  # noqa: E402
from penstock.stores.sqlite import connection as health  # noqa: E402
from penstock.stores.sqlite.store import SqliteStore  # noqa: E402

T0 = 1_900_000_000 * SECOND
JOB = Intent(addon_id="a", job_type="t")
LARGE = Intent(addon_id="a", job_type="t", payload='"' + "x" * 50_000 + '"')


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.db"


def opened(path):
    return SqliteStore(path, lambda: T0)


def filled(path, jobs=500):
    store = opened(path)
    committed(store, Submit([JOB] * jobs, Depth()))
    store.close()


def left_open(path):
    """As after a crash: somebody wrote to the file and never closed it."""
    code = (
        "import os, sys; from penstock.core.jobs.intent import Intent; from penstock.stores.api import Submit, committed\n"
        "from penstock.stores.sqlite.store import SqliteStore; store = SqliteStore(sys.argv[1], lambda: 1_900_000_000_000_000)\n"
        "committed(store, Submit([Intent(addon_id='a', job_type='t')])); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    assert Path(f"{path}-wal").stat().st_size > 0


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p"])
def test_a_network_file_system_is_refused_by_name(path, monkeypatch, kind):
    device = path.parent.stat().st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /far rw,noatime shared:1 - {kind} server:/x rw"
    monkeypatch.setattr(health, "_mounts", lambda: [line])

    with pytest.raises(StoreFailed, match=f"{kind}, mounted at /far.*local disk") as refusal:
        opened(path)
    assert refusal.value.data["kind"] == "network"
    assert not path.exists()


def test_a_full_disk_refuses_and_goes_on_when_there_is_room_again(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("a small disk can be mounted by root alone")
    try:
        store = opened(folder / "jobs.db")
        accepted = committed(store, Submit([JOB], Depth()))
        ballast = folder / "ballast"
        ballast.write_bytes(b"x" * 1_500_000)
        with pytest.raises(StoreFailed, match=r"jobs\.db.*free") as refusal:
            while True:
                accepted += committed(store, Submit([LARGE], Depth()))
        assert refusal.value.data["kind"] in {"full", "io"}
        ballast.unlink()
        accepted += committed(store, Submit([LARGE], Depth()))
        kept = {job.job_id for job in store.find(Query(limit=1_000))}
        problems = store.audit()
        store.close()
    finally:
        subprocess.run(["umount", str(folder)], check=True)

    assert kept == {receipt.job_id for receipt in accepted}
    assert problems == []


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StoreFailed, match=r"nowhere/jobs\.db cannot be opened: its folder must exist"):
        opened(tmp_path / "nowhere" / "jobs.db")


def test_a_file_that_may_only_be_read_is_refused_and_usable_when_it_may_be_written(path):
    filled(path)
    con = apsw.Connection(f"file:{path}?immutable=1", flags=apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_READONLY)
    con.close()
    subprocess.run(["chattr", "+i", str(path)], check=False, capture_output=True)
    try:
        if os.access(path, os.W_OK):
            pytest.skip("this file system has no immutable files")
        with pytest.raises(StoreFailed, match="write") as refusal:
            committed(opened(path), Submit([JOB], Depth()))
        assert refusal.value.data["kind"] in {"readonly", "cantopen", "permissions"}
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=False, capture_output=True)
    store = opened(path)
    assert len(store.find(Query(limit=1_000))) == 500
    store.close()


def test_damage_that_came_with_a_crash_is_found_at_the_next_start_and_the_file_is_left_alone(path):
    filled(path, 3_000)
    left_open(path)
    data = bytearray(path.read_bytes())
    for page in range(10, len(data) // 4096, 3):
        data[page * 4096 : page * 4096 + 200] = random.Random(page).randbytes(200)
    path.write_bytes(data)

    with pytest.raises(StoreFailed, match=r"damaged.*restore a backup.*\.recover") as refusal:
        opened(path)
    assert refusal.value.data["kind"] == "corrupt"
    assert path.read_bytes() == data


def test_a_file_that_was_closed_is_not_examined_and_one_that_was_not_is_once(path, monkeypatch):
    examined = []
    monkeypatch.setattr(health, "first_problem", lambda con: examined.append(con))
    filled(path)
    opened(path).close()
    assert examined == []

    left_open(path)
    first, second = opened(path), opened(path)
    assert len(examined) == 1
    second.close()
    first.close()


def test_a_large_file_is_examined_for_no_longer_than_a_start_may_take(path, monkeypatch):
    filled(path, 3_000)
    left_open(path)
    monkeypatch.setattr(health, "EXAMINE_SEC", -1.0)

    store = opened(path)
    assert committed(store, Submit([JOB], Depth()))
    store.close()


def test_a_wal_that_is_removed_under_us_loses_nothing_that_was_answered(path):
    store = opened(path)
    before = committed(store, Submit([JOB] * 20, Depth()))
    Path(f"{path}-wal").unlink()

    for _ in range(2):
        with pytest.raises(StoreFailed, match=r"jobs\.db-wal was removed.*start again") as refusal:
            committed(store, Submit([JOB], Depth()))
        assert refusal.value.data["kind"] == "wal_removed"
    store.close()
    again = opened(path)
    kept = {job.job_id for job in again.find(Query(limit=100))}
    committed(again, Submit([JOB], Depth()))
    problems = again.audit()
    again.close()
    assert kept == {receipt.job_id for receipt in before}
    assert problems == []


def test_a_wal_longer_than_what_is_in_it_is_read_to_its_end_and_no_further(path, tmp_path):
    store = opened(path)
    answered = [committed(store, Submit([JOB], Depth()))[0].job_id for _ in range(40)]
    after_a_crash = tmp_path / "crash"
    after_a_crash.mkdir()
    for name in ("jobs.db", "jobs.db-wal"):
        (after_a_crash / name).write_bytes((tmp_path / name).read_bytes())
    length = Path(f"{path}-wal").stat().st_size
    committed(store, Submit([JOB], Depth()))

    assert length == Path(f"{path}-wal").stat().st_size
    again = opened(after_a_crash / "jobs.db")
    kept = [job.job_id for job in again.find(Query(limit=100))]
    committed(again, Submit([JOB], Depth()))
    assert sorted(answered) == sorted(kept)
    again.close()
    store.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_is_an_error_or_harmless_but_never_a_crash(path, seed):
    filled(path, 300)
    data = bytearray(path.read_bytes())
    chance = random.Random(seed)
    for _ in range(20):
        data[chance.randrange(100, len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)

    try:
        store = opened(path)
    except StoreFailed:
        return
    try:
        store.find(Query(limit=1_000))
        committed(store, Submit([JOB], Depth()))
    except (StoreFailed, ValueError, KeyError, apsw.Error):
        pass
    finally:
        store.close()
