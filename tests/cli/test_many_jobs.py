"""Several jobs at once: by name, by filter, again; and `--json` in every case."""

from __future__ import annotations

import json

import pytest

DONE, USAGE, NOT_FOUND, REFUSED, IN_THE_WAY, INTERRUPTED = 0, 2, 4, 5, 75, 130


@pytest.fixture
def held(shell):
    """Jobs that do not start: their addon is paused."""
    shell("pause", "--create", "held")
    yield lambda *words: shell("submit", "--addon", "held", *words).stdout.strip()
    shell("cancel", "--addon", "held", "--yes")


def test_every_job_of_a_cancel_is_tried_and_reported_whatever_happens_to_another(shell, held):
    first, second = held("true"), held("true")

    done = shell("cancel", first, "0000ffff", second)

    assert done.returncode == NOT_FOUND
    assert [line.split() for line in done.stdout.splitlines()] == [
        [first[-8:], "CANCELED"],
        [second[-8:], "CANCELED"],
    ]
    assert "0000ffff" in done.stderr


def test_json_is_json_also_when_something_fails(shell, held):
    job_id = held("true")

    many = shell("--json", "cancel", job_id, "0000ffff")
    one = shell("show", "0000ffff", "--json")
    usage = shell("ls", "--limit", "0", "--json")
    refused = shell("submit", "--json", "--not-before", "+2h", "--deadline", "+1h", "true")
    verb = shell("--json", "frobnicate")
    setting = shell("settings", "--set", "capcity.units=9", "--json")
    second = shell("up", "--json", "--port", "0")

    assert [set(each) >= {"job_id"} or "error" in each for each in json.loads(many.stdout)] == [True, True]
    assert json.loads(one.stdout)["error"]["exit_code"] == NOT_FOUND
    assert json.loads(usage.stdout)["error"]["exit_code"] == USAGE
    assert json.loads(refused.stdout)["error"]["problems"][0]["field"] == "earliest_start_at"
    assert json.loads(verb.stdout)["error"]["exit_code"] == USAGE
    assert json.loads(setting.stdout)["error"]["problems"][0]["key"] == "capcity.units"
    assert json.loads(second.stdout)["error"]["exit_code"] == IN_THE_WAY


def test_a_filter_cancels_after_a_count_and_a_yes(shell, held):
    jobs = [held("--tag", "old", "true") for _ in range(3)]
    other = held("true")

    no = shell("cancel", "--tag", "old", stdin="n\n")
    yes = shell("cancel", "--tag", "old", "--state", "queued", stdin="y\n")
    nothing = shell("cancel", "--tag", "old")

    assert "Cancel 3 jobs?" in no.stderr
    assert no.returncode == INTERRUPTED
    assert (yes.returncode, yes.stdout) == (DONE, "Canceled 3 jobs.\n")
    assert (nothing.returncode, nothing.stdout) == (DONE, "Canceled 0 jobs.\n")
    assert {shell.job(job_id)["state"] for job_id in jobs} == {"CANCELED"}
    assert shell.job(other)["state"] == "QUEUED"


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_a_filter_that_no_job_matches_is_told_so_and_changes_nothing(shell, verb):
    shell("submit", "--addon", "photos", "true")

    done, listed = shell(verb, "--addon", "phtos", "--yes"), shell("ls", "--addon", "phtos")
    answer = json.loads(shell(verb, "--addon", "phtos", "--yes", "--json").stdout)

    assert (done.returncode, done.stdout) == (listed.returncode, "") == (DONE, "")
    assert done.stderr == listed.stderr == "No matching jobs.\n"
    assert answer["changed"] == 0


def test_a_filter_retries_failed_jobs(shell):
    job_id = shell("submit", "--tag", "again", "false").stdout.strip()
    shell("wait", job_id)

    done = shell("retry", "--state", "failed", "--older", "0s", "--search", "false", "--yes")

    assert (done.returncode, done.stdout) == (DONE, "Retried 1 job.\n")
    shell("wait", job_id)
    assert shell.job(job_id)["attempts"] == 2


@pytest.mark.parametrize(("answer", "code"), [("", USAGE), ("n\n", INTERRUPTED)])
def test_without_a_yes_nothing_changes(shell, answer, code):
    job_id = shell("submit", "--not-before", "+1h", "--tag", "kept", "true").stdout.strip()

    done = shell("cancel", "--tag", "kept", stdin=answer)

    assert done.returncode == code
    assert ("--yes" if code == USAGE else "Nothing changed.") in done.stderr
    assert shell.job(job_id)["state"] == "QUEUED"
    shell("cancel", job_id)


@pytest.mark.parametrize("words", [("cancel",), ("retry",), ("cancel", "last", "--state", "queued")])
def test_jobs_are_either_named_or_filtered(shell, words):
    done = shell(*words)

    assert done.returncode == USAGE
    assert "name the jobs, or choose them" in done.stderr


def test_a_rerun_is_a_new_job_with_the_same_request(shell):
    first = shell("submit", "--priority", "80", "true").stdout.strip()
    shell("wait", first)

    second = shell("rerun", first).stdout.strip()

    shell("wait", second)
    assert second != first
    assert (shell.job(second)["payload"], shell.job(second)["priority"]) == (shell.job(first)["payload"], 80)


def test_the_first_word_that_is_no_option_begins_the_command(shell, tmp_path):
    done = shell("run", "--cwd", str(tmp_path), "sh", "-c", "echo $1 $2; pwd", "sh", "--json", "-j2")

    assert (done.returncode, done.stdout) == (DONE, f"--json -j2\n{tmp_path}\n")


def test_a_list_says_what_each_job_is_and_takes_a_text_to_search_for(shell, held):
    held("echo", "needle in a stack")
    held("true")

    listed = shell("ls", "--search", "NEEDLE", "--since", "1h").stdout

    assert "echo 'needle in a stack'" in listed
    assert len(listed.splitlines()) == 2
    assert "No matching jobs" in shell("ls", "--older", "1h").stderr


def test_an_addon_that_was_never_seen_is_not_paused_by_mistake(shell, held):
    held("true")

    done = shell("pause", "helt")

    assert done.returncode == NOT_FOUND
    assert "did you mean held?" in done.stderr
