"""
The job that is killed: `python markers.py FOLDER SECONDS`. It is run as a file and imports nothing of the
package.

It writes marks outside of the scheduler's database, so that the checks do not depend on the scheduler's word.
A file lock shows whether another attempt of the same job is alive: the kernel drops it with the process,
however that dies.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Marker(NamedTuple):
    what: str  # began, ended, or beside: another attempt of the job was alive
    job_id: str
    pid: int


def marks(folder: Path) -> list[Marker]:
    if not (folder / _JOURNAL).exists():
        return []
    lines = (folder / _JOURNAL).read_text("ascii").splitlines()
    return [Marker(what, job_id, int(pid)) for what, job_id, pid in map(str.split, lines)]


_JOURNAL = "journal"


def main(folder: Path, seconds: float) -> None:
    job_id = os.environ["PENSTOCK_JOB_ID"]
    journal = os.open(folder / _JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def mark(what: str) -> None:
        """One append: marks of several processes never mix."""
        os.write(journal, f"{what} {job_id} {os.getpid()}\n".encode())

    with (folder / f"{job_id}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mark("beside")
        mark("began")
        time.sleep(seconds)
        mark("ended")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
