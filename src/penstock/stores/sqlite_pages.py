"""
What a transaction writes, gathered: rows and events go in with few statements, and a sum (ledger, account, tally) is written
once per key, however many jobs were moved.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, TypeAlias

import apsw

from penstock.core.books import keys_of
from penstock.core.changes import Note
from penstock.core.demand import Demand
from penstock.core.states import State
from penstock.core.words import AddonId, DispatchId, HostId, Moment
from penstock.stores.rows import encode
from penstock.stores.sqlite_file import one, query, statements
from penstock.stores.sqlite_floor import Accounts

__all__ = ["NO_JOB", "Pages", "Told"]

#: Whose event it is: the job's number, the event's number within the job, the job's state after it.
Told: TypeAlias = tuple[int | None, int, State | None]
NO_JOB: Final[Told] = (None, 0, None)


class Pages:
    def __init__(self, con: apsw.Connection) -> None:
        self._con, self._sql = con, statements()
        marks = dict(query(con, "marks"))
        self._no, self._seq = int(marks["job"]), int(marks["event"])
        self._jobs: list[tuple[Any, ...]] = []
        self._intents: list[tuple[Any, ...]] = []
        self._taken: list[tuple[Any, ...]] = []
        self._dispatches: list[tuple[Any, ...]] = []
        self._events: list[tuple[Any, ...]] = []
        self._ledger: dict[tuple[str, str], list[int]] = {}
        self.tally: Counter[tuple[str, str]] = Counter()
        self.accounts = Accounts(con)
        self.touched: set[AddonId] = set()
        self.told = False

    def next_no(self) -> int:
        self._no += 1
        return self._no

    def add_job(self, job: tuple[Any, ...], intent: tuple[Any, ...]) -> None:
        self._jobs.append(job)
        self._intents.append(intent)

    def take_job(self, row: tuple[Any, ...]) -> None:
        self._taken.append(row)

    def add_dispatch(self, row: tuple[Any, ...]) -> None:
        self._dispatches.append(row)

    def note(self, at: Moment, note: Note, told: Told, dispatch_id: DispatchId | None = None) -> None:
        """The number is taken under the write lock, so numbers follow commits and a reader's cursor skips nothing."""
        no, n, state = told
        self._seq += 1
        self._events.append(
            (
                self._seq,
                at,
                note.kind,
                no,
                n,
                state,
                note.reason,
                dispatch_id,
                encode(note.data) if note.data else None,
            )
        )

    def moved(self, addon_id: AddonId, source: State, target: State) -> None:
        if source is not target:
            self.tally[addon_id, source] -= 1
            self.tally[addon_id, target] += 1

    def hold(self, host: HostId, demand: Demand, sign: int) -> None:
        for scope, name in [("host", host), *keys_of(demand)]:
            row = self._ledger.get((scope, name))
            if row is None:
                row = list(one(self._con, "ledger_row", {"scope": scope, "name": name}) or (0, 0))
                self._ledger[scope, name] = row
            row[0] += sign * demand.cost_units
            row[1] += sign

    def flush_rows(self) -> None:
        """Before anything reads jobs or dispatches."""
        if self._taken or self._dispatches:
            self._con.executemany(self._sql["take_job"], self._taken)
            self._con.executemany(self._sql["add_dispatch"], self._dispatches)
            self._taken, self._dispatches = [], []
        if self._jobs:
            self._con.executemany(self._sql["add_job"], self._jobs)
            self._con.executemany(self._sql["add_intent"], self._intents)
            self._con.execute(self._sql["set_mark"], {"name": "job", "value": self._no})
            self._jobs, self._intents = [], []

    def flush(self) -> None:
        self.flush_rows()
        if self._events:
            self._con.executemany(self._sql["add_event"], self._events)
            self._con.execute(self._sql["set_mark"], {"name": "event", "value": self._seq})
            self._events, self.told = [], True
        counts = [(addon_id, state, n) for (addon_id, state), n in self.tally.items() if n]
        self._con.executemany(self._sql["count_jobs"], counts)
        self._con.executemany(self._sql["set_ledger"], [(*key, *row) for key, row in self._ledger.items()])
        for addon_id in self.touched:
            a = self.accounts[addon_id]
            row = (addon_id, a.weight, int(a.paused), a.average, a.units, a.at)
            self._con.execute(self._sql["set_account"], row)
        self._ledger = {}
        self.tally.clear()
        self.touched.clear()
