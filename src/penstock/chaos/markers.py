"""
The job of a trial as a command: `python markers.py FOLDER SECONDS`. It is run as a file and imports nothing
of the package. `sdk_worker.py` has the same job as a function.

It writes marks outside of the scheduler's database, so that the checks do not rely on the scheduler: one at
its beginning, one every few milliseconds while it works, one at its end. A mark is one append to one file, so
the lines are in the order in which all processes wrote them, and show without a clock whether two attempts of
one job worked at the same time.

A command also locks a file of its job. The kernel releases the lock when the process dies, so an attempt that
finds it locked knows that another attempt still exists, even a frozen one that writes nothing.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

JOURNAL = "journal"
#: Seconds between two marks of an attempt that works.
BEAT_SEC = 0.02


class Marking:
    """The marks of one attempt. `kind`: command or function."""

    def __init__(self, folder: Path, kind: str, dispatch_id: str) -> None:
        self._line = f"{kind} {dispatch_id} {os.getpid()}\n"
        self._journal = os.open(folder / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def mark(self, what: str) -> None:
        """Append one mark in one write: marks of several processes never mix."""
        os.write(self._journal, f"{what} {self._line}".encode())

    def work(self, seconds: float, check: Callable[[], object]) -> None:
        """
        Work by writing marks. `check` is called before every mark and raises when the attempt must end. Marks
        are counted, not seconds: a process that was frozen still has the rest of its work to do.
        """
        check()
        self.mark("began")
        for _ in range(int(seconds / BEAT_SEC)):
            time.sleep(BEAT_SEC)
            check()
            self.mark("beat")
        self.mark("ended")

    def close(self) -> None:
        os.close(self._journal)


def main(folder: Path, seconds: float) -> None:
    dispatch_id = os.environ["PENSTOCK_DISPATCH_ID"]
    marking = Marking(folder, "command", dispatch_id)
    with (folder / f"{dispatch_id.rpartition('.')[0]}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            marking.mark("beside")
        marking.work(seconds, lambda: None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
