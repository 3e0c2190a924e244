"""
Marks, ledger, accounts, how many jobs are in which state, and leases that were given out.

The writer keeps them from one commit to the next. SQLite says whether somebody else has written since, and only then they are read
again: half of what a single job had to read was what the commit before it had written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import apsw
import msgspec

from penstock.core.jobs.admission import EVERYTHING, Account
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, DispatchId, Moment
from penstock.stores.sqlite.connection import one, query

#: Units and how many, by row of the ledger.
Held: TypeAlias = Mapping[tuple[str, str], tuple[int, int]]
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(dict[str, int]).decode


class Accounts(dict[AddonId, Account]):
    """Read when asked for: there may be many addons, and a round meets few of them."""

    def __init__(self, con: apsw.Connection) -> None:
        super().__init__()
        self._con = con
        self._absent: set[AddonId] = set()

    def get(self, addon_id: AddonId, default: Any = None) -> Any:
        known = super().get(addon_id)
        if known is not None:
            return known
        if addon_id not in self._absent:
            self._absent |= {addon_id, EVERYTHING}
            # With the one that stands for all, which is asked for as often.
            for row in query(self._con, "accounts", {"addon_id": addon_id, "everything": EVERYTHING}):
                name, weight, paused, average, units, at = row
                if name not in self:
                    self[name] = Account(weight, bool(paused), average, units, at)
        return super().get(addon_id, default)

    def setdefault(self, addon_id: AddonId, default: Any = None) -> Any:
        self.get(addon_id)
        return super().setdefault(addon_id, default)


def read_ledger(con: apsw.Connection) -> dict[tuple[str, str], tuple[int, int]]:
    return {(scope, name): (units, running) for scope, name, units, running in query(con, "ledger")}


#: What leases that were given out together have in common: the number of their demand, their host, when they expire.
Kept: TypeAlias = tuple[int, str, Moment]
#: Of an attempt, all that its completion goes by: the number of its job, how many events that has, and its kind.
Lease: TypeAlias = tuple[int, int, Kept]


class SqliteTotals:
    def __init__(self, con: apsw.Connection) -> None:
        self._con = con
        self._version: int | None = None
        self.forget()

    def forget(self) -> None:
        """After a rollback: what was reckoned meanwhile never came to be."""
        self._version = None
        self.accounts = Accounts(self._con)
        self.job = self.event = 0
        self._ledger: dict[tuple[str, str], tuple[int, int]] | None = None
        self._queued: dict[str, int] | None = None
        self._jobs: dict[str, dict[str, int]] = {}
        #: What was leased here and not touched since by anything but its completion.
        self.leases: dict[DispatchId, Lease] = {}

    def begin(self) -> None:
        """Inside a transaction that nobody else can write beside."""
        if self._con.data_version() != self._version:
            self.forget()
            self.job, self.event = one(self._con, "newest_numbers") or (0, 0)

    def committed(self) -> None:
        self._version = self._con.data_version()

    @property
    def ledger(self) -> dict[tuple[str, str], tuple[int, int]]:
        if self._ledger is None:
            self._ledger = read_ledger(self._con)
        return self._ledger

    @property
    def queued(self) -> dict[str, int]:
        """How many of an addon, where there are any."""
        if self._queued is None:
            self._queued = dict(query(self._con, "queued"))
        return self._queued

    def hold(self, more: Held) -> None:
        ledger = self.ledger
        for key, (units, running) in more.items():
            before = ledger.get(key, (0, 0))
            ledger[key] = (before[0] + units, before[1] + running)

    def count(self, addon_id: str, state: str, jobs: int) -> None:
        its = self._jobs_of(addon_id)
        its[state] = its.get(state, 0) + jobs
        if state == JobState.QUEUED and self._queued is not None:
            left = self._queued.pop(addon_id, 0) + jobs
            if left:
                self._queued[addon_id] = left

    def _jobs_of(self, addon_id: str) -> dict[str, int]:
        jobs = self._jobs.get(addon_id)
        if jobs is None:
            (text,) = one(self._con, "jobs_of", {"addon_id": addon_id}) or (None,)
            jobs = self._jobs[addon_id] = {} if text is None else _decode(text)
        return jobs

    def rows(self, keys: Iterable[tuple[str, str]]) -> list[tuple[Any, ...]]:
        """As they are now, to be written whole."""
        rows: list[tuple[Any, ...]] = []
        for scope, name in keys:
            held = self.ledger.get((scope, name), (0, 0))
            if scope != "addon":
                rows.append((scope, name, *held, None, None, None, None, None, None))
                continue
            a, jobs = self.accounts.get(AddonId(name)), _encode(self._jobs_of(name)).decode()
            account = (None,) * 5 if a is None else (a.weight, int(a.paused), a.average, a.units, a.at)
            rows.append((scope, name, *held, *account, jobs))
        return rows
