"""
`penstock chaos` as a user runs it, on SQLite and on PostgreSQL: real schedulers, workers and jobs, killed and frozen. Each promise is a
test of its own, so that a planted bug (`tests/mutants/chaos_mutants.py`) must be found by the check of that promise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.daemon import environment

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
PROMISES = {
    "lost": "a job accepted is never lost",
    "undone": "a DONE job ran to its end",
    "two-live": "never two live attempts of one job",
    "fences": "every attempt has a higher fence than the one before",
    "moved-on": "every job ends in one state, and stays there",
    "overfull": "never more units in use than there are",
    "audit": "the trail has no gap and the ledger adds up",
}
EACH_PROMISE = pytest.mark.parametrize("promise", list(PROMISES))


def trial(kills, jobs, *options):
    command = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "chaos",
        "--json",
        "--kills",
        str(kills),
        "--jobs",
        str(jobs),
    ]
    done = subprocess.run(
        [*command, "--patience", "30", *options],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def broken(answer):
    return {one["promise"]: one["broken"] for one in answer["promises"]}


@pytest.fixture(scope="module")
def on_sqlite():
    """Each deed twice: the scheduler, a worker and a job are killed and frozen."""
    return trial(12 * SOAK, 24 * SOAK, "--workers", "3", "--seed", "2")


@pytest.fixture(scope="module")
def on_postgres(postgres_server):
    """Two schedulers on one database: when one is frozen, the other takes over its jobs."""
    return trial(6 * SOAK, 12 * SOAK, "--database", postgres_server.dsn, "--workers", "3", "--seed", "2")


@pytest.mark.long
@EACH_PROMISE
def test_a_promise_holds(on_sqlite, promise):
    assert broken(on_sqlite)[PROMISES[promise]] == []


@pytest.mark.long
@EACH_PROMISE
def test_a_promise_holds_on_postgres(on_postgres, promise):
    assert broken(on_postgres)[PROMISES[promise]] == []


@pytest.mark.parametrize("where", ["on_sqlite", "on_postgres"])
def test_a_trial_kills_and_freezes_everything_and_leaves_nothing(where, request):
    answer = request.getfixturevalue(where)

    deeds = {(deed["verb"], deed["target"]) for deed in answer["done"]}
    assert {
        (verb, target) for verb in ("killed", "froze") for target in ("the scheduler", "a worker", "a job")
    } <= deeds
    assert ("reported late", "an attempt") in deeds
    assert answer["trouble"] == ""
    assert (answer["holds"], answer["folder"], answer["schema"]) == (True, None, None)
