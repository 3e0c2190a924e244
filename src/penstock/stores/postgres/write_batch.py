"""
What a transaction is going to write, gathered, and left with its session to go out with the COMMIT.

Demands are made beforehand, in a transaction of their own: they are facts that harm nobody if nothing comes of them, and the
transaction that needs one may be the caller's, who must not hold up everybody else with a row that all of them need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from penstock.core.jobs.admission import Account, keys_of
from penstock.core.jobs.changes import Note
from penstock.core.jobs.intent import AdmissionClass
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment
from penstock.stores.common.rows import class_from, class_row, pack
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import array, columns

#: Whose event it is: the job's number and id, the event's number within the job, the job's state after it.
Told: TypeAlias = tuple[int | None, JobId | None, int, JobState | None]
NO_JOB: Final[Told] = (None, None, 0, None)
#: As `trail.pack` has them.
EventRow: TypeAlias = tuple[
    Moment, EventKind, JobId | None, int, JobState | None, str, str | None, Mapping[str, Any] | None
]
#: A ledger row: scope and name.
Key: TypeAlias = tuple[str, str]


class PostgresAdmissionClasses:
    """Few, and never changed, so each is read once."""

    def __init__(self, link: Database) -> None:
        self._link = link
        self._numbers: dict[AdmissionClass, int] = {}
        self.known: dict[int, AdmissionClass] = {}

    def make(self, demands: Iterable[AdmissionClass]) -> None:
        """Before the transaction that needs them."""
        for admission_class in demands:
            if admission_class not in self._numbers:
                self._numbers[admission_class] = self._link.transact(
                    partial(_number, admission_class=admission_class)
                )

    def number(self, admission_class: AdmissionClass) -> int:
        return self._numbers[admission_class]

    def knows(self, admission_class: AdmissionClass) -> bool:
        return admission_class in self._numbers

    def of(self, session: DatabaseSession, numbers: Iterable[int]) -> dict[int, AdmissionClass]:
        if missing := set(numbers) - self.known.keys():
            for no, *row in session.ask("classes_by_no", {"nos": array(sorted(missing))}):
                admission_class = self.known[no] = class_from(row)
                self._numbers[admission_class] = no
        return self.known


def _number(session: DatabaseSession, admission_class: AdmissionClass) -> int:
    """With its ledger rows: what is not there cannot be locked."""
    *_, found = session.together(
        ("add_class", class_row(admission_class)),
        ("add_ledger", columns(sorted(keys_of(admission_class)))),
        ("class_by_key", {"key": admission_class.key}),
    )
    return int(found[0][0])


def lock_ledger(keys: Iterable[Key]) -> tuple[str, Sequence[bytes]]:
    named = sorted(set(keys))
    return "lock_ledger", [array([scope for scope, _ in named]), array([name for _, name in named])]


def accounts_from(rows: Iterable[Any]) -> dict[AddonId, Account]:
    return {
        addon_id: Account(weight, bool(paused), average, units, at)
        for addon_id, weight, paused, average, units, at in rows
    }


class PostgresWriteBatch:
    def __init__(self) -> None:
        #: One each, or a function that makes many.
        self._events: list[EventRow | Callable[[], Iterable[EventRow]]] = []
        self._mentioned: set[int] = set()
        self.tally: Counter[tuple[str, str]] = Counter()
        self.accounts: dict[AddonId, Account] = {}
        self._changed: set[AddonId] = set()
        self._held: Counter[tuple[HostId, AdmissionClass]] = Counter()
        #: How many of which flight have ended.
        self.landed: Counter[int] = Counter()
        #: What is settled from now on, and may be forgotten some day.
        self._settled: list[int] = []
        self._settled_at: Moment = 0

    def note(self, at: Moment, note: Note, told: Told, dispatch_id: DispatchId | None = None) -> None:
        no = told[0]
        if no is not None:
            self._mentioned.add(no)
        _, job_id, n, state = told
        attempt: str | None = dispatch_id
        if job_id is not None and dispatch_id is not None:
            attempt = dispatch_id[len(job_id) + 1 :]
        self._events.append((at, note.kind, job_id, n, state, note.reason, attempt, note.data or None))

    def note_many(self, tell: Callable[[], Iterable[EventRow]]) -> None:
        """
        Of jobs whose places say in which batch that is told. It is called when what stands before these pages is with the server already,
        which is busy for as long as it takes.
        """
        self._events.append(tell)

    def moved(self, addon_id: AddonId, source: JobState, target: JobState, n: int = 1) -> None:
        if source is not target:
            self.tally[addon_id, source] -= n
            self.tally[addon_id, target] += n

    def settled(self, nos: Iterable[int], at: Moment) -> None:
        """`at` is the same for all of a transaction."""
        self._settled += nos
        self._settled_at = at

    def hold(self, host: HostId, admission_class: AdmissionClass, more: int) -> None:
        """The rows of its keys are locked by now."""
        self._held[host, admission_class] += more

    def account(self, addon_id: AddonId) -> Account:
        """To be changed: it will be written."""
        self._changed.add(addon_id)
        return self.accounts.setdefault(addon_id, Account())

    def leave(self, session: DatabaseSession) -> bool:
        """True: there is something to tell."""
        ledger = self._ledger()
        changed = self._changed | {AddonId(name) for scope, name, *_ in ledger if scope == "addon"}
        accounts = [(addon_id, self.accounts[addon_id]) for addon_id in sorted(changed)]
        of_accounts = [(name, a.weight, int(a.paused), a.average, a.units, a.at) for name, a in accounts]
        counts = [(*key, n) for key, n in self.tally.items() if n]
        tells = bool(self._events)
        if self._held or accounts or counts or tells:
            batch = session.batch
            written = [*columns(ledger, 4), *columns(of_accounts, 6), *columns(counts, 3)]
            session.tells |= tells
            if not (self.landed or self._settled or self._mentioned):
                session.leave("write_start", lambda: [*written, batch, *self._told()])
                return tells
            landed = columns(sorted(self.landed.items()), 2)
            over = [batch, self._settled_at, array(self._settled)]
            rest = [*over, batch, array(sorted(self._mentioned))]
            session.leave("write_batch", lambda: [*written, *landed, batch, *self._told(), *rest])
        session.tells |= tells
        return tells

    def _told(self) -> tuple[int, bytes]:
        """
        How many events, and what they are. Once: who tells them knows of these pages, and as long as they know of each other all that a turn read is left
        to the garbage collector, which took an eighth of a worker's time for it.
        """
        events: list[EventRow] = []
        left, self._events = self._events, []
        for told in left:
            events += told() if callable(told) else (told,)
        return len(events), pack(events)

    def _ledger(self) -> list[tuple[str, str, int, int]]:
        """
        Without the rows of which as much is given back as is held anew, which under load are all of them. An account says the same then as the row has
        it: it goes by the units held, and by when that changed. While somebody reads for long no version of a row goes, and
        whoever comes for it steps over all of them.
        """
        rows: dict[Key, list[int]] = {}
        for (host, admission_class), n in self._held.items():
            for key in (("host", host), *keys_of(admission_class)):
                row = rows.setdefault(key, [0, 0])
                row[0] += n * admission_class.cost_units
                row[1] += n
        return [
            (scope, name, units, running)
            for (scope, name), (units, running) in rows.items()
            if units or running
        ]
