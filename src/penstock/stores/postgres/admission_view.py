"""
The view that a round gets: the ledger, and one ready queue for each admission class; and the rows of the
classes.

An admission class is written in a transaction of its own, before the transaction that needs it. That one may
be the caller's, and must not make other processes wait for a row that all of them need. An unused class does
no harm.

The view reads a ready queue in pieces. One statement reads the first piece of all queues, about as far as the
last round went, because a round trip takes longer than a few rows too many. Reading locks nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from sys import maxsize
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias, cast

from penstock.core.jobs.admission import Account, AdmissionClass, Ledger, keys_of, windows
from penstock.core.jobs.ordering import QueuedJob
from penstock.core.jobs.round import ReadyQueue, RoundResult, RunningJob
from penstock.core.jobs.types import AddonId, HostId, Moment
from penstock.stores.common.reads import AdmissionClasses
from penstock.stores.common.rows import Queued, class_row, spent_from
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import Values, columns

PIECE: Final = 1_000
#: After a read of all queues, rounds read from hints for this many times as long as the read took, but not
#: longer than `MOST_REST_SEC`.
REST: Final = 50
MOST_REST_SEC: Final = 5.0
#: After a slower read, rounds read from hints even if this process has added to the queues.
SLOW_SEC: Final = 0.003
#: How many rows the first pieces of all queues have together.
FIRST: Final = 1_000
#: Before all turns.
_FIRST_TURN: Final = (-(2**63), 0)
#: After the numbers of all classes.
_LAST_CLASS: Final = 2**31 - 1
#: A ready queue: the number of its class, and 1, or 2 for its urgent jobs.
QueueKey: TypeAlias = tuple[int, int]
#: The columns of a row of `heads`: class and line, then a `Queued`.
_NO: Final = 2
_TURN: Final = 5
_position: Final[Callable[[Sequence[Any]], tuple[int, int]]] = itemgetter(_TURN, _NO)


class PostgresAdmissionClasses(AdmissionClasses):
    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database

    def make(self, classes: Iterable[AdmissionClass]) -> None:
        """Write new classes, before the transaction that needs their numbers."""
        for admission_class in classes:
            if admission_class not in self._numbers:
                self._numbers[admission_class] = self._database.transact(
                    partial(_number, admission_class=admission_class)
                )

    def number(self, admission_class: AdmissionClass) -> int:
        return self._numbers[admission_class]

    def has_number(self, admission_class: AdmissionClass) -> bool:
        return admission_class in self._numbers


def _number(session: DatabaseSession, admission_class: AdmissionClass) -> int:
    """Write the class with its ledger rows: a row that does not exist cannot be locked."""
    *_, rows = session.execute_many(
        ("add_class", class_row(admission_class)),
        ("add_ledger", columns(sorted(keys_of(admission_class)))),
        ("class_by_key", {"key": admission_class.key}),
    )
    return int(rows[0][0])


class NewHead(NamedTuple):
    """
    A job that this transaction puts into a ready queue. `row`: as `heads` will return it; None if its number
    is not known.
    """

    key: QueueKey
    turn: Moment
    row: tuple[Any, ...] | None = None

    @property
    def position(self) -> tuple[int, int]:
        return (self.turn, maxsize) if self.row is None else _position(self.row)


#: Stands for jobs that must be read.
UNKNOWN_HEAD: Final = NewHead((0, 0), 0)


class Heads:
    """
    The first piece of every ready queue; with `everything=False` read from the hints of `ScanHint`. The last
    of the `rows` says how long the server took.
    """

    def __init__(self, rows: Sequence[Any], most: int, *, everything: bool = True) -> None:
        self.most, self.everything = most, everything
        self.took_sec = rows[-1][2] / 1_000_000
        self.queues: dict[QueueKey, list[Any]] = defaultdict(list)
        #: The numbers of added jobs.
        self.added: set[int] = set()
        for row in rows[:-1]:
            self.queues[row[:_NO]].append(row)

    def is_before(self, new: NewHead) -> bool:
        """
        Whether the job stands behind a full piece. The next piece is read after the job is written, and will
        have it.
        """
        queue = self.queues.get(new.key, [])
        return len(queue) >= self.most and new.position > _position(queue[-1])

    def add(self, new: NewHead) -> bool:
        """Add a job that is not written yet. False: it must be written, and then all heads read again."""
        if new.row is None:
            return False
        insort(self.queues[new.key], new.row, key=_position)
        self.added.add(new.row[_NO])
        return True


class ScanHint:
    """
    How the next round reads the ready queues: how far and from where, by what the last round found.

    While another program has a long transaction open, the server cannot remove the rows of started jobs, and
    each read from the beginning steps over all of them. So most rounds begin where the last one found the
    first job of each queue, and one in a while reads everything. Both find new queues. But if another process
    submits a job that comes before the first of its queue, or such a job becomes due, it waits for the next
    round that reads everything.
    """

    def __init__(self) -> None:
        self._rows, self._queues = 16, 1
        #: Turn and number of the first job of each queue; of its last first job if the queue is empty now.
        self._first: dict[QueueKey, tuple[int, int]] = {}
        self._read_all_at, self._slow = 0.0, False
        #: How often this process added to the queues: until now, when the last full read was sent, and when
        #: it came back.
        self._additions = self._additions_seen = self._additions_read = 0

    def disturb(self) -> None:
        """
        Record that this process has added to the queues, perhaps at their heads. Any thread may call it.
        """
        self._additions += 1

    def call(self, ended: int) -> tuple[int, tuple[str, Values]]:
        """
        How many rows of each queue to read, and the statement. `ended`: how many dispatches may end in the
        same transaction, and so let jobs start.
        """
        rows = self._rows
        if ended:
            follow = ended + max(4, ended // 16)
            rows = follow if self._queues == 1 else min(rows, follow)
        most = max(1, min(rows, FIRST // self._queues))
        undisturbed = self._slow or (ended and self._additions == self._additions_read)
        if self._first and undisturbed and monotonic() < self._read_all_at:
            classes = sorted({class_no for class_no, _ in self._first})
            starts = [
                (no, line, *self._first.get((no, line), _FIRST_TURN)) for no in classes for line in (1, 2)
            ]
            gaps = [(a, b) for a, b in pairwise([0, *classes, _LAST_CLASS]) if b > a + 1]
            return most, ("heads_from", [*columns(starts), *columns(gaps, 2), most])
        self._additions_seen = self._additions
        return most, ("heads", {"most": most})

    def has_read(self, heads: Heads) -> None:
        if heads.everything:
            self._additions_read, self._slow = self._additions_seen, heads.took_sec >= SLOW_SEC
            self._read_all_at = monotonic() + min(heads.took_sec * REST, MOST_REST_SEC)
            if not self._slow:
                self._first.clear()
        self._first.update((key, (rows[0][_TURN], rows[0][_NO])) for key, rows in heads.queues.items())

    def has_run(self, rows: int, queues: int) -> None:
        """Record how far the round went. A short round shortens the next read only by an eighth."""
        self._rows, self._queues = min(PIECE, max(8, rows + 1, self._rows * 7 // 8)), max(1, queues)


class PostgresAdmissionView:
    """
    What a round sees of the database. `without`: the numbers of jobs to leave out, because another
    transaction is changing them, or this one has changed them.
    """

    def __init__(
        self,
        session: DatabaseSession,
        host: HostId,
        now: Moment,
        ledger: Ledger,
        heads: Heads,
        *,
        classes: AdmissionClasses,
        without: Collection[int] = (),
    ) -> None:
        self.now, self.ledger = now, ledger
        self._session, self._host, self._heads, self._without = session, host, heads, without
        self._classes = classes
        #: How far the round went into each queue.
        self._pulled: dict[QueueKey, int] = {}

    @property
    def most_pulled(self) -> int:
        return max(self._pulled.values(), default=0)

    def ready_queues(self) -> Iterator[ReadyQueue]:
        queues = self._heads.queues
        classes = self._classes.read(self._session, {no for no, _ in queues})
        for key in sorted(queues):
            yield ReadyQueue(classes[key[0]], key[1] == 2, self._pull(key, queues[key], self._heads.most))

    def _pull(self, key: QueueKey, rows: Sequence[Any], most: int) -> Iterator[QueuedJob]:
        without, pulled = self._without, 0
        while True:
            for row in rows:
                pulled += 1
                self._pulled[key] = pulled
                if row[_NO] not in without:
                    yield Queued(*row[_NO:])
            if len(rows) < most:
                return
            most = min(PIECE, most * 4)
            last = rows[-1]
            values = {"class_no": key[0], "line": key[1], "turn": last[_TURN], "no": last[_NO], "most": most}
            [rows] = self._session.flush(("in_line", values))

    def running(self) -> Sequence[RunningJob]:
        return [RunningJob(*row) for row in self._session.execute("running", {"host": self._host})]

    def start_timeouts(self, waiting: QueuedJob) -> int:
        [(start,)] = self._session.execute("start_timeouts", {"no": waiting.no})
        return int(start)


def changed_heads(result: RoundResult) -> dict[int, int]:
    """
    The numbers of the jobs that the round changes, picks first, each with its count of events when it was
    read.
    """
    denied = [denial.waiting for denial in result.denials]
    heads = [*(pick.waiting for pick in result.picks), *denied, *result.passed]
    return {job.no: job.events for job in cast("list[Queued]", heads)}


def ledger_from(session: DatabaseSession, host: HostId, now: Moment) -> Ledger:
    day, month = windows(now)
    rows, accounts, spent = session.execute_many(
        ("ledger", None), ("addons", None), ("spent", {"day": day.name, "month": month.name})
    )
    ledger = Ledger(accounts=accounts_from(accounts), spent=spent_from(spent, day.name))
    add_rows(ledger, rows, host)
    return ledger


def accounts_from(rows: Iterable[Any]) -> dict[AddonId, Account]:
    return {
        addon_id: Account(weight, bool(paused), average, units, at)
        for addon_id, weight, paused, average, units, at in rows
    }


def add_rows(ledger: Ledger, rows: Iterable[Any], host: HostId) -> None:
    """Add rows of the table `ledger` to the ledger that a round of this host sees."""
    for scope, name, units, running in rows:
        if scope != "host":
            ledger.counts[scope, name] = running
        elif name == host:
            ledger.units, ledger.running = units, running
