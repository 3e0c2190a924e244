"""Wrong, refused and missing arguments: the command names the field and the fix, and never prints a traceback."""

from __future__ import annotations

import json
import socket
from unittest import mock

import pytest

FAILED, USAGE, UNREACHABLE, NOT_FOUND, REFUSED, IN_THE_WAY = 1, 2, 3, 4, 5, 75


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("lss",), "Did you mean ls?"),
        (("start",), "Did you mean up?"),
        (("status",), "Did you mean ls?"),
        (
            ("run", "--timeout", "3", "--", "true"),
            "No such option '--timeout'. Did you mean '--max-runtime'?",
        ),
        (("submit", "--depends-on", "last", "--", "true"), "Did you mean '--after'?"),
        (("edit", "last", "--delay", "5s"), "Did you mean '--not-before'?"),
        (("cancel", "last", "--delay", "5s"), "No such option '--delay'."),
        (("frobnicate",), "`penstock --help` lists them"),
        (("help", "frobnicate"), "There is no verb 'frobnicate'"),
        (("submit",), "give a command, or --type"),
        (
            ("submit", "--cost", "200", "--", "true"),
            "'--cost': '200' is not a whole number from 1 to 100, for example 10",
        ),
        (
            ("batch", "open", "b", "--cost", "abc"),
            "'--cost': 'abc' is not a whole number from 1 to 100, for example 10",
        ),
        (
            ("logs", "last", "--attempt", "x"),
            "'--attempt': 'x' is not a whole number of 1 or more, for example 10",
        ),
        (("submit", "--cost-limit", "0", "--", "true"), "'0' is not a number above 0, for example 10"),
        (("simulate", "--seed", "x"), "'--seed': 'x' is not a whole number, for example 10"),
        (("submit", "--not-before", "soon", "--", "true"), "is not a time"),
        (("submit", "--max-runtime", "5 parsecs", "--", "true"), "is not a duration"),
        (("submit", "--not-before", "9999-12-31T23:59:59-14:00", "--", "true"), "is not a time"),
        (("submit", "--not-before", "+99999999999d", "--", "true"), "is not a time"),
        (("submit", "--max-runtime", "9" * 400, "--", "true"), "is not a duration"),
        (("submit", "--type", "t", "--payload", "{"), "is not JSON"),
        (("submit", "--payload", "{}", "--", "true"), "--payload is for a job with --type"),
        (("submit", "--array", "1-3", "--type", "t", "--env", "A=1"), "--env, --shell and --cwd are for"),
        (("edit", "last"), "nothing to change"),
        (("token", "make", "x"), "give --scope"),
        (("ls", "--addon", "a b"), "--addon must be 1..128 characters"),
        (("submit", "--key", "", "--", "true"), "--key must not be empty"),
        (("submit", "--max-runtime", "0", "--", "true"), "--max-runtime must be at least 1"),
        (("addons", "--weight", "5"), "needs an ADDON"),
        (("up", "--set", "capcity.units=9"), "capacity"),
        (("submit", "--priority", "101", "--", "true"), "write 1..100, or low, normal, high, urgent"),
        (("submit", "--type", "t", "--payload", "@nowhere"), "--payload @nowhere: No such file"),
        (("token", "make", "x", "--scope", "everything"), "jobs:read"),
        (("--url", "ftp://example.org", "ls"), "--url: 'ftp://example.org' must be http://host:port"),
        (("top",), "needs a terminal"),
    ],
)
def test_a_wrong_command_line_names_what_is_wrong_and_exits_with_two(shell, words, says):
    done = shell(*words)

    assert done.returncode == USAGE, done.stderr
    assert says in done.stderr


def test_what_the_scheduler_refuses_names_the_field_and_nothing_that_is_not_to_be_seen_here(shell):
    done = shell("submit", "--not-before", "+2h", "--deadline", "+1h", "--", "true")

    assert done.returncode == USAGE
    assert done.stderr == "penstock: --not-before must lie before --deadline\n"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("submit", "--tag", "caf\udce9", "--", "true"), "--tag"),
        (("submit", "--key", "caf\udce9", "--", "true"), "--key"),
        (("submit", "--", "true", "caf\udce9"), "CMD"),
        (("submit", "--type", "t", "--payload", "[NaN]"), "NaN"),
    ],
)
def test_an_argument_that_is_not_utf8_is_refused_by_its_field_and_never_with_a_traceback(shell, words, field):
    done = shell(*words)

    assert done.returncode in (USAGE, REFUSED)
    assert field in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [("show", "caf\udce9"), ("ls", "--tag", "caf\udce9"), ("logs", "caf\udce9" * 9)]
)
def test_what_is_looked_for_by_words_that_are_not_utf8_is_not_there(shell, words):
    done = shell(*words)

    assert done.returncode in (USAGE, NOT_FOUND, REFUSED)
    assert "Traceback" not in done.stderr


def test_a_move_that_the_state_does_not_allow_is_refused_in_words(shell):
    job_id = shell.submit("true")
    shell("wait", job_id)
    done = shell("cancel", job_id)

    assert done.returncode == REFUSED
    assert done.stderr == "penstock: a DONE job cannot be canceled; that state is final\n"


def test_a_retry_of_a_final_job_names_the_verb_that_runs_it_again(shell):
    job_id = shell.submit("true")
    shell("wait", job_id)
    done = shell("retry", job_id)

    assert done.returncode == REFUSED
    assert "`penstock rerun JOB` submits a new job with the same request." in done.stderr


def test_a_command_that_cannot_be_started_says_why(shell):
    done = shell("run", "--", "no-such-command")

    assert (done.returncode, done.stdout) == (FAILED, "")
    assert "cannot start 'no-such-command': No such file or directory" in done.stderr
    assert "cannot start 'no-such-command'" in shell("explain", "last").stdout


@pytest.mark.parametrize(
    ("argument", "why"),
    [("zzzz", "ids consist of 0-9, a-f"), ("ab", "four characters"), ("ffffffff", "no job with")],
)
def test_what_names_no_job_says_why_not(shell, argument, why):
    done = shell("show", argument)

    assert done.returncode == NOT_FOUND
    assert why in done.stderr


def test_a_token_file_that_is_not_there_is_named(shell):
    url = json.loads((shell.folder / "daemon.json").read_text())["url"]
    with mock.patch.dict(shell.env, PENSTOCK_URL=url, PENSTOCK_TOKEN_FILE="/no/such/token"):
        done = shell("ls")

    assert done.returncode == REFUSED
    assert "PENSTOCK_TOKEN_FILE names /no/such/token, which does not exist" in done.stderr


def test_without_a_scheduler_every_verb_says_how_to_start_one(alone):
    done = alone("ls")

    assert done.returncode == UNREACHABLE
    assert "penstock up" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_another_has_is_found_by_doctor_and_by_up(alone):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        alone.env["PENSTOCK_SERVER_LISTEN"] = f"127.0.0.1:{port}"
        report, started = alone("doctor"), alone("up")
    free = alone("doctor")

    assert (report.returncode, started.returncode) == (FAILED, IN_THE_WAY)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in report.stdout
    assert "penstock up --port 0" in report.stdout
    assert "penstock up --port 0" in started.stderr
    assert f"127.0.0.1:{port} is free" in free.stdout


def test_a_data_directory_that_is_a_file_is_named_with_the_option_that_names_another(alone, tmp_path):
    place = tmp_path / "data"
    place.write_text("")
    done = alone("up", "--port", "0", "--data-dir", str(place))

    assert done.returncode == IN_THE_WAY
    assert f"{place}: File exists; --data-dir names another directory" in done.stderr


def test_settings_that_are_all_at_their_defaults_are_said_to_be(alone):
    alone.env = {name: value for name, value in alone.env.items() if not name.startswith("PENSTOCK_")}

    assert alone("settings", "--changed").stdout == "Every setting has its default.\n"


def test_a_file_that_cannot_be_used_is_named_without_a_traceback(shell, tmp_path):
    done = shell("db", "backup", str(tmp_path / "no" / "such" / "folder" / "copy.db"))

    assert done.returncode in (FAILED, REFUSED)
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("penstock: ")


def test_an_addon_that_is_not_there_is_named(shell):
    done = shell("addons", "nobody")

    assert (done.returncode, done.stderr) == (NOT_FOUND, "penstock: there is no addon nobody\n")


def test_help_is_a_word_beside_the_option_for_json(shell):
    assert shell("--json", "help", "ls").stdout == shell("ls", "--help").stdout


def test_a_backup_that_cannot_be_written_names_its_own_file(shell, tmp_path):
    target = tmp_path / "missing" / "backup.db"

    done = shell("db", "backup", str(target))

    assert done.returncode == REFUSED
    assert done.stderr.startswith(f"penstock: {target} cannot be opened: its folder must exist")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("batch", "show", "été"), "there is no batch 'été'"),
        (("batch", "close", "a b"), "there is no batch 'a b'"),
        (("schedule", "show", "a/run"), "there is no schedule 'a/run'"),
        (("schedule", "rm", "../x"), "there is no schedule '../x'"),
        (("array", "show", "x" * 36), "there is no array xxx"),
    ],
)
def test_a_name_that_nothing_can_have_is_not_found(shell, words, says):
    done = shell(*words)

    assert done.returncode == NOT_FOUND
    assert says in done.stderr
