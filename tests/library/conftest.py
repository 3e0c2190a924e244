from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import penstock

SOURCES = str(Path(penstock.__file__).parents[1])


@pytest.fixture
def make(tmp_path):
    """Schedulers on one file, closed at the end, with the books checked."""
    made = []

    def make(name="jobs.db", **options):
        options = {"workers": 4, "stop_timeout": 10} | options
        scheduler = penstock.Scheduler(tmp_path / name, **options)
        made.append(scheduler)
        return scheduler

    yield make
    problems = []
    for scheduler in made:
        problems += scheduler.store.audit()
        scheduler.close()
    assert problems == []


@pytest.fixture
def real(make):
    return make()


@pytest.fixture
def program(tmp_path):
    """Runs a program beside the test, in an interpreter of its own, in the test's folder."""
    started = []

    def run(source, *args, **more):
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(source))
        env = {**os.environ, "PYTHONPATH": SOURCES, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, str(file), *args],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
