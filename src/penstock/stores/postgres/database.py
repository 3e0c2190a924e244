"""
The database: its connections, its transactions, and its schema.

A transaction is a function that gets a `DatabaseSession`. `Database` may call it again: after a deadlock,
after a conflict with another transaction, or on a connection that turned out to be dead. The function defers
its writes to the session, which sends them with the COMMIT in one round trip. A transaction of one statement
that writes unique names needs only that statement (`once`).

Only a row proves that a transaction was committed: after a crash the server assigns transaction ids again
that never reached its log. So each transaction that must not run twice inserts a row with a token
(`commit_marker`). If the answer to its COMMIT is lost, `Database` inserts the same token as void. If the
token exists already, the transaction was committed; else it never will be, and `Database` runs it again. Only
if the server cannot be reached in time, the caller gets OutcomeUnknown.

The schema is migrated in numbered steps, by one process at a time, in one transaction. A new daemon migrates
while old ones run, so a step only adds. A step that must break old versions sets the mark `needs` to the
schema that a Penstock must know; a Penstock that does not know it is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import BoundedSemaphore
from time import monotonic, sleep
from typing import Any, Final, TypeVar

import psycopg
import psycopg.sql
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from penstock.core.errors import OutcomeUnknown, SchemaNewer, StoreFailed
from penstock.core.jobs.types import Moment
from penstock.stores.api import Clock
from penstock.stores.common.rows import migrations, statements, uuid7
from penstock.stores.postgres.pipeline import (
    Call,
    ConnectionOptions,
    EarlyRows,
    PipelineConnection,
    RoundTrip,
    Statement,
    Values,
    array,
    statement,
)

T = TypeVar("T")

#: How often a transaction that conflicts with others runs.
TRIES: Final = 12
#: How long `Database` tries to learn the outcome of a COMMIT while the server is away.
FIND_OUT_SEC: Final = 5.0
#: The number of the advisory lock for changes of the schema.
SCHEMA_LOCK: Final = 0x50454E31
BEGIN: Final = statement("BEGIN")
SNAPSHOT: Final = statement("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
COMMIT: Final = statement("COMMIT")


class _Unanswered(Exception):
    """The transaction was sent, and may have been committed."""


class DatabaseSession:
    """One transaction, from its first statement until `finish`."""

    def __init__(
        self,
        con: RoundTrip,
        sql: Mapping[str, Statement],
        begin: Sequence[Statement],
        notice: Callable[[], tuple[str, Values] | None] = lambda: None,
    ) -> None:
        """
        `notice`: makes the notice that follows the COMMIT of a transaction with events. It may fail
        unnoticed.
        """
        self._con, self._sql, self._begin, self._notice = con, sql, begin, notice
        self.deferred: list[tuple[str, Values]] = []
        #: Marks the transaction in the database, to prove its COMMIT. None: it may run twice.
        self.token: str | None = None
        self.writes = False
        #: The batch number of its events, and whether there are any.
        self.batch, self.has_events = 0, False
        #: Whether any dependency existed when the locks were taken last.
        self.has_dependencies = False
        self.finishing = False
        #: Whether a caller needs the answer to the COMMIT. It need not if nothing was written.
        self.waits_for_commit = True

    def execute(self, name: str, values: Values = None) -> list[Any]:
        return self.execute_many((name, values))[0]

    def execute_many(self, *calls: tuple[str, Values]) -> list[list[Any]]:
        """Run all statements in one round trip."""
        return self._run([(self._sql[name], values) for name, values in calls])

    array = staticmethod(array)

    def execute_sql(self, sql: str, values: Values = None) -> list[Any]:
        """Run the statement of a list, whose conditions are composed from fixed words."""
        return self._run([(statement(sql, prepared=False), values)])[0]

    def defer(self, name: str, values: Values) -> None:
        """Run the statement with the COMMIT, or with `flush`."""
        self.writes = True
        self.deferred.append((name, values))

    def defer_rows(self, name: str, values: Mapping[str, Any], use: Callable[[list[Any]], None]) -> None:
        """
        Defer a statement; `use` gets its rows while the server writes and commits the rest (see `EarlyRows`).
        """
        self.defer(name, EarlyRows(values, use))

    def flush(self, *calls: tuple[str, Values]) -> list[list[Any]]:
        """
        Run the deferred statements now, and in the same round trip `calls`, which see their effect. Return the
        rows of the calls.
        """
        if not (self.deferred or calls):
            return []
        answers = self._run_deferred([(self._sql[name], values) for name, values in calls])
        return answers[len(answers) - len(calls) :]

    def finish(self) -> None:
        if self._begin and not self.deferred:
            return  # nothing was sent
        if not (self.deferred or self.waits_for_commit):
            self._con.exchange((), [(COMMIT, None)])
            return
        self.finishing = True
        notice = self._notice() if self.has_events else None
        self._run_deferred([(COMMIT, None)], [] if notice is None else [(self._sql[notice[0]], notice[1])])

    def _run_deferred(self, more: Sequence[Call], behind: Sequence[Call] = ()) -> list[list[Any]]:
        deferred, self.deferred = self.deferred, []
        return self._run([*((self._sql[name], values) for name, values in deferred), *more], behind)

    def _run(self, calls: Sequence[Call], behind: Sequence[Call] = ()) -> list[list[Any]]:
        begin, self._begin = self._begin, ()
        return self._con.exchange([*((each, None) for each in begin), *calls], behind)[len(begin) :]


class Database:
    """One schema of a database: connections, transactions, migration and the clock."""

    def __init__(self, dsn: str, schema: str, options: ConnectionOptions, clock: Clock | None) -> None:
        self.schema, self._options, self._clock = schema, options, clock
        self._dsn = options.conninfo(dsn)
        self.quoted = psycopg.sql.Identifier(schema).as_string()
        self.sql = {name: statement(self.in_schema(text)) for name, text in statements("postgres").items()}
        #: The connection that was used last is used next: the caches of its server process are warm.
        self._idle: deque[PipelineConnection] = deque()
        self._room = BoundedSemaphore(options.connections)
        self._offset, self._clock_read_at, self._latest = 0, float("-inf"), 0
        self._closed = False
        #: Tokens of transactions whose outcome is known: the next transaction deletes their rows.
        self._answered: list[str] = []
        #: Makes the notice that goes out behind the COMMIT of a transaction with events.
        self.notice: Callable[[], tuple[str, Values] | None] = lambda: None

    def in_schema(self, sql: str) -> str:
        return sql.replace("penstock.", f"{self.quoted}.")

    # time

    def now(self) -> Moment:
        """
        The time of the server's clock. It is read once a second; in between, and while the server is away,
        the monotonic clock continues it.
        """
        if self._clock is not None:
            return self._clock()
        if monotonic() - self._clock_read_at > 1:
            self._set_clock()
        self._latest = max(self._latest, self._offset + _monotonic())
        return self._latest

    def _set_clock(self) -> None:
        has_read, self._clock_read_at = self._clock_read_at > float("-inf"), monotonic()
        try:
            with self.failures(), self.connection() as con:
                sent = _monotonic()
                [[(now,)]] = con.exchange([(self.sql["now"], None)])
                self._offset = now - (sent + _monotonic()) // 2
        except StoreFailed:
            if not has_read:
                raise

    def given_now(self) -> Moment | None:
        """The moment for a statement that compares with one. None: the statement uses the server's clock."""
        return None if self._clock is None else self._clock()

    def lock(self, session: DatabaseSession, *calls: tuple[str, Values]) -> tuple[Moment, list[list[Any]]]:
        """
        Run the deferred statements and then statements that lock. Then read the moment, the batch number, and
        whether a dependency exists: these must be newer than any lock for which the statements waited.
        """
        *answers, [(now, session.batch, session.has_dependencies)] = session.flush(*calls, ("opening", None))
        session.token = uuid7()
        return now if self._clock is None else self._clock(), answers

    # transactions

    def transact(self, work: Callable[[DatabaseSession], T]) -> T:
        with self.failures():
            return self._insist(lambda: self._attempt(work))

    def once(self, name: str, values: Values) -> None:
        """
        Run a transaction of one statement that writes unique names. If its answer is lost, the statement is
        sent again: either the first transaction never happened, or the second is refused because the names
        exist. A query for the names would prove nothing while the first one is under way; the second one
        waits for it.
        """
        with self.failures():
            try:
                self._insist(lambda: self._send_once(name, values))
            except _Unanswered:
                self._make_sure(lambda: self._send_once(name, values))

    def _send_once(self, name: str, values: Values) -> None:
        with self.connection() as con:
            con.check_alive()
            notice = self.notice()
            pooled = self._begin((BEGIN,)) if self._options.pooler else ()
            calls = [*((each, None) for each in pooled), (self.sql[name], values)]
            try:
                con.exchange(
                    [*calls, (COMMIT, None)] if pooled else calls,
                    () if notice is None else [(self.sql[notice[0]], notice[1])],
                )
            except psycopg.OperationalError as error:
                if error.sqlstate in _GONE:
                    raise _Unanswered from error
                raise

    def _make_sure(self, attempt: Callable[[], None]) -> None:
        self._drop_idle()
        until = monotonic() + FIND_OUT_SEC
        while monotonic() < until:
            try:
                return attempt()
            except errors.UniqueViolation:
                return None
            except (psycopg.OperationalError, StoreFailed, _Unanswered):
                sleep(0.2)
        raise _unknown()

    def snapshot(self, work: Callable[[DatabaseSession], T]) -> T:
        """Run reads in one snapshot."""
        return self._reading(work, (SNAPSHOT,))

    def query(self, name: str, values: Values = None) -> list[Any]:
        """Run one reading statement without a transaction around it."""
        return self._reading(lambda session: session.execute(name, values), ())

    def _reading(self, work: Callable[[DatabaseSession], T], begin: Sequence[Statement]) -> T:
        def read() -> T:
            with self.connection() as con:
                session = DatabaseSession(con, self.sql, self._begin(begin))
                session.waits_for_commit = False
                result = work(session)
                if begin:
                    session.finish()
                return result

        with self.failures():
            return self._insist(read)

    def _begin(self, begin: Sequence[Statement]) -> Sequence[Statement]:
        """
        The statements that begin a transaction; behind a pooler also the settings, which hold only for it.
        """
        return (*begin, self._options.settings_statement) if begin and self._options.pooler else begin

    def _insist(self, attempt: Callable[[], T]) -> T:
        dead = 0
        for again in range(TRIES):
            try:
                return attempt()
            except (errors.SerializationFailure, errors.DeadlockDetected, errors.UniqueViolation):
                if again == TRIES - 1:
                    raise
                sleep(0.002 * again)
            except psycopg.OperationalError as error:
                # The server closed an idle connection, and so probably the other idle ones too.
                if error.sqlstate not in _GONE or dead:
                    raise
                dead += 1
                self._drop_idle()
        raise AssertionError("unreachable")

    def _attempt(self, work: Callable[[DatabaseSession], T]) -> T:
        session = None
        try:
            with self.connection() as con:
                session = DatabaseSession(con, self.sql, self._begin((BEGIN,)), self.notice)
                result = work(session)
                token = session.token if session.writes else None
                if token is not None:
                    # Two threads may take the list at once and lose a token: its row stays until
                    # `forget_commits`.
                    answered, self._answered = self._answered, []
                    session.defer("mark_commit", {"token": token, "answered": array(answered)})
                session.finish()
        except psycopg.OperationalError as error:
            if session is None or not session.finishing or error.sqlstate not in _GONE:
                raise
            self._drop_idle()
            if token is None or not self._was_committed(token):
                raise
        if token is not None:
            self._answered.append(token)
        return result

    def _was_committed(self, token: str) -> bool:
        """
        Whether the transaction was committed. If not, it never will be, even if the server still works on it.
        """
        until = monotonic() + FIND_OUT_SEC
        while monotonic() < until:
            try:
                with self.connection() as con:
                    [[(void,)]] = con.exchange([(self.sql["settle_commit"], {"token": token})])
            except (psycopg.OperationalError, StoreFailed):
                sleep(0.2)
            else:
                return not void
        raise _unknown()

    # connections

    @contextmanager
    def connection(self) -> Iterator[PipelineConnection]:
        if self._closed:
            raise StoreFailed("the store is closed", kind="closed")
        with self._room:
            try:
                con = self._idle.pop()
            except IndexError:
                con = self.connect()
            try:
                yield con
            finally:
                self._put_back(con)

    def _put_back(self, con: PipelineConnection) -> None:
        try:
            if not (con.closed or con.is_behind) and con.info.transaction_status != TransactionStatus.IDLE:
                con.execute("ROLLBACK")
        except psycopg.Error:
            con.close()
        if not con.closed:
            self._idle.append(con)
        if self._closed:
            self._drop_idle()

    def connect(self) -> PipelineConnection:
        con = PipelineConnection.connect(
            self._dsn, autocommit=True, row_factory=tuple_row, prepare_threshold=None
        )
        con.prepares = not self._options.pooler
        return con

    def _drop_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return

    def close(self) -> None:
        self._closed = True
        self._drop_idle()

    @contextmanager
    def failures(self) -> Iterator[None]:
        """
        Turns errors of the server or the connection into StoreFailed. A broken constraint is a bug and stays
        as it is.
        """
        try:
            yield
        except (
            psycopg.OperationalError,
            errors.ReadOnlySqlTransaction,
            errors.InsufficientPrivilege,
        ) as error:
            kind, words = _WHY.get(error.sqlstate or "", ("unreachable", "cannot be reached"))
            if isinstance(error, errors.InsufficientPrivilege | errors.ReadOnlySqlTransaction):
                kind, words = "readonly", "does not let us write"
            first_line = str(error).strip().splitlines()[:1]
            raise StoreFailed(f"the database {words}: {''.join(first_line)}", kind=kind) from error

    # the schema

    def migrate(self) -> None:
        """Make the schema, or bring it up to date."""
        steps = migrations("postgres")
        with self.failures(), self.connection() as con:
            if self._version(con, len(steps)) >= len(steps):
                return
            with con.transaction():
                con.execute("SELECT pg_advisory_xact_lock(%s)", [SCHEMA_LOCK])
                exists = "SELECT 1 FROM pg_namespace WHERE nspname = %s"
                if con.execute(exists, [self.schema]).fetchone() is None:
                    con.execute(f"CREATE SCHEMA {self.quoted}".encode())
                for number in range(self._version(con, len(steps)) + 1, len(steps) + 1):
                    con.execute(self.in_schema(steps[number - 1]))
                    mark = self.in_schema("UPDATE penstock.mark SET value = %s WHERE name = 'schema'")
                    con.execute(mark, [number])

    def _version(self, con: PipelineConnection, known: int) -> int:
        """The number of the schema; 0 if there is none."""
        # Read from the catalog: `to_regclass` may answer from a snapshot older than the lock.
        tables = con.execute(
            "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE nspname = %s",
            [self.schema],
        ).fetchall()
        if not tables:
            return 0
        if ("mark",) not in tables:
            raise StoreFailed(
                f"the schema {self.schema} has tables of another program; choose another schema"
            )
        rows = con.execute(self.in_schema("SELECT name, value FROM penstock.mark")).fetchall()
        marks: dict[str, int] = dict(rows)
        if marks["needs"] > known:
            raise SchemaNewer(
                f"the schema {self.schema} is {marks['schema']} and needs a Penstock that knows {marks['needs']}, "
                f"this one knows {known}: upgrade Penstock",
                schema=marks["schema"],
                known=known,
            )
        return int(marks["schema"])


def _unknown() -> OutcomeUnknown:
    return OutcomeUnknown(
        "the connection broke while the database was writing: it may or may not have been written",
        kind="unknown",
    )


#: The connection is lost. None: it broke. The codes: the server shuts down, starts up, or has ended this
#: session.
_GONE: Final = frozenset({None, "57P01", "57P02", "57P03", "57P05", "08006", "08003", "08001", "25P03"})
_WHY: Final = {
    "55P03": ("busy", "is busy"),
    "57014": ("busy", "is busy"),
    "53100": ("full", "has no room left"),
    "53300": ("busy", "takes no more connections"),
}


def _monotonic() -> Moment:
    return int(monotonic() * 1_000_000)
