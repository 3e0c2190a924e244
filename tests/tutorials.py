"""
Follows a tutorial as it is written.

A Python block with a title is saved under that name. A console block is typed, line by line after `$`; what the page shows
below a command must be what the command prints, where `...` stands for anything. A console block whose title says that it
keeps running is started beside the others. `pip install` is not typed: the environment of the tests has what it names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests import SOURCES
from tests.waiting import LONG, until

BLOCK = re.compile(r'^```(python|console|sh)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)


class Step(NamedTuple):
    kind: str
    title: str
    text: str
    line: int


def steps(page):
    text = page.read_text("utf-8")
    return [Step(b[1], b[2] or "", b[3], text[: b.start()].count("\n") + 1) for b in BLOCK.finditer(text)]


def follow(page, folder):
    """How many files were saved and how many commands were typed."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCES),
        "HOME": str(folder),
    }
    saved, typed, started = 0, 0, []
    try:
        for step in steps(page):
            if step.kind == "python":
                assert step.title, f"{page.name}:{step.line}: a block of a tutorial has a file name"
                (folder / step.title).write_text(step.text)
                saved += 1
                continue
            for command, expected in commands(step.text):
                if command.startswith("pip install"):
                    continue
                typed += 1
                if "keeps running" in step.title:
                    started.append(start(command, folder, env))
                else:
                    check(page, step, command, expected, folder, env)
    finally:
        for process in started:
            process.terminate()
            process.wait(LONG)
    return saved, typed


def commands(text):
    """Each command with the lines that the page shows below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected.strip("\n")


def start(command, folder, env):
    process = subprocess.Popen(["sh", "-c", f"exec {command}"], cwd=folder, env=env)
    if port := re.search(r"--port (\d+)", command):
        until(lambda: listening(int(port[1])), what=command)
    return process


def listening(port):
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A" for row in rows)


def check(page, step, command, expected, folder, env):
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * LONG,
    )
    place = f"{page.name}:{step.line}: {command}"
    assert done.returncode == 0, f"{place}\n{done.stdout}{done.stderr}"
    pattern = re.escape(expected).replace(r"\.\.\.", ".*?")
    if expected:
        assert re.fullmatch(pattern, done.stdout.strip("\n"), re.DOTALL), f"{place}\n{done.stdout}"
