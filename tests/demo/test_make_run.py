"""What `make run` starts: the scheduler, two add-ons, and an end in good order."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.demo.scheduler"]
LONG = 110


@pytest.fixture
def env():
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}


def running_in(folder):
    """Whatever still has our directory in its command line or environment."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            about = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in about and int(process.name) != os.getpid():
            processes.append(about)
    return processes


def finished(folder, env):
    command = [*COMMAND, "--data-dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG, env=env, check=False)


def in_terminal(folder, env):
    command, *words = [*COMMAND, "--data-dir", str(folder)]
    return pexpect.spawn(command, words, timeout=LONG, env=env, encoding="utf-8")


@pytest.mark.long
def test_without_a_terminal_it_ends_by_itself_when_the_samples_are_done(folder, env):
    run = finished(folder, env)

    assert 0 == run.returncode, run.stdout + run.stderr
    total, done = re.search(r"Of (\d+) sample jobs: (\d+) DONE\.", run.stdout).groups()
    assert total == done
    assert f"its data in {folder}" in run.stdout
    assert re.search(r"mail digest \w+ +REQUEUED \(job_error\)", run.stdout)
    assert {"photos", "mail"} <= set(run.stdout.split())
    assert [] == running_in(folder)


def test_in_a_terminal_it_stays_until_ctrl_c_and_leaves_nothing_behind(folder, env):
    seen = in_terminal(folder, env)
    seen.expect("curl -H")
    seen.expect(r"running: \d+ of 40 units")

    seen.sendintr()
    seen.expect("Stopped in good order")
    seen.expect(pexpect.EOF)
    seen.close()

    assert 0 == seen.exitstatus
    assert [] == running_in(folder)


@pytest.mark.long
def test_in_a_terminal_there_are_new_samples_when_the_first_are_done(folder, env):
    """Otherwise a user who opens the page after half a minute sees nothing that moves."""
    seen = in_terminal(folder, env)
    seen.expect(r"mail +[^\n]* 10 ")  # done, of the ten that mail is given
    seen.expect(r"mail +[^\n]* (1[1-9]|20) ")
    seen.sendintr()
    seen.expect(r"Of 54 sample jobs")
    seen.expect(pexpect.EOF)
    seen.close()

    assert 0 == seen.exitstatus


def test_a_port_that_is_taken_at_the_last_moment_does_not_stop_it(folder, env):
    program = (
        "import sys; from examples.demo import scheduler as demo; answers = iter([True, False]);"
        "demo._is_free = lambda port: next(answers); demo.PORT = int(sys.argv.pop(1)); demo.main()"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", program, str(port), "--data-dir", str(folder), "--seconds", "0"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=LONG, env=env, check=False)

    assert "The scheduler is at http://127.0.0.1:" in run.stdout, run.stderr
    assert f":{port}," not in run.stdout


def test_a_second_one_on_the_same_data_says_who_has_it(folder, env):
    first = subprocess.Popen(
        [*COMMAND, "--data-dir", str(folder)], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        first.stdout.readline()
        second = finished(folder, env)
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=LONG)

    assert 1 == second.returncode
    assert "is dispatched by the daemon in" in second.stderr
    assert 0 == first.returncode
