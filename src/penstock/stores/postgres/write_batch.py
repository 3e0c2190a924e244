"""
What one transaction writes, gathered: events, ledger rows, accounts, counts of jobs by state, and what ended.
One statement writes all of it, together with the COMMIT.

Admission classes are written before the transaction that needs them, in a transaction of their own. That
transaction may be the caller's, and it must not keep other processes waiting for a row that all of them need.
A class that no job uses does no harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from penstock.core.jobs.admission import Account, keys_of
from penstock.core.jobs.changes import Note
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import Dispatch, EventKind, Job
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment
from penstock.stores.common.rows import ADMISSION_CLASS, class_from, class_row, dispatch_from, job_from, pack
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import array, columns

#: Where an event belongs: the job's number and id, the event's number within the job, the job's state after it.
Subject: TypeAlias = tuple[int | None, JobId | None, int, JobState | None]
NO_JOB: Final[Subject] = (None, None, 0, None)
#: In the order that `pack` expects.
EventRow: TypeAlias = tuple[
    Moment, EventKind, JobId | None, int, JobState | None, str, str | None, Mapping[str, Any] | None
]
#: A ledger row: scope and name.
Key: TypeAlias = tuple[str, str]
#: Columns of a row of `job_columns` and of `dispatch_columns`; what a statement adds comes behind them.
JOB_WIDTH: Final = 35
DISPATCH_WIDTH: Final = 22


class PostgresAdmissionClasses:
    """The admission classes by number. They are few and never change, so a process reads each once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers: dict[AdmissionClass, int] = {}
        self._by_number: dict[int, AdmissionClass] = {}

    def make(self, classes: Iterable[AdmissionClass]) -> None:
        """Write those that are new, before the transaction that needs their numbers."""
        for admission_class in classes:
            if admission_class not in self._numbers:
                self._numbers[admission_class] = self._database.transact(
                    partial(_number, admission_class=admission_class)
                )

    def number(self, admission_class: AdmissionClass) -> int:
        return self._numbers[admission_class]

    def has_number(self, admission_class: AdmissionClass) -> bool:
        return admission_class in self._numbers

    def read(self, session: DatabaseSession, numbers: Iterable[int]) -> dict[int, AdmissionClass]:
        if missing := set(numbers) - self._by_number.keys():
            for no, *row in session.execute("classes_by_no", {"nos": array(sorted(missing))}):
                admission_class = self._by_number[no] = class_from(row)
                self._numbers[admission_class] = no
        return self._by_number

    def jobs(self, session: DatabaseSession, rows: Sequence[Any]) -> list[Job]:
        """Jobs from rows of `job_columns`."""
        classes = self.read(session, {row[ADMISSION_CLASS] for row in rows})
        fixed = slice(ADMISSION_CLASS + 1, JOB_WIDTH)
        return [
            job_from(row[: ADMISSION_CLASS + 1], row[fixed], classes[row[ADMISSION_CLASS]]) for row in rows
        ]

    def dispatches(self, session: DatabaseSession, rows: Sequence[Any]) -> list[Dispatch]:
        """Dispatches from rows of `dispatch_columns`."""
        classes = self.read(session, {row[DISPATCH_WIDTH - 1] for row in rows})
        return [dispatch_from(row[:DISPATCH_WIDTH], classes[row[DISPATCH_WIDTH - 1]]) for row in rows]


def _number(session: DatabaseSession, admission_class: AdmissionClass) -> int:
    """Write the class with its ledger rows: a row that does not exist cannot be locked."""
    *_, rows = session.execute_many(
        ("add_class", class_row(admission_class)),
        ("add_ledger", columns(sorted(keys_of(admission_class)))),
        ("class_by_key", {"key": admission_class.key}),
    )
    return int(rows[0][0])


def lock_ledger(keys: Iterable[Key]) -> tuple[str, Sequence[bytes]]:
    ordered = sorted(set(keys))
    return "lock_ledger", [array([scope for scope, _ in ordered]), array([name for _, name in ordered])]


def accounts_from(rows: Iterable[Any]) -> dict[AddonId, Account]:
    return {
        addon_id: Account(weight, bool(paused), average, units, at)
        for addon_id, weight, paused, average, units, at in rows
    }


class PostgresWriteBatch:
    def __init__(self) -> None:
        #: Events, or functions that make many.
        self._events: list[EventRow | Callable[[], Iterable[EventRow]]] = []
        self._mentioned: set[int] = set()
        self.tally: Counter[tuple[str, str]] = Counter()
        self.accounts: dict[AddonId, Account] = {}
        self._changed: set[AddonId] = set()
        self._units: Counter[tuple[HostId, AdmissionClass]] = Counter()
        #: How many dispatches of a flight ended.
        self.ended_by_flight: Counter[int] = Counter()
        #: Jobs that retention may prune some day.
        self._settled: list[int] = []
        self._settled_at: Moment = 0

    def note(
        self, at: Moment, note: Note, subject: Subject = NO_JOB, dispatch_id: DispatchId | None = None
    ) -> None:
        no, job_id, n, state = subject
        if no is not None:
            self._mentioned.add(no)
        attempt: str | None = dispatch_id
        if job_id is not None and dispatch_id is not None:
            attempt = dispatch_id[len(job_id) + 1 :]
        self._events.append((at, note.kind, job_id, n, state, note.reason, attempt, note.data or None))

    def note_many(self, make_events: Callable[[], Iterable[EventRow]]) -> None:
        """
        Events of jobs whose dispatch row names the batch of the event, so that no mention is needed.
        `make_events` is called when the statements before this batch are with the server: both work at once.
        """
        self._events.append(make_events)

    def moved(self, addon_id: AddonId, source: JobState, target: JobState, n: int = 1) -> None:
        if source is not target:
            self.tally[addon_id, source] -= n
            self.tally[addon_id, target] += n

    def settled(self, nos: Iterable[int], at: Moment) -> None:
        """`at` is the same for all jobs of a transaction."""
        self._settled += nos
        self._settled_at = at

    def use_units(self, host: HostId, admission_class: AdmissionClass, dispatches: int) -> None:
        """Negative: units go back. The transaction has locked the ledger rows of these keys."""
        self._units[host, admission_class] += dispatches

    def account(self, addon_id: AddonId) -> Account:
        """The account, to be changed: the batch writes it."""
        self._changed.add(addon_id)
        return self.accounts.setdefault(addon_id, Account())

    def defer(self, session: DatabaseSession) -> bool:
        """Hand everything to the session, which writes it with the COMMIT. True: there are events."""
        ledger = self._ledger()
        changed = self._changed | {AddonId(name) for scope, name, *_ in ledger if scope == "addon"}
        accounts = [(addon_id, self.accounts[addon_id]) for addon_id in sorted(changed)]
        of_accounts = [(name, a.weight, int(a.paused), a.average, a.units, a.at) for name, a in accounts]
        counts = [(*key, n) for key, n in self.tally.items() if n]
        has_events = bool(self._events)
        session.has_events |= has_events
        if self._units or accounts or counts or has_events:
            number = session.batch
            written = [*columns(ledger, 4), *columns(of_accounts, 6), *columns(counts, 3)]
            if not (self.ended_by_flight or self._settled or self._mentioned):
                session.defer("write_start", lambda: [*written, number, *self._packed_events()])
                return has_events
            flights = columns(sorted(self.ended_by_flight.items()), 2)
            settled = [number, self._settled_at, array(self._settled)]
            rest = [*settled, number, array(sorted(self._mentioned))]
            session.defer("write_batch", lambda: [*written, *flights, number, *self._packed_events(), *rest])
        return has_events

    def _packed_events(self) -> tuple[int, bytes]:
        """
        How many events, and their text. The batch drops them: their makers refer to the batch, and as long as
        they refer to each other, everything that a round read is left to the garbage collector, which took
        an eighth of a worker's time for it.
        """
        parts, self._events = self._events, []
        events: list[EventRow] = []
        for part in parts:
            events += part() if callable(part) else (part,)
        return len(events), pack(events)

    def _ledger(self) -> list[tuple[str, str, int, int]]:
        """
        The ledger rows that change. A row that gets back as much as it gives is left out; under load that is
        every row. Its account stays right too: it depends on the units in use and on when they changed. While
        another program reads for long, no version of a row goes away, and every reader steps over all of them.
        """
        rows: dict[Key, list[int]] = {}
        for (host, admission_class), n in self._units.items():
            for key in (("host", host), *keys_of(admission_class)):
                row = rows.setdefault(key, [0, 0])
                row[0] += n * admission_class.cost_units
                row[1] += n
        return [
            (scope, name, units, running)
            for (scope, name), (units, running) in rows.items()
            if units or running
        ]
