"""What jobs say is printed for people without the control codes that a terminal would obey."""

from __future__ import annotations

import json
from io import StringIO

from rich.console import Console

from penstock.cli.admin import _rate
from penstock.cli.job_commands import JOB_COLUMNS
from penstock.cli.printing import Column, cut_widths, output, printable, table

TITLE, CLEAR, C1, TURN = "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "\u202e"
EVIL = f"{TITLE}{CLEAR}{C1}{TURN}end"


def obeyed(text):
    return [
        code
        for code in text
        if (ord(code) < 32 and code not in "\n\t") or 127 <= ord(code) < 160 or code == TURN
    ]


def test_control_codes_are_shown_and_not_obeyed():
    assert printable(EVIL) == "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202eend"
    assert printable("two\r\nlines\twide") == "two\nlines\twide"
    assert (
        output(f"\x1b[1;31mred\x1b[0m 10 %\r99 %{TITLE}")
        == "\x1b[1;31mred\x1b[0m 10 %\r99 %\\x1b]0;owned\\x07"
    )


def test_no_verb_prints_a_stored_control_code(shell):
    script = f"import sys; sys.stderr.write({EVIL!r}); sys.exit({EVIL!r})"
    submitted = shell("submit", "--tag", EVIL, "--key", EVIL, "--json", "--", "python3", "-c", script)
    job_id = (
        json.loads(submitted.stdout)["job_id"]
        if submitted.stdout.startswith("{")
        else submitted.stdout.split()[0]
    )
    shell("wait", job_id)
    for verb in (["show", job_id], ["ls"], ["explain", job_id], ["events", "-j", job_id], ["wait", job_id]):
        answer = shell(*verb)
        assert obeyed(answer.stdout + answer.stderr) == [], verb
    assert "\\x1b]0;owned" in shell("show", job_id).stdout


def test_the_widest_columns_are_cut_first():
    assert cut_widths([8, 7, 40, 30], 60) == [8, 7, 22, 22]
    assert cut_widths([8, 7, 40, 30], 85) == [8, 7, 40, 30]
    assert cut_widths([3, 3], 0) == [1, 1]
    assert cut_widths([], 60) == []


def test_an_id_and_a_state_stay_whole_beside_a_long_command():
    for width in (60, 80, 120):
        file = StringIO()
        columns = [Column("job"), Column("state"), Column("what"), Column("why")]
        rows = [("0123abcd", "DISPATCHING", "python train.py " * 20, "the machine is busy " * 9)]
        table(Console(file=file, width=width, force_terminal=True, color_system=None), columns, rows)
        lines = file.getvalue().splitlines()
        assert lines[1].startswith("0123abcd  DISPATCHING  python train.py ")
        assert "…  the machine is" in lines[1]
        assert len(lines) == 2
        assert max(map(len, lines)) <= width


def test_why_a_job_waits_is_whole_in_a_narrow_terminal():
    file = StringIO()
    why = "the machine is in normal use; waits for QUIET"
    rows = [("0123abcd", "QUEUED", "python train.py " * 20, "cli", 10, 50, 0, "5 s", why)]
    table(Console(file=file, width=60, force_terminal=True, color_system=None), JOB_COLUMNS, rows)
    lines = file.getvalue().splitlines()

    assert " ".join(line[-20:].strip() for line in lines[1:]) == why
    assert max(map(len, lines)) <= 60


def test_a_rate_has_no_power_of_ten():
    assert [_rate(per_hour) for per_hour in (0.0123, 4.567, 99.96, 1690.4)] == [
        "0.0123",
        "4.57",
        "100",
        "1,690",
    ]
