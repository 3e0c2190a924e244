"""The command in a terminal: narrow and wide windows, full screen, Ctrl-C, and TAB."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest
from tests.waiting import LONG, until
from textual.widgets import DataTable, Static

from penstock import Client
from penstock.cli.top import Top, TopView
from penstock.core.errors import Unreachable

UNREACHABLE, REFUSED, INTERRUPTED = 3, 5, 130


def test_tables_fit_a_narrow_terminal_and_lose_the_least_columns_first(shell):
    shell.submit("true")
    narrow, wide = (in_terminal(shell, columns, "ls") for columns in (60, 140))

    assert all(len(line.rstrip()) <= 60 for line in narrow.splitlines())
    assert "prio" in wide
    assert "prio" not in narrow
    assert "state" in narrow


def in_terminal(shell, columns, *words):
    child = in_window(shell, columns, *words)
    assert exit_code(child) == 0
    return without_codes(child.before)


def in_window(shell, columns, *words):
    env = {name: value for name, value in shell.env.items() if name != "COLUMNS"} | {"TERM": "xterm-256color"}
    command = ["-m", "penstock.cli.main", *words]
    return pexpect.spawn(
        sys.executable, command, env=env, dimensions=(30, columns), encoding="utf-8", timeout=LONG
    )


def exit_code(child):
    """The exit code, when it has ended."""
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def without_codes(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_ctrl_c_cancels_what_was_run_and_leaves_nothing_behind(shell):
    child = in_window(shell, 80, "run", "--", "sh", "-c", "echo started; sleep 300")
    child.expect("started")
    child.sendintr()

    assert exit_code(child) == INTERRUPTED
    job_id = shell.answer("ls", "-n", "1")["jobs"][0]["job_id"]
    shell.until("CANCELED", job_id)


def test_a_run_whose_scheduler_goes_away_says_how_to_follow_the_job_later(alone):
    alone.up()
    child = in_window(alone, 100, "run", "--when", "any", "--", "sh", "-c", "echo started; sleep 300")
    child.expect("started")
    alone("stop", "--now")

    child.expect(r"The job is on disk. When the scheduler runs again: penstock logs -f [0-9a-f]{8}")
    assert exit_code(child) in (UNREACHABLE, REFUSED)  # it may still answer that it is stopping


def test_ctrl_c_ends_a_chaos_and_removes_its_files(alone, tmp_path):
    trials = tmp_path / "trials"
    trials.mkdir()
    alone.env["TMPDIR"] = str(trials)
    child = in_window(alone, 80, "chaos", "--kills", "50", "--jobs", "4", "--workers", "0")
    child.expect("1 of 50")
    child.sendintr()

    assert exit_code(child) == INTERRUPTED
    assert list(trials.glob("pst-chaos-*")) == []


def test_top_shows_jobs_live_and_keys_act_on_them(shell):
    job_id = shell.submit("sleep", "300")
    shell.until("RUNNING", job_id)
    child = in_window(shell, 120, "top")
    child.expect(job_id[-8:])
    child.send("c")
    child.expect("Cancel")
    child.send("y")
    shell.until("CANCELED", job_id)
    child.send("q")

    assert exit_code(child) == 0


def test_top_explains_retries_and_pauses(alone):
    alone.up()
    job_id = alone.submit("false")
    alone.until("FAILED", job_id)
    child = in_window(alone, 120, "top")
    child.expect(job_id[-8:])
    child.send("e")
    child.expect("That was attempt 1")  # in the dialog: the list has the error too
    child.send("e")

    def second_attempt():
        child.send("r")  # a key that comes before the text has closed goes to the text
        return alone.answer("show", job_id)["attempts"] >= 2

    until(second_attempt, what="a second attempt")
    child.send("p")
    child.expect("PAUSED")
    child.send("p")
    until(lambda: not alone.answer("top")["stats"]["paused"], what="the end of the pause")
    child.send("q")

    assert exit_code(child) == 0


def test_top_cancels_every_marked_job_after_one_question(shell):
    jobs = [shell.submit("sleep", "300") for _ in range(3)]
    for job_id in jobs:
        shell.until("RUNNING", job_id)
    child = in_window(shell, 120, "top")
    child.expect("sleep 300")
    child.send("*")
    child.expect("marked")
    child.send("c")
    child.expect(r"Cancel \d+ jobs")
    child.send("y")
    for job_id in jobs:
        shell.until("CANCELED", job_id)
    child.send("q")

    assert exit_code(child) == 0


def test_top_marks_single_jobs_and_leaves_the_others_alone(shell):
    jobs = [shell.submit("sleep", "300") for _ in range(3)]
    for job_id in jobs:
        shell.until("RUNNING", job_id)
    answer = json.loads((shell.folder / "daemon.json").read_text())
    token = Path(answer["token_file"]).read_text().strip()

    async def cancel_two(client):
        app = Top(client)
        async with app.run_test(size=(60, 24)) as pilot:
            table = app.query_one(DataTable)
            async with asyncio.timeout(LONG):
                while table.row_count < 3:
                    await pilot.pause(0.05)
            order = [str(row.key.value) for row in table.ordered_rows]
            for job_id in jobs[:2]:
                table.move_cursor(row=order.index(job_id))
                await pilot.press("space")
            await pilot.press("c", "y")
            await pilot.pause(0.1)
        return table

    with Client(answer["url"], token=token) as client:
        asyncio.run(cancel_two(client))
        for job_id in jobs[:2]:
            shell.until("CANCELED", job_id)
        assert client.job(jobs[2]).state == "RUNNING"
        client.cancel(jobs[2])


@pytest.mark.parametrize("before", ["", "e"], ids=["the list", "a dialog"])
def test_ctrl_c_leaves_top_from_everywhere(shell, before):
    job_id = shell.submit("false")
    shell.until("FAILED", job_id)
    child = in_window(shell, 120, "top")
    child.expect(job_id[-8:])
    if before:
        child.send(before)
        child.expect("That was attempt 1")
    child.sendintr()

    assert exit_code(child) == 0


def test_top_shows_why_beside_a_long_command(shell):
    job_id = shell("submit", "--not-before", "+3h", "--", "echo", "x" * 300).stdout.strip()
    child = in_window(shell, 80, "top")
    child.expect(job_id[-8:])
    child.expect("starts in")
    child.send("q")

    assert exit_code(child) == 0
    shell("cancel", job_id)


def test_a_long_value_stands_beside_its_name_in_a_terminal(shell):
    job_id = shell.submit("echo", *("word" for _ in range(40)))
    shown = in_terminal(shell, 60, "show", job_id).splitlines()
    at = next(place for place, line in enumerate(shown) if line.strip().startswith("what"))

    assert shown[at + 1].startswith(" " * 13)
    assert all(len(line.rstrip()) <= 60 for line in shown)


class Slow(Client):
    """A scheduler that takes its time to tell how things are."""

    def __init__(self, *where, **access):
        super().__init__(*where, **access)
        self.go_on = threading.Event()

    def stats(self):
        self.go_on.wait(LONG)
        return super().stats()


def test_keys_of_top_reach_a_scheduler_that_is_slow_to_tell_how_things_are(shell):
    answer = json.loads((shell.folder / "daemon.json").read_text())
    token = Path(answer["token_file"]).read_text().strip()

    async def press_p(client):
        app = Top(client)
        async with app.run_test() as pilot:
            for _ in range(50):  # as many seconds; there are fewer threads
                app.reload()
                await asyncio.sleep(0.01)
            await pilot.press("p")
            app.reload()
            try:
                async with asyncio.timeout(LONG):
                    while not Client.stats(client).paused:
                        await asyncio.sleep(0.02)
            finally:
                client.go_on.set()

    with Slow(answer["url"], token=token) as client:
        asyncio.run(press_p(client))
        client.resume()


def test_who_waits_in_a_terminal_is_told_why_meanwhile(shell):
    job_id = shell("submit", "--not-before", "+3h", "--", "true").stdout.strip()
    child = in_window(shell, 100, "wait", job_id, "--timeout", "30s")
    child.expect("QUEUED: starts in about")
    child.sendintr()

    assert exit_code(child) == INTERRUPTED
    assert shell.state(job_id) == "QUEUED"


@pytest.mark.parametrize("columns", [60, 160])
def test_top_shows_why_a_job_waits_and_all_its_keys_in_any_window(shell, columns):
    shell("submit", "--not-before", "+3h", "--", "true")
    child = in_window(shell, columns, "top")
    shown = all_of(child, "starts in about", "mark", "retry", "pause", "quit")
    child.send("q")

    assert exit_code(child) == 0
    assert ("prio" in shown) == (columns > 100)


def test_an_event_that_reaches_top_after_its_end_is_ignored(shell):
    answer = json.loads((shell.folder / "daemon.json").read_text())
    token = Path(answer["token_file"]).read_text().strip()

    async def look(client):
        app = Top(client)
        async with app.run_test():
            pass
        app.on_data_table_row_highlighted()

    with Client(answer["url"], token=token) as client:
        asyncio.run(look(client))


class Full:
    """A scheduler with three running jobs, and with 500 that wait and 500 that failed."""

    def stats(self):
        return None

    def jobs(self, *, states=(), limit=100, newest_first=False):
        many = {"RUNNING": 3, "QUEUED": 500, "FAILED": 500}
        ids = [f"{state} {n}" for state in states for n in range(many.get(state, 0))]
        shown = ids[::-1] if newest_first else ids
        return SimpleNamespace(jobs=[SimpleNamespace(job_id=job_id) for job_id in shown[:limit]])


def test_no_number_of_failed_jobs_hides_from_top_those_that_wait():
    shown = [job.job_id for job in TopView.of(Full(), open_only=True).jobs]

    running, waiting = [f"RUNNING {n}" for n in range(3)], [f"QUEUED {n}" for n in range(147)]
    assert [*running, *waiting, *(f"FAILED {n}" for n in range(499, 449, -1))] == shown


class Failing(Client):
    """A scheduler that may be away."""

    away = False

    def stats(self):
        if self.away:
            raise Unreachable("No scheduler is running.")
        return super().stats()


def test_the_last_line_of_top_has_the_whole_reason_and_no_message_that_is_over(shell):
    reason = "waits for a host with the labels of-a-farm and of-the-moon"
    shell("submit", "--label", "of-a-farm", "--label", "of-the-moon", "--", "true")
    answer = json.loads((shell.folder / "daemon.json").read_text())
    token = Path(answer["token_file"]).read_text().strip()

    async def shown(app, text):
        async with asyncio.timeout(LONG):
            while text not in str(app.query_one("#status", Static).content):
                app.reload()
                await asyncio.sleep(0.02)

    async def look(client):
        app = Top(client)
        async with app.run_test(size=(60, 24)) as pilot:
            await shown(app, "")
            async with asyncio.timeout(LONG):
                while reason not in str(app.query_one("#status", Static).content):
                    await pilot.press("down")
            client.away = True
            await shown(app, "No scheduler is running.")
            client.away = False
            await shown(app, reason)

    with Failing(answer["url"], token=token) as client:
        asyncio.run(look(client))


def test_the_cursor_of_top_stays_on_its_job_when_a_job_above_it_ends(shell):
    jobs = {shell.submit("sleep", "300") for _ in range(3)}
    for job_id in jobs:
        shell.until("RUNNING", job_id)
    answer = json.loads((shell.folder / "daemon.json").read_text())
    token = Path(answer["token_file"]).read_text().strip()

    async def look(client):
        app = Top(client)
        async with app.run_test(size=(60, 24)):
            table = app.query_one(DataTable)

            def shown():
                return [str(row.key.value) for row in table.ordered_rows]

            async with asyncio.timeout(LONG):
                while not jobs <= set(shown()):
                    await asyncio.sleep(0.02)
                above, chosen, _ = (job_id for job_id in shown() if job_id in jobs)
                table.move_cursor(row=shown().index(chosen))
                client.cancel(above)
                while above in shown()[: shown().index(chosen)]:
                    app.reload()
                    await asyncio.sleep(0.02)
            await app.workers.wait_for_complete()
            return shown()[table.cursor_row], chosen

    with Client(answer["url"], token=token) as client:
        at_cursor, chosen = asyncio.run(look(client))
        for job_id in jobs:
            client.cancel(job_id)
    assert at_cursor == chosen


def all_of(child, *words):
    """What is drawn until all of these have been, in whatever order."""
    shown = ""
    for _ in range(1_000):
        shown += child.read_nonblocking(10_000, timeout=LONG)
        if all(word in shown for word in words):
            return shown
    raise AssertionError(shown)


# Completions


def completed(shell, *words):
    """What a shell is offered for the last of the words."""
    env = shell.env | {
        "_PENSTOCK_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["penstock", *words]),
        "COMP_CWORD": str(len(words)),
    }
    command = [sys.executable, "-c", "from penstock.cli.main import main; main()"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=LONG)
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.split()]


def test_verbs_options_and_their_values_are_completed(shell):
    assert completed(shell, "ca") == ["cancel", "capacity"]
    assert completed(shell, "ls", "--st") == ["--state"]
    assert completed(shell, "submit", "-p", "u") == ["urgent"]
    assert completed(shell, "token", "make", "x", "--scope", "jobs:c") == ["jobs:cancel"]


def test_jobs_addons_and_hosts_are_completed_by_those_there_are(shell):
    job_id = shell("submit", "--addon", "photographs", "--not-before", "+3h", "--", "true").stdout.strip()

    assert completed(shell, "show", "l") == ["last"]
    assert completed(shell, "show", job_id[-8:-2]) == [job_id[-8:]]
    assert completed(shell, "pause", "photog") == ["photographs"]
    assert completed(shell, "drain", "") == ["local"]


def test_without_a_scheduler_nothing_is_offered_and_nothing_is_said(alone):
    assert completed(alone, "show", "") == []


def test_tab_completes_a_verb_in_bash(shell, tmp_path):
    (tmp_path / "penstock").write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock.cli.main "$@"\n')
    (tmp_path / "penstock").chmod(0o755)
    env = shell.env | {"PATH": f"{tmp_path}:{shell.env['PATH']}", "TERM": "dumb", "PS1": "$ "}
    child = pexpect.spawn("bash", ["--norc", "--noprofile", "-i"], env=env, encoding="utf-8", timeout=LONG)
    child.sendline('eval "$(_PENSTOCK_COMPLETE=bash_source penstock)"; echo re""ady')
    child.expect("ready")
    child.send("penstock undr\t")
    child.expect("undrain")
    child.close()
