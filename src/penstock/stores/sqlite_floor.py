"""
What a round sees of a SQLite store: books, and one lazy line per demand.

A line is an open cursor on the order index. A round pulls the head of each and goes further only behind what it starts, so
the database never reads a row that was not weighed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import apsw

from penstock.core.books import EVERYTHING, Books
from penstock.core.demand import Demand
from penstock.core.order import Line, Running, Waiting
from penstock.core.share import Account
from penstock.core.spend import windows
from penstock.core.words import AddonId, HostId, Moment
from penstock.stores.rows import demand_from, demand_row
from penstock.stores.sqlite_file import one, query, statements

__all__ = ["Accounts", "Demands", "Held", "Spent", "Standby", "TableFloor", "read_books"]


class Demands:
    """Demands are few and never change, so each is read once. Forgotten on a rollback: one of them may never have been."""

    def __init__(self) -> None:
        self._numbers: dict[Demand, int] = {}
        self._demands: dict[int, Demand] = {}

    def number(self, con: apsw.Connection, demand: Demand) -> int:
        no = self._numbers.get(demand)
        if no is None:
            (no,) = one(con, "demand_by_key", {"key": demand.key}) or one(
                con, "add_demand", demand_row(demand)
            )
            self._numbers[demand] = no
        return no

    def demand(self, con: apsw.Connection, no: int) -> Demand:
        demand = self._demands.get(no)
        if demand is None:
            demand = demand_from(one(con, "demand_by_no", {"no": no}))
            self._demands[no] = demand
        return demand

    def forget(self) -> None:
        self._numbers.clear()
        self._demands.clear()


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


class Standby(NamedTuple):
    """What the store itself must know of a job in line when it is picked."""

    demand_no: int
    events: int
    max_runtime_sec: int | None
    max_active_sec: int | None
    active: int


class Spent(Mapping[AddonId, Mapping[str, int]]):
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


#: Units and how many, by row of the ledger: what was taken or given back and is not in the table yet.
Held: TypeAlias = Mapping[tuple[str, str], tuple[int, int]]
_NOTHING: Final[Held] = {}


def read_books(
    con: apsw.Connection, host: HostId, now: Moment, accounts: Accounts, held: Held = _NOTHING
) -> Books:
    books = Books(accounts=accounts, spent=Spent(con, now))
    ledger = {(scope, name): (units, running) for scope, name, units, running in query(con, "ledger")}
    for key, (units, running) in held.items():
        before = ledger.get(key, (0, 0))
        ledger[key] = (before[0] + units, before[1] + running)
    books.units, books.running = ledger.get(("host", host), (0, 0))
    books.counts = {key: running for key, (_, running) in ledger.items() if key[0] != "host"}
    return books


class TableFloor:
    def __init__(
        self,
        con: apsw.Connection,
        host: HostId,
        now: Moment,
        demands: Demands,
        accounts: Accounts,
        *,
        held: Held = _NOTHING,
    ) -> None:
        self.now = now
        self.books = read_books(con, host, now, accounts, held)
        self.standby: dict[int, Standby] = {}
        self._con, self._host, self._demands = con, host, demands
        self._open: list[apsw.Cursor] = []

    def lines(self) -> Iterator[Line]:
        demand_no, line = 0, 0
        while row := one(self._con, "next_line", {"demand": demand_no, "line": line}):
            demand_no, line = row
            cursor = self._con.execute(statements()["in_line"], {"demand": demand_no, "line": line})
            self._open.append(cursor)
            demand = self._demands.demand(self._con, demand_no)
            self.books.accounts.get(demand.addon_id)  # will be asked for, and the one for all with it
            yield Line(demand, line == 2, self._pull(demand_no, cursor))

    def _pull(self, demand_no: int, cursor: Iterable[Any]) -> Iterator[Waiting]:
        for row in cursor:
            self.standby[row[0]] = Standby(demand_no, *row[8:])
            yield Waiting(*row[:8])

    def running(self) -> Sequence[Running]:
        return [Running(*row) for row in query(self._con, "running", {"host": self._host})]

    def close(self) -> None:
        """Before anything is written: an open cursor would walk over rows that move."""
        for cursor in self._open:
            cursor.close(True)
