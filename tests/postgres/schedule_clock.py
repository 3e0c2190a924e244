"""Clocks that several processes read and the test moves."""

from __future__ import annotations

import mmap
from pathlib import Path

import psycopg


class SharedClock:
    """A file with the moment, eight bytes. It stands still between two moves."""

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    def __call__(self) -> int:
        return int.from_bytes(self._memory[:8], "little")

    def set(self, moment: int) -> None:
        self._memory[:8] = moment.to_bytes(8, "little")


class ServerClock:
    """
    A database whose server's clock the test sets forward, by replacing the functions that tell the time. A daemon
    goes by that clock, so it need not know that it is tested. The clock runs on between two moves.

    The moment at which a statement began moves too: else every read of the queues seems to have taken as long as the
    clock has moved, and rounds spare themselves such reads: a job that is tried again waits for 5 s.
    """

    def __init__(self, server, name):
        self._server, self._name = server, name
        server.run(f"CREATE DATABASE {name} OWNER penstock")
        server.run(
            """
            CREATE SEQUENCE clock_offset MINVALUE 0 START 0;
            GRANT ALL ON SEQUENCE clock_offset TO penstock;
            ALTER FUNCTION pg_catalog.clock_timestamp() RENAME TO server_clock;
            CREATE FUNCTION pg_catalog.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
            $$SELECT server_clock() + last_value * interval '1 microsecond' FROM public.clock_offset$$;
            ALTER FUNCTION pg_catalog.statement_timestamp() RENAME TO statement_began;
            CREATE FUNCTION pg_catalog.statement_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
            $$SELECT statement_began() + last_value * interval '1 microsecond' FROM public.clock_offset$$
            """,
            name,
        )
        self.dsn = server.address("penstock", name)
        self._connection = psycopg.connect(self.dsn, autocommit=True)

    def __call__(self) -> int:
        return self._value("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")

    def set(self, moment: int) -> None:
        now = self._value("SELECT (extract(epoch FROM server_clock()) * 1000000)::bigint")
        self._value("SELECT setval('clock_offset', %s)", moment - now)

    def _value(self, statement: str, *values: int) -> int:
        [[value]] = self._connection.execute(statement, values)
        return int(value)

    def close(self) -> None:
        self._connection.close()
        self._server.run(f"DROP DATABASE {self._name} WITH (FORCE)")
