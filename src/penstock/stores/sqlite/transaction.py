"""
The write transaction of the SQLite store, which all operations share that arrived together.

How a write is made, from the outside in:

1. `store.py` opens the transaction, hands each operation to the function that writes it, and commits.
2. `changes.py` writes submits, changes, completions and heartbeats. `admission.py` lets a round decide and
   writes what starts. `maintenance.py` writes the rest. All of them use the methods of `Transaction`.
3. Three things are written at the end of the transaction, because one statement then serves many operations:
   new jobs (unless an operation reads jobs before), the events, which are one text, and the totals, one row
   per key. A round sees new jobs before they are written: a job that starts in the transaction of its submit
   never enters the `queue` table.

`SqliteTotals` keeps what admission reads (ledger, accounts, job counts) from one commit to the next: half of
the rows that a single job needed were those that the commit before it had written. A rollback clears it, and
so does a commit of another connection.
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

#: How many rows one INSERT writes. `executemany` takes the statement out of the connection's cache and puts
#: it back for every row, and each time the cache drops another one: a batch of a hundred made SQLite compile
#: most statements again.
ROWS_AT_ONCE: Final = (64, 16, 4, 3, 2, 1)
#: How many arrays are kept; with more, the kept ones are dropped.
MOST_ARRAYS: Final = 100
_encode: Final = msgspec.json.Encoder().encode


def listed(keys: Sequence[Any]) -> str:
    """Many keys as one value, for `json_each`."""
    return _encode(keys).decode()


def by_name(dispatch_ids: Iterable[str]) -> str:
    """Dispatch ids as one value for `json_each`, each with its job and its fence."""
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
    The lock that a writer holds for one commit. SQLite's own busy handler sleeps up to 100 ms between tries;
    the kernel wakes the next waiter at once, and frees the lock of a process that dies.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path.with_name(path.name + "-write"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        #: Whether this process had to wait for the lock, so that another process writes too.
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
    The write transaction, entered anew for each commit: committed at the end, rolled back if anything raises.
    All that is committed together has one moment, `now`, which is read from the clock under the write lock.
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
        #: Functions to call just before the commit: threads can prepare dispatches while the disk syncs.
        self.previews: list[Callable[[], None]] = []
        #: The numbers of jobs that became DONE, for pruning.
        self.done: list[int] = []
        #: The columns that jobs share which differ only by their payload: see `changes.submit`.
        self.templates: dict[Any, Any] = {}
        #: Ends and retries of jobs, for their dependents, batches and arrays.
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
            # IMMEDIATE: a deferred transaction that turns into a writer may fail at once, whatever the busy
            # timeout.
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
        Commit. OutcomeUnknown: if the sync fails, the whole transaction may be in the `-wal`, where the next
        process that opens the file finds it.
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
        Overwrite a failed commit in the `-wal`: a job that is not found now must not exist after the next
        start. This holds after a kill even if this sync fails too; only after a power cut the outcome is
        open.
        """
        with suppress(apsw.Error):
            self._undo()
            version = self.con.pragma("user_version")
            self.con.execute(f"BEGIN IMMEDIATE; PRAGMA user_version = {version}; COMMIT")

    def _undo(self) -> None:
        """Roll back, unless SQLite has done so already, as on a full disk; and forget what was kept."""
        if self.con.in_transaction:
            self.con.execute("ROLLBACK")
        self.classes.forget()
        self.totals.forget()

    # rows

    def write(self, name: str, values: tuple[Any, ...], rows: int = 1) -> None:
        """
        Execute a statement that must change `rows` rows. Such a statement names the state that each row
        leaves. A row in another state is a bug of this store, and the transaction must not commit.
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
        """
        Add a job, to be written later. `template`: the further columns of its rows in `job`, `queue` and
        `intent`.
        """
        self._last_job += 1
        of_job, of_queue, of_intent = template
        self._jobs.append((self._last_job, job_id, self.batch, *of_job))
        self._queued.append((self._last_job, job_id, *of_queue))
        self._intents.append((self._last_job, intent.payload, *of_intent))
        self.new_jobs[self._last_job] = intent

    def new_lines(self) -> dict[tuple[int, int], list[Queued]]:
        """The ready jobs that are not written yet, by class number and line, for a round."""
        lines: defaultdict[tuple[int, int], list[Queued]] = defaultdict(list)
        for no, job_id, class_no, line, turn, *_, priority, expected, max_runtime, max_active in self._queued:
            if line:
                queued = Queued(no, job_id, priority, turn, 0, expected, None, "", 1, max_runtime, max_active)
                lines[class_no, line].append(queued)
        return lines

    @property
    def queue_is_empty(self) -> bool:
        """Whether the `queue` table has no row: every queued job is new."""
        return self.totals.queued(None) == len(self.new_jobs)

    def flush_jobs(self, started: Container[int] = ()) -> None:
        """Write the new jobs, before anything reads jobs. `started`: new jobs that get no row in `queue`."""
        if self._jobs:
            self.insert("insert_job", self._jobs)
            self.insert("insert_intent", self._intents)
            self.insert("insert_new_queued", [row for row in self._queued if row[0] not in started])
            self._jobs, self._intents, self._queued, self.new_jobs = [], [], [], {}

    # events

    def add_events(self, *events: EventRow) -> None:
        """
        Add events, in the layout of `rows.pack_events`. They get their numbers under the write lock, in the
        order of commits, so a reader's cursor skips none. Rows of jobs and attempts name the batches of
        events in which the job was submitted, and the attempt began and was completed. For every other event
        `add_note` writes a mention.
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
        """
        Whether any dependency exists. One query per transaction: jobs without dependencies cost no more.
        """
        if self._has_dependencies is None:
            self._has_dependencies = bool(self.one("dependencies_exist")[0])
        return self._has_dependencies

    @has_dependencies.setter
    def has_dependencies(self, value: bool) -> None:
        self._has_dependencies = value

    # what dispatches hold

    def give_back(self, host: HostId, class_no: int, n: int) -> AdmissionClass:
        """Return the units of `n` dispatches that have ended. No other function returns units."""
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
    """Admission classes by number. A rollback clears them, because it may remove a new class."""

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
    """
    What a completion needs: the job's number and count of events, when the lease expires, and `kind`, which
    leases share that are granted together.
    """

    no: int
    events: int
    expires_at: Moment
    #: The number of the admission class, and the host.
    kind: tuple[int, str]


class SqliteTotals:
    """
    The rows of `totals` as values, and the newest numbers of jobs and events. `ledger` has the units and the
    number of dispatches of each row. A round changes the accounts as it picks.
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
        #: Leases that this writer granted and has not changed since.
        self.leases: dict[DispatchId, GrantedLease] = {}
        #: Arrays that have not ended.
        self.arrays: dict[JobId, ArrayRecord] = {}
        #: The ledger's part of each changed row before this transaction; None: the row is written in any
        #: case.
        self._changed: dict[_Key, tuple[int, int] | None] = {}

    def begin(self) -> None:
        """Read the totals again if another connection has written. Called inside the write transaction."""
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
        """Keep an array for the next end of one of its jobs, until the array has ended."""
        self.arrays.pop(record.array.array_id, None)
        if record.progress.ended_at is None:
            if len(self.arrays) >= MOST_ARRAYS:
                self.arrays.clear()
            self.arrays[record.array.array_id] = record

    def queued(self, addon_id: AddonId | None) -> int:
        """How many jobs of the addon are queued; None: of all addons."""
        counts = self._jobs.values() if addon_id is None else [self._jobs.get(addon_id, {})]
        return sum(jobs.get(JobState.QUEUED, 0) for jobs in counts)

    def account(self, addon_id: AddonId) -> Account:
        """The account of the addon, for a caller that changes it: its row will be written."""
        self._changed["addon", addon_id] = None
        return self.accounts.setdefault(addon_id, Account())

    def hold(self, host: HostId, admission_class: AdmissionClass, n: int) -> None:
        """Count `n` more dispatches of this class; a negative `n`: dispatches that have ended."""
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
        """
        The changed rows, whole. A row whose units and counts are as before is left out: most of what a
        transaction gives back it takes again.
        """
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
