"""
The marks that the jobs of a trial write, and the journal of them that the checks read.

`python markers.py FOLDER SECONDS` is the job as a command. It is run as a file, so this module imports
nothing of the package. `sdk_worker.py` has the same job as a function.

A job writes marks outside of the scheduler's database, so that the checks do not rely on the scheduler: one
at its beginning, one every few milliseconds while it works, one at its end. A mark is one append to one file,
so the lines are in the order in which all processes wrote them, and show without a clock whether two attempts
of one job worked at the same time.

A command also locks a file of its job. The kernel releases the lock when the process dies, so an attempt that
finds it locked knows that another attempt still exists, even a frozen one that writes nothing.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

JOURNAL = "journal"
#: Seconds between two marks of an attempt that works.
BEAT_SEC = 0.02
#: How many marks of each kind may come late. A function may be frozen between checking its lease and writing
#: one mark. A command is killed, so it writes none.
_LATE_MARKS = {"command": 0, "function": 1}


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


class Journal:
    """
    All marks, read while they are written: call `read` to take in those written since. `began`, `ended`: by the id
    of a dispatch.
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._position, self._rest = folder / JOURNAL, 0, b""
        #: The process id of each attempt that began and, by its marks, has not ended.
        self.at_work: dict[str, dict[str, int]] = {"command": {}, "function": {}}
        self.began: set[str] = set()
        self.ended: set[str] = set()
        self.overlaps: list[str] = []
        self._newest: dict[str, int] = {}
        self._late: Counter[str] = Counter()

    def read(self) -> Journal:
        if not self._file.exists():
            return self
        with self._file.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(*line.decode("ascii").split())
        return self

    def superseded(self) -> list[str]:
        """Attempts that are certainly over, because a later one has begun."""
        return [one for one in self.began if _fence(one) < self._newest[_job(one)]]

    def _take(self, what: str, kind: str, dispatch_id: str, pid: str) -> None:
        job_id, fence = _job(dispatch_id), _fence(dispatch_id)
        newest = self._newest.setdefault(job_id, fence)
        if fence < newest:
            self._late[dispatch_id] += 1
            if self._late[dispatch_id] == _LATE_MARKS[kind] + 1:
                self.overlaps.append(f"{kind} {dispatch_id} worked after attempt {newest} had begun")
        elif fence > newest:
            self._newest[job_id] = fence
            for attempts in self.at_work.values():
                attempts.pop(f"{job_id}.{newest}", None)
        match what:
            case "began":
                self.began.add(dispatch_id)
                self.at_work[kind][dispatch_id] = int(pid)
            case "ended":
                self.ended.add(dispatch_id)
                self.at_work[kind].pop(dispatch_id, None)
            case "beside":
                self.overlaps.append(f"{kind} {dispatch_id} began while an earlier attempt was alive")


def _job(dispatch_id: str) -> str:
    return dispatch_id.rpartition(".")[0]


def _fence(dispatch_id: str) -> int:
    return int(dispatch_id.rpartition(".")[2])


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
