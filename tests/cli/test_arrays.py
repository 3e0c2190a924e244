"""Arrays of commands, from the command line to the output of one index."""

from __future__ import annotations

import json
import sys

BLOCKED = 7


def test_an_array_of_commands_runs_once_for_each_index(shell):
    array_id = shell(
        "submit",
        "--array",
        "1-5%2",
        "--shell",
        "--",
        'echo "index $PENSTOCK_ARRAY_INDEX"; test $PENSTOCK_ARRAY_INDEX != 4',
    ).stdout.strip()

    waited = shell("array", "wait", array_id, "--timeout", "60s")

    assert waited.returncode == 1, waited.stderr
    assert "4 of 5 done, 0 live, 0 to come, 2 at once" in waited.stdout
    assert "1 failed: 4" in waited.stdout
    assert shell("logs", array_id, "--index", "3").stdout == "index 3\n"
    assert shell("logs", "last", "--index", "4").stdout == "index 4\n"
    assert json.loads(shell("array", "show", array_id[-8:], "--json").stdout or "{}")["failed_indices"] == "4"
    assert array_id[-6:] in shell("array", "ls").stdout
    assert (
        f"`penstock array retry {array_id[-8:]}` queues it again." in shell("explain", f"{array_id}_4").stdout
    )


def test_an_array_is_canceled_as_a_whole(shell):
    array_id = shell("submit", "--array", "1-100000%4", "--", "sleep", "60").stdout.strip()

    canceled = shell.answer("array", "cancel", array_id)
    waited = shell("array", "wait", array_id, "--timeout", "60s")

    assert canceled["canceled"] + canceled["live"] + canceled["failed"] == 100_000
    assert (waited.returncode, " canceled" in waited.stdout) == (6, True)
    assert shell("array", "retry", array_id).returncode == 5


def test_a_bad_array_is_refused_by_its_option(shell):
    for indices in ("9-1", "1-5%0", "1-1000000000", "", "banana"):
        refused = shell("submit", "--array", indices, "--", "true")

        assert (refused.returncode, refused.stdout) == (2, "")
        assert "--array" in refused.stderr
        assert "regex" not in refused.stderr
    missing = shell("array", "show", "nothing")
    assert (missing.returncode, missing.stderr) == (
        4,
        "penstock: there is no array with 'nothing' in its id\n",
    )


def test_an_array_has_no_parents_and_its_jobs_no_children(shell):
    array_id = shell("submit", "--array", "1-2", "--", "true").stdout.strip()
    shell("array", "wait", array_id, "--timeout", "60s")

    child = shell("submit", "--after", f"{array_id}_1", "--", "true")
    array = shell("submit", "--array", "1-2", "--after", "last", "--", "true")

    assert (child.returncode, child.stdout) == (2, "")
    assert f"{array_id}_1 is a job of an array, and no job can wait for those" in child.stderr
    assert (array.returncode, array.stdout) == (2, "")
    assert "--after cannot be given with --array: submit the array when" in array.stderr


def test_a_blocked_job_of_an_array_is_retried_alone(shell):
    spend = f"test -e again || {{ touch again; {sys.executable} -m penstock.cli.main job spend 2; }}"
    array_id = shell("submit", "--array", "1", "--cost-limit", "1", "--shell", spend).stdout.strip()
    job_id = f"{array_id}_1"

    assert shell("wait", job_id, "--timeout", "60s").returncode == BLOCKED
    assert f"`penstock retry {job_id[-8:]}` queues it again." in shell("explain", job_id).stdout
    assert shell("retry", job_id).returncode == 0
    assert shell("array", "wait", array_id, "--timeout", "60s").returncode == 0
