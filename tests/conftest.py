"""
One PostgreSQL server for a test session (each xdist worker has its own), and a schema of its own for each test.

A shell that starts us in the background has us ignore Ctrl-C, and so would everything that a test starts and then interrupts: to the tests it is
always as at a prompt.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # not every environment has xdist
def pytest_xdist_auto_num_workers():
    """For `-n auto`: most of the time a test waits, for another process, the disk or a lease, and meanwhile another one can compute."""
    return 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(items):
    """Those that take long come first: at the end one of them would keep all but one worker waiting."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    """Hundreds of tests collect garbage, to see that nothing is left: it is theirs, not that of all the modules and tests that stay anyway."""
    gc.collect()
    gc.freeze()


class Place(NamedTuple):
    """Where a store can live: nobody has been there."""

    dsn: str
    schema: str


@pytest.fixture
def folder():
    """Short: the path of a Unix socket may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="pst") as name:
        yield Path(name)


@pytest.fixture
def daemon(folder):
    """A function that starts the daemon on that folder, with these settings."""
    from tests.daemon import Daemon

    made = []

    def make(*flags):
        made.append(Daemon(folder, *flags))
        return made[-1].start()

    yield make
    for one in made:
        one.close()


SCHEMAS = count(1)


@pytest.fixture(scope="session")
def postgres_server():
    pytest.importorskip("psycopg")
    from tests.postgres_server import PostgresServer, find_binaries

    if find_binaries() is None:
        pytest.skip("no PostgreSQL here")
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres(postgres_server):
    import psycopg

    place = Place(postgres_server.dsn, f"t{next(SCHEMAS)}")
    yield place
    with psycopg.connect(place.dsn, autocommit=True) as con:
        con.execute(f'DROP SCHEMA IF EXISTS "{place.schema}" CASCADE')


@pytest.fixture(scope="session")
def postgres_emptied(postgres_server):
    """A function: the same place each time, with the tables and nothing in them. A tenth of the price of a new one."""
    import psycopg

    from penstock.stores.postgres.store import PostgresStore

    place = Place(postgres_server.dsn, "emptied")
    PostgresStore(place.dsn, schema=place.schema).close()
    with psycopg.connect(place.dsn, autocommit=True) as con:
        tables = [
            name for (name,) in con.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'emptied'")
        ]
        # Statistics that the server gathers between two tests say that full pages have no rows. Plans made for that
        # take minutes with the rows of the next test.
        con.execute(
            "".join(f"ALTER TABLE emptied.{name} SET (autovacuum_enabled = false);" for name in tables)
        )
        deletes = "".join(f"DELETE FROM emptied.{name};" for name in tables if name != "mark")

        def empty():
            con.execute(f"{deletes} UPDATE emptied.mark SET value = 0 WHERE name = 'event'")
            con.execute("SELECT setval('emptied.job_no', 1, false)")
            return place

        empty.place = place
        yield empty
