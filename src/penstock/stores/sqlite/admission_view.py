"""
What a round sees of a SQLite store: books, and one lazy line per demand.

A line is an open cursor on the order index. A round pulls the head of each and goes further only behind what it starts, so
the database never reads a row that was not weighed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import starmap
from typing import Final, NamedTuple, TypeAlias

import apsw

from penstock.core.jobs.admission import Ledger
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.ordering import QueuedJob, ReadyQueue, RunningJob
from penstock.core.jobs.spending import windows
from penstock.core.jobs.types import AddonId, HostId, JobId, Moment
from penstock.stores.common.rows import class_from, class_row
from penstock.stores.sqlite.connection import one, query, statements
from penstock.stores.sqlite.totals import Accounts, Held

#: Which line it is: the number of its demand, and 2 for the urgent one.
_Key: TypeAlias = tuple[int, int]
_NOTHING: Final[Held] = {}


class SqliteAdmissionClasses:
    """Demands are few and never change, so each is read once. Forgotten on a rollback: one of them may never have been."""

    def __init__(self) -> None:
        self._numbers: dict[AdmissionClass, int] = {}
        self._demands: dict[int, AdmissionClass] = {}

    def number(self, con: apsw.Connection, admission_class: AdmissionClass) -> int:
        no = self._numbers.get(admission_class)
        if no is None:
            (no,) = one(con, "class_by_key", {"key": admission_class.key}) or one(
                con, "add_class", class_row(admission_class)
            )
            self._numbers[admission_class] = no
        return no

    def admission_class(self, con: apsw.Connection, no: int) -> AdmissionClass:
        admission_class = self._demands.get(no)
        if admission_class is None:
            admission_class = class_from(one(con, "classes_by_no", {"no": no}))
            self._demands[no] = admission_class
        return admission_class

    def forget(self) -> None:
        self._numbers.clear()
        self._demands.clear()


class Queued(QueuedJob, frozen=True, gc=False):
    """A queued job with what the store itself must know of one that starts."""

    events: int = 0
    max_runtime_sec: int | None = None
    max_active_sec: int | None = None
    active: int = 0


class NewQueued(NamedTuple):
    """A row of `queue` that is not in the file yet, in the order of `add_queued`."""

    no: int
    job_id: JobId
    admission_class: int
    line: int
    turn: Moment
    ready_at: Moment
    urgent_at: Moment | None
    deadline_at: Moment | None
    priority: int
    expected_sec: float | None
    max_runtime_sec: int | None
    max_active_sec: int | None


class SqliteSpent(Mapping[AddonId, Mapping[str, int]]):
    """Read when somebody asks: few have a budget."""

    def __init__(self, con: apsw.Connection, now: Moment) -> None:
        self._con, self._now = con, now
        self._read: dict[AddonId, dict[str, int]] | None = None

    def all(self) -> dict[AddonId, dict[str, int]]:
        if self._read is None:
            day, month = windows(self._now)
            self._read = {}
            for addon_id, period, amount in query(self._con, "spent", {"day": day.name, "month": month.name}):
                self._read.setdefault(addon_id, {})["day" if period == day.name else "month"] = amount
        return self._read

    def __getitem__(self, addon_id: AddonId) -> Mapping[str, int]:
        return self.all()[addon_id]

    def __iter__(self) -> Iterator[AddonId]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())


def read_ledger_totals(
    con: apsw.Connection,
    host: HostId,
    now: Moment,
    accounts: Accounts,
    ledger_rows: Held,
    *,
    held: Held = _NOTHING,
) -> Ledger:
    """`held`: what was taken or given back, and is not in the ledger yet."""
    ledger = Ledger(accounts=accounts, spent=SqliteSpent(con, now))
    sums = dict(ledger_rows)
    for key, (units, running) in held.items():
        before = sums.get(key, (0, 0))
        sums[key] = (before[0] + units, before[1] + running)
    ledger.units, ledger.running = sums.get(("host", host), (0, 0))
    ledger.counts = {key: running for key, (_, running) in sums.items() if key[0] != "host"}
    return ledger


class SqliteAdmissionView:
    """`fresh`: jobs that are not in the file yet. `anybody`: whether somebody may stand in line there."""

    def __init__(
        self,
        con: apsw.Connection,
        host: HostId,
        now: Moment,
        demands: SqliteAdmissionClasses,
        ledger: Ledger,
        *,
        fresh: Iterable[NewQueued] = (),
        anybody: bool = True,
    ) -> None:
        self.now, self.ledger = now, ledger
        self._con, self._host, self._demands = con, host, demands
        self._fresh, self.anybody = _lines_of(fresh), anybody
        self._open: list[apsw.Cursor] = []

    def lines(self) -> Iterator[ReadyQueue]:
        fresh = dict(self._fresh)
        for key in self._in_file() if self.anybody else ():
            while fresh and (first := next(iter(fresh))) < key:
                yield self._line(first, self._new(fresh.pop(first)))
            cursor = self._con.execute(statements()["in_line"], {"class_no": key[0], "line": key[1]})
            self._open.append(cursor)
            jobs: Iterator[QueuedJob] = starmap(Queued, cursor)
            if key in fresh:
                jobs = merge(jobs, self._new(fresh.pop(key)), key=_by_turn)
            yield self._line(key, jobs)
        for key, new in fresh.items():
            yield self._line(key, self._new(new))

    def _in_file(self) -> Iterator[_Key]:
        key: _Key = (0, 0)
        while row := one(self._con, "next_line", {"class_no": key[0], "line": key[1]}):
            key = row
            yield key

    def _line(self, key: _Key, jobs: Iterator[QueuedJob]) -> ReadyQueue:
        admission_class = self._demands.admission_class(self._con, key[0])
        self.ledger.accounts.get(admission_class.addon_id)  # will be asked for, and the one for all with it
        return ReadyQueue(admission_class, key[1] == 2, jobs)

    def _new(self, jobs: Iterable[NewQueued]) -> Iterator[QueuedJob]:
        for job in jobs:
            limits = (job.max_runtime_sec, job.max_active_sec)
            yield Queued(
                job.no, job.job_id, job.priority, job.turn, 0, job.expected_sec, None, "", 1, *limits, 0
            )

    def running(self) -> Sequence[RunningJob]:
        return [RunningJob(*row) for row in query(self._con, "running", {"host": self._host})]

    def close(self) -> None:
        """Before anything is written: an open cursor would walk over rows that move."""
        for cursor in self._open:
            cursor.close(True)


def _lines_of(jobs: Iterable[NewQueued]) -> dict[_Key, list[NewQueued]]:
    """As the file would have them: by line, and by turn in each."""
    lines: dict[_Key, list[NewQueued]] = {}
    jobs = tuple(jobs)
    if len(jobs) == 1:
        [job] = jobs
        return {(job.admission_class, job.line): [job]} if job.line else {}
    for job in jobs:
        if job.line:
            lines.setdefault((job.admission_class, job.line), []).append(job)
    return {key: sorted(lines[key], key=_by_turn) for key in sorted(lines)}


def _by_turn(job: QueuedJob | NewQueued) -> tuple[Moment, int]:
    return job.turn, job.no
