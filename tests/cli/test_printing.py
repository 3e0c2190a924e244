"""What jobs say is printed for people without the control codes that a terminal would obey."""

from __future__ import annotations

import json

from penstock.cli.printing import output, printable

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
