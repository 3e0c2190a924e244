"""
Opens the store that a user names: the path of a SQLite file, or the `postgresql://` address of a database
that many hosts share. An address may contain a password, so every output, log line and error shows it by
`shown`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import StoreFailed
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.types import Moment
from penstock.stores.api import Clock, Store

if TYPE_CHECKING:
    from penstock.stores.postgres.store import PostgresStore


_SCHEMES: Final = ("postgresql://", "postgres://")
#: Up to the last @: no part of a password that contains an unescaped @ may appear in a log.
_PASSWORD: Final = re.compile(r"(://[^:/?#@\s]*):.*@")
_PARAMETER: Final = re.compile(r"((?:^|[?&\s])(?:ssl)?password\s*=\s*)[^&\s]+")


class SharedOptions(NamedTuple):
    """How to use a PostgreSQL database. `pooler`: connections go through PgBouncer in transaction mode."""

    schema: str = "penstock"
    connections: int = 16
    pooler: bool = False


def is_address(where: str) -> bool:
    return where.startswith(_SCHEMES)


def shown(where: str) -> str:
    """The path or address without its password."""
    return _PARAMETER.sub(r"\1***", _PASSWORD.sub(r"\1:***@", where))


def open_store(
    where: str,
    clock: Clock,
    ordering: Ordering,
    sharing: SharedOptions | None = None,
    *,
    accept_loss: bool = False,
) -> Store:
    """
    Open a SQLite file or a PostgreSQL database. `clock` is used for a file; a database uses the time of its
    server. `accept_loss`: open a file that has lost acknowledged work, and record that in its trail.
    """
    if is_address(where):
        return open_postgres(where, ordering, sharing)
    from penstock.stores.sqlite.store import SqliteStore  # noqa: PLC0415  # only the store that is used

    return SqliteStore(where, clock, ordering=ordering, accept_loss=accept_loss)


def open_postgres(
    where: str, ordering: Ordering | None = None, sharing: SharedOptions | None = None
) -> PostgresStore:
    with _driver(where):
        from penstock.stores.postgres.pipeline import ConnectionOptions  # noqa: PLC0415  # as above
        from penstock.stores.postgres.store import PostgresStore  # noqa: PLC0415  # as above
    sharing = sharing or SharedOptions()
    options = ConnectionOptions(connections=sharing.connections, pooler=sharing.pooler)
    return PostgresStore(where, schema=sharing.schema, options=options, ordering=ordering)


def server_time(where: str, sharing: SharedOptions) -> Moment:
    """The time of the server's clock, for a command that only reads: it makes and migrates no table."""
    with _driver(where):
        from penstock.stores.postgres.database import Database  # noqa: PLC0415  # as above
        from penstock.stores.postgres.pipeline import ConnectionOptions  # noqa: PLC0415  # as above
    with closing(Database(where, sharing.schema, ConnectionOptions(pooler=sharing.pooler), None)) as database:
        return database.now()


def drop_schema(where: str, schema: str) -> None:
    """Remove a schema with all its tables: a trial has made it."""
    with _driver(where):
        import psycopg  # noqa: PLC0415  # as above
        from psycopg import sql  # noqa: PLC0415  # as above
    with psycopg.connect(where, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


@contextmanager
def _driver(where: str) -> Iterator[None]:
    try:
        yield
    except ImportError as missing:
        raise StoreFailed(
            f"{shown(where)} needs the PostgreSQL driver: pip install 'penstock[postgres]' ({missing})",
            kind="driver",
        ) from missing
