"""The examples, run as they stand against a real daemon."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests import ROOT
from tests.daemon import environment
from tests.waiting import LONG


@pytest.fixture
def access(daemon):
    one = daemon()
    return one, environment(
        PENSTOCK_URL=one.url, PENSTOCK_TOKEN_FILE=str(one.data / "token"), STEP_SEC="0.05"
    )


def run(env, *command):
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LONG, check=False, cwd=ROOT / "examples"
    )


def test_a_job_from_submit_to_done_with_curl_alone(access):
    one, env = access

    done = run(env, "sh", "addon.sh")

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "the job is DONE" in done.stdout
    [job] = one.client.jobs(addon_id="visuals").jobs
    kinds = [event.kind for event in one.client.events(job_id=job.job_id).events]
    assert ["SUBMITTED", "DISPATCHING", "RUNNING", "DONE"] == [
        k for k in kinds if k not in ("ADMITTED", "CHECKPOINT")
    ]
    assert (30, b'{"files":42}', 0.01) == (
        job.cost_units,
        bytes(one.client.job(job.job_id).result).replace(b" ", b""),
        job.spent,
    )


def test_a_wrong_token_ends_the_example_with_what_to_do(access, tmp_path):
    _, env = access
    (tmp_path / "token").write_text("pst_not_it")

    done = run({**env, "PENSTOCK_TOKEN_FILE": str(tmp_path / "token")}, "sh", "addon.sh")

    assert 0 != done.returncode
    assert '"code":"unauthorized"' in done.stdout + done.stderr


def test_an_addon_with_the_sdk(access):
    _, env = access

    done = run(env, sys.executable, "addon.py")

    assert 0 == done.returncode, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert 6 == sum(line.startswith("thumbnail DONE") for line in lines)
    assert 'describe DONE {"pages":3,"resumed_at":0} $0.006' in lines
