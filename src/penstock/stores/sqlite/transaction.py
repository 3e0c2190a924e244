"""
The write transaction of the SQLite store, one after the other, each shared by all operations that arrived together.

How a write is made, from the outside in:

1. `store.py` opens the transaction, hands each operation to the function that writes it, and closes it.
2. `changes.py` writes submits, changes, completions and heartbeats. `admission.py` lets a round decide and writes what
   starts. `maintenance.py` writes the rest. Each writes its rows at once, with the methods of `Transaction`.
3. Three things wait for the end of the transaction, because one statement then serves many operations: new jobs (until
   something reads jobs), the events, which are one text, and the totals, one row per key. A round sees new jobs before
   they are written: one that starts in the transaction of its submit never enters the `queue` table.

`SqliteTotals` keeps what admission reads (ledger, accounts, job counts) from one commit to the next: half of what a single
job had to read was what the commit before it had written. Everything kept is forgotten after a rollback, and when
SQLite says that another connection has written.
"""

from __future__ import annotations

import fcntl
import os
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeAlias

import apsw
import msgspec

from penstock.core.errors import OutcomeUnknown
from penstock.core.jobs.admission import Account, AdmissionClass, keys_of
from penstock.core.jobs.arrays import ArrayRecord
from penstock.core.jobs.changes import Note
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment, dispatch_parts
from penstock.stores.api import Clock
from penstock.stores.common.dependencies import StateMove
from penstock.stores.common.reads import AdmissionClasses
from penstock.stores.common.rows import Queued, class_row, pack_events
from penstock.stores.common.writes import EventJob, EventRow, event_row
from penstock.stores.sqlite.connection import SQL, failures
from penstock.stores.sqlite.guard import FileGuard, FileLost

#: Rows that one INSERT writes. `executemany` takes the statement out of the connection's cache and puts it back for every
#: row, and each time the cache drops another one: a batch of a hundred compiled most statements of the store anew.
ROWS_AT_ONCE: Final = (64, 16, 4, 3, 2, 1)
#: So many arrays are kept; beyond that all are read again.
MOST_ARRAYS: Final = 100
_encode: Final = msgspec.json.Encoder().encode


def listed(keys: Sequence[Any]) -> str:
    """Many keys as one value, for `json_each`."""
    return _encode(keys).decode()


def by_name(dispatch_ids: Iterable[str]) -> str:
    """Dispatch ids as one value: each with its job and its fence."""
    return _encode([(name, *dispatch_parts(name)) for name in dispatch_ids]).decode()


def dispatch_key(dispatch_id: str) -> dict[str, str | int]:
    """A dispatch id with its job and its fence, as values of a statement."""
    job_id, fence = dispatch_parts(dispatch_id)
    return {"dispatch_id": dispatch_id, "job_id": job_id, "fence": fence}


class SqliteSession:
    """Named statements on one connection: a snapshot, or the write transaction."""

    def __init__(self, con: apsw.Connection) -> None:
        self.con = con

    def execute(self, name: str, values: apsw.Bindings | None = None) -> list[Any]:
        return self.con.execute(SQL[name], values).fetchall()

    def execute_many(self, *calls: tuple[str, apsw.Bindings | None]) -> list[list[Any]]:
        return [self.execute(name, values) for name, values in calls]

    def one(self, name: str, values: apsw.Bindings | None = None) -> Any:
        """The first row, or None."""
        return self.con.execute(SQL[name], values).fetchone()

    array = staticmethod(listed)


class WriteLock:
    """
    Held for one commit: SQLite's own busy handler sleeps up to 100 ms between tries, while the kernel wakes the next
    waiter at once, and frees the lock of a process that dies.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path.with_name(path.name + "-write"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        #: Another process writes as well: this one had to wait for the lock.
        self.contended = False

    def __enter__(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.contended = True
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._fd)


class Transaction(SqliteSession):
    """
    Entered for one write transaction at a time: committed at the end, rolled back if anything raises. All that is committed
    together has one moment, `now`, read from the clock when the lock has been waited for.
    """

    def __init__(
        self,
        con: apsw.Connection,
        lock: WriteLock,
        path: Path,
        clock: Clock,
        ordering: Ordering,
        *,
        guard: FileGuard,
        new_id: Callable[[], str],
    ) -> None:
        super().__init__(con)
        self.ordering, self.new_id = ordering, new_id
        self.classes, self.totals = SqliteAdmissionClasses(), SqliteTotals(self)
        self._lock, self._path, self._clock, self._guard = lock, path, clock, guard
        self._failures = failures(path)
        self._prepare()

    def _prepare(self) -> None:
        self.now = self._clock()
        #: The number of the first event of this transaction.
        self.batch = self.totals.last_event + 1
        #: Called before the commit: the sync takes a while, and needs no interpreter.
        self.previews: list[Callable[[], None]] = []
        #: The numbers of jobs that became DONE, by which pruning will find them.
        self.done: list[int] = []
        #: What jobs of this transaction have in common that differ by their payload alone: see `changes.submit`.
        self.templates: dict[Any, Any] = {}
        #: Ends and retries of jobs, for what follows from them.
        self.moves: list[StateMove] = []
        self._has_dependencies: bool | None = None
        self._last_job = self.totals.last_job
        self._jobs: list[tuple[Any, ...]] = []
        self._queued: list[tuple[Any, ...]] = []
        self._intents: list[tuple[Any, ...]] = []
        #: The jobs that are not written yet, by number.
        self.new_jobs: dict[int, Intent] = {}
        self.events: list[EventRow] = []
        self._mentioned: set[int] = set()

    # begin and end

    def __enter__(self) -> Self:
        try:
            self._begin()
        except Exception as error:
            self._failures.__exit__(None, error, None)
            raise
        return self

    def _begin(self) -> None:
        self._lock.__enter__()
        try:
            # IMMEDIATE, always: a deferred transaction that turns into a writer fails at once, whatever the busy timeout.
            self.con.execute("BEGIN IMMEDIATE")
            self._guard.look()
            self.totals.begin()
            self._prepare()
        except BaseException as error:  # `__exit__` will not come, so the lock is released here
            if self.con.in_transaction:
                self.con.execute("ROLLBACK")
            try:
                if isinstance(error, FileLost):
                    raise self._guard.save(error) from None
            finally:
                self._lock.__exit__()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._end(error)
        except Exception as failure:
            self._failures.__exit__(None, failure, None)
            raise
        if error is not None:
            self._failures.__exit__(kind, error, trace)

    def _end(self, error: BaseException | None) -> None:
        stands = False
        try:
            if error is None:
                self._flush()
                for preview in self.previews:
                    preview()
                self._commit()
                self.totals.committed()
                stands = True
                self._guard.committed(self.totals.last_event)
        finally:
            if not stands:
                self._undo()
            self._lock.__exit__()

    def _commit(self) -> None:
        """
        An error here leaves the outcome open: all that a commit writes may be in the `-wal` when its sync fails, and the next
        process to open the file finds it there.
        """
        try:
            self.con.execute("COMMIT")
        except apsw.IOError as error:
            self._erase()
            raise OutcomeUnknown(
                f"{self._path} could not be synced to the disk ({error}): this may or may not have been written",
                kind="unknown",
            ) from error

    def _erase(self) -> None:
        """
        Overwrite in the `-wal` what a failed commit has written: a job that is not found now must not be there after the next
        start. That holds for a kill even if this sync fails as well; only after a power cut the outcome is open.
        """
        with suppress(apsw.Error):
            self._undo()
            version = self.con.pragma("user_version")
            self.con.execute(f"BEGIN IMMEDIATE; PRAGMA user_version = {version}; COMMIT")

    def _undo(self) -> None:
        """SQLite may have done its part already, as it does on a full disk."""
        if self.con.in_transaction:
            self.con.execute("ROLLBACK")
        self.classes.forget()
        self.totals.forget()

    # rows

    def write(self, name: str, values: tuple[Any, ...], rows: int = 1) -> None:
        """
        Execute a statement that must change so many rows. Each names the state that it leaves: if it does not find that
        state, there is a bug in this store, and nothing of it may be committed.
        """
        before = self.con.total_changes()
        self.con.execute(SQL[name], values)
        if self.con.total_changes() - before != rows:
            raise AssertionError(f"{name}: a row was not in the state it was read in")

    def insert(self, name: str, rows: Sequence[tuple[Any, ...]]) -> None:
        first, remaining = 0, len(rows)
        for size in ROWS_AT_ONCE:
            while remaining >= size:
                values = tuple(chain.from_iterable(rows[first : first + size]))
                self.con.execute(_of_many_rows(name, size), values)
                first, remaining = first + size, remaining - size

    def add_job(
        self,
        job_id: JobId,
        intent: Intent,
        template: tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]],
    ) -> None:
        """`template`: the columns behind these in the rows of `job`, `queue` and `intent`."""
        self._last_job += 1
        of_job, of_queue, of_intent = template
        self._jobs.append((self._last_job, job_id, self.batch, *of_job))
        self._queued.append((self._last_job, job_id, *of_queue))
        self._intents.append((self._last_job, intent.payload, *of_intent))
        self.new_jobs[self._last_job] = intent

    def new_lines(self) -> dict[tuple[int, int], list[Queued]]:
        """The jobs that are not written yet and are ready, by class number and line, as a round sees them."""
        lines: defaultdict[tuple[int, int], list[Queued]] = defaultdict(list)
        for no, job_id, class_no, line, turn, *_, priority, expected, max_runtime, max_active in self._queued:
            if line:
                queued = Queued(no, job_id, priority, turn, 0, expected, None, "", 1, max_runtime, max_active)
                lines[class_no, line].append(queued)
        return lines

    @property
    def queue_is_empty(self) -> bool:
        """Whether no row is in `queue`: every other job that waits is new."""
        return self.totals.queued(None) == len(self.new_jobs)

    def flush_jobs(self, started: Container[int] = ()) -> None:
        """Write the new jobs: before anything reads jobs. Those that have `started` are not queued."""
        if self._jobs:
            self.insert("insert_job", self._jobs)
            self.insert("insert_intent", self._intents)
            self.insert("insert_new_queued", [row for row in self._queued if row[0] not in started])
            self._jobs, self._intents, self._queued, self.new_jobs = [], [], [], {}

    # events

    def add_events(self, *events: EventRow) -> None:
        """
        As `rows.pack_events` says. Their numbers are taken under the write lock, so they follow commits and a reader's cursor skips
        nothing. A job knows in which batch it was submitted, and an attempt in which it began and was completed; every
        other event must be mentioned (`add_note`).
        """
        self.events += events

    def add_note(self, at: Moment, note: Note, job: EventJob, dispatch_id: DispatchId | None = None) -> None:
        self.events.append(event_row(at, note, job, dispatch_id))
        if job.no is not None and job.no <= self.totals.last_job:
            self._mentioned.add(job.no)

    def _flush(self) -> None:
        self.flush_jobs()
        if self.events:  # no job is submitted or moved without one
            size = len(self.events)
            self.execute(
                "insert_events", (self.batch, size, self._last_job, pack_events(self.events).decode())
            )
            if self._mentioned:
                self.execute("insert_mentions", (self.batch, listed(sorted(self._mentioned))))
            self.totals.last_job, self.totals.last_event = self._last_job, self.batch + size - 1
        if self.done:
            self.execute("insert_ended_jobs", (self.now, listed(self.done)))
        self.insert("set_totals", self.totals.changed_rows())

    # what follows from ends

    @property
    def has_dependencies(self) -> bool:
        """Whether any job waits for another. Asked once for a transaction: plain jobs pay no more than this."""
        if self._has_dependencies is None:
            self._has_dependencies = bool(self.one("dependencies_exist")[0])
        return self._has_dependencies

    @has_dependencies.setter
    def has_dependencies(self, value: bool) -> None:
        self._has_dependencies = value

    # what dispatches hold

    def give_back(self, host: HostId, class_no: int, n: int) -> AdmissionClass:
        """Return what `n` dispatches held that have ended. Nowhere else are units returned."""
        admission_class = self.classes.one(self, class_no)
        self.totals.hold(host, admission_class, -n)
        account = self.totals.account(admission_class.addon_id)
        account.hold(-n * admission_class.cost_units, self.now, self.ordering.sharing)
        return admission_class


@cache
def _of_many_rows(name: str, size: int) -> str:
    head, _, values = SQL[name].rpartition("VALUES")
    return f"{head}VALUES {', '.join([values] * size)}"


# what admission reads


class SqliteAdmissionClasses(AdmissionClasses):
    """Forgotten on a rollback, which may undo one."""

    def number(self, session: SqliteSession, admission_class: AdmissionClass) -> int:
        no = self._numbers.get(admission_class)
        if no is None:
            (no,) = session.one("class_by_key", {"key": admission_class.key}) or session.one(
                "add_class", class_row(admission_class)
            )
            self._numbers[admission_class] = no
        return no

    def one(self, session: SqliteSession, number: int) -> AdmissionClass:
        return self._by_number.get(number) or self.read(session, [number])[number]

    def forget(self) -> None:
        self._numbers.clear()
        self._by_number.clear()


#: A row of `totals`: scope and name.
_Key: TypeAlias = tuple[str, str]
_NONE_HELD: Final = (0, 0)
_decode: Final = msgspec.json.Decoder(dict[str, int]).decode


class GrantedLease(NamedTuple):
    """All that a completion needs: the job's number and events, when the lease expires, and what its batch shares."""

    no: int
    events: int
    expires_at: Moment
    #: The number of the class, and the host.
    kind: tuple[int, str]


class SqliteTotals:
    """
    The rows of `totals` as values, and the newest numbers of jobs and events. `ledger` has the units and the number of
    dispatches of each row. A round changes the accounts as it picks.
    """

    def __init__(self, session: SqliteSession) -> None:
        self._session, self._con = session, session.con
        self.forget()

    def forget(self) -> None:
        self._version: int | None = None
        self.last_job = self.last_event = 0
        self.ledger: dict[_Key, tuple[int, int]] = {}
        self.accounts: dict[AddonId, Account] = {}
        self._jobs: dict[AddonId, dict[str, int]] = {}
        #: Leases that this writer granted, and that nothing but their completion has touched since.
        self.leases: dict[DispatchId, GrantedLease] = {}
        #: Arrays that have not ended.
        self.arrays: dict[JobId, ArrayRecord] = {}
        #: What the ledger had in a row before this transaction; None: the row is written in any case.
        self._changed: dict[_Key, tuple[int, int] | None] = {}

    def begin(self) -> None:
        """Inside a transaction that no other connection can write beside."""
        if self._con.data_version() != self._version:
            self.forget()
            self.read()
            self.last_job, self.last_event = self._session.one("newest_numbers") or (0, 0)

    def read(self) -> Self:
        for row in self._session.execute("totals"):
            scope, name, units, running, weight, paused, average, held, at, jobs = row
            self.ledger[scope, name] = (units, running)
            if weight is not None:
                self.accounts[name] = Account(weight, bool(paused), average, held, at)
            if jobs is not None:
                self._jobs[name] = _decode(jobs)
        return self

    def committed(self) -> None:
        self._version = self._con.data_version()

    def keep_array(self, record: ArrayRecord) -> None:
        """For the next end of one of its jobs."""
        self.arrays.pop(record.array.array_id, None)
        if record.progress.ended_at is None:
            if len(self.arrays) >= MOST_ARRAYS:
                self.arrays.clear()
            self.arrays[record.array.array_id] = record

    def queued(self, addon_id: AddonId | None) -> int:
        """How many jobs of an addon are queued, or in all (None)."""
        counts = self._jobs.values() if addon_id is None else [self._jobs.get(addon_id, {})]
        return sum(jobs.get(JobState.QUEUED, 0) for jobs in counts)

    def account(self, addon_id: AddonId) -> Account:
        """To be changed."""
        self._changed["addon", addon_id] = None
        return self.accounts.setdefault(addon_id, Account())

    def hold(self, host: HostId, admission_class: AdmissionClass, n: int) -> None:
        """`n` dispatches more; less than 0: so many have ended."""
        for key in (("host", host), *keys_of(admission_class)):
            before = units, running = self.ledger.get(key, _NONE_HELD)
            self._changed.setdefault(key, before)
            self.ledger[key] = (units + n * admission_class.cost_units, running + n)

    def count(self, addon_id: AddonId, state: JobState, n: int) -> None:
        self._changed["addon", addon_id] = None
        jobs = self._jobs.setdefault(addon_id, {})
        jobs[state] = jobs.get(state, 0) + n

    def move(self, addon_id: AddonId, source: JobState, target: JobState, n: int = 1) -> None:
        self.count(addon_id, source, -n)
        self.count(addon_id, target, n)

    def changed_rows(self) -> list[tuple[Any, ...]]:
        """Whole, to be written. Most of what a transaction gives back it also takes again: such rows are the same."""
        changed, self._changed = self._changed, {}
        return [
            self._row(*key) for key, before in changed.items() if self.ledger.get(key, _NONE_HELD) != before
        ]

    def _row(self, scope: str, name: str) -> tuple[Any, ...]:
        held = self.ledger.get((scope, name), _NONE_HELD)
        if scope != "addon":
            return (scope, name, *held, *(None,) * 6)
        a, jobs = self.accounts.get(AddonId(name)), self._jobs.get(AddonId(name), {})
        account = (None,) * 5 if a is None else (a.weight, int(a.paused), a.average, a.units, a.at)
        return (scope, name, *held, *account, _encode(jobs).decode())
