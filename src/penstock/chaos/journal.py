"""
The journal of all marks, read while it grows. It shows whether two attempts of one job worked at the same
time, independently of the trail.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from penstock.chaos.markers import JOURNAL

#: How many marks of each kind may come late. A function may be frozen between checking its lease and writing
#: one mark. A command is killed, so it writes none.
_LATE_MARKS = {"command": 0, "function": 1}


class Journal:
    """`began`, `ended`: by the id of a dispatch. Call `read` to take in the marks written since."""

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
