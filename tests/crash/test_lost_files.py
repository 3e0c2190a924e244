"""
The daemon, a program that has the scheduler inside, and the commands, when the files of the database are removed, cut or cannot grow: they say so,
acknowledge nothing more, and what was acknowledged is there afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.daemon import Daemon, environment

apsw = pytest.importorskip("apsw")

from penstock import Client, Scheduler  # noqa: E402 - after importorskip
from penstock.core.errors import StoreFailed  # noqa: E402

UNAVAILABLE = 75


def nothing() -> None:
    pass


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path, "runner.enabled=false")
    yield daemon
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.end(signal.SIGKILL)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def client_of(daemon):
    """It does not try again what was refused."""
    return Client(daemon.url, token=daemon.token, retry_for=0.0)


def submitted(client, jobs=1, **fields):
    return {client.submit("a", "t", **fields).job_id for _ in range(jobs)}


def refused(daemon):
    """The log of a start that ends by itself."""
    daemon.log.write_bytes(b"")
    flags = [f"--set={flag}" for flag in daemon.flags]
    with daemon.log.open("ab") as log:
        command = [sys.executable, "-m", "penstock.daemon", *flags]
        code = subprocess.run(command, stdout=log, stderr=log, env=environment(), check=False).returncode
    text = daemon.log.read_text()
    assert code == UNAVAILABLE, text
    assert "Traceback" not in text
    return text


def command(daemon, *words):
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words],
        env=environment(PENSTOCK_DATA_DIR=str(daemon.data)),
        check=False,
        capture_output=True,
        text=True,
    )


def test_a_daemon_whose_file_is_deleted_says_so_until_the_saved_copy_is_put_in_its_place(daemon):
    daemon.start()
    with client_of(daemon) as client:
        acknowledged = submitted(client, 5)
        assert client.health().problems == []
        for name in ("", "-wal", "-shm"):
            (daemon.data / f"jobs.db{name}").unlink()

        for _ in range(3):
            with pytest.raises(StoreFailed, match=r"jobs\.db was deleted.*saved into .*rescued"):
                submitted(client)
        (problem,) = client.health().problems
        assert "cannot be written" in problem
        assert "jobs.db was deleted" in problem
    daemon.end(signal.SIGKILL)
    for _ in range(2):
        assert "missing, but it had come to event" in refused(daemon)
    restored = command(daemon, "db", "restore", str(daemon.data / "jobs.db.rescued"))
    assert restored.returncode == 0, restored.stderr
    daemon.start()
    with client_of(daemon) as client:
        assert {job.job_id for job in client.jobs().jobs} == acknowledged


@pytest.mark.parametrize("left", [0, 32, 4096, 50_000])
def test_a_daemon_whose_log_is_cut_keeps_the_database_as_it_was_at_the_last_checkpoint(daemon, left):
    daemon.start()
    with client_of(daemon) as client:
        kept = submitted(client, 5)
    assert daemon.end() == 0  # the last close makes a checkpoint
    before = (daemon.data / "jobs.db").read_bytes()
    daemon.start()
    with client_of(daemon) as client:
        submitted(client, 50)
        os.truncate(daemon.data / "jobs.db-wal", left)

        for _ in range(2):
            with pytest.raises(StoreFailed, match=r"jobs\.db-wal was cut while it was in use"):
                submitted(client)
        assert "was cut" in " ".join(client.health().problems)
    assert daemon.end() == 0
    assert (daemon.data / "jobs.db").read_bytes() == before
    assert "acknowledged work is missing" in refused(daemon)
    daemon.start("--accept-loss")
    with client_of(daemon) as client:
        assert {job.job_id for job in client.jobs(limit=500).jobs} >= kept


def test_a_daemon_whose_log_was_cut_by_a_crash_starts_only_when_the_loss_is_accepted(daemon):
    daemon.start()
    with client_of(daemon) as client:
        submitted(client, 5)
    daemon.end(signal.SIGKILL)
    (daemon.data / "jobs.db-wal").unlink()

    for _ in range(2):
        assert "acknowledged work is missing" in refused(daemon)
    checked, doctored = command(daemon, "db", "check"), command(daemon, "doctor")
    assert checked.returncode != 0
    assert "acknowledged work is missing" in checked.stderr
    assert doctored.returncode == 1
    assert "acknowledged work is missing" in " ".join(doctored.stdout.split())
    daemon.start("--accept-loss")
    with client_of(daemon) as client:
        assert "LOSS_ACCEPTED" in [event.kind for event in client.events().events]
        acknowledged = submitted(client, 2)
    assert daemon.end() == 0
    daemon.start()
    with client_of(daemon) as client:
        assert {job.job_id for job in client.jobs().jobs} == acknowledged


def test_the_command_accepts_a_loss_for_programs_that_have_the_scheduler_inside(daemon):
    daemon.data.mkdir(mode=0o700)
    scheduler = Scheduler(daemon.data / "jobs.db")
    scheduler.job(nothing, name="t").enqueue()
    scheduler.close()
    (daemon.data / "jobs.db").unlink()
    with pytest.raises(StoreFailed, match=r"missing.*penstock db check --accept-loss"):
        Scheduler(daemon.data / "jobs.db").find()

    accepted = command(daemon, "db", "check", "--accept-loss", str(daemon.data / "jobs.db"))
    assert accepted.returncode == 0, accepted.stderr
    again = Scheduler(daemon.data / "jobs.db")
    assert again.find() == []
    again.close()


def test_a_program_whose_file_is_deleted_is_told_at_its_next_submit(tmp_path):
    scheduler = Scheduler(tmp_path / "jobs.db")
    job = scheduler.job(nothing, name="t")
    job.enqueue()
    (tmp_path / "jobs.db").unlink()

    with pytest.raises(StoreFailed, match="was deleted while it was in use"):
        job.enqueue()
    scheduler.close()


def test_health_is_ok_only_while_the_log_is_there(daemon):
    daemon.start()
    with client_of(daemon) as client:
        submitted(client)
        assert client.health().status == "ok"
        (daemon.data / "jobs.db-wal").unlink()

        assert client.health().status == "degraded"


def test_health_is_ok_only_while_the_disk_has_room(daemon, small_disk):
    daemon.data = small_disk
    daemon.flags.append(f"data_dir={small_disk}")
    daemon.start()
    ballast = small_disk / "ballast"
    with client_of(daemon) as client:
        assert client.health().status == "ok"
        _fill(ballast)
        with pytest.raises(StoreFailed, match="free"):
            while True:
                submitted(client, payload="x" * 50_000)
        (problem,) = client.health().problems
        assert "cannot be written" in problem
        ballast.unlink()

        submitted(client)
        assert client.health().status == "ok"


def test_a_start_on_a_full_disk_is_one_line_and_no_traceback(daemon, small_disk):
    daemon.data = small_disk
    daemon.flags.append(f"data_dir={small_disk}")
    daemon.start()
    daemon.end(signal.SIGKILL)
    ballast = small_disk / "ballast"
    _fill(ballast)

    text = refused(daemon)
    assert "not started" in text
    assert "No space left" in text or "free some space" in text
    ballast.unlink()
    daemon.start()


def _fill(ballast):
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass
