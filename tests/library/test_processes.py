"""Several processes on one file, worker processes, and processes that end without being asked."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from tests.waiting import LONG

import penstock

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))

APP = """
import os, sys, time
import penstock

scheduler = penstock.Scheduler("jobs.db", workers=3, crash_retries=[0.01] * 20, stop_timeout=5, {options})

@scheduler.job(cost=5, retries=())
def append(n: int) -> int:
    with open("ran.txt", "a") as file:
        file.write(f"{{n}}\\n")
    time.sleep(0.002)
    return os.getpid()

@scheduler.job
def forever(ctx: penstock.JobContext) -> None:
    print("began", flush=True)
    while True:
        time.sleep(0.01)
        {look}

@scheduler.job
async def nap(ctx: penstock.JobContext, n: int) -> int:
    import asyncio
    await asyncio.sleep(0.01)
    return n + 1

@scheduler.job
def die() -> None:
    os.kill(os.getpid(), 9)

@scheduler.job
def talk(ctx: penstock.JobContext) -> dict:
    ctx.progress(1.0)
    ctx.spend("0.25")
    ctx.save_checkpoint([1, 2])
    return {{"id": ctx.id, "pid": os.getpid(), "again": penstock.current_job().checkpoint}}

if __name__ == "__main__":
    {main}
"""


def app(main, options="", look="ctx.check()"):
    return APP.format(main=main.replace("\n", "\n    "), options=options, look=look)


#: No lease expires while a test waits: maintenance would then end what nothing else has ended.
LONG_LEASE = "lease=3600"
RUN = 'scheduler.start(); print("ready", flush=True); scheduler.run(); print("stopped", flush=True)'


# one enqueues, the other runs


def test_one_process_enqueues_and_waits_while_another_runs(make, program, tmp_path):
    here = make()
    append = here.job(name="append")(lambda n: None)
    other = program(app(RUN))
    other.stdout.readline()

    pids = {job.result(LONG) for job in append.enqueue_many(range(20))}

    assert {other.pid} == pids
    assert sorted(range(20)) == sorted(int(line) for line in (tmp_path / "ran.txt").read_text().split())


def test_who_waits_in_another_process_is_woken_and_does_not_poll(make, program, monkeypatch):
    monkeypatch.setattr("penstock.library.handle.POLL_SEC", 600.0)
    here = make()
    append = here.job(name="append")(lambda n: None)
    other = program(app(RUN))
    other.stdout.readline()

    for n in range(5):
        assert other.pid == append.enqueue(n).result(LONG)


def test_a_process_that_only_enqueues_is_told_who_runs_the_file(make, program):
    other = program(app(RUN))
    other.stdout.readline()
    here = make()

    with pytest.raises(penstock.DispatcherHeld, match=f"program.py, process {other.pid}"):
        here.start()


# ending


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_program_stops_when_it_is_asked_and_puts_back_what_yields(make, program, number):
    here = make()
    other = program(app(RUN))
    assert "ready\n" == other.stdout.readline()
    # By the time that it has begun, the program waits for signals.
    job = here.job(name="forever")(lambda: None).enqueue()
    assert "began\n" == other.stdout.readline()

    other.send_signal(number)
    out, err = other.communicate(timeout=LONG)

    assert ("stopped\n", 0) == (out, other.returncode), err
    assert "QUEUED" == job.state
    assert 0 == job.job.counters.crash
    assert "graceful_shutdown" == str(job.attempts()[-1].end)


def test_ctrl_c_in_a_with_block_stops_in_good_order(make, program):
    here = make()
    job = here.job(name="forever")(lambda: None).enqueue()
    other = program(app("with scheduler:\n    time.sleep(600)"))
    assert "began\n" == other.stdout.readline()

    other.send_signal(signal.SIGINT)
    _, err = other.communicate(timeout=LONG)

    assert "KeyboardInterrupt" in err
    assert ("QUEUED", 0) == (job.state, job.job.counters.crash)


def test_a_second_ctrl_c_does_not_wait_for_a_function_that_ignores_everything(make, program):
    here = make()
    job = here.job(name="forever")(lambda: None).enqueue()
    other = program(app("print(scheduler); scheduler._stop_timeout = 600; scheduler.run()", look="pass"))
    other.stdout.readline()
    assert "began\n" == other.stdout.readline()

    other.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert other.poll() is None
    other.send_signal(signal.SIGINT)
    other.communicate(timeout=LONG)

    assert ("QUEUED", 0) == (job.state, job.job.counters.crash)


def test_a_second_ctrl_c_counts_before_anybody_has_woken_up_for_the_first(make, monkeypatch):
    class Asleep(threading.Event):
        def wait(self, timeout=None):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return super().wait(timeout)

    here, stops = make(), []
    monkeypatch.setattr(here, "start", lambda: here)
    monkeypatch.setattr(here, "stop", lambda timeout=None: stops.append(timeout))
    monkeypatch.setattr(threading, "Event", Asleep)
    before = signal.getsignal(signal.SIGINT)
    here.run()
    monkeypatch.undo()

    assert [0] == stops
    assert before is signal.getsignal(signal.SIGINT)


def test_a_program_that_just_ends_puts_back_what_runs(make, program):
    other = program(app("forever.enqueue(); scheduler.start(); sys.stdin.readline()"))
    assert "began\n" == other.stdout.readline()
    other.communicate("\n", timeout=LONG)

    [job] = make().find()

    assert ("QUEUED", 0) == (job.state, job.job.counters.crash)


def test_after_kill_9_a_restart_finishes_everything(make, program, tmp_path):
    here = make()
    many = 60 * SOAK
    jobs = here.job(name="append", cost=5)(lambda n: None).enqueue_many(range(many))
    for _ in range(3 * SOAK):
        done = here.counts()["DONE"]
        other = program(app(RUN, LONG_LEASE))
        end = time.monotonic() + 20
        while here.counts()["DONE"] < min(many, done + 12) and time.monotonic() < end:
            time.sleep(0.002)
        other.kill()
        other.wait()

    last = program(app(RUN, LONG_LEASE))
    for job in jobs:
        job.result(LONG)

    assert {"DONE"} == {str(job.state) for job in jobs}
    assert set(range(many)) == {int(line) for line in (tmp_path / "ran.txt").read_text().split()}
    last.send_signal(signal.SIGTERM)
    last.communicate(timeout=LONG)
    assert [] == here.store.audit()


# worker processes


PROCESS = f'kind="process", {LONG_LEASE}'


def test_functions_run_in_processes_of_their_own(program):
    main = """with scheduler:
    pid = append.enqueue(1).result(60)
    print(pid != os.getpid(), nap.enqueue(1).result(60))
    told = talk.enqueue()
    answer = told.result(60)
    print(answer["id"] == told.id, answer["pid"] != os.getpid(), answer["again"])
    print(told.progress, told.job.spent)"""

    out, err = program(app(main, PROCESS)).communicate(timeout=100)

    assert ["True 2", "True True [1, 2]", "1.0 250000"] == out.splitlines(), err


def test_a_job_that_kills_its_process_is_one_crash_each_and_harms_nobody(program):
    main = """with scheduler:
    job = die.enqueue()
    others = append.enqueue_many(range(10))
    try:
        job.result(60)
    except penstock.JobFailed as failed:
        print(failed.reason, len(job.attempts()))
    for other in others:
        other.result(60)
    print(scheduler.counts()["DONE"])"""

    out, err = program(app(main, PROCESS).replace("[0.01] * 20", "[0.01] * 2")).communicate(timeout=100)

    assert ["worker_crashed 3", "10"] == out.splitlines(), err


@pytest.mark.parametrize("look", ["ctx.check()", "pass"])
def test_a_cancel_ends_a_process_that_looks_and_one_that_does_not(program, look):
    main = """from penstock.library import attempt
attempt.GRACE_SEC = 0.2
with scheduler:
    job = forever.enqueue()
    while job.state != "RUNNING":
        time.sleep(0.01)
    time.sleep(0.5)
    job.cancel()
    try:
        job.result(60)
    except penstock.JobCanceled:
        print(job.state)"""

    out, err = program(app(main, PROCESS, look)).communicate(timeout=100)

    assert "CANCELED" in out, err


@pytest.mark.parametrize(("look", "stop_timeout"), [("ctx.check()", 3_600), ("pass", 2)])
def test_processes_yield_when_the_program_stops_and_are_ended_if_they_do_not(program, look, stop_timeout):
    """One that looks has an hour, and does not need it."""
    main = f"""with scheduler:
    job = forever.enqueue()
    while job.state != "RUNNING":
        time.sleep(0.01)
    time.sleep(1.0)
    scheduler._stop_timeout = {stop_timeout}
print(job.state, job.attempts()[-1].end)"""
    out, err = program(app(main, PROCESS, look)).communicate(timeout=100)

    assert "QUEUED graceful_shutdown" in out, err


def test_what_a_worker_process_cannot_find_is_refused_when_it_is_registered(make):
    scheduler = make(kind="process")

    with pytest.raises(ValueError, match="defined inside a function"):
        scheduler.job(name="nested")(lambda: 1)
