"""
What a round sees of the database: books, and one line per demand.

A line is read in pieces, the first piece of all lines at once and as long as a round went last time, since a round trip costs more
than a few rows too many. Nothing is locked by looking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from time import monotonic
from typing import Any, Final

from msgspec import Struct

from penstock.core.jobs.admission import Ledger
from penstock.core.jobs.ordering import QueuedJob, ReadyQueue, RoundResult, RunningJob
from penstock.core.jobs.spending import windows
from penstock.core.jobs.types import AddonId, HostId, Moment
from penstock.stores.postgres.database import DatabaseSession
from penstock.stores.postgres.pipeline import Values, columns
from penstock.stores.postgres.write_batch import PostgresAdmissionClasses, accounts_from

PIECE: Final = 1_000
#: A look at all lines comes only once in so many times its length, or so many seconds,
REST: Final = 50
MOST_REST_SEC: Final = 5.0
#: and if it took longer it is slow: then that holds whatever this process has put into the lines since.
SLOW_SEC: Final = 0.003
#: What the first pieces of all lines hold together.
FIRST: Final = 1_000
#: Before and behind all others.
_FIRST_TURN: Final = (-(2**63), 0)
_LAST_CLASS: Final = 2**31 - 1


class ScanHint:
    """
    How the next round looks at the lines, by how the last one went: how far into them, and from where.

    While somebody's transaction is open for long, a transaction that has nothing to do with us, the server cannot clear away what lies before
    the first of a line, and each look from the beginning has to step over all jobs that were started since. So rounds that follow upon each other,
    each behind what the last one started, begin where that one found the first, and one in a while looks at everything. A line that
    nobody knew of is found by both; but a job that comes before the first of its line by another process's doing, or because its time has
    come, waits for the next look at everything.
    """

    def __init__(self) -> None:
        self._rows, self._lines = 16, 1
        #: Turn and number of the first of each line, or where it was when the line was not empty yet.
        self._first: dict[tuple[int, int], tuple[int, int]] = {}
        self._look_again_at, self._slow = 0.0, False
        self._disturbed = self._heeded = self._heeding = 0

    def disturbed(self) -> None:
        """From here something was put into the lines, perhaps before all others. Called in any thread."""
        self._disturbed += 1

    def call(self, ended: int, now: Moment | None = None) -> tuple[int, tuple[str, Values]]:
        """
        How much of each line, and the question. `ended`: so many made room for others, in the same transaction. `now`: None is the server's.
        """
        rows = self._rows
        if ended:
            follow = ended + max(4, ended // 16)
            rows = follow if self._lines == 1 else min(rows, follow)
        most = max(1, min(rows, FIRST // self._lines))
        calm = self._slow or (ended and self._disturbed == self._heeded)
        if self._first and calm and monotonic() < self._look_again_at:
            return most, ("heads_from", [now, *columns(self._known()), *columns(self._between(), 2), most])
        self._heeding = self._disturbed
        return most, ("heads", {"now": now, "most": most})

    def _known(self) -> list[tuple[int, int, int, int]]:
        demands = sorted({admission_class for admission_class, _ in self._first})
        return [(no, line, *self._first.get((no, line), _FIRST_TURN)) for no in demands for line in (1, 2)]

    def _between(self) -> list[tuple[int, int]]:
        """Where in their order demands may stand that are not known."""
        demands = sorted({admission_class for admission_class, _ in self._first})
        return [(a, b) for a, b in pairwise([0, *demands, _LAST_CLASS]) if b > a + 1]

    def looked(self, heads: Heads) -> None:
        if heads.everything:
            self._heeded, self._slow = self._heeding, heads.took_sec >= SLOW_SEC
            self._look_again_at = monotonic() + min(heads.took_sec * REST, MOST_REST_SEC)
            if not self._slow:
                self._first.clear()
        self._first.update((key, (rows[0][_TURN], rows[0][_NO])) for key, rows in heads.lines.items())

    def was(self, rows: int, lines: int) -> None:
        """A short round does not make the next one's appetite small."""
        self._rows, self._lines = min(PIECE, max(8, rows + 1, self._rows * 7 // 8)), max(1, lines)


class Standby(Struct, frozen=True, gc=False):
    """What the store itself must know of a job in line when it is picked."""

    events: int
    max_runtime_sec: int | None
    max_active_sec: int | None
    active: int


#: Where in a row of `heads` is what: first its demand and line, then a `QueuedJob`, then a `Standby`.
_NO: Final = 2
_TURN: Final = 5
_STANDBY: Final = 10


class Heads:
    """
    The first piece of every line, or of those that were known. A line is named by its demand's number and where it stands (1, urgent: 2).
    """

    def __init__(self, rows: Sequence[Any], most: int, *, everything: bool = True) -> None:
        """Behind the `rows` comes one that says whether others should step into line, and how long the server took to find them."""
        self.most, self.everything = most, everything
        self.due = bool(rows and rows[-1][1])
        self.took_sec = rows[-1][2] / 1_000_000 if rows else 0.0
        self.lines: dict[tuple[int, int], list[Any]] = defaultdict(list)
        for row in rows[:-1]:
            self.lines[row[:_NO]].append(row)


class PostgresAdmissionView:
    """`without`: jobs that somebody else is at just now."""

    def __init__(
        self,
        session: DatabaseSession,
        host: HostId,
        now: Moment,
        ledger: Ledger,
        heads: Heads,
        *,
        demands: PostgresAdmissionClasses,
        without: Collection[int] = (),
    ) -> None:
        self.now, self.ledger = now, ledger
        self.standby: dict[int, Standby] = {}
        self._session, self._host, self._heads, self._without = session, host, heads, without
        self._demands = demands
        self._pulled: dict[tuple[int, int], int] = {}

    def lines(self) -> Iterator[ReadyQueue]:
        lines = self._heads.lines
        demands = self._demands.of(self._session, {no for no, _ in lines})
        for key in sorted(lines):
            yield ReadyQueue(demands[key[0]], key[1] == 2, self._pull(key, lines[key], self._heads.most))

    def _pull(self, key: tuple[int, int], rows: Sequence[Any], most: int) -> Iterator[QueuedJob]:
        standby, without, pulled = self.standby, self._without, 0
        while True:
            for row in rows:
                pulled += 1
                self._pulled[key] = pulled
                no = row[_NO]
                if no not in without:
                    standby[no] = Standby(*row[_STANDBY:])
                    yield QueuedJob(*row[_NO:_STANDBY])
            if len(rows) < most:
                return
            most = min(PIECE, most * 4)
            last = rows[-1]
            values = {"class_no": key[0], "line": key[1], "turn": last[_TURN], "no": last[_NO], "most": most}
            rows = self._session.ask("in_line", values)

    def running(self) -> Sequence[RunningJob]:
        return [RunningJob(*row) for row in self._session.ask("running", {"host": self._host})]

    def heads_of(self, round_result: RoundResult) -> dict[int, int]:
        """The jobs that it changes, and how many events each had when it was seen."""
        heads = [pick.waiting for pick in round_result.picks]
        heads += [denial.waiting for denial in round_result.denials]
        return {waiting.no: self.standby[waiting.no].events for waiting in (*heads, *round_result.passed)}

    def tell(self, scan_hint: ScanHint) -> None:
        """What this round was like, for the next one."""
        scan_hint.was(max(self._pulled.values(), default=0), len(self._heads.lines))


def read_ledger_rows(session: DatabaseSession, host: HostId, now: Moment) -> Ledger:
    day, month = windows(now)
    ledger_rows, accounts, spent = session.together(
        ("ledger", None), ("addons", None), ("spent", {"day": day.name, "month": month.name})
    )
    ledger = Ledger(accounts=accounts_from(accounts), spent=spent_from(spent, day.name))
    enter(ledger, ledger_rows, host)
    return ledger


def enter(ledger: Ledger, ledger_rows: Sequence[Any], host: HostId) -> None:
    for scope, name, units, running in ledger_rows:
        if scope != "host":
            ledger.counts[scope, name] = running
        elif name == host:
            ledger.units, ledger.running = units, running


def spent_from(rows: Sequence[Any], day: str) -> dict[AddonId, dict[str, int]]:
    spent: dict[AddonId, dict[str, int]] = {}
    for addon_id, period, amount in rows:
        spent.setdefault(addon_id, {})["day" if period == day else "month"] = amount
    return spent


class PostgresSpent(Mapping[AddonId, Mapping[str, int]]):
    """What each addon has spent, asked for by the first who looks: most have no budget, and nobody does."""

    def __init__(self, ask: Callable[[], Mapping[AddonId, Mapping[str, int]]]) -> None:
        self._ask = ask
        self.found: Mapping[AddonId, Mapping[str, int]] | None = None

    def _all(self) -> Mapping[AddonId, Mapping[str, int]]:
        if self.found is None:
            self.found = self._ask()
        return self.found

    def __getitem__(self, addon_id: AddonId) -> Mapping[str, int]:
        return self._all()[addon_id]

    def __iter__(self) -> Iterator[AddonId]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
