"""The daemon as a process: it starts, refuses, stops in time, and loses nothing when it does not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from threading import Thread

import pytest
from tests.client.conftest import overlaps
from tests.daemon import Daemon, environment
from tests.waiting import LONG, until

from penstock.core.errors import Unavailable
from penstock.daemon.lifecycle import _LEAVE_AFTER, stop_times
from penstock.runner.folder import RunnerFolder
from penstock.runner.process_tree import RUNNER_MARK, find_marked
from penstock.runner.runner import AFTER_STOP
from penstock.stores.sqlite.store import SqliteStore

LEASE = 3.0
SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))


def main(*arguments, **env):
    command = [sys.executable, "-m", "penstock.daemon", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LONG, check=False, env=environment(**env)
    )


def states(client, receipts):
    return [client.job(receipt.job_id).state for receipt in receipts]


def submit(client, job_type, count, **payload):
    return [client.submit("photos", job_type, payload, cost_units=1) for _ in range(count)]


# Starting


def test_a_daemon_with_wrong_settings_names_them_and_does_not_start(tmp_path):
    done = main(
        f"--set=data_dir={tmp_path / 'data'}", "--set=leases.ttl=soon", PENSTOCK_CAPS_CONCURRENT="many"
    )

    assert 2 == done.returncode
    assert "2 problems in the settings" in done.stderr
    assert "leases.ttl (--set)" in done.stderr
    assert not (tmp_path / "data").exists()


def test_settings_are_listed_with_their_source(tmp_path):
    done = main("--settings", f"--set=data_dir={tmp_path}", PENSTOCK_LEASES_TTL="20s")

    assert 0 == done.returncode
    assert "20s  (PENSTOCK_LEASES_TTL)" in done.stdout


def test_a_second_daemon_is_refused_with_the_name_of_the_first(daemon):
    first = daemon()

    second = main(*(f"--set={flag}" for flag in first.flags))

    assert 75 == second.returncode
    assert f"pid {first.process.pid}" in second.stderr
    assert first.url in second.stderr
    assert first.client.health().status == "ok"


def test_a_port_in_use_is_named(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = main(f"--set=data_dir={folder / 'data'}", f"--set=server.listen=127.0.0.1:{port}")

    assert 75 == done.returncode
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_data_token_and_socket_are_for_the_owner_alone(daemon):
    one = daemon()

    modes = {
        name: oct((one.data / name).stat().st_mode & 0o777)
        for name in ("token", "tokens.json", "penstock.sock")
    }
    assert {"token": "0o600", "tokens.json": "0o600", "penstock.sock": "0o600"} == modes
    assert 0o700 == one.data.stat().st_mode & 0o777
    assert one.token not in one.log.read_text()


def test_a_data_directory_that_others_can_enter_is_refused(folder):
    (folder / "data").mkdir(mode=0o755)

    done = main(f"--set=data_dir={folder / 'data'}", "--set=server.listen=127.0.0.1:0")

    assert 75 == done.returncode
    assert "chmod 700" in done.stderr


def test_weights_and_caps_of_the_settings_hold(folder):
    config = folder / "penstock.toml"
    config.write_text('[addons.photos]\nweight = 250\nconcurrent = 1\n[leases]\nttl = "5s"\n')
    one = Daemon(folder)
    try:
        client = one.start(f"--config={config}").client
        submit(client, "sleep", 2, seconds=0)
        claimed = client.claim(
            addon_id="photos", limit=5, wait_sec=10
        )  # a round may have reserved it just now
        weights = [addon.weight for addon in client.addons().addons if addon.addon_id == "photos"]
    finally:
        one.close()

    assert 5.0 == claimed.ttl_sec
    assert 1 == len(claimed.jobs)
    assert [250] == weights


def test_logs_are_one_json_object_a_line(daemon):
    one = daemon()
    one.end()

    lines = [json.loads(line) for line in one.log.read_text().splitlines()]
    assert "stopped" == lines[-1]["event"]
    assert all({"event", "level", "logger", "timestamp"} <= line.keys() for line in lines)


# Stopping


def test_it_stops_at_once_although_somebody_waits_for_jobs_and_events(daemon):
    one = daemon("server.shutdown_timeout=300s")
    client = one.client

    def poll():
        with suppress(Unavailable):
            client.claim(addon_id="photos", wait_sec=60)

    polling = Thread(target=poll)
    polling.start()
    with client.stream() as stream:
        client.stats()
        iter(stream)
        began = time.monotonic()
        code = one.end()
        took = time.monotonic() - began
    polling.join(LONG)

    assert 0 == code
    assert took < 45  # by itself the poll would end after 60 s, the stream never
    assert not (one.data / "daemon.json").exists()


@pytest.mark.parametrize("timeout", [1, 2, 3, 5, 10, 30, 300])
def test_all_that_a_stop_waits_for_fits_into_its_time(timeout):
    runs, requests = stop_times(timeout)

    assert runs > timeout / 4
    assert runs + AFTER_STOP + requests <= timeout + _LEAVE_AFTER


@pytest.mark.parametrize("round_", range(1 if SOAK == 1 else 6 * SOAK))
def test_a_stop_leaves_no_lease_and_takes_no_longer_than_its_time_and_a_second(daemon, round_):
    one = daemon("server.shutdown_timeout=2s")
    script = {"script": "trap '' TERM INT HUP; echo up; exec sleep 60"}
    jobs = [one.client.submit("me", "penstock.shell", script, cost_units=1) for _ in range(20)]
    until(lambda: all(one.client.job(job.job_id).state == "RUNNING" for job in jobs))
    began = time.monotonic()
    one.end()
    took = time.monotonic() - began
    store = SqliteStore(one.data / "jobs.db", lambda: time.time_ns() // 1_000)
    left, states = store.live(), {str(store.job(job.job_id).state) for job in jobs}
    store.close()

    until(
        lambda: not list(find_marked(RUNNER_MARK, {RunnerFolder(one.data).mark})),
        what="the end of all processes",
    )
    # Seconds count only where the machine is ours.
    assert SOAK == 1 or took <= 3
    assert (left, states) == ([], {"QUEUED"})


def test_a_stop_that_no_thread_can_end_is_ended_by_the_kernel(tmp_path):
    """One call of C code keeps the interpreter for ever: no timer of Python's has a turn."""
    program = (
        "import re, signal\n"
        "from penstock.daemon.lifecycle import _Stop\n"
        "_Stop(0.01).on_signal(signal.SIGTERM)\n"
        "re.match(r'(a|a)*b', 'a' * 64)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, timeout=LONG, check=False
    )

    assert -signal.SIGALRM == done.returncode


def test_a_second_signal_does_not_wait_for_a_job_that_will_not_stop(daemon):
    one = daemon()
    script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    job = one.client.submit("me", "penstock.shell", {"script": script})
    until(lambda: one.client.logs(job.job_id).pieces)
    one.process.send_signal(signal.SIGTERM)
    until(lambda: "stopping within" in one.log.read_text())

    assert 128 + signal.SIGINT == one.end(signal.SIGINT)


@pytest.fixture
def hangups_heard():
    """With nohup, every test and every daemon of a test outlives the terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups_heard")
def test_a_terminal_that_is_closed_asks_for_an_end_in_good_order(daemon):
    one = daemon()
    one.process.send_signal(signal.SIGSTOP)
    one.process.send_signal(signal.SIGHUP)
    one.process.send_signal(signal.SIGCONT)
    one.process.send_signal(signal.SIGHUP)

    assert 0 == one.process.wait(LONG)
    assert not (one.data / "daemon.json").exists()


def test_what_was_accepted_before_a_stop_is_done_after_it(daemon, workers):
    one = daemon(f"leases.ttl={LEASE}s")
    client = one.client
    receipts = submit(client, "sleep", 30, seconds=0.1)
    worker = workers.start(one)
    until(lambda: len(workers.started()) >= 5)

    assert 0 == one.end(signal.SIGTERM)
    one.start()

    until(lambda: states(client, receipts) == ["DONE"] * 30)
    assert worker.poll() is None
    assert [] == overlaps(workers.lines())


@pytest.mark.long
@pytest.mark.soak
def test_kill_9_of_the_daemon_loses_nothing_and_runs_nothing_twice_at_once(daemon, workers):
    one = daemon(f"leases.ttl={LEASE}s")
    client = one.client
    receipts = submit(client, "sleep", 40, seconds=0.15)
    for _ in range(2):
        workers.start(one, "--concurrency=2")

    for enough in (5, 15, 25):
        until(lambda enough=enough: len(workers.started()) >= enough)
        assert -signal.SIGKILL == one.end(signal.SIGKILL)
        one.start()

    until(lambda: states(client, receipts) == ["DONE"] * 40)
    assert [] == overlaps(workers.lines())


def test_a_run_that_outlives_a_killed_daemon_keeps_its_lease(daemon, workers):
    one = daemon("leases.ttl=120s")
    client = one.client
    [receipt] = submit(client, "sleep", 1, seconds=2)
    workers.start(one)
    until(workers.started)

    one.end(signal.SIGKILL)
    one.start()

    assert "DONE" == client.wait(receipt.job_id, LONG).state
    assert 1 == len(workers.started())


def test_a_submit_with_a_key_waits_out_a_restart_and_is_taken_once(daemon):
    one = daemon()
    client = one.client
    client.submit("photos", "sleep", {"seconds": 0}, idempotency_key="once")
    one.end(signal.SIGKILL)
    answers = []
    asking = Thread(
        target=lambda: answers.append(
            client.submit("photos", "sleep", {"seconds": 0}, idempotency_key="once")
        )
    )
    asking.start()
    one.start()
    asking.join(LONG)

    assert [False] == [answer.created for answer in answers]
    assert 1 == sum(client.stats().jobs.values())


def test_events_go_on_where_they_were_after_a_restart(daemon):
    one = daemon()
    client = one.client
    first = client.submit("photos", "sleep", {"seconds": 0})
    seen = []
    stream = client.stream(after=0)
    events = iter(stream)
    while not (seen and seen[-1].job_id == first.job_id):
        seen.append(next(events))

    one.end(signal.SIGKILL)
    one.start()
    second = client.submit("photos", "sleep", {"seconds": 0})
    while seen[-1].job_id != second.job_id:
        seen.append(next(events))
    stream.close()

    numbers = [event.seq for event in seen if event.kind != "ADMITTED"]  # one entry with DISPATCHING
    assert numbers == sorted(set(numbers))
    assert {first.job_id, second.job_id} <= {event.job_id for event in seen if event.kind == "SUBMITTED"}
