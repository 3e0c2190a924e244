"""Odd ends of functions and commands in the runner: each lands in a stated state, and its neighbours notice nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.core.jobs.types import EndReason
from penstock.runner.payload import Functions
from penstock.stores.postgres.store import PostgresStore
from tests.poison import NOT_FINITE, POISONS, STATES, STORED

from .plant import HERE

ROOT = str(Path(__file__).parents[2])
SAYS = f"{sys.executable} -m penstock.runner.job"


@pytest.fixture(params=["sqlite", "postgres"])
def store(request):
    """None: the file that a runner of these tests has by itself."""
    if request.param == "sqlite":
        return None
    place = request.getfixturevalue("postgres")
    return PostgresStore(place.dsn, schema=place.schema)


def test_functions(store, plants):
    names = [*POISONS, "leave_at_once", "neighbour"]
    plant = plants(
        functions=Functions(paths=[f"tests.poison:{name}" for name in names]),
        path=(str(HERE), ROOT),
        store=store,
    )
    jobs, beside = {}, {}
    for n, name in enumerate([*POISONS, "leave_at_once"]):
        jobs[name] = plant.submit("function", {"function": f"tests.poison:{name}"})
        beside[n + 1] = plant.submit("function", {"function": "tests.poison:neighbour", "args": [n]})

    ended = {name: plant.settled(job_id, 60) for name, job_id in jobs.items()}

    assert list(beside) == [json.loads(plant.settled(job_id, 60).result) for job_id in beside.values()]
    ends = {attempt.end for job_id in beside.values() for attempt in plant.store.attempts(job_id)}
    assert ends <= {
        EndReason.COMPLETED,
        EndReason.RELEASED,
    }  # a call that waits too long for a worker goes back to the queue
    states = {name: plant.state(job_id) for name, job_id in jobs.items()}
    assert "FAILED" == states.pop("leave_at_once")
    assert STATES == states
    for name, words in NOT_FINITE.items():
        assert words in ended[name].error
    assert STORED == {name: json.loads(ended[name].result) for name in STORED}


def test_commands(store, plants):
    plant = plants(store=store)
    commands = {
        "FAILED": ["printf 'caf\\351\\000' >&2; exit 1", "printf '\\377\\376' >&2; kill -9 $$", "exit 255"],
        "DONE": ["printf '\\351\\000'", "head -c 3000000 /dev/zero", "true"],
    }

    jobs = {
        script: plant.submit("shell", {"script": script})
        for scripts in commands.values()
        for script in scripts
    }

    for state, scripts in commands.items():
        for script in scripts:
            plant.settled(jobs[script], 60)
            assert state == plant.state(jobs[script]), script
    assert "caf\ufffd\u2400" in plant.last(jobs[commands["FAILED"][0]]).error


def test_what_a_command_says_in_latin_1_is_kept_with_a_sign_in_the_place_of_each_bad_byte(store, plants):
    plant = plants(store=store)
    script = f"""
        {SAYS} log "$(printf 'caf\\351')" &&
        {SAYS} checkpoint "$(printf '"caf\\351"')" &&
        {SAYS} progress 0.5
    """

    job = plant.submit("shell", {"script": script, "env": {"PYTHONPATH": f"{ROOT}/src"}})

    assert plant.settled(job, 60).error is None
    assert ("DONE", "caf\ufffd") == (plant.state(job), plant.output(job)["log"].strip())
    assert '"caf\ufffd"' == plant.store.checkpoint(job)


def test_a_checkpoint_that_is_no_json_number_is_refused(plant):
    job = plant.submit(
        "shell", {"script": f"{SAYS} checkpoint '[NaN]'", "env": {"PYTHONPATH": f"{ROOT}/src"}}
    )

    assert "it holds NaN: JSON has no NaN and no infinity" in plant.settled(job, 60).error
