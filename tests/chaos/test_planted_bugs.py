"""
Every check of `penstock chaos` is awake: for each planted bug that breaks a promise, the trial says that this promise is broken.
`make mutants` finds the same bugs by a test that fails; here the answer itself is read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.chaos.test_kills import PROMISES
from tests.mutants.chaos_mutants import MUTANTS, ON_POSTGRES
from tests.mutants.planting import plant
from tests.mutants.run import copied_sources

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
BROKEN = {mutant.name: mutant.tests[0].partition("[")[2].removesuffix("]") for mutant in MUTANTS}


def test_each_promise_has_a_planted_bug():
    assert set(BROKEN.values()) == set(PROMISES)


@pytest.mark.skipif(SOAK == 1, reason="a trial for each planted bug: make soak runs it")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_promise_is_named(mutant, postgres_server):
    shared = (
        ["--database", postgres_server.dsn, "--workers", "3"]
        if mutant.tests[0].startswith(ON_POSTGRES)
        else []
    )
    with copied_sources() as (src, env):
        file = src / mutant.file
        file.write_text(plant(file.read_text("utf-8"), mutant), "utf-8")
        command = [sys.executable, "-m", "penstock.cli.main", "chaos", "--json", "--patience", "20"]
        done = subprocess.run(
            [*command, "--kills", "12", "--jobs", "24", "--seed", "2", *shared],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    answer = json.loads(done.stdout)
    broken = {one["promise"] for one in answer["promises"] if one["broken"]}
    assert PROMISES[BROKEN[mutant.name]] in broken
