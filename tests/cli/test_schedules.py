"""`penstock schedule`: reads like crontab, prints the next five moments, and refuses without changing anything."""

from __future__ import annotations

import json
import re

import pytest
from tests.waiting import until

from penstock.cli.crontab import read_crontab, shell_payload

DONE, USAGE, NOT_FOUND, REFUSED = 0, 2, 4, 5


@pytest.fixture
def schedules(shell):
    def names():
        return [each["name"] for each in json.loads(shell("schedule", "ls", "--json").stdout)]

    yield names
    for name in names():
        shell("schedule", "rm", name)


def add(shell, name, *words):
    return shell("schedule", "add", name, *words)


def test_simulate_plays_a_schedule_and_tries_it_otherwise(shell, schedules):
    add(shell, "often", "--every", "1s", "--overlap", "queue", "--", "echo", "tick")
    until(lambda: json.loads(shell("schedule", "show", "often", "--json").stdout)["last"])
    shell("schedule", "pause", "often")
    answer = shell.answer("simulate", "--set", "schedules.often.every_sec=86400")
    text, wrong = shell("simulate"), shell("simulate", "--set", "schedules.seldom.cron=@daily")

    [as_it_is], [tried] = answer["as_it_is"]["schedules"], answer["tried"]["schedules"]
    assert (as_it_is["name"], tried["submitted"]) == ("often", 0)
    assert as_it_is["submitted"] >= 1
    assert not any("schedules.often" in note for note in answer["not_played"])
    assert re.search(r"schedule +submitted +skipped +missed\noften +\d", text.stdout)
    assert (wrong.returncode, "has no schedule 'seldom'; there are often" in wrong.stderr) == (USAGE, True)


def test_add_prints_the_next_five_moments(shell, schedules):
    done = add(
        shell, "report", "--cron", "0 6 * * mon-fri", "--zone", "Europe/Berlin", "--", "echo", "-n", "hi"
    )

    assert done.returncode == DONE, done.stderr
    first, *moments = done.stdout.splitlines()
    assert first == "Added report: 0 6 * * mon-fri in Europe/Berlin"
    assert len(moments) == 5
    for line in moments:
        assert re.fullmatch(r"  (Mon|Tue|Wed|Thu|Fri) \d{4}-\d\d-\d\d 06:00 \+0[12]00  in .*", line), line
    info = json.loads(shell("schedule", "show", "report", "--json").stdout)
    assert info["job"]["payload"] == {"argv": ["echo", "-n", "hi"], "cwd": str(shell.folder)}
    assert info["created_by"]


def test_a_schedule_runs_its_command_every_second_and_shows_its_jobs(shell, schedules):
    add(shell, "often", "--every", "1s", "--overlap", "queue", "--tag", "x", "--", "echo", "tick")

    def fired():
        last = json.loads(shell("schedule", "show", "often", "--json").stdout)["last"]
        return [each for each in last if each["state"] == "DONE"]

    until(lambda: len(fired()) >= 2)
    shell("schedule", "pause", "often")
    shown = shell("schedule", "show", "often").stdout
    listed = shell("schedule", "ls").stdout
    job_id = fired()[0]["job_id"]
    assert shell("logs", job_id).stdout.strip() == "tick"
    assert {"schedule:often", "x"} < set(shell.job(job_id)["tags"])
    assert "(paused)" in shown
    assert job_id[-8:] in shown
    assert "paused" in listed
    moments = [
        each["moment"] for each in json.loads(shell("schedule", "show", "often", "--json").stdout)["last"]
    ]
    assert len(moments) == len(set(moments))


def test_edit_pause_resume_run_and_rm(shell, schedules):
    add(shell, "nightly", "--cron", "@daily", "--zone", "UTC", "--", "true")

    assert " edited " not in shell("schedule", "show", "nightly").stdout
    edited = shell("schedule", "edit", "nightly", "--cron", "30 2 * * *", "--missed", "all")
    assert edited.stdout.startswith("Edited nightly: 30 2 * * * in UTC\n")
    moved = shell("schedule", "edit", "nightly", "--at", "2040-12-01 06:00", "--zone", "Europe/Berlin")
    assert "Sat 2040-12-01 06:00 +0100" in moved.stdout
    assert shell("schedule", "edit", "nightly", "--", "false").returncode == DONE
    assert " edited " in shell("schedule", "show", "nightly").stdout
    info = json.loads(shell("schedule", "show", "nightly", "--json").stdout)
    assert (info["job"]["payload"]["argv"], info["missed"], info["cron"]) == (["false"], "all", None)
    assert "Paused nightly" in shell("schedule", "pause", "nightly").stdout
    job_id = json.loads(shell("schedule", "run", "nightly", "--json").stdout)["job_id"]
    assert shell("wait", job_id).returncode == 1
    assert shell("schedule", "resume", "nightly").stdout.startswith("Resumed nightly")
    assert shell("schedule", "rm", "nightly").stdout == "Removed nightly.\n"
    assert shell("schedule", "rm", "nightly").returncode == NOT_FOUND
    assert schedules() == []
    trail = shell("events", "-n", "50").stdout
    for what in ("added", "edited", "paused", "run", "resumed", "removed"):
        assert f" {what} schedule nightly by " in trail


def test_an_edit_of_the_job_keeps_what_is_not_given(shell, schedules):
    options = (
        "-a",
        "photos",
        "-c",
        "3",
        "-p",
        "high",
        "--tag",
        "x",
        "--retry",
        "5",
        "--max-runtime",
        "60",
        "--no-preempt",
    )
    add(shell, "nightly", "--cron", "@daily", "--zone", "UTC", *options, "--", "true", "1")

    def job_after(*words):
        done = shell("schedule", "edit", "nightly", *words)
        assert done.returncode == DONE, done.stderr
        return json.loads(shell("schedule", "show", "nightly", "--json").stdout)["job"]

    before = json.loads(shell("schedule", "show", "nightly", "--json").stdout)["job"]
    cheaper = job_after("-c", "1", "--when", "any")
    assert before | {"cost_units": 1, "run_when": "any"} == cheaper
    other = job_after("--", "false")
    assert cheaper | {"payload": other["payload"]} == other
    assert ["false"] == other["payload"]["argv"]
    typed = job_after("-t", "resize", "--payload", '{"n": 1}', "-a", "movies")
    assert other | {"job_type": "resize", "payload": {"n": 1}, "addon_id": "movies"} == typed
    assert typed | {"payload": {"n": 2}} == job_after("--payload", '{"n": 2}')
    for words, said in (
        (("--env", "A=1"), "need the command"),
        (("-t", "t", "--", "true"), "give a command"),
        ((), "nothing to change"),
    ):
        refused = shell("schedule", "edit", "nightly", *words)
        assert (refused.returncode, said in refused.stderr) == (USAGE, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cron", "0 0 31 2 *", "--", "true"], "--cron never comes"),
        (["--cron", "61 * * * *", "--", "true"], "--cron has a wrong minute: write 0-59, *"),
        (["--cron", "@reboot", "--", "true"], "--cron must be five fields"),
        (["--cron", "@daily", "--zone", "Mars/Base", "--", "true"], "--zone must be a time zone"),
        (["--cron", "@daily", "--every", "5m", "--", "true"], "exactly one"),
        (["--every", "soon", "--", "true"], "not a duration"),
        (["--every", "0", "--", "true"], "--every"),
        (["--at", "tomorrow", "--", "true"], "--at 'tomorrow' is not a time"),
        (["--at", "2020-01-01 06:00", "--", "true"], "--at has passed"),
        (["--in-quietest-hour-before", "6 am", "--", "true"], "06:00"),
        (["--in-quietest-hour-before", "06:00", "--", "true"], "no recorded load"),
        (["--cron", "@daily", "--overlap", "maybe", "--", "true"], "--overlap"),
        (["--cron", "@daily", "--missed-limit", "0", "--", "true"], "--missed-limit"),
        (["--cron", "@daily", "--priority", "1000", "--", "true"], "priority"),
        (["--cron", "@daily", "--addon", "a b", "--", "true"], "--addon must be"),
        (["--cron", "@daily", "--tag", "batch:b", "--", "true"], "--tag cannot name a batch"),
        (["--cron", "@daily", "--payload", "{}", "--", "true"], "--payload is for a job with --type"),
        (["--cron", "@daily"], "give a command"),
        (["--", "true"], "say when"),
        (["--cron", "@daily", "--deadline", "+1h", "--", "true"], "--deadline"),
        (["--cron", "@daily", "--after", "last", "--", "true"], "--after"),
    ],
)
def test_what_is_no_schedule_is_refused_by_the_option_and_adds_nothing(shell, schedules, words, said):
    done = add(shell, "wrong", *words)

    assert done.returncode == USAGE, done
    assert said in done.stderr
    assert schedules() == []


def test_a_schedule_of_one_moment_shows_it_on_the_clocks_of_its_zone(shell):
    done = add(shell, "move", "--at", "2127-01-15 06:00", "--zone", "America/New_York", "--", "true")

    assert done.stdout.splitlines()[0] == "Added move: once, Wed 2127-01-15 06:00 in America/New_York"
    shell("schedule", "rm", "move")


def test_a_bad_name_and_a_name_that_is_taken_are_refused(shell, schedules):
    add(shell, "once", "--cron", "@daily", "--", "true")

    bad = add(shell, "a b", "--cron", "@daily", "--", "true")
    assert (bad.returncode, bad.stderr.split()[:3]) == (USAGE, ["penstock:", "NAME", "must"])
    again = add(shell, "once", "--cron", "@hourly", "--", "true")
    assert again.returncode == REFUSED
    assert again.stderr == "penstock: there is a schedule 'once' already: edit it, or remove it first\n"
    assert schedules() == ["once"]


CRONTAB = """\
# my jobs
SHELL=/bin/bash
MAILTO=me@example.org
PATH = "/usr/local/bin:/usr/bin:/bin"

0 6 * * mon-fri  /opt/report.sh --full > /dev/null 2>&1
CRON_TZ=Europe/Berlin
@daily  echo 100\\% done
"""


def test_import_takes_a_crontab_file(shell, schedules):
    (shell.folder / "crontab").write_text(CRONTAB)

    dry = shell("schedule", "import", "--dry-run", "crontab")
    assert schedules() == []
    assert len(dry.stdout.splitlines()) == 2
    planned = json.loads(shell("schedule", "import", "--dry-run", "crontab", "--json").stdout)
    assert [f"{plan['name']}:" for plan in planned] == [line.split()[0] for line in dry.stdout.splitlines()]
    done = shell("schedule", "import", "crontab", "--zone", "America/New_York")

    assert done.returncode == DONE, done.stderr
    assert "line 3: MAILTO is ignored" in done.stderr
    assert schedules() == ["echo-8", "report.sh-6"]
    echo, report = json.loads(shell("schedule", "ls", "--json").stdout)
    assert ("@daily", "Europe/Berlin", "America/New_York") == (echo["cron"], echo["zone"], report["zone"])
    assert report["job"]["payload"] == {
        "argv": ["/bin/bash", "-c", "/opt/report.sh --full > /dev/null 2>&1"],
        "env": {"PATH": "/usr/local/bin:/usr/bin:/bin"},
        "cwd": str(shell.folder),
    }
    job_id = shell("schedule", "run", "echo-8").stdout.strip()
    assert shell("wait", job_id).returncode == DONE
    assert shell("logs", job_id).stdout == "100% done\n"
    again = shell("schedule", "import", "crontab")
    assert again.returncode == USAGE
    assert "line 6: there is a schedule 'report.sh-6'" in again.stderr
    assert len(schedules()) == 2


def test_an_import_reports_each_line_that_it_cannot_take_and_adds_nothing(shell, schedules):
    lines = [
        "0 6 * * * true", "0 0 31 2 * true", "@reboot true", "* * * true", "@fortnightly true",
        "0 6 * * * cat%hello", "CRON_TZ=Mars/Base", "@daily",
    ]  # fmt: skip

    done = shell("schedule", "import", "-", stdin="\n".join(lines))

    assert done.returncode == USAGE
    assert [f"line {n}" for n in range(2, 9)] == re.findall(r"line \d+", done.stderr)
    assert "nothing was added" in done.stderr
    assert schedules() == []


def test_a_line_of_the_system_crontab_is_refused_by_its_user():
    crontab = read_crontab("0 6 * * *\troot\t/opt/report.sh --full\n0 7 * * * true root\n0 8 * * * root")

    assert [
        (1, "its sixth field is the user root, as in /etc/crontab: take the user out")
    ] == crontab.problems
    assert ["true root", "root"] == [entry.command for entry in crontab.entries]


def test_a_command_keeps_separators_that_are_no_end_of_line():
    [entry] = read_crontab("0 6 * * * printf 'a\x0cb\u2028c'\r\n").entries

    assert "printf 'a\x0cb\u2028c'" == entry.command


def test_a_line_for_the_plain_shell_stays_a_script():
    [entry] = read_crontab("*/5 * * * * cd /tmp && ls | wc -l").entries

    assert ("penstock.shell", {"script": "cd /tmp && ls | wc -l", "cwd": "/home/me"}) == shell_payload(
        entry, "/home/me"
    )
    assert "x-cd-1" == entry.name("x-")
