"""The command as a user types it, against a daemon that runs."""

from __future__ import annotations

import getpass
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from datetime import datetime

import click
import pytest
from tests import ROOT
from tests.waiting import until

from penstock.cli import main as cli_main
from penstock.cli.examples import EXAMPLES
from penstock.cli.main import VERBS, cli
from penstock.cli.session import CliSession
from penstock.client.client import Client

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))

DONE, FAILED, USAGE, NOT_FOUND, REFUSED, CANCELED, BLOCKED, TIMEOUT = 0, 1, 2, 4, 5, 6, 7, 124


def test_a_command_runs_and_its_output_and_exit_code_come_back(shell):
    done = shell("run", "--", "sh", "-c", "echo out; echo err >&2; exit 3")

    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_a_command_that_went_well_exits_with_zero_and_starts_where_the_user_stands(shell):
    done = shell("run", "--env", "GREETING=hello", "--", "sh", "-c", 'echo "$GREETING from $PWD"')

    assert (done.returncode, done.stdout) == (0, f"hello from {shell.folder}\n")


def test_a_command_that_a_signal_ended_is_told_as_a_shell_tells_it_when_no_try_is_left(alone):
    alone.up("--set", "retry.crash=0s")

    assert alone("run", "--shell", "--", "kill -USR1 $$").returncode == 128 + signal.SIGUSR1
    assert alone.answer("show", "last")["attempts"] == 2


def test_every_exit_code_that_help_names_is_in_the_documents():
    named, documented = (
        re.findall(r"(?:^| {4,})(\d+)  ", cli_main.__doc__, re.MULTILINE),
        (ROOT / "docs/cli.md").read_text(),
    )

    assert len(named) >= 10
    assert [code for code in named if f"| {code} | " not in documented] == []


def test_a_shell_line_is_asked_for(shell):
    assert shell("run", "--shell", "--", "echo one | tr a-z A-Z").stdout == "ONE\n"


def test_submit_prints_the_id_alone(shell):
    done = shell("submit", "--", "true")

    assert re.fullmatch(r"[0-9a-f-]{36}\n", done.stdout)
    assert shell("wait", done.stdout.strip()).returncode == DONE


def test_a_job_is_named_by_any_part_of_its_id_and_by_last(shell):
    job_id = shell.submit("true")

    assert shell.answer("show", job_id[-8:])["job_id"] == job_id
    assert shell.answer("show", "last")["job_id"] == job_id


def test_a_part_that_fits_several_jobs_is_asked_for_more_of(shell):
    first, second = shell.submit("true"), shell.submit("true")
    done = shell("show", first[:8])
    short = shell("show", second[:2])

    assert done.returncode == NOT_FOUND
    assert "give more of the id" in done.stderr
    assert "four characters" in short.stderr


def test_cancel_and_wait_tell_how_a_job_ended(shell):
    job_id = shell.submit("sleep", "60")
    shell.until("RUNNING", job_id)
    canceled = shell("cancel", job_id)

    assert canceled.returncode == DONE
    assert shell("wait", job_id).returncode == CANCELED


def test_a_canceled_job_can_be_canceled_again(shell):
    job_id = shell("submit", "--not-before", "+3h", "--", "true").stdout.strip()
    shell("cancel", job_id)
    again = shell("cancel", job_id)

    assert (again.returncode, again.stderr) == (DONE, "")
    assert shell.answer("show", job_id)["end"] == "canceled"


def test_a_cancel_while_the_runtime_limit_stops_a_command_is_the_end_of_the_job(shell, tmp_path):
    runs, go = tmp_path / "runs", tmp_path / "go"
    script = f"trap '' TERM; echo run >> {runs}; until [ -e {go} ]; do sleep 0.1; done"
    job_id = shell("submit", "--max-runtime", "1", "--", "sh", "-c", script).stdout.strip()
    until(lambda: "max_runtime_exceeded" in shell("events", "--job", job_id, "--json").stdout)
    canceled = shell("cancel", job_id)
    go.touch()

    assert canceled.returncode == DONE
    assert shell("wait", job_id).returncode == CANCELED
    assert runs.read_text() == "run\n"


def test_show_names_the_process_that_runs_a_job(shell):
    job_id = shell.submit("sh", "-c", "echo $$; exec sleep 60")
    until(lambda: shell.answer("show", job_id)["pid"] is not None)
    pid, shown = shell.answer("show", job_id)["pid"], shell("show", job_id).stdout
    printed = shell("logs", job_id).stdout.strip()
    shell("cancel", job_id)

    assert str(pid) == printed
    assert f"pid  {pid}" in shown


def test_wait_gives_up_with_a_code_of_its_own(shell):
    job_id = shell.submit("sleep", "60")
    done = shell("wait", "--timeout", "300ms", job_id)
    shell("cancel", job_id)

    assert done.returncode == TIMEOUT
    assert "is still" in done.stderr


def test_a_failed_job_can_be_retried_and_an_illegal_move_changes_nothing(shell):
    job_id = shell.submit("false")
    failed = shell("wait", job_id)
    retried = shell("retry", job_id)
    shell("wait", job_id)
    done_id = shell.submit("true")
    shell("wait", done_id)
    refused = shell("retry", done_id)

    assert (failed.returncode, retried.returncode) == (FAILED, DONE)
    assert refused.returncode == REFUSED
    assert shell.state(done_id) == "DONE"


def test_an_edit_and_an_explanation_of_a_job_that_waits(shell):
    job_id = shell("submit", "--not-before", "+1h", "--priority", "low", "--", "true").stdout.strip()
    shell("edit", job_id, "--priority", "high")
    answer = shell("explain", job_id).stdout
    shell("cancel", job_id)

    assert shell.answer("show", job_id)["priority"] == 75
    assert answer.strip()


def test_an_edit_sets_and_removes_times(shell):
    job_id = shell("submit", "--not-before", "+1h", "--", "true").stdout.strip()
    shell("edit", job_id, "--not-before", "+2h", "--deadline", "+3h")
    both = shell.answer("show", job_id)
    shell("edit", job_id, "--deadline-none")
    one = shell.answer("show", job_id)
    shell("cancel", job_id)

    assert both["earliest_start_at"] < both["deadline_at"]
    assert (one["earliest_start_at"], one["deadline_at"]) == (both["earliest_start_at"], None)


def test_logs_show_what_was_printed_and_follow_what_is_still_to_come(shell):
    job_id = shell.submit("sh", "-c", "echo one; sleep 0.5; echo two")
    followed = shell("logs", "-f", job_id)

    assert followed.stdout == "one\ntwo\n"
    assert shell("logs", job_id).stdout == "one\ntwo\n"


def test_cancel_now_does_not_wait_for_a_command_that_will_not_stop(shell):
    job_id = shell.submit("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    while not shell("logs", job_id).stdout:
        shell.until("RUNNING", job_id)
    shell("cancel", "--now", job_id)
    shell.until("CANCELED", job_id)
    lines = map(json.loads, shell("events", "--job", job_id, "--json").stdout.splitlines())
    signals = {e["reason"]: datetime.fromisoformat(e["at"]) for e in lines if e["kind"] == "SIGNALED"}

    assert (signals["kill"] - signals["term"]).total_seconds() < 1  # five without it


def test_a_job_for_an_addon_waits_for_its_worker(shell):
    done = shell("submit", "--type", "index", "--addon", "photos", "--payload", '{"path": "/data"}')
    answer = shell.answer("show", done.stdout.strip())
    shell("cancel", done.stdout.strip())

    assert (answer["job_type"], answer["addon_id"], answer["payload"]) == (
        "index",
        "photos",
        {"path": "/data"},
    )


def test_a_job_asks_for_a_label_that_no_host_has_and_is_told_so(shell):
    job_id = shell("submit", "--label", "gpu", "--label", "large", "-t", "t", "--addon", "a").stdout.strip()

    assert "No running host has the labels gpu and large" in shell("explain", job_id).stdout
    assert "gpu, large" in shell("show", job_id).stdout


def test_a_command_on_a_busy_machine_says_why_it_waits_and_what_would_start_it(alone, monkeypatch):
    """
    The application's signal has the highest score that there is, so the state does not depend on what else the
    machine does. Only a disk that is as busy may be named in its place.
    """
    busy = {
        "capacity.units": "auto",
        "capacity.curve": "[[10, 1]]",
        "quiet.needed": "error_rate",
        "quiet.busy": "10",
        "quiet.fresh_for": "1h",
    }
    alone.up(*(word for name, value in busy.items() for word in ("--set", f"{name}={value}")))
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(alone.folder))
    with Client() as client:
        client.signals("shop", error_rate=0.25)
    waiting = subprocess.Popen(
        [*PENSTOCK, "run", "--", "echo", "hello"],
        env=alone.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = waiting.stderr.readline()

    assert "The machine is busy" in line
    assert re.search("from (error_rate of shop|io_pressure|memory_pressure)", line)
    assert re.search("`penstock edit [0-9a-f]{8} --when any` changes that", line)
    assert alone("run", "--when", "any", "--", "echo", "hello").stdout == "hello\n"
    assert "the machine is busy; waits for NORMAL" in alone("ls", "-s", "queued").stdout
    way_out = re.search(r"`penstock (edit [^`]*)` changes that", line)[1]
    assert alone(*way_out.split()).returncode == 0
    assert waiting.communicate(timeout=60)[0] == "hello\n"
    assert alone("capacity").stdout.startswith("BUSY for ")


def test_a_job_that_must_not_be_preempted_says_so(shell):
    job_id = shell("submit", "--no-preempt", "-t", "t", "--addon", "a").stdout.strip()
    other = shell("submit", "-t", "t", "--addon", "a").stdout.strip()

    assert [False, True] == [shell.answer("show", each)["preemptible"] for each in (job_id, other)]
    assert "preemptible  no" in shell("show", job_id).stdout
    assert shell("run", "--no-preempt", "--", "echo", "hello").stdout == "hello\n"
    assert shell.answer("show", "last")["preemptible"] is False


def test_a_job_runs_after_another_and_is_canceled_with_it(shell):
    parent = shell("submit", "-t", "t", "--addon", "a").stdout.strip()
    child = shell("submit", "--after", "last", "--", "true").stdout.strip()
    clean_up = shell(
        "submit", "--after", f"{parent[-8:]}:done", "--after", child + ":done", "--", "true"
    ).stdout.strip()

    assert shell.answer("show", child)["after"] == [f"{parent}:ok"]
    assert f"It waits for job {parent[-8:]} (" in shell("explain", child).stdout
    assert "(waits for 2)" in shell("show", clean_up).stdout
    assert [job["why"] for job in shell.answer("ls", "-n", "2")["jobs"]] == [
        "waits for 2 other jobs",
        "waits for another job",
    ]
    shell("cancel", parent)
    shell("wait", clean_up)

    assert shell.answer("show", child)["end"] == "dependency_unmet"
    assert shell.answer("show", clean_up)["state"] == "DONE"
    wrong = shell("submit", "--after", f"{parent}:ended", "--", "true")
    assert (wrong.returncode, "ok, done, failed" in wrong.stderr) == (2, True)
    assert shell("submit", "--after", "zzzz", "--", "true").returncode != 0


def test_at_its_cost_limit_a_command_is_stopped_and_a_retry_grants_as_much_again(shell):
    script = (
        f"[ -e again ] && exit; touch again; '{sys.executable}' -m penstock.runner.job spend 2.5; sleep 60"
    )
    answer = shell("submit", "--cost-limit", "2", "--max-active", "1h", "--shell", "--", script)
    job_id = answer.stdout.strip()
    waited = shell("wait", job_id)
    shown = shell.answer("show", job_id)
    retried = shell("retry", job_id)

    shell.until("DONE", job_id)
    assert (2, 3_600, 2.5) == (shown["cost_limit"], shown["max_active_sec"], shown["spent"])
    assert (waited.returncode, retried.returncode) == (BLOCKED, DONE)


def test_a_key_makes_two_submits_one_job(shell):
    first, second = (shell("submit", "--key", "nightly", "--", "true") for _ in range(2))

    assert first.stdout == second.stdout
    assert "exists already" in second.stderr


def test_pause_keeps_and_resume_lets_go(shell):
    shell("pause", "--create", "slow")
    job_id = shell("submit", "--addon", "slow", "--", "true").stdout.strip()
    why = shell("explain", job_id).stdout
    shell("resume", "slow")

    assert "paused" in why
    assert shell("wait", job_id).returncode == DONE


@pytest.mark.parametrize("verb", ["ls", "capacity", "addons", "settings", "events"])
def test_every_listing_is_text_and_json(shell, verb):
    shell.submit("true")
    text = shell(verb)

    assert text.returncode == DONE
    assert text.stdout
    assert "\x1b" not in text.stdout  # no color where it is piped
    assert shell(verb, "--json").stdout.lstrip()[0] in "{["


def test_a_table_in_a_pipe_has_its_numbers_below_each_other_and_no_blanks_at_the_ends(shell):
    for cost in ("5", "40"):
        shell("submit", "--cost", cost, "--not-before", "+3h", "--", "true")
    listed = shell("ls", "-n", "2").stdout
    head, *rows = listed.splitlines()
    end = head.index("units") + len("units")

    assert [row[:end].split()[-1] for row in rows] == ["40", "5"]
    assert all(row[:end] == row[:end].rstrip() for row in rows)
    assert "starts in about 3 h at the earliest" in rows[0]
    assert listed == "".join(f"{line.rstrip()}\n" for line in listed.splitlines())


def test_output_as_json_is_one_document_and_a_line_for_each_piece_while_it_is_followed(shell):
    job_id = shell.submit("sh", "-c", "echo one; echo two >&2")
    followed = shell("logs", "-f", job_id, "--json").stdout.splitlines()
    answer = shell.answer("logs", job_id)

    assert {(p["stream"], p["text"]) for p in answer["pieces"]} == {("stdout", "one\n"), ("stderr", "two\n")}
    assert answer["over"]
    assert [json.loads(line) for line in followed] == answer["pieces"]


def test_a_run_as_json_is_the_job_that_it_became_and_its_output_goes_aside(shell):
    done = shell("--json", "run", "--", "sh", "-c", "echo seen; exit 3")
    answer = json.loads(done.stdout)

    assert (done.returncode, done.stderr) == (3, "seen\n")
    assert (answer["state"], answer["result"]["exit_code"]) == ("FAILED", 3)


def test_what_top_shows_is_to_be_had_as_json(shell):
    job_id = shell("submit", "--not-before", "+3h", "--", "true").stdout.strip()
    answer = shell.answer("top")

    assert answer["stats"]["jobs"]["QUEUED"] >= 1
    assert job_id in {job["job_id"] for job in answer["jobs"]}


def test_capacity_says_that_nothing_starts_because_of_a_pause_or_a_drain(alone):
    alone.up()
    open_answer = alone.answer("capacity")
    alone("pause")
    alone("drain", "local")
    until(lambda: alone.answer("capacity")["draining"])
    text = alone("capacity").stdout
    answer = alone.answer("capacity")

    assert "Everything is paused: `penstock resume` ends that." in text
    assert "local starts no more jobs: `penstock undrain local` ends that." in text
    assert (open_answer["paused"], answer["paused"], answer["draining"]) == (False, True, True)


def test_a_list_without_jobs_offers_to_submit_one_unless_a_filter_hides_them(alone):
    alone.up()

    assert "`penstock submit echo hello` submits one" in alone("ls").stderr
    assert alone("ls", "--addon", "mail").stderr == "No matching jobs.\n"


def test_logs_without_output_say_why(shell):
    waiting = shell("submit", "--not-before", "+3h", "--", "true").stdout.strip()
    silent = shell.submit("true")
    shell("wait", silent)

    assert (
        shell("logs", waiting).stderr
        == f"{waiting[-8:]} has not been started yet: penstock logs -f {waiting[-8:]}\n"
    )
    assert shell("logs", silent).stderr == f"{silent[-8:]} printed nothing.\n"
    shell("cancel", waiting)
    assert shell("logs", waiting).stderr == f"{waiting[-8:]} was never started.\n"


def test_followed_events_begin_with_as_many_earlier_ones_as_asked_for(shell):
    job_id = shell("submit", "--not-before", "+3h", "--", "true").stdout.strip()
    shell("cancel", job_id)
    following = subprocess.Popen(
        [*PENSTOCK, "events", "-f", "-n", "2"], env=shell.env, stdout=subprocess.PIPE, text=True
    )
    lines = [following.stdout.readline() for _ in range(2)]
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=60)

    assert ["submitted", "canceled"] == [line.split()[1] for line in lines]
    assert all(job_id[-8:] in line for line in lines)
    assert shell("events", "-f", "--job", job_id, "-n", "2").returncode == USAGE


def test_a_fixed_capacity_has_not_been_quiet_since_1970(shell):
    assert shell("capacity").stdout.startswith("QUIET: the capacity is fixed by a setting")
    assert shell.answer("capacity")["quiet_sec"] is None


def test_what_an_addon_spent_stands_against_its_budget(alone):
    alone.up("--set", "addons.me.budget_day=0.5", "--set", "addons.me.budget_month=20")
    command = [sys.executable, "-m", "penstock.runner.job", "spend", "0.45"]
    alone("wait", alone("submit", "--addon", "me", "--", *command).stdout.strip())
    answer = {use["window"]: use for use in alone.answer("addons", "me")["addons"][0]["budgets"]}

    assert (answer["day"]["spent"], answer["day"]["limit"], answer["day"]["mark"]) == (0.45, 0.5, "warned")
    assert (answer["month"]["spent"], answer["month"]["limit"], answer["month"]["mark"]) == (0.45, 20, None)
    assert "0.45 of 0.50" in alone("addons").stdout


def test_the_jobs_that_ran_are_played_again_under_other_settings(shell):
    shell("wait", shell.submit("sleep", "0.2"))
    answer = shell.answer("simulate", "--set", "capacity.units=1")
    text = shell("simulate")

    assert answer["as_it_is"]["everything"]["refused"] == 0
    assert answer["tried"]["everything"]["refused"] == answer["tried"]["everything"]["jobs"] > 0
    # Jobs of other tests, for which no worker was seen, are stuck in the play.
    assert "All jobs ended after" in text.stdout or "The last job that ended did so after" in text.stdout
    assert "\x1b" not in text.stdout + text.stderr


def test_a_made_up_load_needs_no_scheduler_and_settings_are_checked_first(alone):
    nothing, made_up = alone("simulate"), alone("simulate", "--made-up", "--jobs", "50", "--hosts", "2")
    wrong = alone("simulate", "--made-up", "--set", "capacity.unitss=3")

    assert (nothing.returncode, made_up.returncode, wrong.returncode) == (FAILED, DONE, USAGE)
    assert "--from made-up" in nothing.stderr
    assert "addon0" in made_up.stdout
    assert "did you mean capacity.units?" in wrong.stderr


def test_a_sweep_compares_every_value_and_names_what_is_not_played(alone, tmp_path):
    sweep = (
        "--sweep",
        "capacity.units=40,90",
        "--set",
        "leases.ttl=10s",
        "--svg",
        str(tmp_path / "plays.svg"),
    )
    answer = alone.answer("simulate", "--from", "made-up", "--jobs", "60", *sweep)
    text = alone("simulate", "--from", "made-up", "--jobs", "60", "--plot", *sweep)

    names = [play["name"] for play in answer["plays"]]
    assert names == ["as it is", "leases.ttl=10s capacity.units=40", "leases.ttl=10s capacity.units=90"]
    assert [note for note in answer["not_played"] if note.startswith("leases.ttl is not played")]
    assert "leases.ttl is not played" in text.stdout
    assert "jobs in the queue, by hour" in text.stdout
    assert "<svg" in (tmp_path / "plays.svg").read_text()


def test_a_sweep_or_a_host_load_that_cannot_be_read_is_refused(alone, tmp_path):
    (tmp_path / "load").write_text("0 1\n60 eleven\n")
    sweep = alone("simulate", "--from", "made-up", "--sweep", "capacity.units")
    load = alone("simulate", "--from", "made-up", "--host-load", str(tmp_path / "load"))

    assert sweep.returncode == USAGE
    assert "KEY=VALUE,VALUE" in sweep.stderr
    assert load.returncode == FAILED
    assert "load:2: '60 eleven'" in load.stderr


def test_bench_measures_this_disk_and_leaves_nothing_on_it(alone, tmp_path_factory):
    disk = tmp_path_factory.mktemp("disk")
    answer = alone.answer("bench", "--jobs", "20", "--dir", str(disk))
    paces = {one["what"]: one["per_sec"] for one in answer["measured"]}

    assert len(paces) == 5
    assert all(pace > 0 for pace in paces.values())
    assert list(disk.iterdir()) == []


def test_chaos_says_what_it_did_and_that_every_promise_holds(alone):
    done = alone("chaos", "--kills", "1", "--jobs", "2", "--workers", "0")

    assert done.returncode == DONE, done.stdout
    assert done.stdout.startswith("2 jobs; ")
    assert "killed" in done.stdout or "froze" in done.stdout
    assert done.stdout.count("holds") == 7


def test_chaos_refuses_what_it_cannot_use_and_starts_nothing(alone):
    no_address = alone("chaos", "--database", "jobs.db")
    not_shared = alone("chaos", "--daemons", "2")

    assert (no_address.returncode, not_shared.returncode) == (USAGE, USAGE)
    assert "--database takes a postgresql:// address" in no_address.stderr
    assert "--database postgresql://..." in not_shared.stderr


def test_tokens_are_made_bound_and_revoked(shell):
    secret = shell("token", "make", "reader", "--scope", "jobs:read", "--addon", "photos").stdout.strip()
    url = next(line for line in shell("doctor").stdout.splitlines() if "settings: served on" in line)
    listed = shell("token", "ls").stdout
    token_id = secret.split("_")[1]

    assert re.search(r"127\.0\.0\.1", url)
    assert "reader" in listed
    assert secret not in listed
    assert shell("token", "revoke", token_id).returncode == DONE


def test_login_prints_a_link_that_opens_the_page(shell):
    link = shell("login").stdout.strip()

    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#code=[\w-]{20,}", link)
    assert link.partition("#")[0] in shell.greeting


def test_doctor_finds_a_database_that_is_well_and_a_token_that_others_can_read(shell):
    well = shell("doctor")
    token = shell.folder / "token"
    token.chmod(0o644)
    report = shell("doctor")
    token.chmod(0o600)

    assert well.returncode == DONE, well.stdout
    assert report.returncode == FAILED
    assert f"chmod 600 {token}" in report.stdout


def test_doctor_says_where_the_scheduler_listens_and_not_only_where_the_settings_would_have_it(shell):
    url = json.loads(shell("hosts", "--json").stdout)["hosts"][0]["url"]
    answers = next(line for line in shell("doctor").stdout.splitlines() if "answers" in line)

    assert answers.endswith(f"it listens on {url}")


def test_the_database_is_checked_and_backed_up_while_it_is_used(shell, tmp_path):
    checked, copied = shell("db", "check"), shell("db", "backup", str(tmp_path / "copy.db"))
    again = shell("db", "backup", str(tmp_path / "copy.db"))

    assert (checked.returncode, copied.returncode) == (DONE, DONE), checked.stderr + copied.stderr
    assert shell("db", "check", str(tmp_path / "copy.db")).returncode == DONE
    assert "exists already" in again.stderr


def test_a_backup_is_restored_when_the_scheduler_has_stopped(alone, tmp_path):
    alone.up()
    job_id = alone.submit("true")
    alone.until("DONE", job_id)
    alone("db", "backup", str(tmp_path / "copy.db"))
    later = alone.submit("true")
    refused = alone("db", "restore", str(tmp_path / "copy.db"))
    alone.down()
    restored = alone("db", "restore", str(tmp_path / "copy.db"))
    alone.up()

    assert "penstock stop" in refused.stderr
    assert (refused.returncode != DONE, restored.returncode) == (True, DONE), restored.stderr
    assert "before-restore" in restored.stdout
    assert (tmp_path / "copy.db").stat().st_mode & 0o077 == 0
    assert alone("show", job_id).returncode == DONE
    assert alone("show", later).returncode != DONE
    assert " restored " in (trail := alone("events").stdout)
    assert f" by user {getpass.getuser()}" in trail


def test_a_job_whose_daemon_was_killed_says_so_in_explain_and_in_every_list(alone):
    alone.up()
    job_id = alone.submit("sleep", "300")
    alone.until("RUNNING", job_id)
    alone.daemon.kill()
    alone.daemon.wait()
    alone.down()
    alone.up()
    alone.until("QUEUED", job_id)

    explained = alone("explain", job_id).stdout
    assert "Attempt 1 of 6 was cut off: the scheduler was killed or stopped unexpectedly." in explained
    assert "scheduler killed in attempt 1 of 6; next in " in alone("ls").stdout
    assert alone.job(job_id)["why"].startswith("scheduler killed in attempt 1 of 6; next in ")


def test_stop_ends_the_daemon_and_what_ran_goes_back_to_the_queue(alone):
    alone.up()
    job_id = alone.submit("sleep", "300")
    alone.until("RUNNING", job_id)
    stopped = alone("stop")
    code = alone.daemon.wait(10)
    alone.down()
    alone.up()
    alone.until("RUNNING", job_id)

    assert (stopped.returncode, code) == (DONE, 0)


def test_help_loads_nothing_that_it_only_names():
    code = (
        "import sys; from penstock.cli.main import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'textual', 'rich', 'msgspec', 'apsw', 'uvicorn', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30
    )

    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(alone, verb):
    done = alone(verb, "--help")

    assert done.returncode == 0, done.stderr
    assert f"Usage: penstock {verb}" in done.stdout


def test_help_is_a_word_as_well_as_an_option(alone):
    assert alone("help").stdout == alone("--help").stdout
    assert alone("help", "batch", "submit").stdout == alone("batch", "submit", "--help").stdout


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_the_examples_of_help_are_command_lines_that_their_verbs_accept(line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("lines.txt", "jobs-backup.db"):
        (tmp_path / name).write_text("")
    program, *words = shlex.split(line)
    command, context = cli, click.Context(cli, info_name=program, obj=CliSession())
    while isinstance(command, click.Group):
        command = command.get_command(context, words.pop(0))
        context = click.Context(command, context, info_name=command.name)

    with command.make_context(command.name, words, parent=context.parent) as accepted:
        assert accepted.command is command


def test_every_example_is_on_the_help_page_of_its_verb(alone):
    for path, lines in EXAMPLES.items():
        page = alone(*path.split(), "--help").stdout

        assert [line for line in lines if f"\n    {line}\n" not in page] == [], path


def test_output_that_nobody_reads_to_its_end_is_no_error(shell):
    for _ in range(3):
        shell.submit("true")
    line = f"{sys.executable} -m penstock.cli.main ls -n 500 | head -1"
    done = subprocess.run(
        ["/bin/sh", "-c", line], env=shell.env, capture_output=True, text=True, check=False, timeout=30
    )

    assert done.stdout.startswith("job")
    assert done.stderr == ""


def test_following_the_trail_tells_what_happens_as_it_happens(shell):
    child = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "events", "-f"],
        env=shell.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        # What happened before it listened is not told, and nobody tells when it listens.
        for _ in range(60):
            job_id = shell.submit("true")
            if select.select([child.stdout], [], [], 0.5)[0]:
                break
        lines = iter(child.stdout.readline, "")
        assert any(job_id[-8:] in line and "done" in line for line in lines)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


# Hosts


def test_a_host_is_listed_drained_and_undrained(shell):
    before = shell("hosts").stdout
    drained = shell("drain", "local").stdout
    listed = shell("hosts").stdout
    explained = shell("submit", "--", "true")
    undrained = shell("undrain", "local")

    assert "local (here)  alive" in before
    assert "penstock undrain local" in drained
    assert "alive, draining" in listed
    assert 0 == explained.returncode
    assert 0 == undrained.returncode
    assert 0 == shell("wait", "last", "--timeout", "30s").returncode


def test_a_host_that_nobody_knows_is_told_with_those_there_are(shell):
    done = shell("drain", "nowhere")

    assert NOT_FOUND == done.returncode
    assert "there is no host nowhere; the hosts are local" in done.stderr


def test_what_was_learned_about_job_types_is_shown(shell):
    code = "x = b'x' * 150_000_000"
    shell("run", "--addon", "learned", "--tag", "size:small", "--", sys.executable, "-c", code)

    def learned():
        types = shell.answer("stats", "--addon", "learned")["types"]
        return types if types and types[0]["memory_bytes"] else None

    types = until(learned, what="the learner")
    lines = shell("stats", "--addon", "learned").stdout.splitlines()

    assert [(one["job_type"], one["size"], one["attempts"]) for one in types] == [
        ("penstock.command", "", 1),
        ("penstock.command", "small", 1),
    ]
    assert 150_000_000 < types[0]["memory_bytes"] < 300_000_000
    assert lines[0].split()[:3] == ["addon", "type", "size"]
    assert lines[2].split()[:3] == ["learned", "penstock.command", "small"]
    assert shell("stats", "--addon", "unheard").stdout.startswith("Nothing was learned yet")


def test_a_batch_is_submitted_and_addressed_as_one(shell, tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("true\n# nothing\ntrue\nfalse\n")
    marks = {name: tmp_path / name for name in ("end", "failure")}

    answer = shell(
        *("batch", "submit", "nightly", str(lines), "--on-end", f"touch {marks['end']}"),
        *("--on-failure", f"touch {marks['failure']}"),
    )
    waited = shell("batch", "wait", "nightly")

    assert answer.stdout.startswith("3 jobs")
    assert waited.returncode == 1
    assert "3 of 3 ended" in waited.stdout
    assert "2 done, 1 failed" in waited.stdout
    until(lambda: all(mark.exists() for mark in marks.values()))
    assert shell.answer("batch", "show", "nightly")["total"] == 3
    assert shell("batch", "retry", "nightly").stdout == "1 job queued again\n"
    assert shell("batch", "wait", "nightly").returncode == 1
    assert shell("batch", "cancel", "nightly").stdout == "0 jobs canceled\n"
    for name in ("nightly", "nightly"):  # the same request again is another batch of that name
        assert "there is a batch nightly already" in shell("batch", "submit", name, str(lines)).stderr
    assert len(json.loads(shell("batch", "submit", "later", str(lines), "--json").stdout)["jobs"]) == 3
    assert [b["name"] for b in shell.answer("batch", "ls")][:2] == ["later", "nightly"]
    missing = shell("batch", "show", "other")
    assert (missing.returncode, missing.stderr) == (4, "penstock: there is no batch other\n")


def test_jobs_are_added_to_an_open_batch_and_its_callback_waits_for_the_close(shell, tmp_path):
    mark = tmp_path / "end"
    shell("batch", "open", "import", "--on-end", f"touch {mark}")
    added = shell("submit", "--batch", "import", "--", "true").stdout.strip()
    assert shell("wait", added).returncode == 0
    assert shell.answer("batch", "show", "import")["open"] is True
    child = shell("submit", "--after", "batch:import", "--", "true").stdout.strip()
    explained = shell("explain", child).stdout
    assert "batch import (open, 1 of 1 ended) to be DONE" in " ".join(explained.split())
    assert "penstock batch close import" in explained
    assert not mark.exists()
    ring = shell("submit", "--batch", "import", "--after", "batch:import", "--", "true")
    assert ring.returncode == 2
    assert "--after makes jobs of this submit wait for each other: #0 -> batch:import -> #0" in ring.stderr

    assert "DONE" in shell("batch", "close", "import").stdout
    assert shell("batch", "wait", "import").returncode == 0
    assert shell("wait", child).returncode == 0
    until(mark.exists)
    refused = shell("submit", "--batch", "import", "--", "true")
    assert (refused.returncode, "takes no more jobs" in refused.stderr) == (5, True)


def test_a_job_waits_for_an_array(shell):
    array_id = shell("submit", "--array", "1-3%1", "--", "true").stdout.strip()
    behind = shell("submit", "--after", "last:done", "--", "true").stdout.strip()
    assert shell.answer("show", behind)["after"] == [f"{array_id}:done"]
    child = shell("submit", "--after", f"{array_id[-8:]}:done", "--", "true").stdout.strip()
    assert shell.answer("show", child)["after"] == [f"{array_id}:done"]
    assert shell("wait", child).returncode == 0
    assert shell.answer("array", "show", array_id)["state"] == "DONE"


def test_bad_batches_are_refused_by_name_and_change_nothing(shell, tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("")
    before = (shell.answer("batch", "ls"), shell.answer("ls", "--limit", "1"))
    for words, said in (
        (("batch", "submit", "a b", str(empty)), "NAME must be 1..49 characters"),
        (("batch", "submit", "x" * 50, str(empty)), "NAME must be 1..49 characters"),
        (("batch", "open", "-x"), "-x"),
        (("submit", "--batch", "a b", "--", "true"), "--batch must be 1..49 characters"),
        (("submit", "--batch", "nosuch", "--", "true"), "there is no batch 'nosuch'"),
        (("submit", "--tag", "batch:a b", "--", "true"), "where NAME must be 1..49 characters"),
        (("submit", "--after", "batch:nosuch", "--", "true"), "there is no batch nosuch"),
        (("submit", "--after", "batch:nosuch:well", "--", "true"), "must be one of ok, done, failed"),
        (("submit", "--after", "batch:a b", "--", "true"), "the name of a batch must be"),
        (("submit", "--batch", "x", "--array", "1-2", "--", "true"), "--batch cannot be given with --array"),
        (("batch", "close", "nosuch"), "there is no batch nosuch"),
        (("submit", "--after", "import:done", "--", "true"), "a batch is named batch:import"),
    ):
        refused = shell(*words)
        assert refused.returncode != 0, words
        assert said in " ".join(refused.stderr.split()), (words, refused.stderr)
        assert "regex" not in refused.stderr
    assert (shell.answer("batch", "ls"), shell.answer("ls", "--limit", "1")) == before
