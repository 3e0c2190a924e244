"""The demo is run as a user runs it; what it prints at the end must be true."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from examples.demo import __main__ as demo
from examples.demo import stages
from examples.demo.lab import Lab
from examples.demo.ledger import Diary, PhotoBook, StageBook, equation
from examples.demo.photo import take
from examples.demo.plain import proof
from examples.demo.screen import LiveDisplay
from examples.demo.story import Story
from rich.console import Console

COMMAND = [sys.executable, "-m", "examples.demo"]


@pytest.fixture
def start():
    """Starts the demo; what a failed test leaves behind is ended with it."""
    started = []

    def start(*options, out=subprocess.PIPE, **how):
        process = subprocess.Popen(
            [*COMMAND, *options], stdout=out, stderr=subprocess.STDOUT, text=True, **how
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def workers_of(pid):
    """The processes whose command line says that this one is their parent."""
    pids = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "penstock.pools.child.main" in line and f" {pid})" in line:
                pids.append(int(process.name))
    return pids


def numbers(pattern, text):
    """The one group of the first match, as whole numbers."""
    return [int(number) for number in re.findall(pattern, text, re.MULTILINE)[0].replace(",", "").split()]


def check_proof(text):
    """Do the sums that it printed, again."""
    equations = re.findall(r"^.* = .*$", text, re.MULTILINE)
    assert [line.split(" = ")[0].split(" ", 1)[1] for line in equations] == ["photos taken", "calls accepted"]
    for line in equations:
        total, *parts = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", line))
        assert total == sum(parts) > 0
    assert "nothing lost" in text
    assert "failed" not in text


def row(stage, text):
    names = ("accepted", "done", "canceled", "shed", "requeued", "crashes")
    return dict(zip(names, numbers(rf"^{stage} +(.*?) +[\d,]+ ms", text), strict=True))


@pytest.fixture(scope="module")
def shown():
    """Run once, for all that is asked of it: where there is no terminal."""
    process = subprocess.Popen(
        [*COMMAND, "--seconds", "2"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    text = process.communicate(timeout=100)[0]
    assert process.returncode == 0, text
    assert workers_of(process.pid) == []
    return text


def test_it_shows_a_crash_a_cancel_and_a_shed_burst_and_its_books_balance(shown):
    check_proof(shown)
    decode, analyse = row("decode", shown), row("analyse", shown)
    assert (decode["crashes"], analyse["crashes"]) == (1, 0)
    assert decode["requeued"] >= 1
    assert decode["canceled"] >= 1
    assert analyse["shed"] >= 1
    assert "decoded at attempt 2" in shown
    assert numbers(r"(\d+) negatives in memory", shown) < numbers(r"(\d+) photos in progress", shown)


def test_where_there_is_no_terminal_it_prints_lines(shown):
    assert "\x1b" not in shown
    assert re.search(r"^ +[\d.]+ s +decode \d+\+\d+\+\d+ ", shown, re.MULTILINE)


def test_ctrl_c_ends_it_with_its_summary_and_leaves_no_worker(start):
    process = start("--plain", "--seconds", "600")
    while "analysed" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]

    assert process.returncode == 0, text
    assert "Interrupted" in text
    check_proof(text)
    assert workers_of(process.pid) == []


def test_on_a_terminal_it_draws_and_gives_the_screen_back(start):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
    process = start("--seconds", "1", out=theirs, env=environment)
    os.close(theirs)
    text = read_all(ours)

    assert process.wait(60) == 0, text
    drawn, leave_screen, after = text.partition("\x1b[?1049l")
    assert "\x1b[?1049h" in drawn
    assert "PENSTOCK" in drawn
    assert leave_screen
    check_proof(re.sub(r"\x1b\[[\d;?]*\w|\r", "", after))


def read_all(fd):
    parts = []
    try:
        while part := os.read(fd, 65536):
            parts.append(part)
    except OSError:  # the other side is closed: that is how a terminal says end of file
        pass
    os.close(fd)
    return b"".join(parts).decode()


@pytest.fixture
def lab():
    lab = Lab(Diary())
    yield lab
    for pool in lab.pools:
        pool.dispose()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_everything_fits_on_the_screen(lab, width, height):
    story = Story(lab, 1)
    story.act = 2
    paper = io.StringIO()
    console = Console(file=paper, width=width, height=height, force_terminal=True, color_system=None)
    lab.latest = stages.analyse(stages.resize(stages.decode(take(7, None)).photo))
    for number in range(50):
        lab.diary.say(f"line {number}")
    console.print(LiveDisplay(lab, story, console).picture([pool.snapshot() for pool in lab.pools]), end="")
    lines = paper.getvalue().splitlines()

    assert len(lines) == height
    assert {len(line) for line in lines} == {width}
    for word in (
        "kill -9",
        "in flight",
        "pending",
        "waiting",
        "worker 1",
        "decode",
        "resize",
        "analyse",
        "drop-oldest",
    ):
        assert word in paper.getvalue()
    assert "crashes" in paper.getvalue()
    assert "line 49" in paper.getvalue(), "the newest entry of the diary"
    assert "photo 7" in paper.getvalue()
    assert "…" not in paper.getvalue(), "nothing is cut off"


def test_without_rich_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(demo, "_can_draw", lambda: True)
    monkeypatch.setattr(sys, "argv", ["demo"])

    assert demo.main() == 2
    assert "pip install 'penstock[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "soon"])
def test_a_wrong_number_of_seconds_is_refused_by_name(monkeypatch, capsys, seconds):
    monkeypatch.setattr(sys, "argv", ["demo", f"--seconds={seconds}"])
    with pytest.raises(SystemExit) as ended:
        demo.main()

    assert ended.value.code == 2
    assert f"'{seconds}' is not a number of seconds above 0" in capsys.readouterr().err


def test_books_that_do_not_balance_are_not_hidden(lab):
    lab.photos.taken = 1
    lines = proof(lab, interrupted=False)

    assert not lab.balanced
    assert lines[0] == "1 photos taken ≠ 0 analysed + 0 canceled + 0 shed"
    assert "do not balance" in lines[-1]


def test_a_call_that_ends_twice_or_never_is_seen():
    book = StageBook("decode", Diary())
    book.accepted = 2
    book.done = 1
    photos = PhotoBook(taken=1, analysed=1, shed=1)

    assert not book.balanced
    assert not photos.balanced
    assert equation("2 calls", {"done": 1, "failed": 1}, holds=True) == "2 calls = 1 done + 1 failed"


def test_photos_that_look_alike_have_the_same_fingerprint():
    reports = [stages.analyse(stages.resize(stages.decode(take(number, None)).photo)) for number in (3, 3, 4)]

    assert reports[0] == reports[1]
    assert reports[0].fingerprint != reports[2].fingerprint
    assert (reports[0].photo.width, reports[0].photo.height) == (48, 36)
    assert len(reports[0].photo.pixels) == 48 * 36 * 3
