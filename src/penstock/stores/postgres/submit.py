"""
Submits that arrived together, in one transaction; or one submit in a transaction of the caller's own.

Most submits have nothing to ask first: no key that may have been used, no limit that may be reached. They are
one statement and one round trip. Most are calls of the same few functions, so everything that does not depend
on the moment is made once and kept (`Forms`): it was a third of what a submit costs in its process.

In a transaction of the caller our statements run like the caller's own, and the caller ends it.
"""

#: Of forms; beyond it all are made again: then every job has something of its own.
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import psycopg
from msgspec.structs import replace
from psycopg.errors import UniqueViolation
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from penstock.core.errors import OutcomeUnknown
from penstock.core.jobs.intent import AdmissionClass, Intent, admission_class_of, all_but_payload
from penstock.core.jobs.job import EventKind, Place, place
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import AddonId, JobId, Moment
from penstock.stores.api import Depth, Receipt, Submit, key_conflict
from penstock.stores.common.group_commit import BatchUnknown
from penstock.stores.common.rows import body_hash, intent_row, job_row, pack
from penstock.stores.postgres.database import Database, DatabaseSession
from penstock.stores.postgres.pipeline import Heard, Statement, Values, array, columns, text
from penstock.stores.postgres.write_batch import PostgresAdmissionClasses

MOST_KEPT: Final = 1_000
#: As `job_row` and `intent_row` have them.
_NAMES: Final = (
    *("addon_id", "class_no", "line", "turn", "ready_at", "urgent_at", "priority", "created_at"),
    *("earliest_start_at", "deadline_at", "expected_sec", "max_runtime_sec", "max_active_sec"),
    *("idempotency_key", "tags", "unit", "cost_limit", "time_sensitive", "retry_delays", "body_hash"),
)


class _Form(NamedTuple):
    """`row`: by name, with the values as the server reads them."""

    admission_class: AdmissionClass
    row: dict[str, bytes | None]


class Forms:
    def __init__(self, demands: PostgresAdmissionClasses, ordering: Ordering) -> None:
        self._demands, self._ordering = demands, ordering
        self._kept: dict[Hashable, _Form] = {}

    def prepare(self, intents: Sequence[Intent]) -> None:
        """Their demands, before the transaction that needs them."""
        if len(intents) == 1 and all_but_payload(intents[0]) in self._kept:
            return
        new, like = set(), None
        for intent in intents:
            if (its := all_but_payload(intent)) != like:
                like = its
                if its not in self._kept:
                    new.add(admission_class_of(intent))
        self._demands.make(new)

    def columns(self, firsts: Sequence[Intent], now: Moment) -> dict[str, bytes]:
        """For `submit_jobs`: one row for each, and each is one of many."""
        rows = [self._row(intent, place(intent, now, None, self._ordering), now) for intent in firsts]
        return dict(zip(_NAMES, columns(rows), strict=True))

    def row(self, intent: Intent, now: Moment) -> dict[str, bytes | None]:
        """For `submit_alike`. What does not depend on the moment was perhaps put together before."""
        form = self._kept.get(all_but_payload(intent)) or self._make(intent, now)
        its = place(intent, now, None, self._ordering, form.admission_class)
        return {
            **form.row,
            "line": b"%d" % its.line(now),
            "turn": b"%d" % its.turn,
            "ready_at": b"%d" % its.ready_at,
            "created_at": b"%d" % now,
        }

    def _make(self, intent: Intent, now: Moment) -> _Form:
        its = place(intent, now, None, self._ordering)
        form = _Form(
            its.admission_class, dict(zip(_NAMES, map(text, self._row(intent, its, now)), strict=True))
        )
        if intent.idempotency_key is None:  # or it would have the payload's hash, and never come again
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[all_but_payload(intent)] = form
        return form

    def _row(self, intent: Intent, its: Place, now: Moment) -> tuple[Any, ...]:
        class_no = self._demands.number(its.admission_class)
        _, _, *of_job = job_row(0, JobId(""), intent, its, class_no=class_no, now=now)
        _, _, *of_intent, body = intent_row(0, intent)
        return (*of_job, *of_intent, None if body is None else body.hex())


_Key: TypeAlias = tuple[AddonId, str]
#: So many go to the server while the next are put into rows.
PIECE: Final = 250
#: Below a limit by so many jobs, a count that is no older than `FRESH_SEC` will do: all hosts together do not submit as many in that time.
FAR: Final = 100_000
FRESH_SEC: Final = 1.0


class _Used(NamedTuple):
    """A key, and the job that it means."""

    receipt: Receipt
    body: str


class Submitting:
    def __init__(
        self, link: Database, demands: PostgresAdmissionClasses, ordering: Ordering, new_id: Callable[[], str]
    ) -> None:
        self._link, self._forms, self._new_id = link, Forms(demands, ordering), new_id
        #: How many were queued, and when that was read.
        self._counted: tuple[float, Counter[AddonId]] = (-1e9, Counter())

    def prepare(self, submissions: Sequence[Submit]) -> None:
        self._forms.prepare([intent for s in submissions for intent in s.intents])

    def submit(self, submissions: Sequence[Submit]) -> list[list[Receipt]]:
        """BatchUnknown: they may have been written."""
        receipts: list[list[Receipt]] = []

        def take(session: DatabaseSession) -> None:
            nonlocal receipts
            receipts = self.run(session, submissions)

        try:
            if any(map(self._asks, submissions)) or sum(len(s.intents) for s in submissions) > PIECE:
                self._link.transact(take)
                return receipts
            # The moment may be ours: nothing is judged by it here, and whoever starts these jobs reads the server's clock behind their commit.
            batch = _Batch(self._forms, self._link.now())
            receipts = [batch.take(submission, self._new_id) for submission in submissions]
            if (call := batch.call()) is not None:
                self._link.once(*call)
        except OutcomeUnknown as error:
            raise BatchUnknown(error, receipts) from error
        return receipts

    def run(
        self, session: DatabaseSession, submissions: Sequence[Submit], *, exact: bool = True
    ) -> list[list[Receipt]]:
        """`exact`: nobody else may submit up to a depth limit at the same time. A transaction of the caller's cannot afford that."""
        keys = sorted({key for s in submissions for intent in s.intents if (key := _key(intent))})
        calls: list[tuple[str, Any]] = [("jobs_by_key", columns(keys))] if keys else []
        limits = [s.depth for s in submissions if _limited(s.depth)]
        if limits:
            calls.append(("queued", None))
        now, answers = self._link.opening(session, *calls)
        used = {(row[0], row[1]): _used(row) for row in answers[0]} if keys else {}
        queued = Counter(dict(answers[-1])) if limits else None
        if queued is not None:
            self._counted = (monotonic(), queued.copy())
        if (
            queued is not None
            and exact
            and any(_near(depth, queued, _addons(submissions)) for depth in limits)
        ):
            *_, rows = session.together(("lock_depth", None), ("queued", None))
            queued = Counter(dict(rows))
        batch = _Batch(self._forms, now, used, queued)
        receipts = [batch.take(submission, self._new_id) for submission in submissions]
        batch.leave(session)
        return receipts

    def _asks(self, submission: Submit) -> bool:
        """Whether anything must be known before it can be taken."""
        return any(intent.idempotency_key is not None for intent in submission.intents) or (
            _limited(submission.depth) and not self._far(submission)
        )

    def _far(self, submission: Submit) -> bool:
        """Whether the limits are so far away that a count of a moment ago will do."""
        (at, queued), depth = self._counted, submission.depth
        addons = {intent.addon_id for intent in submission.intents}
        return (
            monotonic() - at <= FRESH_SEC
            and (depth.total is None or queued.total() + FAR <= depth.total)
            and (depth.per_addon is None or all(queued[a] + FAR <= depth.per_addon for a in addons))
        )


class _Batch:
    """`used`: the keys of it that are known. `queued`: how many there are so far, where anybody has a limit."""

    def __init__(
        self,
        forms: Forms,
        now: Moment,
        used: dict[_Key, _Used] | None = None,
        queued: Counter[AddonId] | None = None,
    ) -> None:
        self._forms, self._now, self._used, self._queued = forms, now, used or {}, queued
        self._taken: list[tuple[JobId, Intent]] = []

    def take(self, submission: Submit, new_id: Callable[[], str]) -> list[Receipt]:
        """A bulk that conflicts is refused for that before it is refused for its size."""
        if not any(map(_key, submission.intents)):
            self._check_depth(submission.intents, submission.depth)
            return [self._make(intent, new_id) for intent in submission.intents]
        known = [self._known(intent) for intent in submission.intents]
        fresh = [intent for intent, found in zip(submission.intents, known, strict=True) if found is None]
        self._check_depth(fresh, submission.depth)
        return [
            found or self._take(intent, new_id)
            for intent, found in zip(submission.intents, known, strict=True)
        ]

    def _take(self, intent: Intent, new_id: Callable[[], str]) -> Receipt:
        if found := self._known(intent):  # twice in one bulk
            return found
        receipt = self._make(intent, new_id)
        if key := _key(intent):
            self._used[key] = _Used(replace(receipt, created=False), body_hash(intent).hex())
        return receipt

    def _make(self, intent: Intent, new_id: Callable[[], str]) -> Receipt:
        receipt = Receipt(JobId(new_id()), JobState.QUEUED, created=True)
        self._taken.append((receipt.job_id, intent))
        if self._queued is not None:
            self._queued[intent.addon_id] += 1
        return receipt

    def _known(self, intent: Intent) -> Receipt | None:
        key = _key(intent)
        used = None if key is None else self._used.get(key)
        if used is None:
            return None
        if used.body != body_hash(intent).hex():
            raise key_conflict(intent, used.receipt.job_id)
        return used.receipt

    def _check_depth(self, fresh: Sequence[Intent], depth: Depth) -> None:
        queued = self._queued
        if queued is not None:
            depth.check(fresh, lambda addon_id: queued.total() if addon_id is None else queued[addon_id])

    def call(self) -> tuple[str, Values] | None:
        """All of it, and the batch is drawn with it."""
        return self._piece(0, None) if self._taken else None

    def leave(self, session: DatabaseSession) -> None:
        """Each piece is put together when the one before is with the server already."""
        for first in range(0, len(self._taken), PIECE):
            session.leave(*self._piece(first, session.batch))
        session.tells |= bool(self._taken)

    def _piece(self, first: int, batch: int | None) -> tuple[str, Callable[[], dict[str, Any]]]:
        """Most that come together differ by their payload alone."""
        piece = self._taken[first : first + PIECE]
        last = first + PIECE >= len(self._taken)
        like = all_but_payload(piece[0][1])
        alike = all(all_but_payload(intent) == like for _, intent in piece)

        def values() -> dict[str, Any]:
            rows = self._alike(piece) if alike else self._rows(piece)
            return rows | (self._told() if last else _NOTHING_TOLD) | {"batch": batch}

        return "submit_alike" if alike else "submit_jobs", values

    def _alike(self, piece: Sequence[tuple[JobId, Intent]]) -> dict[str, Any]:
        return {
            **self._forms.row(piece[0][1], self._now),
            "ids": array([job_id for job_id, _ in piece]),
            "payloads": array([intent.payload for _, intent in piece]),
        }

    def _told(self) -> dict[str, Any]:
        now, kind, state = self._now, EventKind.SUBMITTED, JobState.QUEUED
        events = [(now, kind, job_id, 1, state, "", None, None) for job_id, _ in self._taken]
        return {"size": len(events), "events": pack(events)}

    def _rows(self, piece: Sequence[tuple[JobId, Intent]]) -> dict[str, Any]:
        kinds: dict[tuple[Any, ...], int] = {}
        firsts: list[Intent] = []
        rows, like, kind = [], None, 0
        for job_id, intent in piece:
            if (its := all_but_payload(intent)) != like:
                like, kind = its, kinds.setdefault(its, len(kinds) + 1)
                if kind > len(firsts):
                    firsts.append(intent)
            rows.append((job_id, intent.payload, kind))
        names = dict(zip(("ids", "payloads", "kinds"), columns(rows), strict=True))
        counts = Counter([intent.addon_id for _, intent in piece])
        names["addons"], names["counts"] = array(list(counts)), array(list(counts.values()))
        return names | self._forms.columns(firsts, self._now)


#: Of a piece that others of the same batch follow.
_NOTHING_TOLD: Final = {"size": 0, "events": None}


def _limited(depth: Depth) -> bool:
    return depth.total is not None or depth.per_addon is not None


def _addons(submissions: Sequence[Submit]) -> Counter[AddonId]:
    return Counter(intent.addon_id for s in submissions for intent in s.intents)


def _key(intent: Intent) -> _Key | None:
    return None if intent.idempotency_key is None else (intent.addon_id, intent.idempotency_key)


def _used(row: Sequence[Any]) -> _Used:
    _, _, job_id, state, body = row
    return _Used(Receipt(job_id, JobState(state), created=False), body)


def _near(depth: Depth, queued: Counter[AddonId], more: Counter[AddonId]) -> bool:
    """Beyond half of a limit submits go one by one. Below it, what others submit meanwhile cannot reach it."""
    total = depth.total is not None and queued.total() + more.total() > depth.total // 2
    return total or (
        depth.per_addon is not None and any(queued[a] + n > depth.per_addon // 2 for a, n in more.items())
    )


T = TypeVar("T")
TRIES: Final = 3


@contextmanager
def borrowed(connection: Any, sql: Mapping[str, Statement]) -> Iterator[DatabaseSession]:
    """
    A savepoint: what is refused takes back what we wrote and nothing of the caller's. On a connection without a transaction one is
    begun, as any statement on it would; in autocommit there is none to be part of, and ours is committed.
    """
    con = _psycopg(connection)
    if not con.autocommit and con.info.transaction_status == TransactionStatus.IDLE:
        con.execute("SELECT 1")
    with con.transaction():
        session = _Borrowed(_Guest(con), sql, ())
        yield session
        session.finish()


def retried(attempt: Callable[[], T]) -> T:
    """Somebody committed the same key while we waited for them: the savepoint is rolled back, and now their job can be seen."""
    for _ in range(TRIES):
        with suppress(UniqueViolation):
            return attempt()
    return attempt()


class _Borrowed(DatabaseSession):
    def finish(self) -> None:
        """Without a COMMIT: that is the caller's."""
        self.flush()


class _Guest:
    """Our statements on somebody else's connection, with rows as we read them, whatever its owner has set."""

    def __init__(self, con: psycopg.Connection[Any]) -> None:
        self._cursor = psycopg.RawCursor(con, row_factory=tuple_row)

    def exchange(
        self, calls: Sequence[tuple[Statement, Values]], behind: Sequence[tuple[Statement, Values]] = ()
    ) -> list[list[Any]]:
        return [self._one(statement, values) for statement, values in (*calls, *behind)]

    def _one(self, statement: Statement, values: Values) -> list[Any]:
        bound = [None if value is None else value.decode() for value in statement.bind(values)]
        self._cursor.execute(statement.text, bound)
        rows = self._cursor.fetchall() if self._cursor.description else []
        if isinstance(values, Heard):
            values.then(rows)
        return rows


def _psycopg(given: Any) -> psycopg.Connection[Any]:
    """SQLAlchemy: a Session has a Connection, that one a pooled connection, and that one the driver's."""
    found = given
    if callable(getattr(found, "connection", None)):
        found = found.connection()
    if not isinstance(found, psycopg.Connection) and hasattr(found, "connection"):
        found = getattr(found.connection, "driver_connection", None)
    if not isinstance(found, psycopg.Connection):
        raise TypeError(
            f"connection must be a psycopg Connection, or a SQLAlchemy Session or Connection on psycopg, "
            f"not {type(given).__module__}.{type(given).__qualname__}"
        )
    return found
