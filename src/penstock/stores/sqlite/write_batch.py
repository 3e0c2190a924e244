"""
What one transaction writes, gathered: rows and events go in with few statements, and a total once per key,
however many jobs moved.

The batch also keeps the jobs that a round has started as values (`Started`): the round has just read them, so
their workers need not. Many rows are written by one statement: `executemany` takes the statement out of the
connection's cache and puts it back for every row, and each time the cache drops another one, so a batch of a
hundred compiled most statements of the store anew.
"""

#: So many rows by one statement.
from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final, TypeAlias

import apsw
import msgspec
from msgspec.structs import replace

from penstock.core.jobs.admission import Account, FairShare, keys_of
from penstock.core.jobs.changes import Note
from penstock.core.jobs.intent import AdmissionClass, Intent
from penstock.core.jobs.job import Job
from penstock.core.jobs.states import NONE_YET, Counters, DispatchPhase, JobState
from penstock.core.jobs.types import AddonId, DispatchId, HostId, JobId, Moment, Money, Span
from penstock.stores.common.rows import by_name, intent_from, listed, pack
from penstock.stores.sqlite.admission_view import (
    NewQueued,
    Queued,
    SqliteAdmissionClasses,
    SqliteAdmissionView,
    read_ledger_totals,
)
from penstock.stores.sqlite.connection import one, statements
from penstock.stores.sqlite.totals import Held, Kept, Lease, SqliteTotals

SIZES: Final = (64, 16, 4, 3, 2, 1)


def insert(con: apsw.Connection, name: str, rows: Sequence[tuple[Any, ...]]) -> None:
    first, left = 0, len(rows)
    for size in SIZES if left > 4 else (left,):
        while left >= size > 0:
            con.execute(_rows_at_once(name, size), tuple(chain.from_iterable(rows[first : first + size])))
            first, left = first + size, left - size


@cache
def _rows_at_once(name: str, size: int) -> str:
    head, _, values = statements()[name].rpartition("VALUES")
    return f"{head}VALUES {', '.join([values] * size)}"


def update(con: apsw.Connection, name: str, groups: dict[Hashable, list[Any]]) -> None:
    """
    `groups`: the keys of the rows that get the same values. Each statement names the state that it leaves. One that finds another would be
    a bug of ours, and must not be committed.
    """
    before, many = con.total_changes(), _keys_at_once(name)
    for values, keys in groups.items():
        if len(keys) == 1:
            con.execute(statements()[name], (*values, keys[0]))  # type: ignore[misc]  # a tuple, whatever is in it
        else:
            con.execute(many, (*values, listed(keys)))  # type: ignore[misc]  # likewise
    _check(con, name, before, sum(map(len, groups.values())))


def write(con: apsw.Connection, name: str, values: tuple[Any, ...], rows: int) -> None:
    """One statement that finds by itself which rows it concerns, and how many these must be."""
    before = con.total_changes()
    con.execute(statements()[name], values)
    _check(con, name, before, rows)


def _check(con: apsw.Connection, name: str, before: int, rows: int) -> None:
    if con.total_changes() - before != rows:
        raise AssertionError(f"{name}: a row was not in the state it was read in")


@cache
def _keys_at_once(name: str) -> str:
    """The key is the last thing a statement asks for."""
    head, _, number = statements()[name].rpartition(" = ?")
    return f"{head} IN (SELECT value FROM json_each(?{number}))"  # noqa: S608 - fixed words


_decode: Final = msgspec.json.Decoder(tuple[Any, ...]).decode
#: What `said_of` leaves out of a job that has nothing of it.
_NOTHING: Final = (None, None, 0, None, None, None, None, None, 0, 0, 0, 0, 0, 0, None)
_UNTRIED: Final = (None, NONE_YET, 0, 0, 0, None)


class Started:
    """What jobs that start together share: most differ by their payload alone. `said`: as the statement `said_of` has it, by their numbers."""

    def __init__(
        self,
        admission_class: AdmissionClass,
        fresh: Mapping[int, Intent],
        said: Mapping[int, Sequence[Any]],
        per_point: Span,
    ) -> None:
        self._admission_class, self._fresh, self._said, self.per_point = (
            admission_class,
            fresh,
            said,
            per_point,
        )
        self._like: Any = None
        self._intent: Intent | None = None
        self._life: tuple[Moment | None, Counters, Span, Money, Money, float | None] = _UNTRIED

    def job(self, queued: Queued, dispatch_id: DispatchId) -> Job:
        no, job_id, priority, fence = queued.no, queued.job_id, queued.priority, queued.fence + 1
        intent = self._fresh.get(no)
        if intent is not None:  # submitted at this moment too
            since = queued.turn + priority * self.per_point
            return Job(no, job_id, intent, JobState.RUNNING, since, since, None, fence, dispatch_id)
        _, payload, unit, created_at, ready_at, rest = self._said[no]
        like = (
            priority, queued.expected_sec, queued.max_runtime_sec, queued.max_active_sec, unit, rest
        )  # fmt: skip
        if like != self._like:
            self._read(like)
        assert self._intent is not None
        not_before, failed, active, spent, spent_before, progress = self._life
        return Job(
            no, job_id, replace(self._intent, payload=payload), JobState.RUNNING, created_at, ready_at, not_before, fence, dispatch_id, failed,
            active, spent, spent_before, progress
        )  # fmt: skip

    def _read(self, like: tuple[Any, ...]) -> None:
        priority, expected, max_runtime, max_active, unit, rest = self._like = like
        (tags, cost_limit, time_sensitive, retry_delays, earliest, deadline, key,
         not_before, crash, unavailable, error, active, spent, spent_before, progress) = _NOTHING if rest is None else _decode(rest)  # fmt: skip
        edited = (priority, earliest, deadline, expected, max_runtime, max_active, key)
        said = ("", tags, unit, cost_limit, time_sensitive, retry_delays)
        self._intent = intent_from(self._admission_class, edited, said)
        failed = Counters(crash, unavailable, error, 0) if crash or unavailable or error else NONE_YET
        self._life = (not_before, failed, active, spent, spent_before, progress)


#: Whose event it is: the job's number and id, the event's number within the job, the job's state after it.
Told: TypeAlias = tuple[int | None, JobId | None, int, JobState | None]
NO_JOB: Final[Told] = (None, None, 0, None)
#: Which one of those asked for, and what is known of it (`Lease`).
_Lease: TypeAlias = tuple[int, int, int, Kept]
_leases: Final = msgspec.json.Decoder(list[_Lease]).decode


class SqliteWriteBatch:
    def __init__(
        self, con: apsw.Connection, demands: SqliteAdmissionClasses, sums: SqliteTotals, now: Moment
    ) -> None:
        self._con, self._sql, self._demands, self._sums, self._now = con, statements(), demands, sums, now
        self._no = self._submitted_before = sums.job
        #: The number of the first event that is told here.
        self.batch = sums.event + 1
        self._jobs: list[tuple[Any, ...]] = []
        self._intents: list[tuple[Any, ...]] = []
        #: What would wait if it were written now: a job that starts with the commit that it came with never stands in the queue.
        self._queued: dict[int, NewQueued] = {}
        self._jobs_written = False
        self._leasing: list[tuple[tuple[Any, ...], list[int]]] = []
        self._starting: list[tuple[Any, ...]] = []
        self._leaving: list[int] = []
        self._plain: list[int] = []
        self._with_result: list[tuple[int, str]] = []
        self._done: list[int] = []
        self._updates: dict[str, dict[Hashable, list[Any]]] = {}
        self._events: list[tuple[Any, ...]] = []
        self._mentioned: set[int] = set()
        self._held: dict[tuple[HostId, int], int] = defaultdict(int)
        self._moves: dict[tuple[AddonId, JobState, JobState], int] = defaultdict(int)
        self.tally: dict[tuple[str, str], int] = defaultdict(int)
        self.accounts = sums.accounts
        self.touched: set[AddonId] = set()
        self.told = False
        #: Submitted here: no worker that starts one of them need read it.
        self.fresh: dict[int, Intent] = {}

    def next_no(self) -> int:
        self._no += 1
        return self._no

    def add_job(self, job: tuple[Any, ...], queued: NewQueued, intent: tuple[Any, ...]) -> None:
        self._jobs.append(job)
        self._queued[queued.no] = queued
        self._intents.append(intent)

    def start(self, nos: Iterable[int]) -> None:
        """They wait no longer. What they are from now on comes by `lease` or `add_live`."""
        if self._queued:
            nos = [no for no in nos if self._queued.pop(no, None) is None]
        self._leaving += nos

    def lease(self, kind: Kept, worker: str, nos: list[int]) -> None:
        """Those that wait in the file, and have nothing of their own but their number."""
        class_no, host, until = kind
        if nos:
            self._leasing.append(((class_no, host, self.batch, self._now, until, worker), nos))

    def add_live(self, rows: list[tuple[Any, ...]]) -> None:
        self._starting += rows

    def complete(self, plain: list[int], with_result: Sequence[tuple[int, str]]) -> None:
        """They are done. What they were in flight becomes attempts."""
        self._plain += plain
        self._with_result += with_result
        self.done((*plain, *(no for no, _ in with_result)))

    def done(self, nos: Iterable[int]) -> None:
        """By whichever way: who forgets old jobs will find them by it."""
        self._done += nos

    def number(self, admission_class: AdmissionClass) -> int:
        return self._demands.number(self._con, admission_class)

    def said(self, nos: Sequence[int]) -> dict[int, tuple[Any, ...]]:
        """What was said of these jobs, by their numbers."""
        rows: list[Any] = self._con.execute(self._sql["intents_of"], (listed(nos),)).fetchall() if nos else []
        return {row[0]: row for row in rows}

    def update(self, statement: str, key: int | str, *values: Any) -> None:
        self._updates.setdefault(statement, {}).setdefault(values, []).append(key)

    def note(self, at: Moment, note: Note, told: Told, dispatch_id: DispatchId | None = None) -> None:
        no, job_id, n, state = told
        attempt = dispatch_id if job_id is None or dispatch_id is None else dispatch_id[len(job_id) + 1 :]
        self.tell((at, note.kind, job_id, n, state, note.reason, attempt, note.data or None))
        if no is not None and no <= self._submitted_before:
            self._mentioned.add(no)

    def tell(self, *events: tuple[Any, ...]) -> None:
        """
        As `trail.pack` says. Their numbers are taken under the write lock, so they follow commits and a reader's cursor skips nothing. A job
        knows in which batch it was submitted, and an attempt in which it began and was completed; all else must be mentioned (`note`).
        """
        self._events += events

    def moved(self, addon_id: AddonId, source: JobState, target: JobState, n: int = 1) -> None:
        self._moves[addon_id, source, target] += n

    def hold(self, host: HostId, class_no: int, n: int) -> None:
        self._held[host, class_no] += n

    def give_back(
        self, host: HostId, class_no: int, n: int, sharing: FairShare, now: Moment
    ) -> AdmissionClass:
        """What `n` dispatches held that have ended. Nowhere else do units go back."""
        admission_class = self._demands.admission_class(self._con, class_no)
        self.hold(host, class_no, -n)
        account = self.accounts.get(admission_class.addon_id) or self.accounts.setdefault(
            admission_class.addon_id, Account()
        )
        account.hold(-n * admission_class.cost_units, now, sharing)
        self.touched.add(admission_class.addon_id)
        return admission_class

    @property
    def leased(self) -> dict[DispatchId, Lease]:
        return self._sums.leases

    def forget_leases(self) -> None:
        """Before anything moves or notes something of a job otherwise than by its completion."""
        self._sums.leases.clear()

    def leases(self, dispatch_ids: Sequence[DispatchId], now: Moment) -> list[_Lease]:
        """
        Those under which a job runs. Most were leased by this writer, which knows them still; the others are read, as one text: see `sqlite_many`.
        Each is known once: who is completed twice is looked up.
        """
        known = [self._sums.leases.pop(dispatch_id, None) for dispatch_id in dispatch_ids]
        if None not in known:
            return [(at, *lease) for at, lease in enumerate(known) if lease and lease[2][2] > now]
        values = {"ids": by_name(dispatch_ids), "now": now}
        (text,) = one(self._con, "leases_to_complete", values)
        return _leases(text)

    def admission_view(self, host: HostId, now: Moment) -> SqliteAdmissionView:
        """What a round sees. Most that are submitted to a machine with room start in the same commit, and never stood in line in the file."""
        self._flush_moves()
        queued_here = any(target is JobState.QUEUED for _, _, target in self._moves)
        anybody = self._jobs_written or queued_here or bool(self._sums.queued)
        ledger = read_ledger_totals(self._con, host, now, self.accounts, self._sums.ledger, held=self.held())
        fresh = self._queued.values()
        return SqliteAdmissionView(self._con, host, now, self._demands, ledger, fresh=fresh, anybody=anybody)

    def queued(self, addon_id: AddonId | None) -> int:
        if addon_id is not None:
            return self._sums.queued.get(addon_id, 0) + self.tally[addon_id, JobState.QUEUED]
        more = sum(n for (_, state), n in self.tally.items() if state == JobState.QUEUED)
        return sum(self._sums.queued.values()) + more

    def flush_rows(self) -> None:
        """Before anything reads jobs or dispatches."""
        self._flush_moves()
        if self._jobs:
            insert(self._con, "insert_job", self._jobs)
            insert(self._con, "insert_intent", self._intents)
            insert(self._con, "insert_new_queued", [*self._queued.values()])
            self._jobs, self._intents, self._queued, self._jobs_written = [], [], {}, True

    def _flush_moves(self) -> None:
        if self._plain or self._with_result:
            self._flush_completed()
        updates, self._updates = self._updates, {}
        for statement, groups in updates.items():
            update(self._con, statement, groups)
        for values, nos in self._leasing:
            write(self._con, "insert_leases", (*values, listed(nos)), len(nos))
        self._leasing.clear()
        if self._leaving:
            update(self._con, "leave_queue", {(): self._leaving})
            self._leaving = []
        if self._starting:
            insert(self._con, "insert_dispatches", self._starting)
            self._starting = []

    def _flush_completed(self) -> None:
        landed = [*self._plain, *(no for no, _ in self._with_result)]
        for statement, ended in (("complete", self._plain), ("complete_with", self._with_result)):
            if ended:
                write(self._con, statement, (self.batch, self._now, listed(ended)), len(ended))
        update(self._con, "delete_dispatch", {(str(DispatchPhase.LEASED),): landed})
        self._plain, self._with_result = [], []

    def held(self) -> Held:
        """What a round must know besides the ledger, which has it only at the end: most of what is given back is taken again."""
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for (host, class_no), n in self._held.items():
            admission_class = self._demands.admission_class(self._con, class_no)
            for key in [("host", host), *keys_of(admission_class)] if n else ():
                units, running = sums.get(key, (0, 0))
                sums[key] = (units + n * admission_class.cost_units, running + n)
        return sums

    def flush(self) -> None:
        self.flush_rows()
        if self._events:  # nothing is submitted or moved without one
            size = len(self._events)
            self._con.execute(
                self._sql["insert_events"], (self.batch, size, self._no, pack(self._events).decode())
            )
            if self._mentioned:
                self._con.execute(self._sql["insert_mentions"], (self.batch, listed(sorted(self._mentioned))))
            self._sums.job, self._sums.event = self._no, self.batch + size - 1
            self.told = True
        if self._done:
            self._con.execute(self._sql["insert_ended_jobs"], (self._now, listed(self._done)))
        self._flush_sums()

    def _flush_sums(self) -> None:
        held = self.held()
        self._held.clear()
        self._sums.hold(held)
        for (addon_id, source, target), n in self._moves.items():
            self.tally[addon_id, source] -= n
            self.tally[addon_id, target] += n
        self._moves.clear()
        changed = dict.fromkeys([*held, *(("addon", addon_id) for addon_id in self.touched)])
        for (name, state), n in self.tally.items():
            if n:
                self._sums.count(name, state, n)
                changed["addon", name] = None
        if changed:
            insert(self._con, "set_totals", self._sums.rows(changed))
        self.tally.clear()
        self.touched.clear()
