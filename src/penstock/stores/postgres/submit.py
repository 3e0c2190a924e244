"""
The writer of submits: of those that arrived together, or of one in a transaction of the caller's.

Most submits need no check: they have no idempotency key, no parents, and no depth limit that they may reach.
Such submits are one statement and one round trip. Most jobs are calls of the same few functions, so the
values that do not depend on the moment are encoded once and kept (`RowCache`); without that, encoding took a
third of the time of a submit.

In a transaction of the caller's the caller decides whether the jobs are committed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import psycopg
from msgspec.structs import replace
from psycopg.errors import UniqueViolation
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from penstock.core.errors import OutcomeUnknown
from penstock.core.jobs.admission import AdmissionClass, admission_class_of
from penstock.core.jobs.dependencies import batch_of, stored_parents
from penstock.core.jobs.groups import JobGroup, add_members
from penstock.core.jobs.intent import Intent, all_but_payload
from penstock.core.jobs.job import EventKind
from penstock.core.jobs.ordering import Ordering, Place, place
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, JobId, Moment
from penstock.stores.api import NO_LIMIT, Depth, Operation, Receipt, Submit
from penstock.stores.common.group_commit import BatchUnknown, GroupCommit
from penstock.stores.common.rows import changed_group_values, group_from, intent_row, job_row, pack_events
from penstock.stores.common.writes import (
    EventRow,
    UsedKeys,
    added_members,
    key_of,
    new_dependencies,
    submit_intents,
)
from penstock.stores.postgres.admission_view import PostgresAdmissionClasses
from penstock.stores.postgres.changes import Effects, PostgresWriteBatch
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.dependencies import depend, lock_parents
from penstock.stores.postgres.pipeline import Call, EarlyRows, Statement, Values, array, columns, text

#: How many jobs one statement inserts: the server writes them while this process makes the rows of the next
#: ones.
PIECE: Final = 250
#: This far below a depth limit, a count that is at most `FRESH_SEC` old is enough: all hosts together submit
#: fewer jobs in that time.
FAR: Final = 100_000
FRESH_SEC: Final = 1.0
#: How often a submit in a transaction of the caller's runs again because another process used its key.
TRIES: Final = 3


class SubmitBatcher(GroupCommit):
    """The writer of submits. `on_commit` is called after each transaction with whether it created jobs."""

    def __init__(
        self,
        database: Database,
        classes: PostgresAdmissionClasses,
        ordering: Ordering,
        *,
        new_id: Callable[[], str],
        on_commit: Callable[[bool], None],
    ) -> None:
        self._database, self._new_id, self._on_commit = database, new_id, on_commit
        self.rows = RowCache(classes, ordering)
        #: When the queued jobs were last counted, and how many each addon had.
        self._counted: tuple[float, Counter[AddonId]] = (-1e9, Counter())
        #: Holds one pass; a thread that takes it writes its own submit. If a Ctrl-C at the wrong moment loses
        #: the pass, the writer's thread writes all submits.
        self._pass = deque([object()])
        super().__init__(self._write_all)  # type: ignore[arg-type]  # nothing but submits comes here

    def commit(self, operations: Sequence[Operation[Any]], *, wait: bool = False) -> list[Future[Any]]:
        """
        Submit. While no other thread submits, a thread that waits for the answer writes itself, so that two
        threads need not wake each other. The main thread does so too, although Ctrl-C may interrupt it: no
        other thread waits for these answers, and the outcome of an interrupted submit is unknown in either
        case.
        """
        taken = self._take_pass() if wait else None
        if taken is None:
            return super().commit(operations)
        pending = [(operation, Future[Any]()) for operation in operations]
        try:
            self._run(pending)
        finally:
            self._pass.append(taken)
        return [answer for _, answer in pending]

    def _take_pass(self) -> object | None:
        """The pass; None: another thread has it, or earlier submits wait, which must be written first."""
        if self._closed or not self.idle:
            return None
        try:
            return self._pass.pop()
        except IndexError:
            return None

    def _write_all(self, submits: list[Submit]) -> list[list[Receipt]]:
        """Write submits. BatchUnknown: they may have been written."""
        self.rows.prepare([intent for submit in submits for intent in submit.intents])
        receipts: list[list[Receipt]] = []

        def write(session: DatabaseSession) -> None:
            nonlocal receipts
            receipts = self._submit(session, submits)

        try:
            if any(map(self._must_check, submits)) or sum(len(s.intents) for s in submits) > PIECE:
                self._database.transact(write)
            else:
                # The moment may be estimated: no decision depends on it, and a round that starts these jobs
                # reads the server's clock after their commit.
                batch = _Batch(self.rows, self._database.now(), self._new_id)
                receipts = [batch.take(submit) for submit in submits]
                if batch.jobs:
                    self._database.once(*batch.piece(0, None))
        except OutcomeUnknown as error:
            raise BatchUnknown(error, receipts) from error
        self._on_commit(any(receipt.created for answer in receipts for receipt in answer))
        return receipts

    def submit_within(self, connection: Any, submit: Submit, notice: tuple[str, Values]) -> list[Receipt]:
        """
        Submit in the transaction of the caller's connection. If another process commits the same key
        meanwhile, the savepoint is rolled back, and the next try finds that job. `notice` goes out with the
        caller's commit. Depth limits are checked without a lock, which would stop all submits until the
        caller's commit.
        """
        self.rows.prepare(submit.intents)
        with self._database.failures():
            for _ in range(TRIES):
                with suppress(UniqueViolation):
                    return self._submit_in_savepoint(connection, submit, notice)
            return self._submit_in_savepoint(connection, submit, notice)

    def submit_in(
        self, session: DatabaseSession, submit: Submit, events_for: Callable[[Receipt], list[EventRow]]
    ) -> Receipt:
        """
        Submit one job in another transaction of the store. The caller has prepared its row. `events_for`:
        makes more events for the batch of its submit, so that they are kept as long as the job.
        """
        [[receipt]] = self._submit(session, [submit], events_for=events_for)
        return receipt

    def submit_all_in(self, session: DatabaseSession, submit: Submit) -> list[Receipt]:
        """Submit in another transaction of the store. The caller has prepared the rows."""
        [receipts] = self._submit(session, [submit])
        return receipts

    def _submit_in_savepoint(
        self, connection: Any, submit: Submit, notice: tuple[str, Values]
    ) -> list[Receipt]:
        with _savepoint(connection, self._database.sql) as session:
            [receipts] = self._submit(session, [submit], exact=False)
            session.defer(*notice)
        return receipts

    def _submit(
        self,
        session: DatabaseSession,
        submits: Sequence[Submit],
        *,
        exact: bool = True,
        events_for: Callable[[Receipt], list[EventRow]] | None = None,
    ) -> list[list[Receipt]]:
        """`exact`: lock the depth limits, so that other processes cannot exceed them at the same time."""
        keys = sorted({key for s in submits for intent in s.intents if (key := key_of(intent))})
        calls: list[tuple[str, Any]] = [("jobs_by_key", columns(keys))] if keys else []
        limits = [s.depth for s in submits if _limited(s.depth)]
        if limits:
            calls.append(("queued", None))
        intents = [intent for s in submits for intent in s.intents]
        parents, added = stored_parents(intents), added_members(intents).keys()
        locks = lock_parents(parents | added) if parents or added else []
        names = {"batches": array(sorted(added)), "parents": array(sorted(parents))}
        rings = [("waiting_for_groups", names)] if parents and added else []
        now, answers = self._database.lock(session, *locks, *rings, *calls)
        existing, groups = set[JobId](), dict[JobId, JobGroup]()
        if locks:
            *_, group_rows, job_rows = answers[: len(locks)]
            groups = {row[1]: group_from(row[1:]) for row in group_rows}
            existing = groups.keys() | {job_id for _, job_id in job_rows}
        waiting = answers[len(locks)] if rings else []
        answers = answers[len(locks) + len(rings) :]
        queued = None
        if limits:
            queued = Counter(dict(answers[-1]))
            self._counted = (monotonic(), queued.copy())
            more = Counter(intent.addon_id for s in submits for intent in s.intents)
            # Below half of a limit, submits of other processes in the meantime cannot reach it.
            if exact and not all(_fits(depth, queued, more, share=2) for depth in limits):
                *_, rows = session.execute_many(("lock_depth", None), ("queued", None))
                queued = Counter(dict(rows))
        batch = _Batch(
            *(self.rows, now, self._new_id, answers[0] if keys else (), queued),
            existing=existing,
            groups=groups,
            waiting=waiting,
        )
        receipts = [batch.take(submit) for submit in submits]
        if events_for is not None:
            batch.more_events = events_for(receipts[0][0])
        batch.defer(session)
        if batch.dependencies:
            receipts = self._depend(session, batch, receipts)
        return receipts

    def _depend(
        self, session: DatabaseSession, batch: _Batch, receipts: list[list[Receipt]]
    ) -> list[list[Receipt]]:
        """Make new jobs wait for their parents. A job whose parent has ended already may end at once."""
        classes, ordering = self.rows.classes, self.rows.ordering
        for group in batch.grown_groups():
            session.defer("set_group", changed_group_values(group))
        now, _ = self._database.lock(session)  # also gives the next events a batch of their own
        effects = Effects(now)
        depend(session, batch.dependencies, effects, classes, ordering.aging)
        effects.writes.defer(session)
        states = {job_id: job.state for job_id, job in effects.jobs.items()}
        return [[replace(r, state=states.get(r.job_id, r.state)) for r in answer] for answer in receipts]

    def _must_check(self, submit: Submit) -> bool:
        """Whether the transaction must read before it can accept this submit."""
        for intent in submit.intents:
            if intent.idempotency_key is not None or intent.after or (intent.tags and batch_of(intent)):
                return True
        if not _limited(submit.depth):
            return False
        counted_at, queued = self._counted
        more = Counter({intent.addon_id: FAR for intent in submit.intents})
        return monotonic() - counted_at > FRESH_SEC or not _fits(submit.depth, queued, more)


def _limited(depth: Depth) -> bool:
    return depth.total is not None or depth.per_addon is not None


def _fits(depth: Depth, queued: Counter[AddonId], more: Counter[AddonId], share: int = 1) -> bool:
    """Whether the queues with `more` jobs stay within the limits divided by `share`."""
    return (depth.total is None or queued.total() + more.total() <= depth.total // share) and (
        depth.per_addon is None or all(queued[a] + n <= depth.per_addon // share for a, n in more.items())
    )


class _Batch:
    """
    The new jobs of one transaction. `used`: rows of `jobs_by_key`. `queued`: how many jobs each addon has in
    the queue, if a submit has a limit.
    """

    def __init__(
        self,
        rows: RowCache,
        now: Moment,
        new_id: Callable[[], str],
        used: Sequence[Any] = (),
        queued: Counter[AddonId] | None = None,
        *,
        existing: Collection[JobId] = (),
        groups: Mapping[JobId, JobGroup] = MappingProxyType({}),
        waiting: Sequence[tuple[JobId, JobId]] = (),
    ) -> None:
        self._rows, self._now, self._new_id, self._queued = rows, now, new_id, queued
        self._existing, self._groups, self._waiting = existing, groups, waiting
        #: Parent, child, condition, `if_unmet`.
        self.dependencies: list[tuple[JobId, JobId, str, str]] = []
        self._used: UsedKeys = {
            (addon_id, key): (Receipt(job_id, JobState(state), created=False), bytes.fromhex(body))
            for addon_id, key, job_id, state, body in used
        }
        self.jobs: list[tuple[JobId, Intent]] = []
        self.more_events: list[EventRow] = []

    def take(self, submit: Submit) -> list[Receipt]:
        depth = NO_LIMIT if self._queued is None else submit.depth
        return submit_intents(
            submit.intents,
            depth,
            self._used,
            queued=self._count,
            insert=self._make,
            existing=lambda _: self._existing,
            batches=lambda _: self._groups,
            # Also dependencies that earlier submits of this transaction add.
            waiting=lambda *_: [*self._waiting, *((parent, job) for parent, job, *_ in self.dependencies)],
        )

    def _count(self, addon_id: AddonId | None) -> int:
        assert self._queued is not None
        return self._queued.total() if addon_id is None else self._queued[addon_id]

    def _make(self, _: int, intent: Intent) -> Receipt:
        receipt = Receipt(JobId(self._new_id()), JobState.QUEUED, created=True)
        self.jobs.append((receipt.job_id, intent))
        if intent.after or intent.tags:
            self.dependencies += new_dependencies(receipt.job_id, intent)
        if self._queued is not None:
            self._queued[intent.addon_id] += 1
        return receipt

    def grown_groups(self) -> list[JobGroup]:
        """The batches with their new members."""
        added = Counter(child for _, child, *_ in self.dependencies if child in self._groups)
        return [add_members(self._groups[batch], n) for batch, n in sorted(added.items())]

    def defer(self, session: DatabaseSession) -> None:
        """Defer the jobs in pieces. The rows of a piece are made when the piece before it has been sent."""
        for first in range(0, len(self.jobs), PIECE):
            session.defer(*self.piece(first, session.batch))
        session.has_events |= bool(self.jobs)

    def piece(self, first: int, batch: int | None) -> tuple[str, Callable[[], dict[str, Any]]]:
        """
        The statement for the piece of jobs from `first` on, and its values. Jobs that arrive together usually
        differ only by their payload. `batch`: None lets the statement draw a number. The last piece writes
        the events.
        """
        jobs = self.jobs[first : first + PIECE]
        last = first + PIECE >= len(self.jobs)
        kind = all_but_payload(jobs[0][1])
        alike = all(all_but_payload(intent) == kind for _, intent in jobs)

        def values() -> dict[str, Any]:
            rows = self._rows.alike(jobs, self._now) if alike else self._rows.mixed(jobs, self._now)
            return rows | (self._events() if last else _NO_EVENTS) | {"batch": batch}

        return "submit_alike" if alike else "submit_jobs", values

    def _events(self) -> dict[str, Any]:
        events = _submitted(self.jobs, self._now) + self.more_events
        return {"size": len(events), "events": pack_events(events)}


_NO_EVENTS: Final = {"size": 0, "events": None}


def _submitted(jobs: Sequence[tuple[JobId, Intent]], now: Moment) -> list[EventRow]:
    kind, state = EventKind.SUBMITTED, JobState.QUEUED
    return [(now, kind, job_id, 1, state, "", None, None) for job_id, _ in jobs]


def defer_named(
    session: DatabaseSession,
    rows: RowCache,
    jobs: Sequence[tuple[JobId, Intent]],
    writes: PostgresWriteBatch,
    now: Moment,
) -> None:
    """
    Defer jobs of one kind with these ids in another transaction of the store; `writes` gets their events. The
    caller has prepared `rows` for them.
    """

    def values(piece: Sequence[tuple[JobId, Intent]], batch: int) -> dict[str, Any]:
        return rows.alike(piece, now) | _NO_EVENTS | {"batch": batch}

    for first in range(0, len(jobs), PIECE):
        session.defer("submit_alike", partial(values, jobs[first : first + PIECE], session.batch))
    writes.note_many(lambda: _submitted(jobs, now))


# the rows

#: How many kinds are kept; with more, all are dropped, because then probably every job is a kind of its own.
MOST_KINDS: Final = 1_000
#: The names of the columns of `job_row` and `intent_row`, in their order.
_NAMES: Final = (
    *("addon_id", "class_no", "line", "turn", "ready_at", "urgent_at", "priority", "created_at"),
    *("earliest_start_at", "deadline_at", "expected_sec", "max_runtime_sec", "max_active_sec"),
    *("idempotency_key", "tags", "unit", "cost_limit", "time_sensitive", "retry_delays"),
    *("preemptible", "dependencies", "body_hash"),
)


class _EncodedKind(NamedTuple):
    """The encoded values of a kind of jobs, by name."""

    admission_class: AdmissionClass
    values: dict[str, bytes | None]


class RowCache:
    """
    The values of submitted jobs. Jobs that differ only by their payload are of one kind, whose values are
    kept.
    """

    def __init__(self, classes: PostgresAdmissionClasses, ordering: Ordering) -> None:
        self.classes, self.ordering = classes, ordering
        self.kinds: dict[Hashable, _EncodedKind] = {}

    def prepare(self, intents: Sequence[Intent]) -> None:
        """Make the admission classes of new kinds, before the transaction that needs them."""
        new, last = set(), None
        for intent in intents:
            if (kind := all_but_payload(intent)) != last:
                last = kind
                if kind not in self.kinds:
                    new.add(admission_class_of(intent))
        self.classes.make(new)

    def alike(self, jobs: Sequence[tuple[JobId, Intent]], now: Moment) -> dict[str, Any]:
        """The values of `submit_alike`, for jobs of one kind."""
        intent = jobs[0][1]
        encoded = self.kinds.get(all_but_payload(intent)) or self._encode_kind(intent, now)
        where = place(intent, now, None, self.ordering, encoded.admission_class)
        return {
            **encoded.values,
            "line": b"%d" % where.line(now),
            "turn": b"%d" % where.turn,
            "ready_at": b"%d" % where.ready_at,
            "created_at": b"%d" % now,
            "ids": array([job_id for job_id, _ in jobs]),
            "payloads": array([intent.payload for _, intent in jobs]),
        }

    def mixed(self, jobs: Sequence[tuple[JobId, Intent]], now: Moment) -> dict[str, Any]:
        """The values of `submit_jobs`: a row for each kind, and a row for each job, which names its kind."""
        kinds: dict[Hashable, int] = {}
        firsts: list[Intent] = []
        rows = []
        for job_id, intent in jobs:
            kind = kinds.setdefault(all_but_payload(intent), len(kinds) + 1)
            if kind > len(firsts):
                firsts.append(intent)
            rows.append((job_id, intent.payload, kind))
        counts = Counter([intent.addon_id for _, intent in jobs])
        of_kinds = [self._row(intent, place(intent, now, None, self.ordering), now) for intent in firsts]
        return {
            **dict(zip(("ids", "payloads", "kinds"), columns(rows), strict=True)),
            "addons": array(list(counts)),
            "counts": array(list(counts.values())),
            **dict(zip(_NAMES, columns(of_kinds), strict=True)),
        }

    def _encode_kind(self, intent: Intent, now: Moment) -> _EncodedKind:
        where = place(intent, now, None, self.ordering)
        values = dict(zip(_NAMES, map(text, self._row(intent, where, now)), strict=True))
        encoded = _EncodedKind(where.admission_class, values)
        # Not kept: with a key, the values include the hash of the payload; other jobs seldom have the same
        # parents.
        if intent.idempotency_key is None and not intent.after:
            if len(self.kinds) >= MOST_KINDS:
                self.kinds.clear()
            self.kinds[all_but_payload(intent)] = encoded
        return encoded

    def _row(self, intent: Intent, where: Place, now: Moment) -> tuple[Any, ...]:
        class_no = self.classes.number(where.admission_class)
        _, _, *of_job = job_row(0, JobId(""), intent, where, class_no=class_no, now=now)
        _, _, *of_intent, body = intent_row(0, intent)
        return (*of_job, *of_intent, None if body is None else body.hex())


# in a transaction of the caller's


@contextmanager
def _savepoint(connection: Any, sql: Mapping[str, Statement]) -> Iterator[DatabaseSession]:
    """
    A savepoint in the caller's transaction, so that a refusal undoes only the submit. A connection without a
    transaction begins one, as it would for any statement; in autocommit mode the submit is committed.
    """
    con = _psycopg_connection(connection)
    if not con.autocommit and con.info.transaction_status == TransactionStatus.IDLE:
        con.execute("SELECT 1")
    with con.transaction():
        session = DatabaseSession(_CallersConnection(con), sql, ())
        yield session
        session.flush()


class _CallersConnection:
    """Runs the store's statements on the caller's connection, whatever its row factory is."""

    def __init__(self, con: psycopg.Connection[Any]) -> None:
        self._cursor = psycopg.RawCursor(con, row_factory=tuple_row)

    def exchange(self, calls: Sequence[Call], behind: Sequence[Call] = ()) -> list[list[Any]]:
        return [self._execute(statement, values) for statement, values in (*calls, *behind)]

    def _execute(self, statement: Statement, values: Values) -> list[Any]:
        assert not isinstance(values, EarlyRows)  # only a round has them
        bound = [None if value is None else value.decode() for value in statement.bind(values)]
        self._cursor.execute(statement.text, bound)
        return self._cursor.fetchall() if self._cursor.description else []


def _psycopg_connection(given: Any) -> psycopg.Connection[Any]:
    """
    The psycopg connection of the argument. In SQLAlchemy a Session has a Connection, which has a pooled
    connection, which has the driver's.
    """
    con = given
    if callable(getattr(con, "connection", None)):
        con = con.connection()
    if not isinstance(con, psycopg.Connection) and hasattr(con, "connection"):
        con = getattr(con.connection, "driver_connection", None)
    if not isinstance(con, psycopg.Connection):
        raise TypeError(
            f"connection must be a psycopg Connection, or a SQLAlchemy Session or Connection on psycopg, "
            f"not {type(given).__module__}.{type(given).__qualname__}"
        )
    return con
