"""
The way to the server: connections, transactions, and what becomes of them when something is in the way.

A transaction is a function that is handed a `DatabaseSession`. It may be called again: after a deadlock, after a conflict of two that
came at once, after a connection that turned out to be dead. What it wants written it leaves with the session, and that goes out
with the COMMIT in one round trip. What can be said in one statement, and only once, needs no more than that (`once`).

Only a row of our own proves that a transaction was committed: a crashed server gives transaction ids out again that never reached its
log. So each transaction that must not run twice inserts a row with a token of its own (`commit_marker`). When the answer to its COMMIT is
lost, the link inserts the same token as void: if that fails the transaction was committed, else it never will be, and runs again. Only
if the server cannot be asked in time is the caller told that the outcome is unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import BoundedSemaphore
from time import monotonic, sleep
from typing import Any, Final, TypeVar

import psycopg
import psycopg.sql
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import tuple_row

from penstock.core.errors import OutcomeUnknown, StoreFailed
from penstock.core.jobs.types import Moment
from penstock.stores.api import Clock
from penstock.stores.common.rows import statements, uuid7
from penstock.stores.postgres.pipeline import (
    Heard,
    PipelineConnection,
    RoundTrip,
    Statement,
    Values,
    array,
    statement,
)

T = TypeVar("T")

#: How often a transaction is tried that others keep getting in the way of.
TRIES: Final = 12
#: How long the outcome of a COMMIT is asked for while the server is away.
FIND_OUT_SEC: Final = 5.0
BEGIN: Final = statement("BEGIN")
SNAPSHOT: Final = statement("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
COMMIT: Final = statement("COMMIT")


class Conflict(Exception):
    """What this transaction decided on has changed under it."""


class _Unanswered(Exception):
    """It was sent, and may or may not have been committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """How we behave on a server that others use too. `pooler`: a PgBouncer in transaction mode is between us and it."""

    statement_timeout_ms: int = 30_000
    lock_timeout_ms: int = 10_000
    #: Of a transaction that has begun: whoever is stopped or cut off in the midst of one holds up all others for no longer.
    idle_timeout_ms: int = 5_000
    connect_timeout_sec: int = 10
    connections: int = 16
    pooler: bool = False

    @property
    def settings(self) -> dict[str, str]:
        return {
            "search_path": "pg_catalog",
            "statement_timeout": str(self.statement_timeout_ms),
            "lock_timeout": str(self.lock_timeout_ms),
            "idle_in_transaction_session_timeout": str(self.idle_timeout_ms),
            # A plan is kept for as long as its connection, and what is known of tables like these is always out of date: one that was
            # made when they were small would scan them for ever. All of ours go from key to key.
            "enable_seqscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
            # Making one costs more than a batch of ten jobs, and there is only one way to go.
            "plan_cache_mode": "force_generic_plan",
            "jit": "off",
            # To start a process takes longer than any of ours.
            "max_parallel_workers_per_gather": "0",
        }


class DatabaseSession:
    """One transaction. It begins with the first thing asked and is over with `finish`."""

    def __init__(
        self,
        con: RoundTrip,
        sql: Mapping[str, Statement],
        opening: Sequence[Statement],
        behind: Callable[[], tuple[str, Values] | None] = lambda: None,
    ) -> None:
        """`behind`: what goes out after the COMMIT of something that is to be told. What becomes of it is of no account."""
        self._con, self._sql, self._opening, self._behind = con, sql, opening, behind
        self._left: list[tuple[str, Values]] = []
        #: Marks the transaction in the database, to prove its COMMIT. None: a second time does no harm.
        self.token: str | None = None
        #: Something was left with it to be written.
        self.writes = False
        #: Under which its events are told, and whether there are any.
        self.batch, self.tells = 0, False
        self.finishing = False

    def ask(self, name: str, values: Values = None) -> list[Any]:
        return self.together((name, values))[0]

    def together(self, *calls: tuple[str, Values]) -> list[list[Any]]:
        """One round trip for all of them."""
        return self._run([(self._sql[name], values) for name, values in calls])

    def plain(self, sql: str, values: Values = None) -> list[Any]:
        """For lists, whose conditions are put together from fixed words."""
        return self._run([(statement(sql, prepared=False), values)])[0]

    def leave(self, name: str, values: Values) -> None:
        self.writes = True
        self._left.append((name, values))

    def leave_for(
        self,
        name: str,
        values: Mapping[str, Any],
        prepare: Callable[[list[Any]], None],
    ) -> None:
        """`prepare` is given its rows while the server still writes and commits what stands behind it: it must do nothing that counts."""
        self.writes = True
        self._left.append((name, Heard(values, prepare)))

    def flush(self) -> None:
        """What comes next must see what was left."""
        self._run_left(())

    def finish(self) -> None:
        if self._left or not self._opening:
            self.finishing = True
            call = self._behind() if self.tells else None
            self._run_left([(COMMIT, None)], [] if call is None else [(self._sql[call[0]], call[1])])

    def _run_left(
        self, more: Sequence[tuple[Statement, Values]], behind: Sequence[tuple[Statement, Values]] = ()
    ) -> None:
        left, self._left = self._left, []
        self._run([*((self._sql[name], values) for name, values in left), *more], behind)

    def _run(
        self, calls: Sequence[tuple[Statement, Values]], behind: Sequence[tuple[Statement, Values]] = ()
    ) -> list[list[Any]]:
        opening, self._opening = self._opening, ()
        return self._con.exchange([*((each, None) for each in opening), *calls], behind)[len(opening) :]


class Database:
    def __init__(self, dsn: str, schema: str, options: ConnectionOptions, clock: Clock | None) -> None:
        self.schema, self._options, self._clock = schema, options, clock
        self._dsn = _conninfo(dsn, options)
        self.quoted = psycopg.sql.Identifier(schema).as_string()
        self.sql = {name: statement(self.in_schema(text)) for name, text in statements("postgres").items()}
        #: The last one used is used next: its server process has everything at hand.
        self._idle: deque[PipelineConnection] = deque()
        self._room = BoundedSemaphore(options.connections)
        self._offset, self._asked, self._latest = 0, float("-inf"), 0
        self._closed = False
        #: Tokens of transactions whose outcome is known: their rows can go.
        self._answered: list[str] = []
        #: What goes out behind each COMMIT of something that is to be told.
        self.behind: Callable[[], tuple[str, Values] | None] = lambda: None

    def in_schema(self, sql: str) -> str:
        return sql.replace("penstock.", f"{self.quoted}.")

    # time

    def now(self) -> Moment:
        """The server's clock, asked for every second and carried on by our monotonic one in between, or while it is away."""
        if self._clock is not None:
            return self._clock()
        if monotonic() - self._asked > 1:
            self._set_clock()
        self._latest = max(self._latest, self._offset + _monotonic())
        return self._latest

    def _set_clock(self) -> None:
        known, self._asked = (
            self._asked > float("-inf"),
            monotonic(),
        )  # while it is away, asking once a second is enough
        try:
            with self.failures(), self.connection() as con:
                sent = _monotonic()
                [[(now,)]] = con.exchange([(self.sql["now"], None)])
                self._offset = now - (sent + _monotonic()) // 2
        except StoreFailed:
            if not known:
                raise

    def handed(self) -> Moment | None:
        """For a statement that judges by a moment: None is the server's own."""
        return None if self._clock is None else self._clock()

    def opening(self, session: DatabaseSession, *calls: tuple[str, Values]) -> tuple[Moment, list[list[Any]]]:
        """What locks, then the moment: it must not be older than a lock that was waited for."""
        *answers, [(now, session.batch)] = session.together(*calls, ("opening", None))
        session.token = uuid7()
        return now if self._clock is None else self._clock(), answers

    # transactions

    def transact(self, work: Callable[[DatabaseSession], T]) -> T:
        with self.failures():
            return self._insist(lambda: self._attempt(work))

    def once(self, name: str, values: Values) -> None:
        """
        A transaction of one statement, which writes names that are unique. When its answer is lost it is sent again as it was: either the first
        one never came to be, or the second one meets what it wrote and is refused. To look for those names instead would not do, for the first one
        may still be under way; the second waits for it.
        """
        with self.failures():
            try:
                self._insist(lambda: self._send_once(name, values))
            except _Unanswered:
                self._make_sure(lambda: self._send_once(name, values))

    def _send_once(self, name: str, values: Values) -> None:
        with self.connection() as con:
            con.look()
            notice = self.behind()
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
        """To read: everything that is asked for is as of one moment."""
        return self._reading(work, (SNAPSHOT,))

    def glance(self, name: str, values: Values = None) -> list[Any]:
        """One statement needs no transaction around it."""
        return self._reading(lambda session: session.ask(name, values), ())

    def _reading(self, work: Callable[[DatabaseSession], T], opening: Sequence[Statement]) -> T:
        def read() -> T:
            with self.connection() as con:
                session = DatabaseSession(con, self.sql, self._begin(opening))
                result = work(session)
                if opening:
                    session.finish()
                return result

        with self.failures():
            return self._insist(read)

    def _begin(self, opening: Sequence[Statement]) -> Sequence[Statement]:
        """Behind a pooler a setting lasts for one transaction: the next one may be on another server connection."""
        return (*opening, _settings(self._options)) if opening and self._options.pooler else opening

    def _insist(self, attempt: Callable[[], T]) -> T:
        dead = 0
        for again in range(TRIES):
            try:
                return attempt()
            except (Conflict, errors.SerializationFailure, errors.DeadlockDetected, errors.UniqueViolation):
                if again == TRIES - 1:
                    raise
                sleep(0.002 * again)
            except psycopg.OperationalError as error:
                # An idle connection whose server has gone since. The others are no better; a fresh one tells.
                if error.sqlstate not in _GONE or dead:
                    raise
                dead += 1
                self._drop_idle()
        raise AssertionError("unreachable")

    def _attempt(self, work: Callable[[DatabaseSession], T]) -> T:
        session = None
        try:
            with self.connection() as con:
                session = DatabaseSession(con, self.sql, self._begin((BEGIN,)), self.behind)
                result = work(session)
                token = session.token if session.writes else None
                if token is not None:
                    session.leave("mark_commit", {"token": token, "answered": array(self._take_answered())})
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

    def _take_answered(self) -> list[str]:
        """Two threads may take at once and lose a token between them: then its row stays until `forget_commits`."""
        answered, self._answered = self._answered, []
        return answered

    def _was_committed(self, token: str) -> bool:
        """If not, it cannot be committed any more, even where the server is still at work on it."""
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
            if (
                not (con.closed or con.owes)
                and con.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
            ):
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
        """What PostgreSQL reports about itself, in our words. A broken constraint is our own bug and stays as it is."""
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
            told = str(error).strip().splitlines()[:1]
            raise StoreFailed(f"the database {words}: {''.join(told)}", kind=kind) from error


def _unknown() -> OutcomeUnknown:
    return OutcomeUnknown(
        "the connection broke while the database was writing: it may or may not have been written",
        kind="unknown",
    )


#: No code: the connection broke. The others: the server shuts down, starts up, or has ended this session.
_GONE: Final = frozenset({None, "57P01", "57P02", "57P03", "57P05", "08006", "08003", "08001", "25P03"})
_WHY: Final = {
    "55P03": ("busy", "is busy"),
    "57014": ("busy", "is busy"),
    "53100": ("full", "has no room left"),
    "53300": ("busy", "takes no more connections"),
}


#: A server that does not answer any more, cable and all, is given up after so long; in seconds, and the last in milliseconds.
_PRESENCE: Final = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


def _conninfo(dsn: str, options: ConnectionOptions) -> str:
    try:
        told = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # What libpq says quotes the part that it cannot read, and that may be the password.
        raise StoreFailed(
            "the address of the database cannot be read: write postgresql://USER@HOST:PORT/NAME, "
            "with %40 for an @ and %2F for a / in a name or password",
            kind="address",
        ) from None
    more: dict[str, str] = {"application_name": str(told.get("application_name") or "penstock")}
    more["client_encoding"] = "utf-8"
    more["connect_timeout"] = str(told.get("connect_timeout") or options.connect_timeout_sec)
    for name, value in _PRESENCE.items():
        more[name] = str(told.get(name) or value)
    if not options.pooler:
        pinned = " ".join(f"-c {name}={value}" for name, value in options.settings.items())
        more["options"] = f"{told.get('options') or ''} {pinned}".strip()
    return make_conninfo(dsn, **more)


def _settings(options: ConnectionOptions) -> Statement:
    calls = (f"set_config('{n}', '{v}', true)" for n, v in options.settings.items())
    return statement(f"SELECT {', '.join(calls)}")


def _monotonic() -> Moment:
    return int(monotonic() * 1_000_000)
