"""
Processes that are forked to be killed: a fork costs less than an interpreter, and a test kills hundreds.

`ForkServer` is the side of the test; a program serves it with `serve_orders`. The program itself has no threads and no database.
It forks a child for each order, and reaps it ("reap PID").
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def serve_orders(run: Callable[[str, str, str, int], None], database: str, journal: str) -> None:
    """`run(database, journal, order, seed)` is called in a child of its own for each order, until it is killed."""
    for line in sys.stdin:
        order, number = line.split()
        if order == "reap":
            os.waitpid(int(number), 0)
            say("gone")
            continue
        pid = os.fork()
        if pid == 0:
            try:
                run(database, journal, order, int(number))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        say(pid)


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


class ForkServer:
    """Runs `program`, which forks the processes to kill, and reads their journal."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.database, self.journal, self.errors = folder / "jobs.db", folder / "journal", folder / "errors"
        self.journal.touch()
        with self.errors.open("wb") as errors:
            self._program = subprocess.Popen(
                [sys.executable, program, self.database, self.journal],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def _tell(self, *words: object) -> str:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(" ".join(map(str, words)) + "\n")
        self._program.stdin.flush()
        return self._program.stdout.readline().strip()

    def begin(self, role: str, seed: int) -> int:
        return int(self._tell(role, seed))

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self._tell("reap", pid) == "gone"

    def written(self) -> int:
        return self.journal.stat().st_size

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.journal.read_text().splitlines()]

    def close(self) -> None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.close()
        self._program.wait(30)
        self._program.stdout.close()
        errors = self.errors.read_text()
        assert errors == "", errors
