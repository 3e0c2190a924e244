"""A program that forks while it uses a scheduler: `multiprocessing`, `ProcessPoolExecutor`, a preloading web server."""

from __future__ import annotations

import os
import signal

import pytest
from tests.waiting import LONG

import penstock

PROGRAM = """
import multiprocessing, os, sys, time
import penstock

scheduler = penstock.Scheduler("jobs.db", stop_timeout=60)


def in_copy(work):
    # `multiprocessing` runs the exit handlers of threads in its processes, as a program does at its end.
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


@scheduler.job(run_when="any")
def forks() -> int | None:
    copy = in_copy(int)
    copy.join()
    return copy.exitcode


@scheduler.job(run_when="any")
def double(n: int) -> int:
    return 2 * n


def enqueue():
    try:
        print(double.enqueue(1).id, flush=True)
    except penstock.StoreFailed as failed:
        print(failed, flush=True)


"""


def output(process):
    out, errors = process.communicate(timeout=LONG)
    assert process.returncode == 0, errors
    return out.splitlines()


def test_the_end_of_a_forked_process_stops_no_scheduler_of_its_parent(program):
    lines = output(
        program(
            PROGRAM
            + "with scheduler:\n    job = forks.enqueue()\n    print(job.result(), len(job.attempts()))"
        )
    )

    assert lines == ["0 1"]


def test_a_forked_process_refuses_the_file_that_its_parent_has_open(program):
    lines = output(
        program(
            PROGRAM
            + """
first = double.enqueue(1)
in_copy(enqueue).join()
with scheduler:
    in_copy(enqueue).join()
    print(first.result(), scheduler.counts()["DONE"])
"""
        )
    )

    assert all("was in use when this process was forked" in line for line in lines[:2])
    assert lines[2:] == ["2 1"]


def test_a_forked_process_uses_a_file_that_its_parent_has_not_opened_or_has_closed(program):
    lines = output(
        program(
            PROGRAM
            + """
in_copy(enqueue).join()
double.enqueue(2)
scheduler.close()
in_copy(enqueue).join()
print(scheduler.counts()["QUEUED"])
"""
        )
    )

    assert [len(line) for line in lines] == [36, 36, 1]
    assert lines[2] == "3"


def test_a_forked_process_that_outlives_its_parent_keeps_no_lock(program, make):
    parent = program(
        PROGRAM
        + """
with scheduler:
    copy = in_copy(lambda: (print(os.getpid(), flush=True), time.sleep(3600)))
    time.sleep(3600)
"""
    )
    copy = int(parent.stdout.readline())
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait(LONG)

        with make() as scheduler:
            assert scheduler.job(name="double")(lambda n: 2 * n).enqueue(21).result(LONG) == 42
    finally:
        os.kill(copy, signal.SIGKILL)


def test_a_scheduler_keeps_its_right_to_run_jobs_when_all_lock_files_are_removed(make, tmp_path):
    first, second = make(), make()

    with first:
        for name in ("dispatch", "open", "write", "sockets"):
            (tmp_path / f"jobs.db-{name}").unlink()
        with pytest.raises(penstock.DispatcherHeld, match="only one process may"):
            second.start()
    second.start()
