"""
The files of a SQLite database are removed, replaced, overwritten or cut, while it is in use or between two starts: the store says so, acknowledges
nothing more, and leaves or saves what is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from tests.failing_syncs import FailingSyncs

apsw = pytest.importorskip("apsw")

from penstock.core.errors import OutcomeUnknown, StoreFailed  # noqa: E402
from penstock.core.jobs.intent import Intent  # noqa: E402 - after importorskip
from penstock.core.jobs.job import EventKind  # noqa: E402
from penstock.core.jobs.types import SECOND  # noqa: E402
from penstock.stores.api import Depth, Query, Submit, committed  # noqa: E402
from penstock.stores.sqlite.connection import copy as back_up  # noqa: E402
from penstock.stores.sqlite.guard import reset_mark  # noqa: E402
from penstock.stores.sqlite.restore import restore  # noqa: E402
from penstock.stores.sqlite.store import SqliteStore  # noqa: E402

T0 = 1_900_000_000 * SECOND
JOB = Intent(addon_id="a", job_type="t")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.db"


def opened(path, **options):
    return SqliteStore(path, lambda: T0, **options)


def submitted(store, jobs=1):
    return {receipt.job_id for receipt in committed(store, Submit([JOB] * jobs, Depth()))}


def kept(path, **options):
    """The jobs that a start finds, after a look at every sum."""
    store = opened(path, **options)
    try:
        assert store.audit() == []
        return {job.job_id for job in store.find(Query(limit=1_000))}
    finally:
        store.close()


def beside(path, name):
    return path.with_name(path.name + name)


#: As many jobs, one commit each, had been acknowledged when the process was killed.
JOBS = 40


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder as a killed process left it, and the ids that it was told."""
    folder = tmp_path_factory.mktemp("killed")
    code = (
        "import os, sys; from penstock.core.jobs.intent import Intent; from penstock.stores.api import Submit, committed\n"
        "from penstock.stores.sqlite.store import SqliteStore; store = SqliteStore(sys.argv[1], lambda: 1_900_000_000_000_000)\n"
        "for _ in range(int(sys.argv[2])):\n"
        "    print(committed(store, Submit([Intent(addon_id='a', job_type='t')]))[0].job_id, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(folder / "jobs.db"), str(JOBS)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    return folder, frozenset(done.stdout.split())


@pytest.fixture
def crashed(killed, tmp_path):
    """The file in a copy of that folder."""
    shutil.copytree(killed[0], tmp_path / "crashed")
    return tmp_path / "crashed" / "jobs.db"


@pytest.fixture
def acknowledged(killed):
    return killed[1]


# while it is in use

REMOVED = {
    "the file": ("",),
    "the file and its log": ("", "-wal"),
    "all three": ("", "-wal", "-shm"),
    "all three and the mark": ("", "-wal", "-shm", "-high-water"),
}


@pytest.mark.parametrize("names", REMOVED.values(), ids=REMOVED)
def test_a_file_that_is_deleted_under_us_is_noticed_and_saved_and_nothing_more_is_acknowledged(path, names):
    store = opened(path)
    acknowledged = submitted(store, 20) | submitted(store)
    for name in names:
        beside(path, name).unlink()

    for _ in range(3):
        with pytest.raises(
            StoreFailed, match=r"jobs\.db was deleted.*saved into .*rescued.*start again"
        ) as no:
            submitted(store)
        assert no.value.data["kind"] == "file_deleted"
    store.close()
    with pytest.raises(StoreFailed, match=r"missing.*rescued is a copy"):
        opened(path)
    beside(path, ".rescued").rename(path)
    assert kept(path) == acknowledged


def test_a_file_that_is_replaced_under_us_is_noticed_and_both_files_are_there_afterwards(path, tmp_path):
    backup = tmp_path / "backup.db"
    store = opened(path)
    early = submitted(store, 5)
    back_up(path, backup)
    late = submitted(store, 5)
    shutil.copy(backup, tmp_path / "other")
    (tmp_path / "other").replace(path)

    with pytest.raises(StoreFailed, match=r"replaced.*saved into .*rescued") as refusal:
        submitted(store)
    assert refusal.value.data["kind"] == "file_replaced"
    store.close()
    assert kept(beside(path, ".rescued")) == early | late
    assert kept(backup) == early


def test_a_file_that_is_overwritten_in_place_is_noticed(path, tmp_path):
    backup = tmp_path / "backup.db"
    opened(path).close()
    back_up(path, backup)
    first = opened(path)
    submitted(first, 500)
    first.close()
    store = opened(path)
    submitted(store)
    with path.open("r+b") as file:
        file.write(backup.read_bytes())
        file.truncate()

    with pytest.raises(StoreFailed, match=r"overwritten while it was in use.*restore a backup") as refusal:
        submitted(store)
    assert refusal.value.data["kind"] == "file_overwritten"
    assert "***" not in str(refusal.value)
    store.close()
    for _ in range(2):
        with pytest.raises(
            StoreFailed, match=r"was overwritten while it was in use.*--accept-loss"
        ) as refusal:
            opened(path)
        assert refusal.value.data["kind"] == "file_overwritten"
    restore(backup, path)
    opened(path).close()


def test_a_checkpoint_by_another_program_is_no_loss(path):
    store = opened(path)
    acknowledged = submitted(store, 100)
    other = apsw.Connection(str(path))
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    other.close()

    assert submitted(store, 3) | acknowledged == {job.job_id for job in store.find(Query(limit=1_000))}
    store.close()


#: Fails if this process holds its lock on the `-shm`, by which SQLite knows that the file is in use.
TAKES_THE_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as index:
    fcntl.lockf(index, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 128)
"""


def test_a_look_at_the_files_ends_no_lock_of_sqlite(path):
    store = opened(path)
    submitted(store)
    other = subprocess.run(
        [sys.executable, "-c", TAKES_THE_LOCK, str(beside(path, "-shm"))],
        check=False,
        capture_output=True,
        text=True,
    )

    assert "BlockingIOError" in other.stderr
    store.close()


def test_two_processes_that_make_checkpoints_do_not_alarm_each_other(path, monkeypatch):
    examined = []
    monkeypatch.setattr("penstock.stores.sqlite.guard.first_problem", lambda con: examined.append(con))
    first, second = opened(path), opened(path)
    for store in (first, second, first, second):
        store._con.pragma("wal_autocheckpoint", 1)
        submitted(store)

    assert examined == []
    assert path.stat().st_size > 2_048
    second.close()
    first.close()


def test_a_file_that_is_put_back_is_used_again(path):
    store = opened(path)
    acknowledged = submitted(store)
    path.rename(beside(path, ".away"))
    with pytest.raises(StoreFailed, match="deleted"):
        submitted(store)
    beside(path, ".away").rename(path)

    acknowledged |= submitted(store)
    store.close()
    assert kept(path) == acknowledged


def test_a_copy_that_cannot_be_saved_is_not_called_saved(path, monkeypatch):
    def full(con, target):
        raise OSError(28, "No space left on device")

    store = opened(path)
    acknowledged = submitted(store)
    path.unlink()
    with monkeypatch.context() as patched:
        patched.setattr("penstock.stores.sqlite.guard.write_copy", full)
        with pytest.raises(StoreFailed, match=r"could not be saved.*No space left.*make room") as refusal:
            submitted(store)
    assert "has been saved" not in str(refusal.value)

    with pytest.raises(StoreFailed, match="has been saved"):
        submitted(store)
    store.close()
    assert kept(beside(path, ".rescued")) == acknowledged


def test_a_process_that_submits_by_another_one_is_told_as_well(path):
    dispatcher = opened(path)
    dispatcher.acquire_dispatch("the test")
    sender = opened(path)
    submitted(sender)
    path.unlink()

    with pytest.raises(StoreFailed, match="deleted"):
        submitted(sender)
    sender.close()
    dispatcher.close()


def test_a_reader_does_not_take_another_file_for_its_own(path, tmp_path):
    store = opened(path)
    submitted(store)
    other = opened(tmp_path / "other.db")
    other.close()
    (tmp_path / "other.db").replace(path)

    with pytest.raises(StoreFailed, match="replaced"):
        store.find(Query(limit=10))
    store.close()


# at the next start


@pytest.mark.parametrize("state", ["missing", "empty"])
def test_a_start_without_the_file_is_refused_before_the_log_is_touched(crashed, acknowledged, state):
    path = crashed
    data, wal = path.read_bytes(), beside(path, "-wal").read_bytes()
    reset_mark(path)  # as an older version left it
    path.unlink()
    if state == "empty":
        path.touch()

    for _ in range(2):
        with pytest.raises(StoreFailed, match=rf"is {state}, but .*-wal has .* bytes.*Put the file back"):
            opened(path)
    assert beside(path, "-wal").read_bytes() == wal
    path.write_bytes(data)
    assert kept(path) == acknowledged


def test_a_start_without_any_file_is_refused_if_there_was_one(crashed):
    path = crashed
    for name in ("", "-wal", "-shm"):
        beside(path, name).unlink()

    with pytest.raises(StoreFailed, match="missing, but it had come to event 40") as refusal:
        opened(path)
    assert refusal.value.data == {"kind": "missing", "known": JOBS, "found": 0}
    assert not path.exists()


@pytest.mark.parametrize("part", [0.0, 0.1, 0.4, 0.7, 0.95])
def test_a_log_that_was_cut_or_removed_after_a_crash_is_refused_and_left_alone(crashed, part):
    path = crashed
    wal = beside(path, "-wal")
    size = len(wal.read_bytes().rstrip(b"\0"))
    if part:
        os.truncate(wal, int(size * part))
    else:
        wal.unlink()
    data, log = path.read_bytes(), wal.read_bytes() if part else b""

    for _ in range(2):
        with pytest.raises(StoreFailed, match=r"ends at event \d+, but it had come to event 40") as refusal:
            opened(path)
        assert refusal.value.data["kind"] == "behind"
    assert path.read_bytes() == data
    assert (wal.read_bytes() if part else b"") == log


def test_a_log_with_a_bad_frame_in_its_middle_is_refused(crashed):
    path = crashed
    wal = beside(path, "-wal")
    content = bytearray(wal.read_bytes())
    content[len(content.rstrip(b"\0")) // 2] ^= 1
    wal.write_bytes(content)

    with pytest.raises(StoreFailed, match="acknowledged work is missing"):
        opened(path)
    assert wal.read_bytes() == content


def test_an_older_copy_in_place_of_the_file_is_refused(path, tmp_path):
    store = opened(path)
    submitted(store, 5)
    back_up(path, tmp_path / "backup.db")
    submitted(store, 5)
    store.close()
    shutil.copy(tmp_path / "backup.db", path)

    with pytest.raises(StoreFailed, match="older copy"):
        opened(path)
    reset_mark(path)  # as `penstock db restore` does
    assert len(kept(path)) == 5


@pytest.mark.parametrize("names", [("-wal",), ("", "-wal"), ("",)], ids=["log", "both", "file"])
def test_a_loss_that_is_accepted_is_an_event_and_the_next_start_needs_no_word(crashed, names):
    path = crashed
    for name in names:
        beside(path, name).unlink()
    wal = beside(path, "-wal")
    log = wal.read_bytes() if wal.exists() else None

    store = opened(path, accept_loss=True)
    submitted(store)
    (event,) = [event for event in store.events(0, 100) if event.kind is EventKind.LOSS_ACCEPTED]
    assert event.data == {"known": JOBS, "found": 0}
    assert event.seq == JOBS + 1
    assert store.newest() == JOBS + 2
    store.close()
    assert len(kept(path)) == 1
    assert log is None or beside(path, "-wal.lost").read_bytes() == log


def test_nothing_is_recorded_when_there_is_no_loss_to_accept(crashed, acknowledged):
    store = opened(crashed, accept_loss=True)
    assert [event.kind for event in store.events(0, 100)] == [EventKind.SUBMITTED] * JOBS
    store.close()
    assert kept(crashed) == acknowledged


def test_a_whole_file_that_was_moved_or_copied_with_its_log_starts(crashed, acknowledged, tmp_path):
    for folder, names in (("bare", ("", "-wal")), ("all", ("", "-wal", "-high-water"))):
        (tmp_path / folder).mkdir()
        for name in names:
            shutil.copy(beside(crashed, name), tmp_path / folder)

        assert kept(tmp_path / folder / "jobs.db") == acknowledged


# a kill during the very first start

FIRST_START = """
import os, sys
import apsw
from penstock.stores.sqlite.store import SqliteStore

left = 0

def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), 9)

class File(apsw.VFSFile):
    def __init__(self, name, flags):
        super().__init__("unix", name, flags)
    def xWrite(self, data, offset):
        step()
        super().xWrite(data, offset)
    def xSync(self, flags):
        step()
        super().xSync(flags)
    def xTruncate(self, size):
        step()
        super().xTruncate(size)

class Vfs(apsw.VFS):
    def __init__(self):
        super().__init__("killing", "unix", makedefault=True)
    def xOpen(self, name, flags):
        step()
        return File(name, flags)
    def xDelete(self, name, sync):
        step()
        super().xDelete(name, sync)

vfs = Vfs()
for number in range(1, 10_000, int(sys.argv[2])):
    folder = os.path.join(sys.argv[1], str(number))
    os.mkdir(folder)
    child = os.fork()
    if child == 0:
        left = number
        store = SqliteStore(os.path.join(folder, "jobs.db"), lambda: 1_900_000_000_000_000)
        os._exit(0)
    print(number)
    if os.waitpid(child, 0)[1] == 0:
        break
"""
#: Every so many steps of a start there is a kill; in `make soak` at each.
STRIDE = 1 if int(os.environ.get("PENSTOCK_SOAK", "1")) > 1 else 17


def test_a_kill_at_any_step_of_the_very_first_start_leaves_a_file_that_opens(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FIRST_START, str(tmp_path), str(STRIDE)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    kills = done.stdout.split()
    assert len(kills) > 10

    for number in kills:
        store = opened(tmp_path / number / "jobs.db")
        acknowledged = submitted(store)
        store.close()
        assert kept(tmp_path / number / "jobs.db") == acknowledged


# a sync that fails


@pytest.fixture
def syncs():
    with FailingSyncs() as vfs:
        yield vfs


def test_a_failed_sync_leaves_the_outcome_unknown_and_names_the_jobs_to_ask_for(path, syncs):
    store = opened(path)
    acknowledged = submitted(store)
    syncs.failing = True
    with pytest.raises(OutcomeUnknown, match="may or may not have been written.*Ask for job") as unknown:
        committed(store, Submit([JOB] * 2, Depth()))
    syncs.failing = False

    ids = unknown.value.data["job_ids"]
    assert len(ids) == 2
    assert all(job_id in str(unknown.value) for job_id in ids)
    assert store.jobs(ids) == []
    acknowledged |= submitted(store)
    store.close()
    assert kept(path) == acknowledged


def test_a_job_that_is_not_found_after_a_failed_sync_is_not_found_after_a_kill_either(path, syncs, tmp_path):
    store = opened(path)
    acknowledged = submitted(store)
    syncs.failing = True
    with pytest.raises(OutcomeUnknown):
        submitted(store)
    (tmp_path / "image").mkdir()
    for name in ("", "-wal", "-high-water"):
        shutil.copy(beside(path, name), tmp_path / "image")
    syncs.failing = False

    store.close()
    assert kept(tmp_path / "image" / "jobs.db") == acknowledged


def test_each_of_those_who_shared_a_failed_commit_is_told_its_own_jobs(path, syncs):
    store = opened(path)
    submitted(store)
    syncs.failing = True
    with store._writer._writing:
        answers = [store.commit(Submit([JOB], Depth()))[0] for _ in range(3)]
    ids = [answer.exception().data["job_ids"] for answer in answers]
    syncs.failing = False

    assert len({job_id for (job_id,) in ids}) == 3
    store.close()


def test_a_submit_by_another_process_has_an_unknown_outcome_as_well(path, syncs):
    dispatcher = opened(path)
    dispatcher.acquire_dispatch("the test")
    sender = opened(path)
    acknowledged = submitted(sender)
    syncs.failing = True
    with pytest.raises(OutcomeUnknown) as unknown:
        submitted(sender)
    syncs.failing = False

    assert len(unknown.value.data["job_ids"]) == 1
    acknowledged |= submitted(sender)
    sender.close()
    dispatcher.close()
    assert kept(path) == acknowledged
