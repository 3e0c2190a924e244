"""What `explain` suggests in a program can be called in the program."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from tests.waiting import until

import penstock
from penstock.core.jobs.states import JobState


@pytest.fixture
def program(tmp_path):
    """A program with one worker, which a job holds until the test ends, and the caps of one job for `capped`."""
    scheduler = penstock.Scheduler(
        tmp_path / "jobs.db", workers=2, capacity=40, max_per_job={"capped": 1}, max_concurrent=10
    )
    over = threading.Event()

    @scheduler.job
    def hold():
        over.wait(60)

    @scheduler.job
    def capped():
        over.wait(60)

    scheduler.hold, scheduler.capped = hold, capped
    with scheduler:
        yield scheduler
        over.set()


def running(function, **options):
    job = function.options(**options).enqueue()
    until(lambda: job.state is JobState.RUNNING)
    return job


def call(way_out, scheduler, job):
    return eval(way_out, {"scheduler": scheduler, "job": job})


def test_a_holder_of_the_units_is_canceled_by_the_call(program):
    holder = running(program.hold, cost=40)
    job = program.hold.options(cost=10).enqueue()
    explanation = job.explain()

    assert explanation.way_out == f'scheduler.get("{holder.id}").cancel()'
    assert "penstock " not in explanation.text
    call(explanation.way_out, program, job)
    until(lambda: holder.state is not JobState.RUNNING or holder.explain().reason == "canceled")


def test_an_earliest_start_is_removed_by_the_call(program):
    job = program.hold.options(not_before=timedelta(days=1)).enqueue()

    assert job.explain().way_out == "job.edit(not_before=None)"
    assert "`job.edit(not_before=None)` changes that." in job.explain().text
    call(job.explain().way_out, program, job)
    until(lambda: job.state is JobState.RUNNING)


def test_a_cap_is_an_argument_of_the_scheduler(program):
    running(program.capped)
    job = program.capped.enqueue()

    assert job.explain().way_out == 'Scheduler(..., max_per_job={"capped": 2})'


def test_a_program_that_only_submits_gets_commands_for_the_daemon_that_runs_its_jobs(program):
    other = penstock.Scheduler(program.location)
    job = other.job(name="hold")(lambda: None).options(not_before=timedelta(days=1)).enqueue()

    assert job.explain().way_out == f"penstock edit {job.id[-8:]} --not-before-none"
