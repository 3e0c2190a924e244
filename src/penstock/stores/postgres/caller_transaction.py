"""A transaction of the caller's own: our statements run in it, and it stays the caller's to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg.errors import UniqueViolation
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from penstock.stores.postgres.database import DatabaseSession
from penstock.stores.postgres.pipeline import Heard, Statement, Values

__all__ = ["borrowed", "retried"]

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
